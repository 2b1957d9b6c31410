"""`vc-jax bench preprocess` on a tiny shape, interpreted, with a stand-in for the kernel."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest

from vc_jax.benchmarks import _preprocess_stages, _preprocess_steps, _profile, _programs, preprocess
from vc_jax.benchmarks._amdahl import OfKinds
from vc_jax.benchmarks._programs import compile_jobs
from vc_jax.benchmarks._timing import Measurement
from vc_jax.benchmarks._workloads import WORKLOADS, Workload
from vc_jax.pallas_kernels import _counting_sort, _nearest, clustering, preparation, statistics

from .stand_ins import kernel

EVENTS = [
    _profile.Event("attention", 5_000_000, 4_000_000),
    _profile.Event("clustering", 1_000_000, 2_000_000),
    _profile.Event("MemcpyD2H", 4_000_000, 1_000_000),
    _profile.Event("clustering", 4_500_000, 1_000_000),
]
TINY = Workload("tiny", 300, 2, head_dim=64)


@pytest.fixture(scope="module")
def any_device():
    """Kernels run in the interpreter; the attention's place is taken by the first of its inputs."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(WORKLOADS, "tiny", TINY)
        for module in (_counting_sort, _nearest, clustering, preparation, statistics):

            def launch(body, *arguments, interpret=False, run=module.launch, **options):
                if "interpret" in getattr(body, "keywords", ()):
                    body = functools.partial(body, interpret=True)
                return run(body, *arguments, interpret=True, **options)

            monkeypatch.setattr(module, "launch", launch)

        monkeypatch.setattr(_programs.hopper, "attention", kernel)
        # Most of the time is the compiler's.
        monkeypatch.setattr(_preprocess_stages, "FLASH_KMEANS_CLUSTERS", ())
        monkeypatch.setattr(_preprocess_stages, "FLASH_KMEANS_STEPS", 1)
        config = dataclasses.replace(_preprocess_stages.CONFIG, lloyd_steps=1)
        monkeypatch.setattr(_preprocess_stages, "CONFIG", config)
        fast = functools.partial(compile_jobs, options={"xla_backend_optimization_level": 0})
        monkeypatch.setattr(_preprocess_steps, "compile_jobs", fast)

        def profile(call):
            jax.block_until_ready(call())
            return _profile.summary(EVENTS)

        monkeypatch.setattr(_preprocess_steps, "profile", profile)
        yield


@pytest.fixture(scope="module")
def report(any_device, tmp_path_factory):
    """The written report and its text."""
    folder = tmp_path_factory.mktemp("preprocess")
    arguments = preprocess.parser().parse_args(
        [
            *("--workloads", "tiny", "--schedules", "tiny", "--presets", "int8"),
            *("--seconds", "0.01", "--call-seconds", "0.01", "--stage-seconds", "0.001"),
            *("--rounds", "1"),
            *("--output", str(folder)),
        ]
    )
    assert preprocess.run(arguments, {"device": "test"}, lambda q, k, v: q) == 0
    text = (folder / "preprocess.md").read_text()
    return json.loads((folder / "preprocess.json").read_text()), text


def test_every_stage_and_kind_of_step_is_measured_and_checked(report):
    report, text = report
    found = report["stages"]["tiny"]
    rows = {row["stage"]: row for row in found["rows"]}
    assert next(iter(rows)) == "copy"
    assert rows["copy"]["of_copy_bandwidth"] == pytest.approx(1)
    for name in ("key mean", "keys, int8", "queries, int8", "value statistics", "values", "chain"):
        assert rows[name]["milliseconds"] > 0
    for start in ("PREPARATION int8, in", "PREPARATION int8, after", "REFRESH", "COLD CLUSTERING"):
        assert any(name.startswith(start) for name in rows), start
    assert "k-means, k = 3, 1 steps over all tokens" in rows
    assert all(found["codes"][0][f"{x}_codes"] <= 1e-3 for x in ("query", "key", "value"))
    energy = found["energy"]
    assert energy["fused"] == pytest.approx(energy["xla"], abs=0.02)
    assert energy["fused"] > energy["unsorted"]
    (step,) = report["steps"]
    assert set(step["milliseconds"]) == {"cold", "refresh", "window", "after"}
    assert step["fa3"]["average"] > 0
    assert step["temporary_over_inputs"] > 0
    assert step["state_mb"] > 0
    for words in (
        "A copy moves",
        "Whole calls",
        "1 cold, 2 refresh, 7 window, 30 after",
        "| tiny |",
    ):
        assert words in text


def test_every_kind_of_call_is_profiled(report):
    report, text = report
    kinds = [row["kind"] for row in report["profile"]]
    assert kinds == ["no state", "cold", "refresh", "window", "after"]
    assert report["profile"][0]["to_host"] == 1
    assert "copies to host" in text


def test_a_profile_counts_copies_and_the_time_without_events():
    found = _profile.summary(EVENTS)
    assert (found.kernels, found.from_host, found.to_host) == (3, 0, 1)
    assert found.span_ms == pytest.approx(8)
    assert found.idle_ms == pytest.approx(1)
    assert list(found.milliseconds.items()) == [
        ("attention", pytest.approx(4)),
        ("clustering", pytest.approx(3)),
        ("MemcpyD2H", pytest.approx(1)),
    ]


def test_a_profile_without_a_gpu_says_so():
    with pytest.raises(RuntimeError, match="no GPU"):
        _profile.profile(lambda: jnp.zeros(2))


def test_bytes_of_a_stage_are_its_inputs_once_and_its_results():
    stage = _preprocess_stages.copy_stage(TINY)
    assert stage.bytes == 2 * 300 * 2 * 64 * 2


def test_overhead_is_over_kernels_with_means_in_the_window_only():
    # 10 of 40 steps are in the window.
    same = OfKinds(cold=2.0, refresh=2.0, window=2.0, after=1.0)
    assert _preprocess_steps.overhead(same, 2.0, 1.0) == pytest.approx(0)
    cold = OfKinds(cold=7.0, refresh=2.0, window=2.0, after=1.0)
    assert _preprocess_steps.overhead(cold, 2.0, 1.0) == pytest.approx(5 / 50)


def test_a_schedule_over_the_peer_adds_what_clustering_added_without_it():
    def measurement(milliseconds):
        return Measurement((milliseconds,), (0.0,), None, None)

    alone = OfKinds(cold=30.0, refresh=12.0, window=10.0, after=9.0)
    beside = {
        name: measurement(time)
        for name, time in (
            (_preprocess_steps.PEER, 22.0),
            ("int8 window", 11.0),
            ("int8 after", 10.0),
        )
    }
    found = _preprocess_steps._over_peer("int8", alone, beside)
    assert found["window"] == pytest.approx(2.0)
    assert found["after"] == pytest.approx(2.2)
    assert found["average"] == pytest.approx(40 * 22 / (31 + 2 * 13 + 7 * 11 + 30 * 10))


def test_the_default_is_the_wan_shape_and_the_schedules_of_four_models():
    arguments = preprocess.parser().parse_args([])
    assert arguments.workloads == ["wan-720p"]
    assert WORKLOADS["wan-720p"] == Workload("wan-720p", 75_600, 40)
    assert arguments.schedules == ["wan-720p", "hunyuan-720p", "longcat-480p", "minimax-h3"]
