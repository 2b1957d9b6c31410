"""Mistakes in the arguments of benchmarks: one line, exit code 2, before any work."""

import json
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from vc_jax import _cli
from vc_jax.benchmarks import (
    _end_to_end_report,
    _programs,
    _results,
    _timing,
    attention,
    fidelity,
)
from vc_jax.benchmarks._fidelity_measures import METHODS, Head
from vc_jax.benchmarks._workloads import WORKLOADS, Workload

from .stand_ins import kernel, plain
from .test_mistakes import run


def heads_of(query=(20, 16), key=(30, 16), value=(30, 16)) -> dict[str, np.ndarray]:
    shapes = {"q_a": query, "k_a": key, "v_a": value}
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture
def files(tmp_path, monkeypatch) -> pathlib.Path:
    """A working folder with files of heads, most of them no good."""
    monkeypatch.chdir(tmp_path)
    whole = heads_of()
    np.savez("good.npz", **whole)
    np.savez("none.npz", other=np.ones(3))
    np.savez("partial.npz", q_a=whole["q_a"], k_a=whole["k_a"])
    np.savez("rank.npz", **whole | {"v_a": np.ones((30, 2, 16))})
    np.savez("words.npz", **whole | {"q_a": np.array([["word"] * 16])})
    np.savez("objects.npz", **whole | {"q_a": np.array([[object()] * 16])})
    np.savez("nan.npz", **whole | {"k_a": np.full((30, 16), np.nan)})
    np.savez("large.npz", **whole | {"k_a": np.full((30, 16), 1e300)})
    np.savez("lengths.npz", **heads_of(value=(31, 16)))
    np.savez("sizes.npz", **heads_of(query=(20, 32)))
    np.savez("channels.npz", **heads_of((20, 8), (30, 8), (30, 8)))
    np.save("one.npy", whole["q_a"])
    pathlib.Path("text.npz").write_text("no arrays")
    pathlib.Path("empty.npz").write_bytes(b"")
    pathlib.Path("cut.npz").write_bytes(pathlib.Path("good.npz").read_bytes()[:200])
    return tmp_path


def forbidden(*arguments, **options):
    raise AssertionError("work began")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fidelity", "--times", "5"], "--times: must be from 0 to 1, got 5"),
        (["fidelity", "--times", "nan"], "--times: must be from 0 to 1, got nan"),
        (["fidelity", "--times", "soon"], "--times: must be from 0 to 1, got soon"),
        (["fidelity", "--times", "-0.5"], "--times"),
        (["fidelity", "--size", "10", "10"], "--size: "),
        (["fidelity", "--size", "0", "16"], "--size: must be positive"),
        (["fidelity", "--size", "16"], "--size: expected 2 arguments"),
        (["fidelity", "--heads", "nope.npz"], "no file at nope.npz"),
        (["fidelity", "--heads", "good.npz", "nope.npz"], "no file at nope.npz"),
        (["fidelity", "--heads", ""], "--heads: must not be empty"),
        (["fidelity", "--heads"], "--heads: expected at least one argument"),
        (["fidelity", "--heads", "."], "cannot read . as an .npz file"),
        (["fidelity", "--heads", "text.npz"], "cannot read text.npz as an .npz file"),
        (["fidelity", "--heads", "empty.npz"], "cannot read empty.npz as an .npz file"),
        (["fidelity", "--heads", "cut.npz"], "cannot read cut.npz as an .npz file"),
        (["fidelity", "--heads", "one.npy"], "cannot read one.npy as an .npz file"),
        (["fidelity", "--heads", "objects.npz"], "cannot read objects.npz as an .npz file"),
        (["fidelity", "--heads", "none.npz"], "none.npz has no arrays q_NAME, k_NAME, v_NAME"),
        (["fidelity", "--heads", "partial.npz"], "has q_a but no v_a"),
        (["fidelity", "--heads", "rank.npz"], "v_a of rank.npz must be real [tokens, channels]"),
        (["fidelity", "--heads", "words.npz"], "q_a of words.npz must be real"),
        (["fidelity", "--heads", "nan.npz"], "k_a of nan.npz must be finite"),
        (["fidelity", "--heads", "large.npz"], "k_a of large.npz must be finite"),
        (["fidelity", "--heads", "lengths.npz"], "[20, 16], [30, 16], [31, 16]"),
        (["fidelity", "--heads", "sizes.npz"], "[20, 32], [30, 16], [30, 16]"),
        (["fidelity", "--heads", "channels.npz"], "H a multiple of 16"),
        (["fidelity", "--output", "text.npz"], "text.npz exists and is not a folder"),
        (["fidelity", "--output", "text.npz/in"], "text.npz exists and is not a folder"),
        (["attention", "--seconds", "-1", "--rounds", "0"], "--seconds: must be positive"),
        (["attention", "--seconds", "nan"], "--seconds: must be positive and finite"),
        (["attention", "--rounds", "0"], "--rounds: must be positive"),
        (["attention", "--rounds", "1.5"], "--rounds: invalid int value: '1.5'"),
        (["attention", "--logit-sigma", "inf"], "--logit-sigma: must be positive and finite"),
        (["attention", "--workloads", "big"], "--workloads: invalid choice: 'big'"),
        (["attention", "--shapes", "4096"], "--shapes: must be TOKENSxHEADS, for example 4096x24"),
        (["attention", "--shapes", "0x24"], "--shapes: must be positive, got 0x24"),
        (["attention", "--shapes", "4096x24"], "--shapes is taken with --whole-calls only"),
        (["attention", "--whole-calls", "--softmax", "exp"], "--softmax is taken without"),
        (["attention", "--whole-calls", "--workloads", "wan-720p"], "--workloads is taken without"),
        (["attention", "--whole-calls", "--logit-sigma", "2"], "--logit-sigma is taken without"),
        (["attention", "--whole-calls", "--presets", "nvfp4"], "--presets: invalid choice"),
        (["sharded", "--shapes", "12"], "--shapes: must be SxN or one of"),
        (["sharded", "--attention", "nvfp4"], "--attention: invalid choice: 'nvfp4'"),
        (["sharded", "--budget", "0"], "--budget: must be positive"),
        (["end-to-end", "--models", "foo"], "--models: invalid choice: 'foo'"),
        (["end-to-end", "--budget", "inf"], "--budget: must be positive and finite"),
        (["end-to-end", "--presets", "nvfp4"], "--presets: invalid choice: 'nvfp4'"),
        (["end-to-end", "--layers", "0"], "--layers: must be positive"),
        (["end-to-end", "--seconds", "-1"], "--seconds: must be positive"),
        (["end-to-end", "--rounds", "two"], "--rounds: invalid int value"),
        (["end-to-end", "--compiler-option", "level"], "must be NAME=VALUE"),
        (["memory", "--steps", "3"], "--steps: must be even, got 3"),
        (["memory", "--layers", "0"], "--layers: must be positive"),
        (["preprocess", "--workloads", "wan"], "--workloads: invalid choice: 'wan'"),
        (["preprocess", "--schedules", "wan"], "--schedules: invalid choice: 'wan'"),
        (["preprocess", "--seconds", "0"], "--seconds: must be positive"),
        (["preprocess", "--rounds", "two"], "--rounds: invalid int value"),
        (["preprocess", "--presets", "int4"], "--presets: invalid choice: 'int4'"),
        (["preprocess", "--workloads", "--schedules"], "nothing to measure"),
    ],
)
def test_a_mistake_is_one_line_before_any_work(arguments, words, files, monkeypatch, capfd):
    monkeypatch.setattr(fidelity, "dit_heads", forbidden)
    monkeypatch.setattr(fidelity, "measure_head", forbidden)
    before = sorted(files.rglob("*"))
    code, lines = run(capfd, "bench", *arguments)
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith(f"vc-jax bench {arguments[0]}: ")
    assert words in lines[0]
    assert sorted(files.rglob("*")) == before


