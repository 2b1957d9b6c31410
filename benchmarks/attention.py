"""The attention kernels of this machine's GPU against each other: `vc-jax bench attention`.

Every kernel of a shape runs for seconds, in turns, on random inputs, with clock and power beside
its time and its error beside both. Preparation (rotation, quantisation, clustering) is outside: it
has its own benchmark. The FP8 matrix product of the same run is the card's own limit.

With `--whole-calls`, calls with everything that comes before the kernel, by sequence length.
"""

import argparse
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import vc_jax
from vc_jax._command_line import complain, once, pair, positive

from ..pallas_kernels import hopper
from ._amdahl import kind_counts
from ._command_line import missing_gpu, parser_of
from ._peers import Attention, available_peers, available_torch_peers
from ._programs import SCHEDULE, Job, abstract_inputs, compile_jobs, kernel_job, prepare_job
from ._results import announce_figure, environment, markdown_table, pyplot, write_results
from ._roofline import report
from ._timing import Candidate, Measurement, sustained
from ._whole_call_report import detail_table, write_whole_calls
from ._whole_calls import SHAPES, measure_whole_calls, workload_of
from ._workloads import WORKLOADS, Workload, exact_rows, random_inputs, relative_error

BASELINE = "FlashAttention-3 BF16"
BF16_PEERS = (BASELINE, "cuDNN BF16")
"""What whole calls are compared with, beside the attention of PyTorch."""
GEMM = "FP8 GEMM 8192³"
DEFAULT_WORKLOADS = ("s4k-h24", "s8k-h24", "s32k-h16", "s75k-h8", "wan-720p")
COLUMNS = (
    "kernel",
    "TFLOP/s",
    "× FA3",
    "× GEMM",
    "ms",
    "spread %",
    "error %",
    "SM MHz",
    "W",
    "compile s",
)


def gemm_candidate() -> Candidate:
    """An 8192³ E4M3 matrix product through XLA."""
    size = 8192
    keys = jax.random.split(jax.random.key(7))
    draw = jax.jit(lambda k: jax.random.normal(k, (size, size)).astype(jnp.float8_e4m3fn))
    left, right = (draw(k) for k in keys)

    @jax.jit
    def product(left, right):
        contract = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(left, right, contract, preferred_element_type=jnp.bfloat16)

    return Candidate(lambda: product(left, right), 2.0 * size**3)


class Variant(NamedTuple):
    """A way to run the fused kernel.

    Attributes:
      label: of its row.
      preset: low-bit preset.
      means: whether values are smoothed, and their block means added.
      config: of the kernel; `None` takes the one for the shape.
      softmax: how scores become probabilities.
    """

    label: str
    preset: str
    means: bool
    config: hopper.Config | None
    softmax: str


def standard_variants(presets: Sequence[str], softmax: str = "expcast") -> Iterator[Variant]:
    """With and without block means, in the kernel's default configuration."""
    for preset in presets:
        yield Variant(f"vc_jax {preset}", preset, True, None, softmax)
        yield Variant(f"vc_jax {preset}, no means", preset, False, None, softmax)


def compiled_calls(
    workload: Workload,
    variants: Sequence[Variant],
    peers: Mapping[str, tuple[str, Attention]],
    inputs: Sequence[jax.Array],
) -> tuple[dict[str, Callable[[], jax.Array]], dict[str, float]]:
    """Calls of peers and of the fused kernel by label, and the seconds that compiling each took.

    One after the other, so that no compilation slows another one down.
    """
    prepares = {
        (preset, means): prepare_job(workload, preset, smooth=means)
        for _, preset, means, *_ in variants
    }
    jobs = {
        name: Job(attention, abstract_inputs(workload)) for name, (_, attention) in peers.items()
    }
    for label, preset, means, config, softmax in variants:
        prepare = prepares[preset, means]
        jobs[label] = kernel_job(prepare, softmax=softmax, config=config)
    programs, _ = compile_jobs(jobs, workers=1)
    preparations, _ = compile_jobs(prepares)
    prepared = {key: program.call(*inputs) for key, program in preparations.items()}
    arguments = dict.fromkeys(peers, inputs) | {
        label: (prepared[preset, means],)
        for label, preset, means, *_ in variants
        if (preset, means) in prepared
    }
    calls = {
        label: functools.partial(programs[label].call, *arguments[label])
        for label in jobs
        if label in programs and label in arguments
    }
    return calls, {label: programs[label].compile_s for label in calls}


