"""Calls and a model's step on 2, 4, 8, ... devices, checked against one: `bench sharded`."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import vc_jax
import vc_jax.sharding

from ..models.mesh import ModelMesh
from ._model_programs import state_function, step_function
from ._programs import Job, call_job, compile_jobs
from ._timing import Candidate, sustained
from ._video_models import VideoModel, random_parameters
from ._workloads import Workload, exact_rows, random_inputs, relative_error

Log = Callable[[str], None]
METHODS = ("ulysses", "ring")
_AXIS = "seq"


def device_counts() -> list[int]:
    """2, 4, 8, ... devices, as far as there are any."""
    return [n for n in (2**i for i in range(1, 11)) if n <= jax.device_count()]


def mesh_of(count: int) -> Mesh:
    """The first devices along one axis."""
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), (_AXIS,), devices=devices, axis_types=(AxisType.Auto,))


def measure_link(count: int, megabytes: float, seconds: float) -> dict[str, float]:
    """Bytes a second that leave each device in an all-to-all and in a ring's step."""
    mesh = mesh_of(count)
    rows = max(1, round(megabytes * 1e6 / (2 * 1024 * count))) * count
    place = NamedSharding(mesh, PartitionSpec(_AXIS))
    data = jax.device_put(jnp.zeros((rows * count, 1024), jnp.bfloat16), place)
    pairs = [(i, (i + 1) % count) for i in range(count)]

    def exchange(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, _AXIS, 0, 0, tiled=True)

    def rotate(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, _AXIS, pairs)

    spec = PartitionSpec(_AXIS)
    candidates = {}
    for name, function in (("all-to-all", exchange), ("collective-permute", rotate)):
        run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec))
        candidates[name] = Candidate(functools.partial(run, data))
    found = sustained(candidates, seconds=seconds, rounds=1)
    held = data.nbytes / count
    sent = {"all-to-all": held * (count - 1) / count, "collective-permute": held}
    return {name: sent[name] / (1e-3 * found[name].median_ms) for name in found}


def measure_calls(
    workload: Workload, presets: Sequence[str], counts: Sequence[int], seconds: float, log: Log
) -> list[dict[str, Any]]:
    """Each preset by each method on each number of devices, after one device.

    The length is rounded down so that all numbers of devices divide it; inputs lie on the mesh.
    A row says why a method is not there.
    """
    step = int(np.lcm.reduce([1, *counts]))
    workload = dataclasses.replace(workload, length=workload.length // step * step)
    tensors = random_inputs(workload)
    exact, chosen = exact_rows(*tensors)
    rows: list[dict[str, Any]] = []
    for preset in presets:
        programs, _ = compile_jobs({1: call_job(workload, preset)}, log=log)
        if not programs:
            continue
        one = _measured(workload, programs[1].call, tensors, seconds)
        error = relative_error(programs[1].call(*tensors), exact, chosen)
        about = {"clip": workload.name, "tokens": workload.length, "preset": preset}
        rows.append({**about, "devices": 1, "method": None, **one, "relative_l2": error})
        for count, method in itertools.product(counts, METHODS):
            row = _sharded_row(workload, preset, tensors, count, method, seconds, log)
            if "milliseconds" in row:
                row["relative_l2"] = relative_error(row.pop("out"), exact, chosen)
                row["right"] = bool(row["relative_l2"] < 1.5 * error + 1e-3)
                row["speedup"] = one["milliseconds"] / row["milliseconds"]
                log(f"{workload.name} {preset} {method} over {count}: {row['milliseconds']:.2f} ms")
            rows.append({**about, **row})
    return rows


def _measured(
    workload: Workload, call: Callable[..., Any], tensors: Sequence[jax.Array], seconds: float
) -> dict[str, float]:
    candidate = Candidate(functools.partial(call, *tensors), workload.flops)
    found = sustained({"": candidate}, seconds=seconds, rounds=2)[""]
    return {"milliseconds": found.median_ms, "teraflops": found.median_teraflops}


def _sharded_row(
    workload: Workload,
    preset: str,
    tensors: Sequence[jax.Array],
    count: int,
    method: Any,
    seconds: float,
    log: Log,
) -> dict[str, Any]:
    row: dict[str, Any] = {"devices": count, "method": method}
    mesh = mesh_of(count)
    axes: dict[str, Any] = {"mesh": mesh, "sequence_axis": _AXIS, "method": method}
    try:
        sent = vc_jax.sharding.communication(*tensors, config=preset, **axes).sent
    except (ValueError, NotImplementedError) as error:
        return row | {"refused": str(error)}
    place = NamedSharding(mesh, PartitionSpec(None, _AXIS))
    own = [jax.device_put(x, place) for x in tensors]
    call = functools.partial(vc_jax.sharding.sharded_attention, config=preset, **axes)
    abstract = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in own)
    programs, failures = compile_jobs({method: Job(call, abstract)}, log=log)
    if failures:
        return row | {"refused": failures[method]}
    program = programs[method]
    measured = _measured(workload, program.call, own, seconds)
    out = jax.device_put(program.call(*own), jax.devices()[0])
    return row | {"sent_bytes": sent, "compile_s": program.compile_s, "out": out, **measured}