@pytest.mark.parametrize("name", _cli.BENCHMARKS)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--speed", "9"], "unrecognized arguments: --speed 9"),
        (["two\nlines"], "unrecognized arguments: two lines"),
        (["--output"], "--output: expected one argument"),
        (["--output", ""], "--output: must not be empty"),
        (["--output", "good.npz"], "good.npz exists and is not a folder"),
    ],
)
def test_every_benchmark_reports_a_mistake_in_one_line(name, arguments, words, files, capfd):
    code, lines = run(capfd, "bench", name, *arguments)
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith(f"vc-jax bench {name}: ")
    assert words in lines[0]


@pytest.mark.parametrize("name", ["attention", "end-to-end", "memory", "preprocess"])
def test_without_the_gpu_it_is_one_line_on_stderr(name, capfd):
    code, lines = run(capfd, "bench", name)
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith(f"vc-jax bench {name}: needs a GPU of compute capability 9.0")


def test_without_opencv_it_is_one_line(files, monkeypatch, capfd):
    monkeypatch.setitem(fidelity.sys.modules, "cv2", None)
    code, lines = run(capfd, "bench", "fidelity", "--size", "16", "32")
    assert (code, len(lines)) == (2, 1)
    assert "install vc-jax[video]" in lines[0]


def measured(head: Head) -> dict:
    """What measuring a head would give, at once."""
    clusters = "2 blocks a cluster, 3 steps"
    errors = {"relative_l2": 0.01, "relative_l1": 0.01, "cosine": 1.0, "gain": 1.0}
    orders = ("sequence", "sequence, global mean taken out", "default")
    return {
        "head": head.name,
        "tokens": len(head.key),
        "logit_sigma": 1.0,
        "methods": dict.fromkeys(METHODS, errors),
        "shares": {name: dict.fromkeys(("qk", "p", "v"), 0.1) for name in ("int8", "fp8")},
        "energy": dict.fromkeys(orders, 0.5),
        "energy_by_clusters": {clusters: {"plain": 0.5, "chained": 0.6}},
        "value_error_ratio": {"k-means": 0.5},
        "variation": {k: [0.5] for k in ("spread", "exp", "expcast_running", "expcast")},
    }


