"""The programs of one denoising step: what is compiled, and with which arguments it runs.

One program a method: which kind of step runs (clustering, stored order, after the window) is a
traced number, so all kinds of steps of a preset share one compilation.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import vc_jax

from ..models.attention import AttentionControl, attend
from ..pallas_kernels import hopper
from ._video_models import VideoModel, random_parameters

SCHEDULE = vc_jax.DenoisingSchedule(40)
KINDS = {
    "cold": 0,
    "refresh": SCHEDULE.refresh_every,
    "window": 1,
    "after": SCHEDULE.smoothing_steps + 10,
}
"""Kinds of steps, and a step of the schedule that is one."""
LOW_BIT_PROGRAMS = ("call", "prepare", "kernel, means", "kernel", "step")
"""What is compiled for each preset."""
_PARTS = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")


@dataclasses.dataclass(frozen=True)
class Job:
    """A function and the abstract arguments it is compiled for."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled job.

    Attributes:
      call: the executable.
      compile_s: seconds of its compilation, others running beside it.
      memory: bytes of arguments, results and temporaries, by name.
    """

    call: Callable[..., Any]
    compile_s: float
    memory: dict[str, int]


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def step_function(graph: Any) -> Callable[..., Any]:
    """`(parameters, latents, time, conditioning, state, step) -> (velocity, state)`; a model
    without a state takes and returns `None` for it."""

    def step(parameters, latents, time, conditioning, state, index):
        model = nnx.merge(graph, parameters)
        control = AttentionControl(
            state=state, step=index, schedule=None if state is None else SCHEDULE
        )
        return model.denoise(latents, time, conditioning, control)

    return step


def state_function(graph: Any) -> Callable[..., Any]:
    """`(parameters, latents, conditioning) -> state`, fresh."""

    def fresh(parameters, latents, conditioning):
        return nnx.merge(graph, parameters).sampling_state(latents, conditioning)

    return fresh


def without_lengths(attention: Callable[..., Any]) -> Callable[..., Any]:
    """A peer's attention under the signature that a model calls; here no key is ever a pad."""

    def call(query, key, value, *, key_value_seq_lengths=None):
        del key_value_seq_lengths
        return attention(query, key, value)

    return call


def step_job(model: VideoModel, attention: Any, **options: Any) -> Job:
    """One denoising step with an attention; with a state if that is a preset's name."""
    graph, parameters = model.graph(attention, **options)
    parameters = _abstract(parameters)
    latents, moment, conditioning = jax.eval_shape(model.inputs)
    state = None
    if isinstance(attention, str):
        state = jax.eval_shape(state_function(graph), parameters, latents, conditioning)
    index = None if state is None else jax.ShapeDtypeStruct((), jnp.int32)
    arguments = (parameters, latents, moment, conditioning, state, index)
    return Job(step_function(graph), arguments)


def parameters_job(model: VideoModel) -> Job:
    """Random weights from a seed."""
    abstract = model.graph("bf16")[1]
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    return Job(lambda seed: random_parameters(abstract, seed), (seed,))