def measure_steps(
    model: VideoModel, presets: Sequence[str], counts: Sequence[int], seconds: float, log: Log
) -> list[dict[str, Any]]:
    """A denoising step in the window's first position, weights stored in parts where tokens lie.

    On one device the model has no mesh. The velocities of more devices are held to its own.
    """
    rows: list[dict[str, Any]] = []
    for preset in presets:
        expected: np.ndarray | None = None
        alone = 0.0
        for count in (1, *counts):
            where = None
            if count > 1:
                where = ModelMesh(mesh_of(count), sequence_axis=_AXIS, fsdp_axis=_AXIS)
            began = time.perf_counter()
            run = _step(model, preset, where)
            velocity = np.asarray(jax.block_until_ready(run()), np.float32)
            compile_s = time.perf_counter() - began
            found = sustained({"": Candidate(run)}, seconds=seconds, rounds=1)[""]
            row = {"preset": preset, "devices": count, "milliseconds": found.median_ms}
            if expected is None:
                expected, alone = velocity, found.median_ms
            error = float(np.linalg.norm(velocity - expected) / np.linalg.norm(expected))
            row |= {"first_s": compile_s, "speedup": alone / found.median_ms}
            # Another order of sums sorts some tokens differently: the error of two quantisations.
            rows.append(row | {"relative_l2": error, "right": error < 0.05})
            log(f"{model.name} {preset} on {count}: {found.median_ms:,.0f} ms, error {error:.4f}")
    return rows


def _step(model: VideoModel, preset: str, where: ModelMesh | None) -> Callable[[], jax.Array]:
    """One execution of a step: the velocity."""
    graph, abstract = model.graph(preset, mesh=where)
    make = functools.partial(random_parameters, abstract, 0)
    inputs = model.inputs()
    if where is None:
        parameters = jax.jit(make)()
    else:
        place = where.parameter_sharding(nnx.merge(graph, abstract))
        places = jax.tree_util.tree_map_with_path(
            lambda path, leaf: place(_dotted(path), leaf.shape), abstract
        )
        parameters = jax.jit(make, out_shardings=places)()
        inputs = where.whole(inputs)
    latents, moment, conditioning = inputs
    state = jax.jit(state_function(graph))(parameters, latents, conditioning)
    step = jax.jit(step_function(graph))

    def run() -> jax.Array:
        return step(parameters, latents, moment, conditioning, state, jnp.int32(0))[0]

    return run


def _dotted(path: tuple[Any, ...]) -> str:
    """`blocks.qkv.kernel` of a leaf's path in an `nnx.State`."""
    keys = (getattr(entry, "key", getattr(entry, "name", None)) for entry in path)
    return ".".join(str(key) for key in keys if key is not None and key != "value")
