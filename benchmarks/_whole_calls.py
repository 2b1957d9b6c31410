"""Whole attention calls by sequence length: `vc-jax bench attention --whole-calls`.

A whole call is everything between bfloat16 queries, keys and values and the output. It is timed
twice: many calls inside one jitted `lax.scan`, where nothing waits for Python, and one dispatch a
call. Both end in the output of a call on the drawn inputs, which is held to float32.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16

import vc_jax

from ._peers import Attention, TorchAttention
from ._programs import (
    KINDS,
    SCHEDULE,
    Job,
    Program,
    abstract_inputs,
    call_job,
    compile_jobs,
    fresh_state,
    step_job,
)
from ._timing import Candidate, Measurement, sustained
from ._workloads import Workload, exact_rows, random_inputs, relative_error

SHAPES = (
    *((1024, 24), (2048, 24), (4096, 24), (8192, 24)),
    *((17776, 48), (32760, 12), (75600, 40)),
)
"""Tokens and heads that are measured unless others are asked for."""
SCAN, DISPATCH = "scan", "dispatch"
"""Where calls run: inside one jitted `lax.scan`, or one dispatch each."""
LARGEST_ERROR = 0.2
"""Relative L2 above which an output is wrong, and its time means nothing."""
_CALLS, _FEWEST_CALLS = SCHEDULE.num_steps, 4
_SCAN_FLOPS = 4e14
"""After so much work a scan of calls is long enough: over half a second in BF16 on an H200."""


@dataclasses.dataclass(frozen=True)
class WholeCall:
    """A candidate of one shape.

    Attributes:
      name: of its column.
      where: `SCAN` or `DISPATCH`.
      calls: attention calls of one execution.
      run: starts one execution; its result begins with the output of the last call.
      wait: until a result is there.
      compile_s: seconds of its compilation; `None` where this is not known.
    """

    name: str
    where: str
    calls: int
    run: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    compile_s: float | None = None


def workload_of(length: int, heads: int) -> Workload:
    """A shape by its size, with 128 channels a head."""
    return Workload(f"{length}x{heads}", length, heads)


def calls_in_scan(workload: Workload) -> int:
    """As many as a schedule has steps, fewer where one takes long."""
    return max(_FEWEST_CALLS, min(_CALLS, math.ceil(_SCAN_FLOPS / workload.flops)))


def scanned_calls(attention: Attention, count: int) -> Attention:
    """`count` calls in one scan; the result is that of the last one.

    Every call but the last leaves the queries as they are, which the compiler cannot know: each
    waits for the one before it, as layers do. The barrier keeps keys and values from looking the
    same in every call, or what depends on them alone could be computed once, before the loop.
    """

    def run(
        query: BFloat16[Array, "b t n h"],
        key: BFloat16[Array, "b s n h"],
        value: BFloat16[Array, "b s n h"],
    ) -> BFloat16[Array, "b t n h"]:
        def call(carried, index):
            inputs = jax.lax.optimization_barrier((carried, key, value))
            return jnp.where(index == count - 1, attention(*inputs), inputs[0]), None

        return jax.lax.scan(call, query, jnp.arange(count))[0]

    return run


def scanned_steps_job(workload: Workload, preset: str) -> Job:
    """As many `attention_step`s as the schedule has, in one scan: `(query, key, value, state,
    steps) -> (out, state)`, with the index of each step in int32 `steps`.

    Queries, keys and values as in `scanned_calls`.
    """
    single = step_job(workload, preset)
    *inputs, state, index, _ = single.arguments
    last = SCHEDULE.num_steps - 1

    def run(query, key, value, state, steps):
        def call(carried, numbered):
            place, step = numbered
            query, state = carried
            arrays = jax.lax.optimization_barrier((query, key, value))
            out, state = single.function(*arrays, state, step, None)
            return (jnp.where(place == last, out, arrays[0]), state), None

        return jax.lax.scan(call, (query, state), (jnp.arange(last + 1), steps))[0]

    steps = jax.ShapeDtypeStruct((last + 1,), index.dtype)
    return Job(run, (*inputs, state, steps))


def configurations(presets: Sequence[str]) -> dict[str, vc_jax.AttentionConfig]:
    """What stateless calls run with, by the name of the column."""
    named = {f"{preset} call": vc_jax.PRESETS[preset] for preset in presets}
    if "fp8" in presets:
        plain = dataclasses.replace(vc_jax.PRESETS["fp8"], smooth_values=False)
        named["fp8 call, no V-Smooth"] = plain
    return named


def jobs(
    workload: Workload, presets: Sequence[str], peers: Mapping[str, Attention]
) -> dict[tuple[str, str], Job]:
    """Everything that is compiled for a shape, by where it runs and its name."""
    arguments, count = abstract_inputs(workload), calls_in_scan(workload)
    single = {name: Job(attention, arguments) for name, attention in peers.items()}
    single |= {name: call_job(workload, c) for name, c in configurations(presets).items()}
    found = {(DISPATCH, name): job for name, job in single.items()}
    for name, job in single.items():
        found[SCAN, name] = Job(scanned_calls(job.function, count), arguments)
    for preset in presets:
        found[DISPATCH, f"{preset} steps"] = step_job(workload, preset)
        found[SCAN, f"{preset} steps"] = scanned_steps_job(workload, preset)
    return found


def whole_calls(
    workload: Workload,
    presets: Sequence[str],
    programs: Mapping[tuple[str, str], Program],
    inputs: Sequence[jax.Array],
) -> Iterator[WholeCall]:
    """Candidates of the compiled programs; one that does not run is named and left out."""
    stateful = {f"{preset} steps": preset for preset in presets}
    for (where, name), program in programs.items():
        if name in stateful:
            try:
                yield from _steps_of(workload, stateful[name], where, program, inputs)
            except Exception as error:  # what the others show must not be lost
                _report_failure(where, name, error)
            continue
        calls = calls_in_scan(workload) if where == SCAN else 1
        run = functools.partial(program.call, *inputs)
        yield WholeCall(name, where, calls, run, compile_s=program.compile_s)


def _report_failure(where: str, name: str, error: Exception) -> None:
    print(f"  {name}, {where}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def _steps_of(
    workload: Workload, preset: str, where: str, program: Program, inputs: Sequence[jax.Array]
) -> list[WholeCall]:
    """The schedule from a fresh state, and steps after the window in the order that it left."""
    count, after = SCHEDULE.num_steps, KINDS["after"]
    fresh = fresh_state(workload, preset)
    whole, same = jnp.arange(count), jnp.full(count, after)
    scalars = [jnp.int32(step) for step in range(count)]

    def scan(state, steps):
        return program.call(*inputs, state, steps)

    def one_by_one(state, steps):
        out = None
        for step in steps:
            out, state = program.call(*inputs, state, step, None)
        return out, state

    if where == SCAN:
        run, schedule, late = scan, whole, same
    else:
        run, schedule, late = one_by_one, scalars, [scalars[after]]
    made = jax.block_until_ready(run(fresh, schedule))[1]
    return [
        WholeCall(
            f"{preset} {count} steps",
            where,
            count,
            functools.partial(run, fresh, schedule),
            compile_s=program.compile_s,
        ),
        WholeCall(
            f"{preset} after the window",
            where,
            len(late),
            functools.partial(run, made, late),
            compile_s=program.compile_s,
        ),
    ]


def _error_and_seconds(call: WholeCall, exact: jax.Array, chosen: jax.Array) -> tuple[float, float]:
    """Relative L2 of a candidate's output, and the seconds of its second execution."""
    call.wait(call.run())
    start = time.perf_counter()
    result = call.wait(call.run())
    seconds = time.perf_counter() - start
    out = result[0] if isinstance(result, tuple) else result
    return relative_error(out, exact, chosen), seconds


