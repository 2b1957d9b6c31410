"""Whole `attention_step` calls against the bare kernel, and their memory and compile times."""

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._amdahl import OfKinds, of_kinds
from ._preprocess_stages import Inputs, Stage, bytes_of, clustered_inputs
from ._profile import profile
from ._programs import (
    KINDS,
    SCHEDULE,
    Job,
    Program,
    abstract_inputs,
    bare_kernel_jobs,
    call_job,
    compile_jobs,
    fresh_state,
    step_job,
)
from ._timing import Candidate, Measurement, Pace, sustained
from ._workloads import Workload

PEER = "FlashAttention-3 BF16"
_COMPARED = ("window", "after")
"""Kinds of steps that are timed in turns with the peer."""
_KERNELS = tuple(f"{part}, {m}" for part in ("prepare", "kernel") for m in ("means", "no means"))


def _in_turns(candidates: Mapping[str, Candidate], pace: Pace) -> dict[str, Measurement]:
    """Times, after a second run of each has told how often it runs in a round."""
    return sustained(
        candidates,
        seconds=pace.seconds,
        rounds=pace.rounds,
        estimates={name: _second_run(candidate) for name, candidate in candidates.items()},
        deadline=pace.deadline,
    )


def _second_run(candidate: Candidate) -> float:
    """Seconds."""
    jax.block_until_ready(candidate.run())
    start = time.perf_counter()
    jax.block_until_ready(candidate.run())
    return time.perf_counter() - start


def jobs(
    workload: Workload,
    presets: Sequence[str],
    peer: Callable[..., Any] | None = None,
    stateless: bool = False,
) -> dict[str, Job]:
    """Everything that is compiled for a workload, by name; `stateless` calls if asked for."""
    found = {} if peer is None else {PEER: Job(peer, abstract_inputs(workload))}
    for preset in presets:
        if stateless:
            found[f"{preset} call"] = call_job(workload, preset)
        found[f"{preset} step"] = step_job(workload, preset)
        for name, job in bare_kernel_jobs(workload, preset, ordered=True).items():
            found[f"{preset} {name}"] = job
    return found


def compile_workloads(
    workloads: Mapping[str, Workload],
    presets: Sequence[str],
    peers: Mapping[str, Callable[..., Any]],
    stateless: Collection[str],
) -> dict[str, dict[str, Program]]:
    """Programs of each workload; `peers` has an attention for those that are compared with it."""
    wanted = {
        (name, key): job
        for name, workload in workloads.items()
        for key, job in jobs(workload, presets, peers.get(name), name in stateless).items()
    }
    compiled, _ = compile_jobs(wanted)
    programs: dict[str, dict[str, Program]] = {name: {} for name in workloads}
    for (name, key), program in compiled.items():
        programs[name][key] = program
    return programs


def measure_attention_steps(
    workload: Workload,
    programs: Mapping[str, Program],
    presets: Sequence[str],
    pace: Pace,
    peer_seconds: float,
) -> list[dict[str, Any]]:
    """A row for each preset: times of kinds of steps and of the kernel, overhead, memory.

    What is compared with the peer runs `peer_seconds` a round, in turns with it.
    """
    inputs = clustered_inputs(workload)
    presets = [
        preset
        for preset in presets
        if all(f"{preset} {part}" in programs for part in ("step", *_KERNELS))
    ]
    candidates: dict[str, Candidate] = {}
    for preset in presets:
        candidates |= _candidates_of(preset, programs, inputs, fresh_state(workload, preset))
    measured = _in_turns(candidates, pace)
    with_peer: dict[str, Measurement] = {}
    if PEER in programs:
        compared = {PEER: Candidate(functools.partial(programs[PEER].call, *inputs))}
        compared |= {
            f"{preset} {kind}": candidates[f"{preset} {kind}"]
            for preset in presets
            for kind in _COMPARED
        }
        with_peer = _in_turns(compared, dataclasses.replace(pace, seconds=peer_seconds))
    sizes = bytes_of(inputs)
    return [_row(workload, preset, programs, measured, with_peer, sizes) for preset in presets]


def _candidates_of(preset: str, programs: Mapping[str, Program], inputs: Inputs, cold):
    """Every kind of step, and the kernel on inputs in the order of the cold step."""
    step = programs[f"{preset} step"].call
    _, made = step(*inputs, cold, jnp.int32(KINDS["cold"]), None)
    found = {}
    for name in ("means", "no means"):
        prepared = programs[f"{preset} prepare, {name}"].call(*inputs, made.permutation)
        kernel = programs[f"{preset} kernel, {name}"].call
        found[f"{preset} kernel, {name}"] = Candidate(functools.partial(kernel, prepared))
    for kind, index in KINDS.items():
        state = cold if kind == "cold" else made
        run = functools.partial(step, *inputs, state, jnp.int32(index), None)
        found[f"{preset} {kind}"] = Candidate(run)
    return found


