"""Whatever cannot be done is said in one line, with exit code 2, and leaves nothing behind."""

import subprocess
import sys

import pytest

from vc_jax import _cli


def run(capsys, *arguments: str) -> tuple[int, list[str]]:
    """Exit code and lines on stderr."""
    try:
        code = _cli.main(list(arguments))
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--attention", "int9"], "unknown attention 'int9'"),
        (["--attention", "int8,fp7"], "unknown attention 'fp7'"),
        (["--attention", ","], "attention must name at least one of bf16, int8"),
        (["--attention", ""], "attention must name at least one of bf16, int8"),
        (["--attention", "fp\n7"], "unknown attention"),
        (["--output", ""], "--output: must not be empty"),
        (["--video", ""], "--video: must not be empty"),
        (["--weights", ""], "--weights: must not be empty"),
        (["--video", "two\nlines.mp4"], "no video file at two lines.mp4"),
        (["--steps", "0"], "steps must be at least 1"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--frames", "1"], "frames must be at least 2"),
        (["--condition", "0"], "condition must be between 1 and 4"),
        (["--condition", "5"], "condition must be between 1 and 4"),
        (["--size", "64"], "must be HEIGHTxWIDTH"),
        (["--size", "30x32"], "multiples of the patch (4)"),
        (["--size", "0x32"], "at least 1 frame of 4x4"),
        (["--seed", "-1"], "seed must be in"),
        (["--start", "-1"], "start must be at least 0"),
        (["--start", "10"], "is too short"),
        (["--frames", "13"], "it has 12 frames, 13 are needed"),
        (["--video", "missing.mp4"], "no video file at missing.mp4"),
        (["--video", "."], "no video file at ."),
        (["--weights", "missing.safetensors"], "no weights file at missing.safetensors"),
        (["--weights", "noise.mp4"], "not a safetensors file"),
        (["--output", "noise.mp4"], "exists and is not a folder"),
        (["--output", "noise.mp4/out"], "cannot write to"),
        (["--output", "missing/out"], "cannot write to"),
        (["--output", "full"], "holds other files (kept.txt)"),
        (["--mesh", "seq"], "must be AXIS=N,... with each axis once"),
        (["--mesh", "seq=2,seq=2"], "must be AXIS=N,... with each axis once"),
        (["--mesh", "heads=2"], "mesh must be of batch and seq, got 'heads'"),
        (["--mesh", "seq=0"], "mesh seq must be at least 1"),
        (["--mesh", "batch=2"], "mesh batch must be 1, as one clip is sampled"),
        (["--mesh", "batch=1,seq=999"], "mesh needs 999 devices, this machine has"),
        (["--speed", "9"], "unrecognized arguments: --speed 9"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments, words, tiny, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noise.mp4").write_bytes(b"no video" * 100)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    code, lines = run(capfd, *tiny, "--output", "out", *arguments)
    assert code == 2
    assert len(lines) == 1
    assert words in lines[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_is_no_video_is_one_line_without_the_decoders_own(tiny, tmp_path):
    video, output = tmp_path / "noise.mp4", tmp_path / "out"
    video.write_bytes(b"no video" * 100)
    # A process of its own: the decoder takes its log level when it is used for the first time.
    done = subprocess.run(
        [sys.executable, "-m", "vc_jax", *tiny, "--video", str(video), "--output", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"vc-jax sample: cannot read {video} as a video\n"
    assert list(tmp_path.iterdir()) == [video]


def test_an_unknown_command_is_one_line(capfd):
    code, lines = run(capfd, "simple")
    assert (code, len(lines)) == (2, 1)
    assert "simple" in lines[0]


def test_a_benchmark_of_another_version_is_one_line(capfd, monkeypatch):
    monkeypatch.setattr(_cli, "BENCHMARKS", ("telepathy",))
    code, lines = run(capfd, "bench", "telepathy")
    assert (code, lines) == (2, ["vc-jax bench: this version has no benchmark 'telepathy'"])


def test_a_missing_benchmark_is_one_line_about_the_name_alone(capfd):
    said = "vc-jax bench: the following arguments are required: NAME (see vc-jax bench --help)"
    assert run(capfd, "bench") == (2, [said])


def test_an_unknown_benchmark_is_one_line(capfd):
    code, lines = run(capfd, "bench", "speed")
    assert (code, len(lines)) == (2, 1)
    assert "speed" in lines[0]
