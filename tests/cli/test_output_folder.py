"""The output folder is complete or absent."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from vc_jax import _cli
from vc_jax.models.sample_job import FILES, job

QUICK = ["--attention", "bf16", "--steps", "1"]


def test_an_earlier_run_is_replaced(tiny, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "report.html").write_text("old")
    assert _cli.main([*tiny, *QUICK, "--output", str(output)]) == 0
    assert sorted(p.name for p in output.iterdir()) == sorted(FILES)
    assert (output / "report.html").read_text() != "old"
    assert list(tmp_path.iterdir()) == [output]


def test_a_relative_output_lies_in_the_working_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _cli.main([*tiny, *QUICK]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["vc-jax-sample"]


def test_a_full_disk_leaves_the_earlier_run(tiny, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    output.mkdir()
    (output / "report.html").write_text("old")

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job, "make_page", no_space)
    assert _cli.main([*tiny, *QUICK, "--output", str(output)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [p.name for p in output.iterdir()] == ["report.html"]
    assert (output / "report.html").read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_an_interrupted_run_ends_at_once_and_leaves_nothing(tiny, tmp_path, number, code):
    slow = ["--size", "64x64", "--frames", "12", "--steps", "400", "--attention", "bf16"]
    process = subprocess.Popen(
        [sys.executable, "-m", "vc_jax", *tiny, *slow, "--output", "out"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "sampling" in line:
                break
        assert [p.name.startswith(".out.") for p in tmp_path.iterdir()] == [True]
        time.sleep(0.5)
        sent = time.monotonic()
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(30) == code
        assert time.monotonic() - sent < 15
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.stderr.close()
        process.wait()
    assert len(rest.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
