"""Measuring the programs of one model: its steps, its attention call, the bare kernels."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._amdahl import of_kinds, summary
from ._model_programs import has_lengths, matrix_flops, matrix_product_job, state_function
from ._programs import KINDS, SCHEDULE, Program, fresh_state
from ._timing import Candidate, Measurement, Pace, sustained
from ._video_models import VideoModel
from ._workloads import random_inputs


@dataclasses.dataclass(frozen=True)
class Peer:
    """The BF16 attention of the baseline, and the times it was chosen by.

    Attributes:
      name: of the attention.
      attention: the function.
      program: compiled for the model's call.
      milliseconds: of every candidate.
    """

    name: str
    attention: Callable[..., Any]
    program: Callable[..., Any]
    milliseconds: dict[str, float]


Log = Callable[[str], None]


def choose_peer(
    model: VideoModel,
    programs: Mapping[str, Program],
    attentions: Mapping[str, Callable[..., Any]],
    seconds: float,
) -> Peer:
    """The faster attention at a model's shape.

    Raises:
      RuntimeError: none runs.
    """
    inputs = random_inputs(model.workload)
    candidates, failures = {}, []
    for name, program in programs.items():
        try:
            jax.block_until_ready(program.call(*inputs))
        except Exception as error:  # one that does not take this shape
            failures.append(f"{name}: {type(error).__name__}: {error}")
            continue
        candidates[name] = Candidate(functools.partial(program.call, *inputs))
    if not candidates:
        raise RuntimeError(f"no BF16 attention runs at {model.workload}: {failures}")
    measured = sustained(candidates, seconds=seconds, rounds=2)
    times = {name: entry.median_ms for name, entry in measured.items()}
    best = min(times, key=times.__getitem__)
    return Peer(best, attentions[best], programs[best].call, times)


def relative_l2(out: Any, exact: Any) -> float:
    """|out − exact| / |exact| over all arrays of the velocities."""

    def energy(tree: Any) -> float:
        return sum(float(jnp.sum(jnp.square(x.astype(jnp.float32)))) for x in tree)

    exact, out = jax.tree.leaves(exact), jax.tree.leaves(out)
    difference = [a.astype(jnp.float32) - b.astype(jnp.float32) for a, b in zip(out, exact)]
    return math.sqrt(energy(difference) / energy(exact))


def all_finite(tree: Any) -> bool:
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree))


class _Steps:
    """Runs of the steps; keeps the velocities that each kind gave last."""

    def __init__(self, model: VideoModel, programs: Mapping[str, Program]):
        self.model, self.programs = model, programs
        self.velocities: dict[str, Any] = {}
        weights = programs["weights"].call(jnp.uint32(0))
        self.arguments = (jax.block_until_ready(weights), *model.inputs())

    def run(self, name: str, state: Any = None, index: Any = None) -> Any:
        """Start a step; `name` is that of its program, with the kind of step after a comma."""
        program = self.programs[f"{name.split(',')[0]} step"]
        velocity, state = program.call(*self.arguments, state, index)
        self.velocities[name] = velocity
        return velocity, state

    def timed(self, name: str, state: Any = None, index: Any = None) -> tuple[float, Any]:
        """Seconds of one execution, and the state."""
        start = time.perf_counter()
        result = jax.block_until_ready(self.run(name, state, index))
        return time.perf_counter() - start, result[1]

    def fresh(self, preset: str) -> Any:
        graph = self.model.graph(preset)[0]
        weights, latents, _, conditioning = self.arguments
        return jax.block_until_ready(jax.jit(state_function(graph))(weights, latents, conditioning))


def measure_denoising_steps(
    model: VideoModel,
    programs: Mapping[str, Program],
    presets: Sequence[str],
    pace: Pace,
    log: Log,
) -> list[dict[str, Any]]:
    """Rows of every kind of step of every method, with the error against BF16.

    The first execution of a program also loads it. A cold clustering of a long step is timed
    there, and only there.
    """
    steps = _Steps(model, programs)
    log("weights made")
    first, _ = steps.timed("bf16")
    log(f"bf16: first step {first:.2f} s")
    candidates = {"bf16": Candidate(lambda: steps.run("bf16")[0])}
    measured: dict[str, Measurement] = {}
    # The first execution is a fair estimate of a long step only.
    estimates = {"bf16": first} if first >= 2 * pace.seconds else {}
    for preset in presets:
        fresh = steps.fresh(preset)
        name = f"{preset}, cold"
        seconds, state = steps.timed(name, fresh, jnp.int32(KINDS["cold"]))
        log(f"{name}: first step {seconds:.2f} s")
        states = {kind: fresh if kind == "cold" else state for kind in KINDS}
        if seconds >= pace.seconds:
            measured[name] = Measurement((1e3 * seconds,), (0.0,), None, None)
            del states["cold"]
        for kind, given in states.items():
            name, index = f"{preset}, {kind}", jnp.int32(KINDS[kind])

            def run(name: str = name, given: Any = given, index: Any = index) -> Any:
                return steps.run(name, given, index)[0]

            candidates[name] = Candidate(run)
            if seconds >= 2 * pace.seconds:
                estimates[name] = seconds
        del fresh, state, states
    measured |= sustained(
        candidates,
        seconds=pace.seconds,
        rounds=pace.rounds,
        estimates=estimates,
        deadline=pace.deadline,
    )
    exact = steps.velocities["bf16"]
    order = ["bf16"] + [f"{preset}, {kind}" for preset in presets for kind in KINDS]
    return [
        _row(name, measured[name])
        | {
            "first_execution_only": name not in candidates,
            "relative_l2": relative_l2(steps.velocities[name], exact),
            "finite": all_finite(steps.velocities[name]),
        }
        for name in order
    ]


def measure_attention(
    model: VideoModel,
    programs: Mapping[str, Program],
    peer: Peer,
    presets: Sequence[str],
    pace: Pace,
) -> list[dict[str, Any]]:
    """Rows of one layer's attention call, of the bare kernels, and of a matrix product.

    Each takes half of the seconds that a step takes.
    """
    inputs = random_inputs(model.workload)
    shapes = matrix_product_job(model).arguments
    (rows, width), (_, out) = (x.shape for x in shapes)
    keys = jax.random.split(jax.random.key(3))
    product = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, shapes, strict=True)]
    candidates = {
        "bf16": Candidate(functools.partial(peer.program, *inputs), model.workload.flops),
        "matrix product": Candidate(
            functools.partial(programs["matrix product"].call, *product), 2.0 * rows * width * out
        ),
    }
    for preset in presets:
        call = programs[f"{preset} call"].call
        for kind, argument in call_states(model, preset, call, inputs).items():

            def run(call: Any = call, argument: Any = argument) -> Any:
                return call(*inputs, *argument)[0]

            candidates[f"{preset}, {kind}"] = Candidate(run, model.workload.flops)
        for label, means in (("kernel, means", "means"), ("kernel", "no means")):
            prepared = programs[f"{preset} prepare, {means}"].call(*inputs)
            kernel = functools.partial(programs[f"{preset} kernel, {means}"].call, prepared)
            candidates[f"{preset} {label}"] = Candidate(kernel, model.workload.flops)
    measured = sustained(
        candidates,
        seconds=pace.seconds / 2,
        rounds=pace.rounds,
        deadline=pace.deadline,
    )
    return [_row(name, entry) for name, entry in measured.items()]


def call_states(
    model: VideoModel, preset: str, call: Callable[..., Any], inputs: Sequence[Any]
) -> dict[str, tuple[Any, Any, Any]]:
    """State, step and lengths of every kind of call."""
    work = model.workload
    fresh = fresh_state(work, preset)
    lengths = None
    if has_lengths(model):
        lengths = jnp.full((work.batch,), work.length, jnp.int32)
    made = call(*inputs, fresh, jnp.int32(KINDS["cold"]), lengths)[1]
    return {
        kind: (fresh if kind == "cold" else made, jnp.int32(step), lengths)
        for kind, step in KINDS.items()
    }


def _row(name: str, entry: Measurement) -> dict[str, Any]:
    return {
        "name": name,
        "milliseconds": entry.median_ms,
        "spread": entry.spread if len(entry.milliseconds) > 1 else None,
        "teraflops": entry.median_teraflops,
        "clock_mhz": entry.clock_mhz,
        "power_w": entry.power_w,
        "rounds_ms": entry.milliseconds,
    }


def summaries(
    model: VideoModel,
    steps: Sequence[Mapping[str, Any]],
    attention: Sequence[Mapping[str, Any]],
    presets: Sequence[str],
) -> dict[str, Any]:
    """What the measured rows come to, by preset."""
    step = {row["name"]: row["milliseconds"] for row in steps}
    call = {row["name"]: row["milliseconds"] for row in attention}
    flops = matrix_flops(model)
    rate = next(row["teraflops"] for row in attention if row["name"] == "matrix product")
    found = {}
    for preset in presets:
        kernels = {kind: call[f"{preset} kernel, means"] for kind in KINDS}
        kernels["after"] = call[f"{preset} kernel"]
        found[preset] = summary(
            SCHEDULE,
            model.config.num_layers,
            step["bf16"],
            call["bf16"],
            of_kinds({kind: step[f"{preset}, {kind}"] for kind in KINDS}),
            of_kinds({kind: call[f"{preset}, {kind}"] for kind in KINDS}),
            of_kinds(kernels),
            matrix_products=flops / rate / 1e9,
        )
    return found
