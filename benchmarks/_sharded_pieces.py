"""What one device of n computes in a sharded call, measured on one: `bench sharded --pieces`.

Ulysses leaves a device whole sequences of `heads / n` heads; a step of a ring `tokens / n` queries
against as many keys, of all heads. The time of n of those and of their merges is a ring without its
transfers. Everything is timed as a caller sees it, with clustering from scratch in every call.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import vc_jax
import vc_jax.sharding

from ._programs import UNTUNED, Job, Program, abstract_inputs, call_job, compile_jobs
from ._timing import Candidate, sustained
from ._workloads import Workload, exact_rows, random_inputs, relative_error

PARTS = (1, 2, 4, 8)
ULYSSES, RING, MERGE = "ulysses", "ring step", "merge"
Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A device's part: of a clip, over `parts` devices, by `kind`, with a preset."""

    clip: str
    parts: int
    kind: str
    preset: str


def part_of(workload: Workload, parts: int, kind: str) -> Workload | None:
    """The call that one of `parts` devices makes; `None` where heads cannot be shared out."""
    if kind == ULYSSES:
        if workload.heads % parts:
            return None
        return dataclasses.replace(workload, heads=workload.heads // parts)
    return dataclasses.replace(workload, length=math.ceil(workload.length / parts))


def ring_step_job(workload: Workload, preset: str) -> Job:
    """A call that also returns its normaliser."""
    call = functools.partial(vc_jax.dot_product_attention, config=preset, return_residual=True)
    return Job(call, abstract_inputs(workload))


def merge_job(workload: Workload) -> Job:
    """`vc_jax.sharding.merge` of two results of a ring's step."""
    shape = (workload.batch, workload.length, workload.heads, workload.head_dim)
    result = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, shape[:3]))
    return Job(vc_jax.sharding.merge, (result, result))


def merged_pieces(
    preset: str,
    parts: int,
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s n h"],
    value: Float[Array, "b s n h"],
) -> Float[Array, "b t n h"]:
    """A ring's result for the queries of one device: each part of the keys by itself, merged."""

    def stacked(tokens: Array) -> Array:
        return jnp.stack(jnp.split(tokens, parts, 1))

    def step(so_far: Any, piece: Any) -> tuple[Any, None]:
        out, lse = vc_jax.dot_product_attention(query, *piece, config=preset, return_residual=True)
        return vc_jax.sharding.merge(so_far, (out.astype(jnp.float32), lse)), None

    start = jnp.zeros(query.shape, jnp.float32), jnp.full(query.shape[:3], -jnp.inf)
    (out, _), _ = jax.lax.scan(step, start, (stacked(key), stacked(value)))
    return out


def measure_pieces(
    workloads: Sequence[Workload],
    presets: Sequence[str],
    parts: Sequence[int],
    *,
    seconds: float,
    deadline: float,
    log: Log,
) -> dict[str, Any]:
    """Times of all pieces and errors of merged ones, preset by preset while there is time.

    Args:
      parts: numbers of devices.
      seconds: of each candidate.
      deadline: of `time.perf_counter()`; a preset that would not be done by then is left out.
    """
    rows: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    longest = 0.0
    for preset in presets:
        began = time.perf_counter()
        if began + longest > deadline:
            log(f"no time left for {preset}")
            break
        rows += _times(workloads, preset, parts, seconds, log)
        errors += _errors(workloads[0], preset, [n for n in parts if n > 1], log)
        longest = max(longest, time.perf_counter() - began)
    return {"pieces": rows, "errors": errors}


