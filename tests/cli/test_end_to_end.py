"""`vc-jax bench end-to-end` on tiny models, with a stand-in for the kernel that needs a GPU."""

import functools
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax.benchmarks import _amdahl, _model_programs, _programs, _timing, end_to_end
from vc_jax.benchmarks._end_to_end_report import EndToEndResults
from vc_jax.benchmarks._video_models import VIDEO_MODELS, VideoModel, random_parameters
from vc_jax.benchmarks._workloads import WORKLOADS
from vc_jax.models.hunyuan_video15 import HunyuanVideo15, HunyuanVideo15Config
from vc_jax.models.longcat_video import LongCatVideo, LongCatVideoConfig
from vc_jax.models.minimax_h3 import MiniMaxH3, MiniMaxH3Config
from vc_jax.models.wan import Wan, WanConfig

from .stand_ins import kernel, plain

TEXT = {"text": (1, 8, 16)}
TINY = {
    entry.name: entry
    for entry in (
        VideoModel(
            "wan-a14b",
            "Tiny Wan",
            Wan,
            WanConfig(num_layers=2, num_heads=2, head_dim=32, ffn_dim=64, text_dim=16),
            "4 frames",
            (1, 16, 4, 16, 16),
            TEXT,
        ),
        VideoModel(
            "hunyuan-1.5",
            "Tiny Hunyuan",
            HunyuanVideo15,
            HunyuanVideo15Config(
                num_layers=2,
                num_refiner_layers=1,
                num_heads=2,
                head_dim=32,
                text_dim=16,
                byt5_dim=8,
                byt5_hidden=16,
                image_dim=8,
                rope_axes=(8, 12, 12),
            ),
            "3 frames",
            (1, 32, 3, 8, 12),
            {
                "condition": (1, 33, 3, 8, 12),
                "text": (1, 9, 16),
                "text_mask": (1, 9),
                "byt5": (1, 4, 8),
                "byt5_mask": (1, 4),
                "image": (1, 3, 8),
            },
        ),
        VideoModel(
            "longcat",
            "Tiny LongCat",
            LongCatVideo,
            LongCatVideoConfig(num_layers=2, num_heads=2, hidden=64, text_dim=16, time_dim=32),
            "4 frames",
            (1, 16, 4, 16, 16),
            TEXT,
        ),
        VideoModel(
            "minimax-h3",
            "Tiny MiniMax",
            MiniMaxH3,
            MiniMaxH3Config(
                num_layers=2,
                num_refiner_layers=1,
                num_heads=3,
                head_dim=32,
                hidden=64,
                ffn_dim=96,
                text_dim=16,
                time_hidden=32,
                time_dim=16,
                rope_freqs=4,
            ),
            "7 latent frames",
            {"video": (1, 7 * 4 * 6, 96), "audio": (1, 10, 32)},
            {"text": (1, 5, 16)},
            text_rows=5,
            grid=(7, 8, 12),
        ),
    )
}


@pytest.fixture
def any_device(monkeypatch):
    """The kernel's place is taken by the first of its inputs, in the right layout."""
    monkeypatch.setattr(_programs.hopper, "attention", kernel)


def run(model: VideoModel, folder, *arguments: str) -> tuple[int, dict[str, Any], str]:
    options = ("--seconds", "0.01", "--rounds", "2", "--output", str(folder), *arguments)
    parsed = end_to_end.parser().parse_args(options)
    results = EndToEndResults(parsed.output, {"device": "test"})
    code = end_to_end.run({model.name: model}, {"plain BF16": plain}, parsed, results)
    report = json.loads((folder / "end-to-end.json").read_text())
    return code, report["models"][model.name], (folder / "end-to-end.md").read_text()


