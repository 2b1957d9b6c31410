"""Whatever becomes of the streams, names and the working folder: the documented exit codes only."""

import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest
from flax import nnx

from vc_jax import _cli
from vc_jax._streams import Stream
from vc_jax.models import load_video_dit, save_weights
from vc_jax.models.common.video import read_video

COMMAND = f"{sys.executable} -c 'from vc_jax._cli import entry_point; entry_point()'"


def shell(arguments: str, cwd: pathlib.Path | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    script = f"set -o pipefail; {COMMAND} {arguments}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, cwd=cwd, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("info | true", 0, ""),
        ("--version >&-", 0, ""),
        ("--version >&- 2>&-", 0, ""),
        ("--version 2>/dev/full", 0, ""),
        ("--version >/dev/full", 2, "vc-jax: cannot write to stdout: No space left on device"),
        ("sample --help >/dev/full", 2, "vc-jax: cannot write to stdout"),
        ("sample --steps no 2>/dev/full", 2, ""),
        ("sample --steps no 2>&-", 2, ""),
    ],
)
def test_streams_that_take_nothing(arguments, code, words):
    got, _, err = shell(arguments)
    assert got == code
    assert err.startswith(words)
    assert len(err.splitlines()) == bool(words)


def test_an_encoding_without_the_characters_gets_question_marks(tmp_path):
    with open(tmp_path / "out", "w", encoding="latin-1") as file:
        stream = Stream(file)
        print("a – b, 2×", file=stream, flush=True)
    assert (tmp_path / "out").read_text("latin-1") == "a ? b, 2×\n"
    assert stream.failure is None


def test_a_working_folder_that_is_gone_is_one_line(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert _cli.main(["info"]) == 2
    assert capsys.readouterr().err == "vc-jax info: the working folder is gone\n"


@pytest.mark.parametrize("option", ["--video", "--output", "--weights"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("\udcff.mp4", "must be a name in UTF-8"),
        ("a\0b", "must not hold a null character"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_name_that_no_library_takes_is_refused_first(option, name, words, capsys):
    with pytest.raises(SystemExit) as stop:
        _cli.main(["sample", option, name])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_sample_that_is_not_finite_has_no_distance_and_a_code_of_its_own(
    tiny, weights, tmp_path, capsys
):
    model = load_video_dit(weights)
    bias = model.output.bias
    bias[...] = bias[...].at[0].set(jnp.nan)
    save_weights(tmp_path / "nan.safetensors", nnx.state(model, nnx.Param), model.config)
    arguments = [*tiny, "--weights", str(tmp_path / "nan.safetensors")]
    code = _cli.main([*arguments, "--attention", "int8", "--output", str(tmp_path / "out")])
    streams = capsys.readouterr()
    assert code == 3
    assert "vc-jax sample: the sample of bf16, int8 is not finite" in streams.err.splitlines()[-1]
    report = (tmp_path / "out" / "report.json").read_text()
    assert '"finite": false' in report
    assert '"psnr_db": null' in report
    assert '"psnr_db": 1' not in report


def test_skipped_frames_are_not_kept(film):
    every = read_video(film, height=16, width=32)
    tail = read_video(film, height=16, width=32, start=5, max_frames=3)
    assert (tail == every[5:8]).all()
    assert len(read_video(film, height=16, width=32, start=50)) == 0
