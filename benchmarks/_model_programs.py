"""What `vc-jax bench end-to-end` compiles for a whole model: one denoising step, and around it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..models.attention import AttentionControl
from ._programs import SCHEDULE, Job, bare_kernel_jobs, step_job
from ._video_models import VideoModel, random_parameters

LOW_BIT_PROGRAMS = (
    "call",
    *("prepare, means", "prepare, no means", "kernel, means", "kernel, no means"),
    "step",
)
"""What is compiled for each preset."""


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


def denoising_step_job(model: VideoModel, attention: Any, **options: Any) -> Job:
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


def matrix_product_job(model: VideoModel) -> Job:
    """A BF16 matrix product of the size of a feed-forward: what the card can do on this shape."""
    rows, width = model.rows, model.config.hidden
    arguments = [((rows, width), jnp.bfloat16), ((width, 4 * width), jnp.bfloat16)]
    return Job(jnp.matmul, tuple(jax.ShapeDtypeStruct(*entry) for entry in arguments))


def has_lengths(model: VideoModel) -> bool:
    """Whether the model's self-attention is told how many keys are valid."""
    return "text_mask" in model.conditioning


def jobs_before(
    model: VideoModel, peer: Callable[..., Any], presets: Sequence[str]
) -> dict[str, Job]:
    """All programs of a model but the low-bit steps."""
    jobs = {
        "bf16 step": denoising_step_job(model, without_lengths(peer)),
        "weights": parameters_job(model),
        "matrix product": matrix_product_job(model),
    }
    for preset in presets:
        jobs[f"{preset} call"] = step_job(model.workload, preset, with_lengths=has_lengths(model))
        for name, job in bare_kernel_jobs(model.workload, preset).items():
            jobs[f"{preset} {name}"] = job
    return jobs


def low_bit_jobs(model: VideoModel, presets: Sequence[str]) -> dict[str, Job]:
    """The low-bit steps. Compiled last: their matrix products are those of the BF16 step, for
    which the compiler has chosen by then."""
    return {f"{preset} step": denoising_step_job(model, preset) for preset in presets}


def matrix_flops(model: VideoModel) -> float:
    """Floating-point operations of a step's matrix products, attention kernels left out."""

    def no_attention(query, key, value, **options):
        del key, value, options
        return query

    job = denoising_step_job(model, no_attention, cross_attention=no_attention)
    traced = jax.make_jaxpr(job.function)(*job.arguments)
    return flops_of(traced.jaxpr)


def flops_of(jaxpr: Any) -> float:
    """Of the matrix products of a program, those of a scan as often as they run."""
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
        total += repeats * sum(flops_of(program) for program in inner_programs)
    return total


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")