@pytest.mark.parametrize(
    "name",
    [name if name == "wan-a14b" else pytest.param(name, marks=pytest.mark.slow) for name in TINY],
)
def test_every_kind_of_step_is_measured_and_close_to_bf16(name, any_device, tmp_path):
    code, entry, text = run(TINY[name], tmp_path, "--presets", "int8")
    assert code == 0
    assert (tmp_path / "end-to-end.png").stat().st_size > 1000
    steps = {row["name"]: row for row in entry["steps"]}
    assert list(steps) == ["bf16", *(f"int8, {kind}" for kind in _programs.KINDS)]
    assert all(row["finite"] and row["milliseconds"] > 0 for row in steps.values())
    assert steps["bf16"]["relative_l2"] == 0
    errors = {kind: steps[f"int8, {kind}"]["relative_l2"] for kind in _programs.KINDS}
    assert all(1e-3 < error < 0.05 for error in errors.values())
    # The stored order is that of the cold step; after the window there are no means.
    assert errors["window"] == errors["cold"] != errors["after"]
    assert entry["summary"]["int8"]["schedule"]["step_ms"] > 0
    assert "extrapolated" in text
    assert "CUT" not in text


def test_a_cut_depth_stands_in_the_title(any_device, tmp_path):
    _, entry, text = run(TINY["wan-a14b"], tmp_path, "--presets", "fp8", "--layers", "1")
    assert (entry["layers"], entry["full_layers"]) == (1, 2)
    assert "CUT TO 1 OF 2 LAYERS" in text


def test_a_model_that_fails_leaves_the_others(tmp_path, monkeypatch):
    parsed = end_to_end.parser().parse_args(["--output", str(tmp_path)])
    tried = []

    def measure(model, *rest):
        tried.append(model.name)
        raise RuntimeError(f"out of memory in {model.name}")

    def compile_all(models, *rest):
        return dict.fromkeys(models), {name: {} for name in models}

    monkeypatch.setattr(end_to_end, "measure_model", measure)
    monkeypatch.setattr(end_to_end, "compile_all", compile_all)
    models = {name: TINY[name] for name in ("longcat", "wan-a14b")}
    assert end_to_end.run(models, {}, parsed, EndToEndResults(tmp_path, {})) == 1
    assert tried == list(models)
    report = json.loads((tmp_path / "end-to-end.json").read_text())["models"]
    for name in models:
        assert report[name]["error"] == f"RuntimeError: out of memory in {name}"


def test_one_program_serves_every_kind_of_step():
    model = TINY["wan-a14b"]
    job = _model_programs.denoising_step_job(model, "int8")
    compiled = jax.jit(job.function).lower(*job.arguments).compile()
    graph, abstract = model.graph("int8")
    inputs = (jax.jit(functools.partial(random_parameters, abstract))(),)
    inputs += model.inputs()
    state = _model_programs.state_function(graph)(inputs[0], inputs[1], inputs[3])
    # A compiled program refuses other shapes and structures instead of compiling again.
    for step in _programs.KINDS.values():
        _, state = compiled(*inputs, state, jnp.int32(step))
    assert bool(state.made.all())


def test_kinds_are_steps_of_the_schedule():
    schedule, kinds = _programs.SCHEDULE, _programs.KINDS
    assert kinds["cold"] == 0
    assert kinds["refresh"] in schedule.refresh_steps[1:]
    assert kinds["window"] < schedule.smoothing_steps
    assert kinds["window"] not in schedule.refresh_steps
    assert schedule.smoothing_steps <= kinds["after"] < schedule.num_steps


def test_the_full_models_have_the_shapes_they_are_timed_at():
    rows = {name: model.rows for name, model in VIDEO_MODELS.items()}
    assert rows == {
        "wan-a14b": 75_600,
        "wan-5b": 27_280,
        "hunyuan-1.5": 113_585,
        "longcat": 37_440,
        "minimax-h3": 73_500,
    }
    assert next(iter(VIDEO_MODELS)) == "wan-a14b"
    for name, other in (("wan-a14b", "wan-720p"), ("hunyuan-1.5", "hunyuan-720p")):
        assert VIDEO_MODELS[name].workload.flops == WORKLOADS[other].flops


@pytest.mark.filterwarnings("ignore:a long attention call")
@pytest.mark.parametrize("name", list(VIDEO_MODELS))
def test_full_steps_trace_with_the_state_they_return(name):
    job = _model_programs.denoising_step_job(
        VIDEO_MODELS[name], "fp8", cross_attention=lambda q, k, v, **_: q
    )
    _, state = jax.eval_shape(job.function, *job.arguments)
    assert jax.tree.structure(state) == jax.tree.structure(job.arguments[4])
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    assert shapes == [(x.shape, x.dtype) for x in jax.tree.leaves(job.arguments[4])]


