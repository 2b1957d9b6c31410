"""What the benchmarks compile: the schedule, its kinds of steps, and the jobs of one attention.

A job is a function with the abstract arguments it is compiled for; a program is a compiled job.
Which kind of step runs (clustering, stored order, after the window) is a traced number, so all
kinds of a preset share one program.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import vc_jax
from vc_jax._decode import decode
from vc_jax._prepare import Prepared4

from ..pallas_kernels import hopper, hopper_fp4
from ._workloads import Workload

SCHEDULE = vc_jax.DenoisingSchedule(40)
KINDS = {
    "cold": 0,
    "refresh": SCHEDULE.refresh_every,
    "window": 1,
    "after": SCHEDULE.smoothing_steps + 10,
}
"""Kinds of steps, and a step of the schedule that is one."""
MEMORY_PARTS = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
UNTUNED = {"xla_gpu_autotune_level": 0}
"""For what is not timed: choosing the fastest matrix products takes long."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A function and the abstract arguments it is compiled for, with options for the compiler."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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


def abstract_inputs(workload: Workload) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Query, key and value, bfloat16 BTNH."""
    shape = (workload.batch, workload.length, workload.heads, workload.head_dim)
    return (jax.ShapeDtypeStruct(shape, jnp.bfloat16),) * 3


def fresh_state(workload: Workload, config: vc_jax.AttentionConfig | str) -> vc_jax.AttentionState:
    """A state without an order."""
    return vc_jax.init_state(
        config, workload.batch, workload.length, workload.heads, workload.head_dim
    )


def call_job(workload: Workload, config: vc_jax.AttentionConfig | str) -> Job:
    """`dot_product_attention`: `(query, key, value) -> out`."""
    call = functools.partial(vc_jax.dot_product_attention, config=config)
    return Job(call, abstract_inputs(workload))


def step_job(
    workload: Workload, config: vc_jax.AttentionConfig | str, *, with_lengths: bool = False
) -> Job:
    """`attention_step`: `(query, key, value, state, step, lengths) -> (out, state)`.

    Args:
      with_lengths: the last argument is int32 [B], valid keys of each row, and not `None`.
    """

    def step(query, key, value, state, index, lengths):
        return vc_jax.attention_step(
            *(query, key, value, state),
            step=index,
            schedule=SCHEDULE,
            config=config,
            key_value_seq_lengths=lengths,
        )

    state = jax.eval_shape(functools.partial(fresh_state, workload, config))
    index = jax.ShapeDtypeStruct((), jnp.int32)
    lengths = jax.ShapeDtypeStruct((workload.batch,), jnp.int32) if with_lengths else None
    return Job(step, (*abstract_inputs(workload), state, index, lengths))


def prepare_job(workload: Workload, preset: str, *, smooth: bool, ordered: bool = False) -> Job:
    """Inputs of the bare kernel: `(query, key, value) -> Prepared8` (NVFP4: `Decoded4`), or with an
    order, which comes last: int32 [B, K, S].

    Args:
      smooth: take block means out of the values.
      ordered: there is an order; otherwise keys stay in sequence.
    """

    def prepare(query, key, value, order=None):
        prepared = vc_jax.prepare(
            *(query, key, value, preset),
            order=order,
            key_mean=vc_jax.mean_key(key),
            smooth=smooth,
        )
        return decode(prepared) if isinstance(prepared, Prepared4) else prepared

    arguments = abstract_inputs(workload)
    if ordered:
        shape = (workload.batch, workload.heads, workload.length)
        arguments += (jax.ShapeDtypeStruct(shape, jnp.int32),)
    return Job(prepare, arguments, UNTUNED)


def kernel_job(
    prepare: Job, *, softmax: str = "expcast", config: hopper.Config | None = None
) -> Job:
    """The bare kernel on what a job prepares: `Prepared8 -> out`, or `Decoded4 -> out`.

    Args:
      prepare: gives the inputs; what it smooths has block means, which the kernel adds.
      softmax: how scores become probabilities; NVFP4 has one way.
      config: of the kernel; `None` takes the one for the shape.
    """

    def kernel(prepared):
        if isinstance(prepared, hopper_fp4.Decoded4):
            return hopper_fp4.attention(prepared, config=config)[0]
        return hopper.attention(prepared, softmax=softmax, config=config)[0]

    return Job(kernel, (jax.eval_shape(prepare.function, *prepare.arguments),))


def bare_kernel_jobs(workload: Workload, preset: str, *, ordered: bool = False) -> dict[str, Job]:
    """`prepare` and `kernel`, each with `means` and with `no means`, by such names."""
    jobs = {}
    for smooth, means in ((True, "means"), (False, "no means")):
        prepare = prepare_job(workload, preset, smooth=smooth, ordered=ordered)
        softmax = vc_jax.PRESETS[preset].softmax
        jobs[f"prepare, {means}"] = prepare
        jobs[f"kernel, {means}"] = kernel_job(prepare, softmax=softmax)
    return jobs


def _compile(lowered: Any, options: dict[str, Any]) -> Program:
    start = time.perf_counter()
    call = lowered.compile(compiler_options=options or None)
    seconds = time.perf_counter() - start
    analysis = call.memory_analysis()
    return Program(call, seconds, {part: int(getattr(analysis, part)) for part in MEMORY_PARTS})


def compile_jobs(
    jobs: Mapping[Any, Job],
    *,
    options: Mapping[str, Any] | None = None,
    workers: int = 16,
    log: Callable[[str], None] = print,
) -> tuple[dict[Any, Program], dict[Any, str]]:
    """Compile jobs beside each other; programs by name, and why others have none.

    `options` are the compiler's for every job, over those of a job itself.
    """
    programs, failures = {}, {}
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        running = {}
        for name, job in jobs.items():
            try:
                lowered = jax.jit(job.function).lower(*job.arguments)
            except Exception as error:  # the others can still be measured
                failures[name] = f"{type(error).__name__}: {error}"
                continue
            own = {**job.options, **(options or {})}
            running[pool.submit(_compile, lowered, own)] = name
        for future in concurrent.futures.as_completed(running):
            name = running[future]
            try:
                programs[name] = future.result()
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
    for name, reason in failures.items():
        log(f"{name} does not compile: {reason[:300]}")
    return programs, failures