def measure(
    workload: Workload,
    variants: Sequence[Variant],
    *,
    seconds: float,
    rounds: int,
    peers: Mapping[str, tuple[str, Attention]],
    logit_sigma: float = 1.0,
) -> list[dict[str, Any]]:
    """Rows of one workload: every kernel's speed and error."""
    inputs = random_inputs(workload, logit_sigma=logit_sigma)
    exact, chosen = exact_rows(*inputs)
    calls, compile_s = compiled_calls(workload, variants, peers, inputs)
    candidates, facts = {}, {}
    for name, call in calls.items():
        try:
            out = jax.block_until_ready(call())
        except Exception as error:  # a peer that does not take this shape
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        facts[name] = (compile_s[name], relative_error(out, exact, chosen))
        del out
        candidates[name] = Candidate(call, workload.flops)
    candidates[GEMM] = gemm_candidate()
    measured = sustained(candidates, seconds=seconds, rounds=rounds)
    return [_row(workload, name, measured, facts.get(name)) for name in measured]


def _row(workload: Workload, name: str, measured: dict[str, Measurement], facts) -> dict[str, Any]:
    entry = measured[name]
    base = measured.get(BASELINE)
    compile_s, error = facts or (None, None)
    return {
        "workload": workload.name,
        "kernel": name,
        "teraflops": entry.median_teraflops,
        "ratio_to_fa3": entry.median_teraflops / base.median_teraflops if base else None,
        "ratio_to_gemm": entry.median_teraflops / measured[GEMM].median_teraflops,
        "milliseconds": entry.median_ms,
        "spread": entry.spread,
        "relative_l2": error,
        "clock_mhz": entry.clock_mhz,
        "power_w": entry.power_w,
        "compile_s": compile_s,
        "rounds_ms": entry.milliseconds,
    }


def workload_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of one workload's rows."""
    cells = [
        (
            row["kernel"],
            row["teraflops"],
            row["ratio_to_fa3"],
            row["ratio_to_gemm"],
            row["milliseconds"],
            100 * row["spread"],
            None if row["relative_l2"] is None else 100 * row["relative_l2"],
            row["clock_mhz"],
            row["power_w"],
            row["compile_s"],
        )
        for row in rows
    ]
    return markdown_table(COLUMNS, cells)