def profile_calls(
    workload: Workload, programs: Mapping[str, Program], presets: Sequence[str]
) -> list[dict[str, Any]]:
    """What the GPU does in one execution of each kind of call.

    Raises:
      RuntimeError: the profiler saw no GPU.
    """
    inputs = clustered_inputs(workload)
    rows = []
    for preset in presets:
        cold = fresh_state(workload, preset)
        step = programs[f"{preset} step"].call
        made = step(*inputs, cold, jnp.int32(KINDS["cold"]), None)[1]
        calls = {"no state": functools.partial(programs[f"{preset} call"].call, *inputs)}
        for kind, index in KINDS.items():
            state = cold if kind == "cold" else made
            calls[kind] = functools.partial(step, *inputs, state, jnp.int32(index), None)
        for kind, call in calls.items():
            row = {"workload": workload.name, "preset": preset, "kind": kind}
            rows.append(row | dataclasses.asdict(profile(call)))
    return rows


def overhead(steps: OfKinds, means: float, no_means: float) -> float:
    """How much longer a schedule's calls take than its kernels, with means in the window only."""
    return steps.total(SCHEDULE) / OfKinds(means, means, means, no_means).total(SCHEDULE) - 1.0


def _row(
    workload: Workload,
    preset: str,
    programs: Mapping[str, Program],
    measured: Mapping[str, Measurement],
    with_peer: Mapping[str, Measurement],
    input_bytes: float,
) -> dict[str, Any]:
    times = {kind: measured[f"{preset} {kind}"].median_ms for kind in KINDS}
    kernels = {
        name: measured[f"{preset} kernel, {name}"].median_ms for name in ("means", "no means")
    }
    steps = of_kinds(times)
    program = programs[f"{preset} step"]
    state = jax.eval_shape(functools.partial(fresh_state, workload, preset))
    own = {name: entry for name, entry in measured.items() if name.startswith(preset)}
    return {
        "workload": workload.name,
        "preset": preset,
        "milliseconds": times,
        "kernel_milliseconds": kernels,
        "average_ms": steps.total(SCHEDULE) / SCHEDULE.num_steps,
        "overhead": overhead(steps, kernels["means"], kernels["no means"]),
        "fa3": _over_peer(preset, steps, with_peer) if with_peer else None,
        "temporary_over_inputs": program.memory["temp_size_in_bytes"] / input_bytes,
        "results_over_inputs": program.memory["output_size_in_bytes"] / input_bytes,
        "state_mb": bytes_of(state) / 1e6,
        "compile_s": program.compile_s,
        "rounds": {name: dataclasses.asdict(entry) for name, entry in own.items()},
    }


def _over_peer(preset: str, steps: OfKinds, measured: Mapping[str, Measurement]) -> dict[str, Any]:
    """The peer's time over those of kinds of steps and of a schedule's average.

    A clustering takes as much longer than a stored order as it did without the peer.
    """
    peer = measured[PEER].median_ms
    window, after = (measured[f"{preset} {kind}"].median_ms for kind in _COMPARED)
    cold, refresh = (window + x - steps.window for x in (steps.cold, steps.refresh))
    average = OfKinds(cold, refresh, window, after).total(SCHEDULE) / SCHEDULE.num_steps
    return {
        "milliseconds": peer,
        "window": peer / window,
        "after": peer / after,
        "average": peer / average,
        "rounds": {name: dataclasses.asdict(entry) for name, entry in measured.items()},
    }


def measure_stages(stages: Sequence[Stage], pace: Pace) -> list[dict[str, Any]]:
    """A row for each stage: its time, its bytes, and these over the bandwidth of a copy.

    The first stage is the copy.
    """
    compiled, _ = compile_jobs(
        {i: Job(stage.function, stage.arguments) for i, stage in enumerate(stages)}
    )
    candidates = {
        stage.name: Candidate(functools.partial(compiled[i].call, *stage.arguments))
        for i, stage in enumerate(stages)
        if i in compiled
    }
    measured = _in_turns(candidates, pace)
    copy = stages[0].bytes / (1e-3 * measured[stages[0].name].median_ms)
    return [
        {
            "stage": stage.name,
            "milliseconds": measured[stage.name].median_ms,
            "spread": measured[stage.name].spread,
            "bytes": stage.bytes,
            "floor_ms": 1e3 * stage.bytes / copy,
            "of_copy_bandwidth": stage.bytes / (1e-3 * measured[stage.name].median_ms) / copy,
            "temporary_mb": compiled[i].memory["temp_size_in_bytes"] / 1e6,
            "compile_s": compiled[i].compile_s,
        }
        for i, stage in enumerate(stages)
        if i in compiled
    ]


def deadline_after(seconds: float) -> float:
    """On the clock of `sustained`."""
    return time.perf_counter() + seconds