@pytest.fixture(params=[True, False], ids=["matplotlib", "no matplotlib"])
def drawn(request, monkeypatch) -> bool:
    """Whether Matplotlib is there."""
    if not request.param:
        monkeypatch.setitem(fidelity.sys.modules, "matplotlib", None)
    return request.param


def assert_figure(folder: pathlib.Path, name: str, drawn: bool, err: str) -> None:
    expected = {f"{name}.json", f"{name}.md"} | ({f"{name}.png"} if drawn else set())
    assert {file.name for file in folder.iterdir()} == expected
    assert err.count("matplotlib") == (0 if drawn else 1)
    assert drawn or _results.NO_FIGURE in err.splitlines()


def test_fidelity_leaves_out_only_the_figure(files, drawn, monkeypatch, capfd):
    monkeypatch.setattr(fidelity, "measure_head", measured)
    monkeypatch.setattr(fidelity, "dit_heads", lambda clip, time: fidelity.file_heads("good.npz"))
    monkeypatch.setattr(fidelity, "file_heads", lambda path: [Head("a", *heads_of().values())])
    arguments = ["--heads", "good.npz", "--times", "0.5", "--size", "16", "32", "--output", "out"]
    assert _cli.main(["bench", "fidelity", *arguments]) == 0
    assert_figure(files / "out", "fidelity", drawn, capfd.readouterr().err)


def test_attention_leaves_out_only_the_figure(tmp_path, drawn, monkeypatch, capfd):
    """With stand-ins for what needs a GPU: the kernel, the peers and the card's own limit."""

    def refuses(query, key, value):
        raise ValueError("not this shape")

    peers = {"FlashAttention-3 BF16": ("1", plain), "other BF16": ("1", refuses)}
    monkeypatch.setattr(_programs.hopper, "attention", kernel)
    monkeypatch.setattr(attention, "missing_gpu", lambda: None)
    monkeypatch.setattr(attention, "available_peers", lambda: (peers, {}))
    monkeypatch.setattr(
        attention, "gemm_candidate", lambda: _timing.Candidate(jnp.zeros(2).sum, 1e9)
    )
    monkeypatch.setitem(WORKLOADS, "tiny", Workload("tiny", 256, 2, head_dim=32))
    arguments = ["--workloads", "tiny", "--presets", "int8", "--seconds", "0.001", "--rounds", "2"]
    assert _cli.main(["bench", "attention", *arguments, "--output", str(tmp_path / "out")]) == 0
    printed = capfd.readouterr()
    assert_figure(tmp_path / "out", "attention", drawn, printed.err)
    assert "other BF16 does not compile: ValueError: not this shape" in printed.out
    report = json.loads((tmp_path / "out" / "attention.json").read_text())
    rows = {row["kernel"]: row for row in report["rows"]}
    names = ["FlashAttention-3 BF16", "vc_jax int8", "vc_jax int8, no means", attention.GEMM]
    assert list(rows) == names
    assert rows["FlashAttention-3 BF16"]["relative_l2"] < 0.01
    assert rows["FlashAttention-3 BF16"]["ratio_to_fa3"] == 1.0
    assert rows["vc_jax int8"]["relative_l2"] > 1.0
    assert all(len(row["rounds_ms"]) == 2 for row in rows.values())


def test_the_figure_of_end_to_end_is_left_out_without_a_word_for_each_model(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setitem(fidelity.sys.modules, "matplotlib", None)
    _end_to_end_report.plot({"any": {"summary": {"int8": {}}}}, tmp_path / "figure.png")
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err == ""


def test_files_of_one_name_are_both_reported(files, monkeypatch):
    (files / "more").mkdir()
    np.savez("more/good.npz", **heads_of())
    given = []
    monkeypatch.setattr(fidelity, "run", lambda sources, output: given.append(sources) or 0)
    monkeypatch.setattr(fidelity, "dit_heads", lambda clip, time: [])
    arguments = ["--heads", "good.npz", "more/good.npz", "--times", "0.5", "--size", "16", "32"]
    assert _cli.main(["bench", "fidelity", *arguments]) == 0
    assert list(given[0]) == ["good.npz", "more/good.npz", "video DiT, t = 0.5"]
    (head,) = given[0]["more/good.npz"]
    assert (head.name, head.query.shape, head.key.shape) == ("good/a", (20, 16), (30, 16))


def test_heads_of_the_shipped_model_are_those_of_every_layer():
    clip = fidelity.shipped_clip(16, 32)
    heads = list(fidelity.dit_heads(clip, 0.5))
    assert [heads[0].name, heads[-1].name] == ["t0.5/layer0/head0", "t0.5/layer7/head1"]
    assert len(heads) == 16
    assert all(head.key.shape == (16 * 4 * 8, 128) for head in heads)


def test_benchmarks_of_attention_import_no_model():
    code = (
        "import sys, vc_jax.benchmarks.attention, vc_jax.benchmarks.preprocess; "
        "sys.exit(any(name.startswith('vc_jax.models') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
