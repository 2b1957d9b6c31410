"""`vc-jax bench attention --whole-calls` on tiny shapes, by whichever implementation runs here."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vc_jax.benchmarks import _whole_calls, attention
from vc_jax.benchmarks._peers import TorchAttention
from vc_jax.benchmarks._programs import SCHEDULE, compile_jobs, fresh_state
from vc_jax.benchmarks._whole_call_report import ratio_table, write_whole_calls
from vc_jax.benchmarks._whole_calls import DISPATCH, SCAN
from vc_jax.benchmarks._workloads import Workload, exact_rows, random_inputs, relative_error

from .stand_ins import plain

TINY = Workload("tiny", 140, 1, head_dim=32)
FAST = {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="module")
def inputs():
    return random_inputs(TINY, value_offset=0.0, channel_offset=0.5)


def test_values_have_an_offset_in_each_channel(inputs):
    means = np.asarray(inputs[2], np.float32).mean((0, 1))
    assert 0.3 < means.std() < 0.8
    assert abs(means.mean()) < 0.3


def test_a_scan_of_calls_ends_in_the_output_of_one_and_makes_every_call(inputs):
    looked_at = []

    def attend(query, key, value):
        # Depends on the keys alone, which are the same in every call.
        seen = jax.pure_callback(
            lambda x: looked_at.append(0) or x,
            jax.ShapeDtypeStruct((), jnp.bfloat16),
            key[0, 0, 0, 0],
        )
        return plain(query, key.at[0, 0, 0, 0].set(seen), value)

    out = jax.jit(_whole_calls.scanned_calls(attend, 3))(*inputs)
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.asarray(plain(*inputs), np.float32), atol=0.02
    )
    assert len(looked_at) == 3


def test_a_scan_of_steps_ends_in_attention_of_the_drawn_inputs(inputs):
    job = _whole_calls.scanned_steps_job(TINY, "int8")
    programs, failures = compile_jobs({"steps": job}, options=FAST)
    assert not failures
    exact, chosen = exact_rows(*inputs)
    state = fresh_state(TINY, "int8")
    out, state = programs["steps"].call(*inputs, state, jnp.arange(SCHEDULE.num_steps))
    assert relative_error(out, exact, chosen) < 0.05
    assert bool(state.made.all())
    assert sorted(state.permutation[0, 0].tolist()) == list(range(TINY.length))
    # Steps after the window leave the order alone.
    late = jnp.full(SCHEDULE.num_steps, SCHEDULE.num_steps - 1)
    again, after = programs["steps"].call(*inputs, state, late)
    assert relative_error(again, exact, chosen) < 0.05
    assert jnp.array_equal(after.permutation, state.permutation)


def test_every_candidate_is_timed_and_held_to_float32(tmp_path, monkeypatch):
    # Most of the time is the compiler's.
    fast = functools.partial(compile_jobs, options=FAST)
    monkeypatch.setattr(_whole_calls, "compile_jobs", fast)
    outside = TorchAttention(
        bind=lambda *arrays: lambda: ("tensor", plain(*arrays)), wait=lambda tensor: tensor[1]
    )
    rows = _whole_calls.measure_whole_calls(
        TINY,
        ["int8"],
        {"cuDNN BF16": plain, "useless BF16": lambda query, key, value: value},
        seconds=0.001,
        rounds=1,
        torch_peers={"FlashAttention-4 BF16": outside},
    )
    low_bit = {"int8 call", "int8 40 steps", "int8 after the window"}
    names = {where: {r["name"] for r in rows if r["where"] == where} for where in (SCAN, DISPATCH)}
    assert names[SCAN] == {"cuDNN BF16", "useless BF16", *low_bit}
    assert names[DISPATCH] == {*names[SCAN], "FlashAttention-4 BF16"}
    for row in rows:
        useless = row["name"] == "useless BF16"
        assert (row["relative_l2"] > 0.5) if useless else (row["relative_l2"] < 0.05)
        assert (row["times_bf16"] is None) == useless
        assert row["microseconds"] > 0
        assert len(row["rounds_us"]) == 1
    calls = {(row["where"], row["name"]): row["calls"] for row in rows}
    assert calls[SCAN, "int8 call"] == calls[DISPATCH, "int8 40 steps"] == 40
    assert calls[DISPATCH, "int8 call"] == calls[DISPATCH, "int8 after the window"] == 1
    write_whole_calls(tmp_path, {"device": "test"}, rows)
    assert json.loads((tmp_path / "whole-calls.json").read_text())["rows"] == rows
    assert (tmp_path / "whole-calls.png").stat().st_size > 1000


def test_what_runs_covers_both_presets_and_the_call_without_v_smooth():
    found = _whole_calls.jobs(TINY, ["fp8", "int8"], {"cuDNN BF16": plain})
    names = ["cuDNN BF16", "fp8 call", "int8 call", "fp8 call, no V-Smooth"]
    names += ["fp8 steps", "int8 steps"]
    assert sorted(found) == sorted((where, name) for where in (SCAN, DISPATCH) for name in names)
    for (_, name), job in found.items():
        out = jax.eval_shape(job.function, *job.arguments)
        out = out[0] if name.endswith("steps") else out
        assert out.shape == (1, 140, 1, 32)
        assert out.dtype == jnp.bfloat16


def row(name, microseconds, error=0.01, where=SCAN, length=1024):
    return {
        "workload": f"{length}x24",
        "length": length,
        "heads": 24,
        "where": where,
        "name": name,
        "microseconds": microseconds,
        "relative_l2": error,
    }


def test_ratios_are_over_the_fastest_bf16_of_the_same_place_that_is_right():
    peers = ["a BF16", "b BF16", "c BF16"]
    rows = [
        row("a BF16", 60.0),
        row("b BF16", 50.0),
        row("c BF16", 1.0, error=math.nan),
        row("fp8 call", 25.0),
        row("fp8 40 steps", 10.0, error=0.7),
        row("a BF16", 80.0, where=DISPATCH),
        row("fp8 call", 100.0, where=DISPATCH),
    ]
    found = _whole_calls.over_bf16(rows, peers)
    ratios = [one["times_bf16"] for one in found]
    assert ratios == [pytest.approx(5 / 6), 1.0, None, 2.0, None, 1.0, 0.8]
    table = ratio_table(found, SCAN).splitlines()
    assert table[0] == "| S × H | BF16, µs | a BF16 | b BF16 | c BF16 | fp8 call | fp8 40 steps |"
    assert table[2] == "| 1,024 × 24 | 50 | 0.833 | 1 | wrong | 2 | wrong |"
    assert ratio_table(found, DISPATCH).splitlines()[2] == "| 1,024 × 24 | 80 | 1 | 0.8 |"


def test_without_bf16_nothing_has_a_ratio():
    (found,) = _whole_calls.over_bf16([row("fp8 call", 25.0)], ["a BF16"])
    assert found["bf16_us"] is None
    assert ratio_table([found], SCAN).splitlines()[2] == "| 1,024 × 24 | – | – |"


def test_a_shape_that_another_kernel_did_not_take_has_a_gap():
    rows = [
        *_whole_calls.over_bf16([row("a BF16", 50.0), row("fp8 call", 25.0)], ["a BF16"]),
        *_whole_calls.over_bf16([row("a BF16", 90.0, length=2048)], ["a BF16"]),
    ]
    assert ratio_table(rows, SCAN).splitlines()[3] == "| 2,048 × 24 | 90 | 1 | – |"


def test_scans_of_long_calls_are_shorter():
    counts = [_whole_calls.calls_in_scan(_whole_calls.workload_of(*s)) for s in _whole_calls.SHAPES]
    assert counts == [40, 40, 40, 40, 40, 40, 4]


def test_defaults_are_those_of_what_is_measured():
    kernels, calls = (attention.parse_arguments(argv) for argv in ([], ["--whole-calls"]))
    assert (kernels.seconds, kernels.softmax, kernels.logit_sigma) == (2.0, "expcast", 1.0)
    assert kernels.workloads == list(attention.DEFAULT_WORKLOADS)
    assert (calls.seconds, calls.shapes) == (0.6, list(_whole_calls.SHAPES))
    some = attention.parse_arguments(["--whole-calls", "--shapes", "4096x24", "--seconds", "1"])
    assert (some.shapes, some.seconds) == ([(4096, 24)], 1.0)


def test_without_a_bf16_attention_it_is_one_line(tmp_path, capfd):
    arguments = attention.parse_arguments(["--whole-calls", "--output", str(tmp_path)])
    about = {"missing_peers": {"cuDNN BF16": "ImportError: gone"}}
    peers = {"tokamax BF16": ("1", plain)}
    assert attention.run_whole_calls(arguments, about, peers) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "needs one of FlashAttention-3 BF16, cuDNN BF16: " in line
    assert "ImportError: gone" in line
    assert list(tmp_path.iterdir()) == []