def call_arguments(model: VideoModel) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Query, key and value of one layer."""
    work = model.workload
    shape = (work.batch, work.length, work.heads, work.head_dim)
    return (jax.ShapeDtypeStruct(shape, jnp.bfloat16),) * 3


def call_job(model: VideoModel, preset: str) -> Job:
    """The self-attention of one layer as the model calls it, `(..., state, step, lengths)`."""
    work = model.workload
    state = jax.eval_shape(
        lambda: vc_jax.init_state(preset, work.batch, work.length, work.heads, work.head_dim)
    )
    lengths = None
    if "text_mask" in model.conditioning:
        lengths = jax.ShapeDtypeStruct((work.batch,), jnp.int32)

    def call(query, key, value, state, index, lengths):
        control = AttentionControl(state=state, step=index, schedule=SCHEDULE)
        return attend(preset, query, key, value, control, state, None, lengths)

    index = jax.ShapeDtypeStruct((), jnp.int32)
    return Job(call, (*call_arguments(model), state, index, lengths))


def prepare_job(model: VideoModel, preset: str) -> Job:
    """Prepared inputs of the bare kernel, in sequence order."""

    def prepare(query, key, value):
        config = vc_jax.PRESETS[preset]
        return vc_jax.prepare(query, key, value, config, key_mean=vc_jax.mean_key(key))

    return Job(prepare, call_arguments(model))


def kernel_job(model: VideoModel, preset: str, means: bool) -> Job:
    """The bare kernel on prepared inputs. Without means, those of the inputs are not read."""
    softmax = vc_jax.PRESETS[preset].softmax
    prepared = jax.eval_shape(prepare_job(model, preset).function, *call_arguments(model))

    def run(prepared):
        if not means:
            prepared = dataclasses.replace(prepared, block_means=None)
        return hopper.attention(prepared, softmax=softmax)[0]

    return Job(run, (prepared,))


def matrix_product_job(model: VideoModel) -> Job:
    """A BF16 matrix product of the size of a feed-forward: what the card can do on this shape."""
    rows, width = model.rows, model.config.hidden
    arguments = [((rows, width), jnp.bfloat16), ((width, 4 * width), jnp.bfloat16)]
    return Job(jnp.matmul, tuple(jax.ShapeDtypeStruct(*entry) for entry in arguments))


def jobs_before(model: VideoModel, peer: Callable[..., Any], presets) -> dict[str, Job]:
    """All programs of a model but the low-bit steps."""
    jobs = {
        "bf16 step": step_job(model, without_lengths(peer)),
        "weights": parameters_job(model),
        "matrix product": matrix_product_job(model),
    }
    for preset in presets:
        jobs[f"{preset} call"] = call_job(model, preset)
        jobs[f"{preset} prepare"] = prepare_job(model, preset)
        jobs[f"{preset} kernel, means"] = kernel_job(model, preset, True)
        jobs[f"{preset} kernel"] = kernel_job(model, preset, False)
    return jobs


def low_bit_jobs(model: VideoModel, presets) -> dict[str, Job]:
    """The low-bit steps. Compiled last: their matrix products are those of the BF16 step, for
    which the compiler has chosen by then."""
    return {f"{preset} step": step_job(model, preset) for preset in presets}


def _compile(lowered: Any, options: dict[str, Any] | None) -> Program:
    start = time.perf_counter()
    call = lowered.compile(compiler_options=options)
    seconds = time.perf_counter() - start
    analysis = call.memory_analysis()
    return Program(call, seconds, {part: int(getattr(analysis, part)) for part in _PARTS})


def compile_jobs(
    jobs: Mapping[Any, Job],
    *,
    options: dict[str, Any] | None = None,
    workers: int = 16,
    log: Callable[[str], None] = print,
) -> tuple[dict[Any, Program], dict[Any, str]]:
    """Compile jobs beside each other; programs by name, and why others have none."""
    programs, failures = {}, {}
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        running = {}
        for name, job in jobs.items():
            try:
                lowered = jax.jit(job.function).lower(*job.arguments)
            except Exception as error:  # the others can still be measured
                failures[name] = f"{type(error).__name__}: {error}"
                continue
            running[pool.submit(_compile, lowered, options)] = name
        for future in concurrent.futures.as_completed(running):
            name = running[future]
            try:
                programs[name] = future.result()
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
    for name, reason in failures.items():
        log(f"{name} does not compile: {reason[:300]}")
    return programs, failures


def matrix_flops(model: VideoModel) -> float:
    """Floating-point operations of a step's matrix products, attention kernels left out."""

    def no_attention(query, key, value, **options):
        del key, value, options
        return query

    job = step_job(model, no_attention, cross_attention=no_attention)
    traced = jax.make_jaxpr(job.function)(*job.arguments)
    return _flops_of(traced.jaxpr)


def _flops_of(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracting, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            inner = functools.reduce(lambda n, axis: n * left[axis], contracting, 1)
            total += 2.0 * inner * equation.outvars[0].aval.size
        inner_programs = [
            getattr(leaf, "jaxpr", leaf)
            for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program)
            if _is_program(leaf)
        ]
        repeats = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        total += repeats * sum(_flops_of(program) for program in inner_programs)
    return total


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")