def test_random_weights_have_the_models_shapes_and_differ_between_layers():
    _, abstract = TINY["wan-a14b"].graph("bf16")
    made = jax.jit(functools.partial(random_parameters, abstract))()
    for got, want in zip(jax.tree.leaves(made), jax.tree.leaves(abstract), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
    kernel = np.asarray(made["blocks"]["qkv"]["kernel"][...], np.float32)
    assert np.std(kernel) == pytest.approx(0.02, rel=0.05)
    assert np.abs(kernel[0] - kernel[1]).max() > 0.01
    assert np.all(np.asarray(made["blocks"]["q_norm"]["scale"][...]) == 1)
    assert not np.any(np.asarray(made["head"]["bias"][...]))
    assert np.std(np.asarray(made["blocks"]["modulation"][...])) == pytest.approx(0.5, rel=0.1)


def test_matrix_products_are_counted_through_scans():
    def function(x, weights):
        return jax.lax.scan(lambda x, w: (jax.jit(jnp.matmul)(x, w), None), x, weights)[0]

    arrays = (jnp.zeros((5, 7)), jnp.zeros((3, 7, 7)))
    assert _model_programs.flops_of(jax.make_jaxpr(function)(*arrays).jaxpr) == 3 * 2 * 5 * 7 * 7


def test_a_schedule_has_one_cold_clustering():
    counts = _amdahl.kind_counts(vc_jax.DenoisingSchedule(40))
    assert counts == {"cold": 1, "refresh": 2, "window": 7, "after": 30}
    times = _amdahl.OfKinds(cold=1000.0, refresh=100.0, window=10.0, after=1.0)
    assert times.total(vc_jax.DenoisingSchedule(40)) == 1300.0
    none = vc_jax.DenoisingSchedule(40, smoothing_fraction=0.0)
    assert times.total(none) == 40.0


def test_a_step_that_gains_what_its_kernel_gains_is_all_that_is_allowed():
    # 10 layers of 6 ms in a step of 100 ms; the kernel takes 3 ms, and nothing else is added.
    same = _amdahl.OfKinds(3.0, 3.0, 3.0, 3.0)
    steps = _amdahl.OfKinds(70.0, 70.0, 70.0, 70.0)
    found = _amdahl.summary(vc_jax.DenoisingSchedule(40), 10, 100.0, 6.0, steps, same, same, 30.0)
    assert found["bf16_attention_share"] == pytest.approx(0.6)
    assert found["schedule"]["allowed"] == pytest.approx(1 / 0.7)
    assert found["schedule"]["of_allowed"] == pytest.approx(1.0)
    assert found["schedule"]["rest_ms"] == pytest.approx(found["bf16_rest_ms"])
    assert found["other_ms"] == pytest.approx(10.0)
    assert found["schedule_s"] == pytest.approx(2.8)
    # One millisecond of preparation a layer is paid in `of_allowed`, and explained by the call.
    calls = _amdahl.OfKinds(4.0, 4.0, 4.0, 4.0)
    steps = _amdahl.OfKinds(80.0, 80.0, 80.0, 80.0)
    found = _amdahl.summary(vc_jax.DenoisingSchedule(40), 10, 100.0, 6.0, steps, calls, same)
    assert found["schedule"]["of_allowed"] == pytest.approx(0.875)
    assert found["schedule"]["allowed_by_call"] == pytest.approx(1.25)
    assert found["schedule"]["preparation_ms"] == pytest.approx(10.0)


def test_long_candidates_run_once_a_round_until_the_deadline():
    ran = []
    candidate = _timing.Candidate(lambda: ran.append(0) or time.sleep(0.01))
    _timing.sustained({"a": candidate}, seconds=0.005, rounds=4, estimates={"a": 0.01})
    assert len(ran) == 4
    ran.clear()
    _timing.sustained({"a": candidate}, rounds=4, estimates={"a": 9.0}, deadline=0.0)
    assert len(ran) == 1


def test_compiler_options_are_read_as_what_they_are():
    parsed = end_to_end.parser().parse_args(
        ["--compiler-option", "a=false", "--compiler-option", "b=4", "--compiler-option", "c=x"]
    )
    assert dict(parsed.compiler_option) == {"a": False, "b": 4, "c": "x"}