def measure_whole_calls(
    workload: Workload,
    presets: Sequence[str],
    peers: Mapping[str, Attention],
    *,
    seconds: float,
    rounds: int,
    torch_peers: Mapping[str, TorchAttention] | None = None,
) -> list[dict[str, Any]]:
    """Rows of one shape: time, ratio to BF16 and error of every candidate, all in turns.

    Args:
      peers: BF16 attention of JAX by name.
      seconds: of each candidate a round, or one execution where that is longer.
      rounds: how often the candidates take their turn.
      torch_peers: BF16 attention outside of JAX, which cannot be part of a scan.
    """
    inputs = random_inputs(workload, value_offset=0.0, channel_offset=0.5)
    exact, chosen = exact_rows(*inputs)
    programs, _ = compile_jobs(jobs(workload, presets, peers))
    calls = list(whole_calls(workload, presets, programs, inputs))
    for name, attention in (torch_peers or {}).items():
        calls.append(WholeCall(name, DISPATCH, 1, attention.bind(*inputs), attention.wait))
    candidates, errors, estimates = {}, {}, {}
    for call in calls:
        key = call.where, call.name
        try:
            errors[key], duration = _error_and_seconds(call, exact, chosen)
        except Exception as error:  # one that does not take this shape
            _report_failure(*key, error)
            continue
        candidates[key] = Candidate(call.run, call.calls * workload.flops, call.wait)
        if duration >= seconds:
            estimates[key] = duration
    measured = sustained(candidates, seconds=seconds, rounds=rounds, estimates=estimates)
    rows = [
        _row(workload, call, measured[call.where, call.name], errors[call.where, call.name])
        for call in calls
        if (call.where, call.name) in measured
    ]
    return over_bf16(rows, [*peers, *(torch_peers or {})])


def _row(workload: Workload, call: WholeCall, entry: Measurement, error: float) -> dict[str, Any]:
    per_call = 1e3 / call.calls
    return {
        "workload": workload.name,
        "length": workload.length,
        "heads": workload.heads,
        "head_dim": workload.head_dim,
        "where": call.where,
        "name": call.name,
        "calls": call.calls,
        "microseconds": per_call * entry.median_ms,
        "spread": entry.spread,
        "relative_l2": error,
        "clock_mhz": entry.clock_mhz,
        "power_w": entry.power_w,
        "compile_s": call.compile_s,
        "rounds_us": [per_call * milliseconds for milliseconds in entry.milliseconds],
    }


def over_bf16(rows: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of one shape with `bf16_us`, the time of the fastest BF16 peer at the same place,
    and `times_bf16`, how many times as fast as that a row is.

    Both are `None` where no peer ran; so is `times_bf16` of a row whose output is wrong.
    """
    best: dict[str, float] = {}
    for row in rows:
        if row["name"] in peers and is_right(row):
            time_there = best.get(row["where"], math.inf)
            best[row["where"]] = min(time_there, row["microseconds"])
    found = []
    for row in rows:
        base = best.get(row["where"])
        ratio = base / row["microseconds"] if base is not None and is_right(row) else None
        found.append({**row, "bf16_us": base, "times_bf16": ratio})
    return found


def is_right(row: Mapping[str, Any]) -> bool:
    """Whether a row's output is finite and close to float32."""
    return row["relative_l2"] <= LARGEST_ERROR
