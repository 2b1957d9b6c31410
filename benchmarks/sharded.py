"""Attention over several devices: correctness, strong scaling, bytes beside the link's bandwidth.

On a machine with two devices or more everything is run on 2, 4, 8, ... of them and checked against
one. With `--pieces` one device measures what each of n would compute.
"""

import argparse
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax

from vc_jax._command_line import USAGE_ERROR, complain, positive

from ._command_line import parser_of
from ._results import environment, markdown_table, write_results
from ._sharded_calls import device_counts, measure_calls, measure_link, measure_steps
from ._sharded_pieces import PARTS, measure_pieces, pieces_report
from ._video_models import VIDEO_MODELS
from ._workloads import WORKLOADS, Workload

PIECES = ("wan-720p", "hunyuan-720p", "minimax-h3")
CALLS = ("wan-720p", "minimax-h3")
_PRESETS = ("bf16", "int8", "fp8")


def parser() -> argparse.ArgumentParser:
    """The benchmark's own arguments."""
    parse = parser_of("sharded", __doc__)
    add = parse.add_argument
    add("--pieces", action="store_true", help="measure the parts of n devices on one")
    add(
        "--shapes",
        nargs="+",
        type=_shape,
        metavar="NAME",
        help="workloads, or SxN tokens and heads (default: Wan and MiniMax-H3; with --pieces "
        "HunyuanVideo too)",
    )
    add(
        "--attention",
        nargs="+",
        choices=_PRESETS,
        metavar="NAME",
        help="presets (default: fp8 and int8, without --pieces bf16 too)",
    )
    add("--seconds", type=positive(float), default=0.4, help="of each candidate (default: 0.4)")
    add(
        "--budget",
        type=positive(float),
        default=170.0,
        metavar="S",
        help="seconds after which no further preset is begun (default: 170)",
    )
    add(
        "--layers",
        type=positive(int),
        default=40,
        help="of the Wan2.2-A14B step (default: 40)",
    )
    add("--no-model", action="store_true", help="without the Wan2.2-A14B step")
    return parse


def _shape(text: str) -> Workload:
    if text in WORKLOADS:
        return WORKLOADS[text]
    length, _, heads = text.partition("x")
    if not (length.isdecimal() and heads.isdecimal() and int(length) and int(heads)):
        raise argparse.ArgumentTypeError(f"must be SxN or one of {', '.join(WORKLOADS)}")
    return Workload(text, int(length), int(heads))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 0, or 2 with one line if it cannot be done, 1 if a check failed."""
    arguments = parser().parse_args(argv)
    start = time.perf_counter()
    log = functools.partial(_log, start)
    if arguments.pieces:
        return _run_pieces(arguments, start, log)
    if jax.device_count() < 2:
        complain("bench", "sharded needs two devices, this machine has one; or pass --pieces")
        return USAGE_ERROR
    return _run_calls(arguments, log)


def _log(start: float, text: str) -> None:
    print(f"{time.perf_counter() - start:6.1f} s  {text}", flush=True)


def _run_pieces(arguments: argparse.Namespace, start: float, log: Any) -> int:
    workloads = arguments.shapes or [WORKLOADS[name] for name in PIECES]
    measured = measure_pieces(
        workloads,
        arguments.attention or ("fp8", "int8"),
        PARTS,
        seconds=arguments.seconds,
        deadline=start + arguments.budget,
        log=log,
    )
    report = {"environment": environment(), "seconds": arguments.seconds, **measured}
    text = "\n\n".join(
        [
            "# What one of n devices computes",
            markdown_table(*pieces_report(measured)),
            markdown_table(
                list(measured["errors"][0]) if measured["errors"] else ["errors"],
                [list(row.values()) for row in measured["errors"]],
            ),
        ]
    )
    write_results(arguments.output, "sharded_pieces", report, text)
    print(text)
    log(f"written to {arguments.output}")
    return 0


def _run_calls(arguments: argparse.Namespace, log: Any) -> int:
    counts = device_counts()
    presets = arguments.attention or _PRESETS
    link = {n: measure_link(n, 256.0, arguments.seconds) for n in counts}
    for count, found in link.items():
        log(f"{count} devices: " + ", ".join(f"{k} {v / 1e9:.1f} GB/s" for k, v in found.items()))
    calls: list[dict[str, Any]] = []
    for workload in arguments.shapes or [WORKLOADS[name] for name in CALLS]:
        calls += measure_calls(workload, presets, counts, arguments.seconds, log)
    steps: list[dict[str, Any]] = []
    if not arguments.no_model:
        model = VIDEO_MODELS["wan-a14b"].with_layers(arguments.layers)
        steps = measure_steps(model, presets, counts, arguments.seconds, log)
    for row in calls:
        if "sent_bytes" in row:
            kind = "all-to-all" if row["method"] == "ulysses" else "collective-permute"
            row["link_ms"] = 1e3 * row["sent_bytes"] / link[row["devices"]][kind]
    report = {"environment": environment(), "link": link, "calls": calls, "steps": steps}
    tables = [_table(CALL_COLUMNS, calls), _table(STEP_COLUMNS, steps)]
    text = "\n\n".join(["# Attention over several devices", *tables])
    write_results(arguments.output, "sharded", report, text)
    print(text)
    wrong = [row for row in calls + steps if row.get("right") is False]
    log(f"{len(wrong)} results are wrong; written to {arguments.output}")
    return 1 if wrong else 0


CALL_COLUMNS = (
    *("clip", "tokens", "preset", "devices", "method", "milliseconds", "speedup"),
    *("sent_bytes", "link_ms", "relative_l2", "right", "refused"),
)
STEP_COLUMNS = ("preset", "devices", "milliseconds", "speedup", "relative_l2", "right")


def _table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    return markdown_table(columns, [[row.get(name) for name in columns] for row in rows])
