"""One denoising step of whole video DiTs, BF16 against low-bit: `vc-jax bench end-to-end`.

Full-size models with random weights at their 720p shapes on one GPU, batch 1, one conditional
evaluation, as one jitted program with the attention's state. Each kind of step is measured; the
40-step schedule is extrapolated from them.
"""

import argparse
import dataclasses
import functools
import gc
import time
from collections.abc import Sequence
from typing import Any

import jax

from vc_jax._command_line import complain, positive

from ._command_line import missing_gpu, parser_of
from ._end_to_end_report import EndToEndResults
from ._model_programs import LOW_BIT_PROGRAMS, jobs_before, low_bit_jobs
from ._peers import available_peers
from ._programs import KINDS, SCHEDULE, Job, Program, abstract_inputs, compile_jobs
from ._results import announce_figure, environment
from ._step_measures import (
    Peer,
    choose_peer,
    measure_attention,
    measure_denoising_steps,
    summaries,
)
from ._timing import Pace
from ._video_models import VIDEO_MODELS, VideoModel

PEERS = ("FlashAttention-3 BF16", "cuDNN BF16")
_STEPS_SHARE = 0.8
"""Of a model's time, for its steps; the rest is for attention alone."""


class _Clock:
    """Progress lines with the seconds since the start."""

    def __init__(self):
        self.start = time.perf_counter()

    def log(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.start:6.1f} s] {text}", flush=True)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start


def parser() -> argparse.ArgumentParser:
    """Command line of this benchmark."""
    parse = parser_of("end-to-end", __doc__)
    add = parse.add_argument
    add("--models", nargs="+", choices=list(VIDEO_MODELS), default=list(VIDEO_MODELS))
    add("--presets", nargs="+", choices=("int8", "fp8"), default=["int8", "fp8"])
    add("--seconds", type=positive(float), default=2.0, help="of a step a round, if shorter")
    add("--rounds", type=positive(int), default=3, help="at most; one where time is short")
    add(
        "--budget",
        type=positive(float),
        default=420.0,
        help="seconds of the whole run, compilation included, within which further rounds begin",
    )
    add(
        "--layers",
        type=positive(int),
        help="depth of every model instead of its own; times are then those of a cut model",
    )
    add(
        "--compiler-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        type=_option,
        help="passed to XLA for every program, and written into the results",
    )
    return parse


