"""Any command line of `vc-jax sample`: exit code 2 with one line and nothing left, or it runs.

`VC_JAX_EXAMPLES=1000 pytest tests/cli/test_any_command_line.py -s` tries more and prints counts.
"""

import collections
import contextlib
import io
import os
import pathlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vc_jax import _cli
from vc_jax.models.sample_job import job

EXAMPLES = int(os.environ.get("VC_JAX_EXAMPLES", "60"))
COUNTS: collections.Counter[str] = collections.Counter()


class Reached(Exception):
    """The arguments are taken, the files are read, the work begins."""


def begin(*_):
    raise Reached


NUMBERS = ["5", "1", "0", "-1", "3.5", "many", "", "99999999999999999999", "1e3", "０", "1\n2"]
FILES = ["film.mp4", "cut.mp4", "noise.mp4", "empty.mp4", "folder", "missing", "", "\udcff", "a\0b"]
FILES += [
    "x" * 300,
    "ü –.mp4",
    "tiny.safetensors",
    "cut.safetensors",
    "loop",
    "/dev/null",
    "~",
    "-",
]
VALUES = {
    "--video": FILES,
    "--weights": FILES,
    "--output": ["out", "new/deep/out", "film.mp4", "folder", "full", "", "\udcff", "x" * 300, "."],
    "--start": NUMBERS,
    "--steps": NUMBERS,
    "--frames": NUMBERS,
    "--condition": NUMBERS,
    "--seed": [*NUMBERS, "4294967295", "4294967296"],
    "--mesh": ["seq=1", "batch=1,seq=1", "seq=99999", "seq", "seq=-1", "", "=", "a=1", "seq=1\n"],
    "--size": [
        "16x32",
        "16X32",
        "0x32",
        "15x32",
        "-4x8",
        "16",
        "axb",
        "",
        "16x32x3",
        "4x4",
        "16×32",
    ],
    "--attention": ["int8", "bf16,fp8", "int9", ",", "", "\udcff", "INT8", "nvfp4"],
    "--speed": ["9"],
    "--start=": [""],
}
options = st.sampled_from(sorted(VALUES)).flatmap(
    lambda name: st.tuples(st.just(name), st.sampled_from(VALUES[name]))
)


@pytest.fixture(scope="module")
def folder(film, weights, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("any")
    for source, name in ((film, "mp4"), (weights, "safetensors")):
        data = source.read_bytes()
        (folder / f"{'film' if name == 'mp4' else 'tiny'}.{name}").write_bytes(data)
        (folder / f"cut.{name}").write_bytes(data[: len(data) // 2])
    (folder / "ü –.mp4").write_bytes(film.read_bytes())
    (folder / "noise.mp4").write_bytes(b"no video" * 100)
    (folder / "empty.mp4").touch()
    (folder / "folder").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "kept.txt").touch()
    (folder / "loop").symlink_to("loop")
    return folder


def test_any_command_line_is_refused_in_one_line_or_runs(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(job, "_measure", begin)
    start = ["sample", "--video", "film.mp4", "--weights", "tiny.safetensors", "--size", "16x32"]
    start += ["--frames", "5", "--steps", "3", "--output", "out"]

    def everything():
        return sorted(path for path in folder.rglob("*"))

    before = everything()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(options, max_size=3))
    def check(changes):
        COUNTS["tried"] += 1
        out, err = io.StringIO(), io.StringIO()
        code: object = None
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = _cli.main([*start, *(word for change in changes for word in change)])
            except SystemExit as stop:
                code = stop.code
            except Reached:
                COUNTS["runs"] += 1
        assert everything() == before
        if code is None:
            return
        assert code == 2
        assert len(err.getvalue().splitlines()) == 1, err.getvalue()
        assert err.getvalue().startswith("vc-jax")
        COUNTS["refused"] += 1

    check()
    print(dict(COUNTS))
    assert min(COUNTS["refused"], COUNTS["runs"]) >= COUNTS["tried"] // 20