def _times(
    workloads: Sequence[Workload], preset: str, parts: Sequence[int], seconds: float, log: Log
) -> list[dict[str, Any]]:
    shapes: dict[Piece, Workload] = {}
    jobs: dict[Piece, Job] = {}
    for workload in workloads:
        for count in parts:
            for kind in (ULYSSES, RING, MERGE) if count > 1 else (ULYSSES,):
                part = part_of(workload, count, kind)
                if part is None:
                    log(f"{workload.name}: {count} devices do not divide {workload.heads} heads")
                    continue
                piece = Piece(workload.name, count, kind, preset)
                shapes[piece] = part
                make = {ULYSSES: call_job, RING: ring_step_job}.get(kind)
                jobs[piece] = merge_job(part) if make is None else make(part, preset)
    programs, _ = compile_jobs(jobs, log=log)
    log(f"{preset}: compiled {len(programs)} programs")
    candidates: dict[Piece, Candidate] = {}
    for workload in workloads:
        tensors = random_inputs(workload)
        own = [piece for piece in programs if piece.clip == workload.name]
        for piece in sorted(own, key=lambda piece: (piece.parts, piece.kind)):
            candidates[piece] = _candidate(piece, shapes[piece], programs[piece], tensors)
    found = sustained(candidates, seconds=seconds, rounds=1)
    return [
        {
            **dataclasses.asdict(piece),
            "tokens": shapes[piece].length,
            "heads": shapes[piece].heads,
            "milliseconds": measured.median_ms,
            "teraflops": measured.median_teraflops,
            "clock_mhz": measured.clock_mhz,
            "power_w": measured.power_w,
            "compile_s": programs[piece].compile_s,
        }
        for piece, measured in found.items()
    ]


def _candidate(
    piece: Piece, part: Workload, program: Program, tensors: tuple[Array, ...]
) -> Candidate:
    own = [x[:, : part.length, : part.heads] for x in tensors]
    if piece.kind == MERGE:
        result = own[0].astype(jnp.float32), jnp.zeros(own[0].shape[:3], jnp.float32)
        return Candidate(functools.partial(program.call, result, result))
    return Candidate(functools.partial(program.call, *own), part.flops)


def _errors(
    workload: Workload, preset: str, parts: Sequence[int], log: Log
) -> list[dict[str, Any]]:
    """Relative L2 of rows of one head against float32: keys whole, and in merged pieces.

    Clustered keys and values would be another matter; these are independent normals.
    """
    most = max(parts, default=1)
    length = workload.length // most * most  # so that every number of parts divides it
    query, key, value = (x[:, :length] for x in random_inputs(workload))
    query = query[:, : length // most]
    exact, chosen = exact_rows(query, key, value)
    arguments = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value))
    whole = functools.partial(vc_jax.dot_product_attention, config=preset)
    jobs = {1: Job(whole, arguments, UNTUNED)}
    for count in parts:
        jobs[count] = Job(functools.partial(merged_pieces, preset, count), arguments, UNTUNED)
    programs, _ = compile_jobs(jobs, log=log)
    return [
        {
            "clip": workload.name,
            "preset": preset,
            "pieces": count,
            "queries": query.shape[1],
            "keys": length,
            "relative_l2": relative_error(program.call(query, key, value), exact, chosen),
        }
        for count, program in sorted(programs.items())
    ]


def pieces_report(report: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows: a device's kernel, and what is left of one device's rate."""
    columns = ["clip", "preset", "devices", "method", "call ms", "calls", "merges ms"]
    columns += ["a device ms", "ideal ms", "of one device's rate", "TFLOP/s"]
    found = {
        (row["clip"], row["preset"], row["parts"], row["kind"]): row for row in report["pieces"]
    }
    rows: list[list[Any]] = []
    for (clip, preset, parts, kind), row in found.items():
        if kind == MERGE:
            continue
        one = found.get((clip, preset, 1, ULYSSES))
        calls = parts if kind == RING else 1
        merge = found.get((clip, preset, parts, MERGE)) if kind == RING else None
        merges = 0.0 if merge is None else (parts - 1) * merge["milliseconds"]
        whole = calls * row["milliseconds"] + merges
        ideal = None if one is None else one["milliseconds"] / parts
        share = None if ideal is None else ideal / whole
        method = "ring" if kind == RING else kind
        rows.append(
            [
                *(clip, preset, parts, method, row["milliseconds"], calls, merges, whole),
                *(ideal, share, row["teraflops"]),
            ]
        )
    return columns, rows