def _option(text: str) -> tuple[str, Any]:
    """`"name=value"`, with numbers and booleans read as such."""
    name, found, value = text.partition("=")
    if not found or not name:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    return name, int(value) if value.lstrip("-").isdigit() else value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
      0; 1 when a model could not be measured; 2 when this machine has no GPU that the kernel runs
      on, or no BF16 attention to compare with.
    """
    arguments = parser().parse_args(argv)
    reason = missing_gpu()
    if reason is not None:
        return complain("bench end-to-end", reason)
    found, missing = available_peers()
    attentions = {name: attention for name, (_, attention) in found.items() if name in PEERS}
    if not attentions:
        return complain("bench end-to-end", f"needs one of {', '.join(PEERS)}: {missing}")
    announce_figure()
    about = environment() | {
        "peers": {name: found[name][0] for name in attentions},
        "missing_peers": {name: why for name, why in missing.items() if name in PEERS},
        "schedule": {"steps": SCHEDULE.num_steps, "kinds": KINDS},
        "seconds": arguments.seconds,
        "rounds": arguments.rounds,
        "layers": arguments.layers,
        "compiler_options": dict(arguments.compiler_option),
    }
    results = EndToEndResults(arguments.output, about)
    models = {name: VIDEO_MODELS[name] for name in arguments.models}
    return run(models, attentions, arguments, results)


def run(
    models: dict[str, VideoModel],
    attentions: dict[str, Any],
    arguments: argparse.Namespace,
    results: EndToEndResults,
) -> int:
    """Compile everything, then measure model after model; write after each."""
    clock = _Clock()
    depths = {name: model.config.num_layers for name, model in models.items()}
    models = {name: model.with_layers(arguments.layers) for name, model in models.items()}
    peers, programs = compile_all(models, attentions, arguments, clock)
    names, failed = list(models), 0
    for index, (name, model) in enumerate(models.items()):
        clock.log(f"{name}: {model.rows:,} rows, {model.config.num_layers} layers")
        remaining = [_work(models[other]) for other in names[index:]]
        seconds = (arguments.budget - clock.elapsed) * remaining[0] / sum(remaining)
        try:
            if name not in peers:
                raise RuntimeError("no BF16 attention to compare with")
            entry = measure_model(model, peers[name], programs.pop(name), arguments, clock, seconds)
        except Exception as error:  # what the other models show must not be lost
            failed += 1
            entry = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            clock.log(f"{name} FAILED: {entry['error']}")
        gc.collect()
        print(results.add(model, entry, depths[name]), flush=True)
    clock.log(f"done, results in {arguments.output}")
    return 1 if failed else 0


def _work(model: VideoModel) -> float:
    """Operations of the attention of a step, by which the time is divided among models."""
    return model.workload.flops * model.config.num_layers


def compile_all(
    models: dict[str, VideoModel],
    attentions: dict[str, Any],
    arguments: argparse.Namespace,
    clock: _Clock,
) -> tuple[dict[str, Peer], dict[str, dict[str, Program]]]:
    """The faster BF16 attention of each model, and its programs.

    The card is idle while compiling, so that the compiler's own measurements are not disturbed.
    """
    compiling = functools.partial(
        compile_jobs, options=dict(arguments.compiler_option) or None, log=clock.log
    )
    calls = {
        (name, peer): Job(attention, abstract_inputs(model.workload))
        for name, model in models.items()
        for peer, attention in attentions.items()
    }
    compiled, _ = compiling(calls)
    clock.log(f"compiled {len(compiled)} BF16 attention calls")
    peers = {}
    for name, model in models.items():
        try:
            own = {peer: compiled[name, peer] for peer in attentions if (name, peer) in compiled}
            peers[name] = choose_peer(model, own, attentions, arguments.seconds / 4)
        except Exception as error:
            clock.log(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            continue
        clock.log(f"{name}: {peers[name].name}, ms: {peers[name].milliseconds}")
    programs: dict[str, dict[str, Program]] = {name: {} for name in models}
    waves = (
        lambda name: jobs_before(models[name], peers[name].attention, arguments.presets),
        lambda name: low_bit_jobs(models[name], arguments.presets),
    )
    for wave in waves:
        jobs = {(name, key): job for name in peers for key, job in wave(name).items()}
        for (name, key), program in compiling(jobs)[0].items():
            programs[name][key] = program
        clock.log(f"compiled {len(jobs)} programs")
    return peers, programs


def measure_model(
    model: VideoModel,
    peer: Peer,
    programs: dict[str, Program],
    arguments: argparse.Namespace,
    clock: _Clock,
    seconds: float,
) -> dict[str, Any]:
    """Everything about one model."""
    presets = [
        preset
        for preset in arguments.presets
        if all(f"{preset} {part}" in programs for part in LOW_BIT_PROGRAMS)
    ]
    now = time.perf_counter()
    pace = Pace(arguments.seconds, arguments.rounds, now + _STEPS_SHARE * seconds)
    steps = measure_denoising_steps(model, programs, presets, pace, clock.log)
    for row in steps:
        error = f"error {100 * row['relative_l2']:.3f} %, finite: {row['finite']}"
        clock.log(f"{row['name']}: {row['milliseconds']:,.0f} ms, {error}")
    pace = dataclasses.replace(pace, deadline=now + seconds)
    attention = measure_attention(model, programs, peer, presets, pace)
    clock.log("attention measured")
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "bf16_attention": peer.name,
        "bf16_attention_ms": peer.milliseconds,
        "steps": steps,
        "attention": attention,
        "summary": summaries(model, steps, attention, presets),
        "compile_s": {name: program.compile_s for name, program in programs.items()},
        "memory": {name: program.memory for name, program in programs.items()},
        "peak_bytes_so_far": memory.get("peak_bytes_in_use"),
    }
