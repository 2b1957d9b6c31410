"""The command line, `vc-jax`.

Arguments are parsed before Flax, OpenCV or a model is imported, so that `--help` and mistakes
answer at once. Exit codes: 0 done, 2 something asked for cannot be done (one line on stderr says
what), 3 done, but a sample is not finite (one line names it), 129 the terminal went away, 130
interrupted, 143 terminated.
"""

import argparse
import importlib
import os
import pathlib
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from ._command_line import Parser, complain, once, pair, path, sizes
from ._streams import open_streams

BENCHMARKS = ("attention", "preprocess", "end-to-end", "fidelity", "sharded", "memory")
_PRESETS = ("bf16", "int8", "fp8", "nvfp4")
_NOT_FINITE = 3
_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):
    _SIGNALS[signal.SIGHUP] = "hung up"


class _Stopped(KeyboardInterrupt):
    """A signal that asks to end: cleans up like Ctrl-C."""

    def __init__(self, number: int = signal.SIGINT):
        super().__init__()
        self.number = signal.Signals(number)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = Parser(
        prog="vc-jax",
        description="Low-bit attention for video diffusion transformers in JAX.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _add_sample(commands)
    _add_bench(commands)
    commands.add_parser(
        "info",
        help="show the device, versions, and which implementations run here",
        description="Show the device, versions, and which implementation of the attention each "
        "precision runs on here, and why not on the others.",
    )
    return parser


def _add_sample(commands) -> None:
    sample = commands.add_parser(
        "sample",
        help="sample a video with BF16 and low-bit attention and compare them",
        description="Continue a real video with a small video DiT, once with BF16 attention and "
        "once with each low-bit attention, from the same noise. Writes a folder with the videos "
        "side by side (comparison.gif), contact_sheet.png, report.html and report.json.",
        epilog="An output folder that holds nothing but an earlier run is replaced; any other "
        "that is not empty is refused. On a CPU the default is 16 frames of 48x88 (4,224 tokens) "
        "in 8 steps, on a GPU 16 frames of 88x160 (14,080 tokens) in 40 steps.",
    )
    add = sample.add_argument
    add(
        "--video",
        type=path,
        metavar="FILE",
        help="continue this video instead of the clip that ships with the package",
    )
    add("--start", type=int, default=0, metavar="N", help="skip N frames of the video")
    add(
        "--attention",
        nargs="+",
        default=list(_PRESETS),
        metavar="NAME",
        help=f"what to compare with BF16: any of {', '.join(_PRESETS)} (default: all)",
    )
    add("--steps", type=int, metavar="N", help="denoising steps (default: 8, on a GPU 40)")
    add("--frames", type=int, default=16, metavar="N", help="frames of the clip (default: 16)")
    add(
        "--condition",
        type=int,
        metavar="N",
        help="leading frames that are given (default: 4, or all but one of a shorter clip)",
    )
    add(
        "--size",
        type=_size,
        metavar="HxW",
        help="height and width in pixels, multiples of 4 (default: 48x88, on a GPU 88x160)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the noise (default: 0)")
    add(
        "--output",
        type=path,
        default=pathlib.Path("vc-jax-sample"),
        metavar="DIR",
        help="folder to write (default: vc-jax-sample)",
    )
    add(
        "--weights",
        type=path,
        metavar="FILE",
        help="safetensors file to use instead of the shipped weights",
    )
    add(
        "--mesh",
        type=sizes,
        metavar="AXIS=N,...",
        help="spread the clip's tokens over several devices: batch=1,seq=2 (default: one device)",
    )


def _add_bench(commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="run a benchmark on this machine",
        description="Run a benchmark on this machine: the attention call, its preprocessing, a "
        "whole denoising loop, or the error against exact attention.",
        epilog="Arguments after NAME go to the benchmark: vc-jax bench attention --help",
    )
    bench.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    rest = bench.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False  # or it is named, beside NAME, where NAME is missing


def _size(text: str) -> tuple[int, int]:
    """Height and width."""
    return pair(text, "HEIGHTxWIDTH", "88x160")


def _run_sample(arguments: argparse.Namespace) -> int:
    try:
        sample_job = importlib.import_module("vc_jax.models.sample_job")
    except ImportError as error:
        return complain("sample", f"cannot import {error.name}: install vc-jax[video]")
    names = [name for text in arguments.attention for name in text.split(",") if name]
    options = sample_job.Options(
        output=arguments.output,
        video=arguments.video,
        start=arguments.start,
        attention=tuple(once(names)),
        steps=arguments.steps,
        frames=arguments.frames,
        condition=arguments.condition,
        size=arguments.size,
        seed=arguments.seed,
        weights=arguments.weights,
        mesh=arguments.mesh,
    )
    # The report says which implementation runs.
    warnings.filterwarnings("ignore", message="a long attention call runs on the slow XLA")
    try:
        record = sample_job.run(options)
    except sample_job.InputError as error:
        return complain("sample", error)
    print(sample_job.summary(record, arguments.output))
    if broken := sample_job.not_finite(record):
        complain("sample", f"the sample of {', '.join(broken)} is not finite: no distance is shown")
        return _NOT_FINITE
    return 0


def _run_bench(arguments: argparse.Namespace) -> int:
    module = "vc_jax.benchmarks." + arguments.name.replace("-", "_")
    try:
        benchmark = importlib.import_module(module)
    except ImportError as error:
        if error.name == module:
            return complain("bench", f"this version has no benchmark {arguments.name!r}")
        return complain("bench", f"{arguments.name} needs {error.name}, which is not installed")
    return benchmark.main(arguments.arguments) or 0


def _run_info() -> int:
    print(importlib.import_module("vc_jax._info").describe())
    return 0


def _print_version() -> int:
    import vc_jax

    print(f"vc-jax {vc_jax.__version__}")
    return 0


def _dispatch(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.version:
        return _print_version()
    if arguments.command == "sample":
        return _run_sample(arguments)
    if arguments.command == "bench":
        return _run_bench(arguments)
    if arguments.command == "info":
        return _run_info()
    parser.print_help()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    Raises:
      SystemExit: after `--help`, and with code 2 for arguments that cannot be parsed.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        os.getcwd()
    except OSError:
        return complain(arguments.command or "", "the working folder is gone")
    try:
        return _dispatch(parser, arguments)
    except KeyboardInterrupt as interrupt:
        number = interrupt.number if isinstance(interrupt, _Stopped) else signal.SIGINT
        print(f"vc-jax: {_SIGNALS[number]}", file=sys.stderr)
        return 128 + number


def _stop(number: int, frame: object) -> NoReturn:
    raise _Stopped(number)


def entry_point() -> NoReturn:
    """The console command: `main`, then the end of the process."""
    out, err = open_streams()
    for number in _SIGNALS:
        # A signal that is ignored, as SIGHUP under nohup, stays so.
        if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        code = main()
    except SystemExit as stop:  # argparse: after --help, or a mistake
        code = stop.code if isinstance(stop.code, int) else 0
    out.flush()
    if out.failure is not None and code == 0:
        code = complain("", f"cannot write to stdout: {out.failure.strerror}")
    err.flush()
    if code > 128:
        # A compiled function may still run in a thread that nothing can stop.
        os._exit(code)
    sys.exit(code)