def plot_over_length(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """TFLOP/s over S, a line a kernel; nothing without Matplotlib."""
    plt = pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        points = sorted(
            (WORKLOADS[r["workload"]].length, r["teraflops"]) for r in rows if r["kernel"] == kernel
        )
        style = "--" if kernel == GEMM else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", ms=3, label=kernel)
    axes.set(xscale="log", xlabel="tokens", ylabel="TFLOP/s, sustained", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    """Command line of this benchmark."""
    parse = parser_of("attention", __doc__)
    add = parse.add_argument
    add("--presets", nargs="+", choices=("fp8", "int8", "nvfp4"), default=["fp8", "int8"])
    add(
        "--seconds",
        type=positive(float),
        help="of each kernel a round (default: 2), or of each whole call (0.6)",
    )
    add("--rounds", type=positive(int), default=3)
    kernels = parse.add_argument_group("bare kernels")
    kernels.add_argument(
        "--workloads",
        nargs="+",
        choices=sorted(WORKLOADS),
        help=f"shapes (default: {' '.join(DEFAULT_WORKLOADS)})",
    )
    kernels.add_argument("--softmax", choices=hopper.SOFTMAX, help="default: expcast")
    kernels.add_argument("--logit-sigma", type=positive(float), help="default: 1")
    calls = parse.add_argument_group("whole calls")
    calls.add_argument(
        "--whole-calls",
        action="store_true",
        help="measure whole calls by sequence length instead: in one jitted scan, and one "
        "dispatch each, against the fastest BF16 attention",
    )
    calls.add_argument(
        "--shapes",
        nargs="+",
        type=_shape,
        metavar="TOKENSxHEADS",
        help=f"default: {' '.join(f'{s}x{h}' for s, h in SHAPES)}",
    )
    return parse


def _shape(text: str) -> tuple[int, int]:
    """Tokens and heads."""
    shape = pair(text, "TOKENSxHEADS", "4096x24")
    if min(shape) < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return shape


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; what only the other of the two measurements takes is refused."""
    parse = parser()
    arguments = parse.parse_args(argv)
    of_kernels = {"workloads": list(DEFAULT_WORKLOADS), "softmax": "expcast", "logit_sigma": 1.0}
    of_calls = {"shapes": list(SHAPES)}
    other = of_kernels if arguments.whole_calls else of_calls
    for name in other:
        if getattr(arguments, name) is not None:
            only = "without" if arguments.whole_calls else "with"
            parse.error(f"--{name.replace('_', '-')} is taken {only} --whole-calls only")
    if "nvfp4" in arguments.presets:
        if arguments.whole_calls:
            parse.error("argument --presets: invalid choice: 'nvfp4' with --whole-calls")
        if arguments.softmax is not None:
            parse.error("argument --softmax: of 8 bits only, and --presets has 'nvfp4'")
    own = of_calls if arguments.whole_calls else of_kernels
    for name, default in (own | {"seconds": 0.6 if arguments.whole_calls else 2.0}).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 2 when this machine has no GPU that the kernel runs on, or when whole
    calls have no BF16 attention to be compared with."""
    arguments = parse_arguments(argv)
    reason = missing_gpu()
    if reason is not None:
        return complain("bench attention", reason)
    peers, missing = available_peers()
    about = environment() | {
        "peers": {name: version for name, (version, _) in peers.items()},
        "missing_peers": missing,
        "seconds": arguments.seconds,
        "rounds": arguments.rounds,
    }
    if arguments.whole_calls:
        return run_whole_calls(arguments, about, peers)
    return run_kernels(arguments, about, peers)


def run_kernels(
    arguments: argparse.Namespace,
    about: dict[str, Any],
    peers: Mapping[str, tuple[str, Attention]],
) -> int:
    """Measure the bare kernels and write."""
    announce_figure()
    about |= {"logit_sigma": arguments.logit_sigma, "softmax": arguments.softmax}
    rows, parts = [], [f"# Attention kernels\n\n{about}\n"]
    for name in once(arguments.workloads):
        workload = WORKLOADS[name]
        found = measure(
            workload,
            list(standard_variants(arguments.presets, arguments.softmax)),
            seconds=arguments.seconds,
            rounds=arguments.rounds,
            peers=peers,
            logit_sigma=arguments.logit_sigma,
        )
        rows += found
        title = f"## {name}: S = {workload.length:,}, H = {workload.heads}, D = {workload.head_dim}"
        parts.append(f"{title}\n\n{workload_table(found)}\n")
        print(parts[-1], flush=True)
    device, versions = jax.devices()[0], f"vc-jax {vc_jax.__version__}, jax {jax.__version__}"
    platform = " ".join(device.client.platform_version.split())
    block = report(device.device_kind, f"{versions}, {platform}", rows)
    parts.append(f"## To paste into a report\n\n```\n{block}\n```\n")
    print(parts[-1], flush=True)
    write_results(
        arguments.output, "attention", {"environment": about, "rows": rows}, "\n".join(parts)
    )
    plot_over_length(rows, arguments.output / "attention.png")
    return 0


def run_whole_calls(
    arguments: argparse.Namespace,
    about: dict[str, Any],
    peers: Mapping[str, tuple[str, Attention]],
) -> int:
    """Measure whole calls shape after shape; write after each."""
    of_jax = {name: attention for name, (_, attention) in peers.items() if name in BF16_PEERS}
    if not of_jax:
        wanted = ", ".join(BF16_PEERS)
        return complain("bench attention", f"needs one of {wanted}: {about['missing_peers']}")
    announce_figure()
    torch_peers, missing = available_torch_peers()
    versions = {name: version for name, (version, _) in {**peers, **torch_peers}.items()}
    used = (*of_jax, *torch_peers)
    about["peers"] = {name: versions[name] for name in used}
    about["missing_peers"] = {
        name: why for name, why in about["missing_peers"].items() if name in BF16_PEERS
    } | missing
    about["schedule"] = kind_counts(SCHEDULE)
    rows: list[dict[str, Any]] = []
    for length, heads in once(arguments.shapes):
        found = measure_whole_calls(
            workload_of(length, heads),
            arguments.presets,
            of_jax,
            seconds=arguments.seconds,
            rounds=arguments.rounds,
            torch_peers={name: attention for name, (_, attention) in torch_peers.items()},
        )
        rows += found
        print(detail_table(found), flush=True)
        write_whole_calls(arguments.output, about, rows)
    return 0
