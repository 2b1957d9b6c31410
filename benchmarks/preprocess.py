"""Everything before the attention kernel, on this machine's GPU: `vc-jax bench preprocess`.

Each stage of clustering and preparation with the bytes it has to move over the bandwidth of a copy
in the same run; whole `attention_step` calls over a 40-step schedule against the bare kernel, and
against FlashAttention-3 BF16 where that is installed. Queries and keys are random, values random
but clustered: one of 512 centres of their head and half a normal vector.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from vc_jax._command_line import complain, once, positive

from ._amdahl import kind_counts
from ._command_line import missing_gpu, parser_of
from ._peers import available_peers
from ._preprocess_stages import check_codes, check_energy, clustered_inputs, stages
from ._preprocess_steps import (
    PEER,
    compile_workloads,
    deadline_after,
    measure_attention_steps,
    measure_stages,
    profile_calls,
)
from ._programs import KINDS, SCHEDULE
from ._results import environment, markdown_table, write_results
from ._timing import Pace
from ._workloads import WORKLOADS

DEFAULT_WORKLOADS = ("wan-720p",)
SCHEDULE_WORKLOADS = ("wan-720p", "hunyuan-720p", "longcat-480p", "minimax-h3")
_BUDGET = 150.0
"""Seconds after which no further round begins."""


def parser() -> argparse.ArgumentParser:
    """Command line of this benchmark."""
    parse = parser_of("preprocess", __doc__)
    add, names = parse.add_argument, sorted(WORKLOADS)
    add(
        "--workloads",
        nargs="*",
        choices=names,
        default=list(DEFAULT_WORKLOADS),
        help="shapes whose stages are measured",
    )
    add(
        "--schedules",
        nargs="*",
        choices=names,
        default=list(SCHEDULE_WORKLOADS),
        help="shapes whose whole calls are measured, the first of them against FlashAttention-3",
    )
    add("--presets", nargs="+", choices=("int8", "fp8"), default=["int8", "fp8"])
    add(
        "--seconds",
        type=positive(float),
        default=2.0,
        help="of FlashAttention-3 and of each call beside it a round",
    )
    add("--call-seconds", type=positive(float), default=0.3, help="of each other call a round")
    add("--stage-seconds", type=positive(float), default=0.3, help="of each stage a round")
    add("--rounds", type=positive(int), default=2)
    add(
        "--budget",
        type=positive(float),
        default=_BUDGET,
        help="seconds of the whole run after which no second round begins",
    )
    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 2 when this machine has no GPU that the kernels run on."""
    parse = parser()
    arguments = parse.parse_args(argv)
    if not arguments.workloads and not arguments.schedules:
        parse.error("nothing to measure: --workloads and --schedules are both empty")
    reason = missing_gpu()
    if reason is not None:
        return complain("bench preprocess", reason)
    peers, missing = available_peers()
    about = environment() | {
        "fa3": peers[PEER][0] if PEER in peers else f"missing: {missing.get(PEER)}",
        "seconds": arguments.seconds,
        "call_seconds": arguments.call_seconds,
        "stage_seconds": arguments.stage_seconds,
        "rounds": arguments.rounds,
        "schedule": kind_counts(SCHEDULE),
        "values": "one of 512 normal centres of a head, drawn for each token, + 0.5 normal",
    }
    peer = peers[PEER][1] if PEER in peers else None
    return run(arguments, about, peer)


def run(arguments: argparse.Namespace, about: dict[str, Any], peer: Any) -> int:
    """Measure and write."""
    deadline = deadline_after(arguments.budget)
    report: dict[str, Any] = {"environment": about}
    report["stages"] = {name: _stages_of(name, arguments, deadline) for name in arguments.workloads}
    names = once(arguments.schedules)
    pace = Pace(arguments.call_seconds, arguments.rounds, deadline)
    start = time.perf_counter()
    programs = compile_workloads(
        {name: WORKLOADS[name] for name in names},
        arguments.presets,
        {names[0]: peer} if peer is not None and names else {},
        stateless=names[:1],
    )
    about["compile_of_all_calls_s"] = time.perf_counter() - start
    report["steps"] = []
    report["profile"] = []
    for name in names:
        own = programs.pop(name)
        rows = measure_attention_steps(
            WORKLOADS[name], own, arguments.presets, pace, arguments.seconds
        )
        report["steps"] += rows
        print(_steps_table(rows), flush=True)
        if name == names[0]:
            try:
                report["profile"] = profile_calls(WORKLOADS[name], own, arguments.presets)
                print(_profile_table(report["profile"]), flush=True)
            except RuntimeError as error:
                about["profile"] = str(error)
    write_results(arguments.output, "preprocess", report, report_text(report))
    return 0


def _stages_of(name: str, arguments: argparse.Namespace, deadline: float) -> dict[str, Any]:
    workload = WORKLOADS[name]
    pace = Pace(arguments.stage_seconds, arguments.rounds, deadline)
    inputs = clustered_inputs(workload)
    found = {
        "rows": measure_stages(stages(workload, inputs, arguments.presets), pace),
        "codes": [check_codes(workload, preset) for preset in arguments.presets],
        "energy": check_energy(workload, inputs.value),
    }
    print(_stages_text(name, found), flush=True)
    return found


def _stages_text(name: str, found: dict[str, Any]) -> str:
    workload, rows, energy = WORKLOADS[name], found["rows"], found["energy"]
    copy = rows[0]["bytes"] / rows[0]["milliseconds"] / 1e6
    columns = ("stage", "ms", "spread %", "MB", "ms at copy speed", "of copy speed", "compile s")
    cells = [
        (
            row["stage"],
            row["milliseconds"],
            100 * row["spread"],
            row["bytes"] / 1e6,
            row["floor_ms"],
            row["of_copy_bandwidth"],
            row["compile_s"],
        )
        for row in rows
    ]
    lines = [
        f"## {name}: S = {workload.length:,}, H = {workload.heads}, D = {workload.head_dim}",
        f"A copy moves {copy:,.0f} GB/s (reads and writes).",
        markdown_table(columns, cells),
        f"Energy of the values that block means hold, k = {energy['clusters']}: sorted by these "
        f"kernels {100 * energy['fused']:.2f} %, by XLA's k-means {100 * energy['xla']:.2f} %, "
        f"unsorted {100 * energy['unsorted']:.2f} %.",
    ]
    for codes in found["codes"]:
        shares = ", ".join(
            f"{part} {codes[f'{part}_codes']:.1e}" for part in ("query", "key", "value")
        )
        lines.append(
            f"Codes that differ from XLA's, {codes['preset']}, {codes['tokens']:,} tokens of "
            f"{codes['heads']} heads: {shares}."
        )
    return "\n\n".join(lines) + "\n"


def _steps_table(rows: Sequence[dict[str, Any]]) -> str:
    columns = (
        "shape",
        "preset",
        *(f"{kind}, ms" for kind in KINDS),
        "kernel, means",
        "kernel",
        "40 steps over kernel, %",
        "× FA3, window",
        "× FA3, after",
        "× FA3, 40 steps",
        "temporary / QKV",
        "results / QKV",
        "state, MB",
        "compile s",
    )
    cells = []
    for row in rows:
        peer = row["fa3"] or dict.fromkeys(("window", "after", "average"))
        cells.append(
            (
                row["workload"],
                row["preset"],
                *(row["milliseconds"][kind] for kind in KINDS),
                row["kernel_milliseconds"]["means"],
                row["kernel_milliseconds"]["no means"],
                100 * row["overhead"],
                peer["window"],
                peer["after"],
                peer["average"],
                row["temporary_over_inputs"],
                row["results_over_inputs"],
                row["state_mb"],
                row["compile_s"],
            )
        )
    return markdown_table(columns, cells)


def _profile_table(rows: Sequence[dict[str, Any]]) -> str:
    columns = (
        *("shape", "preset", "call", "kernels", "copies from host", "copies to host", "ms"),
        *("idle, ms", "idle, %"),
    )
    cells = [
        (
            *(row[name] for name in ("workload", "preset", "kind", "kernels")),
            *(row[name] for name in ("from_host", "to_host", "span_ms", "idle_ms")),
            100 * row["idle_ms"] / row["span_ms"],
        )
        for row in rows
    ]
    return markdown_table(columns, cells)


def report_text(report: dict[str, Any]) -> str:
    """Markdown of everything."""
    parts = [f"# Preprocessing\n\n{report['environment']}\n"]
    parts += [_stages_text(name, found) for name, found in report["stages"].items()]
    if report["steps"]:
        counts = ", ".join(f"{n} {kind}" for kind, n in kind_counts(SCHEDULE).items())
        parts.append(
            f"## Whole calls\n\n`attention_step` over a schedule of {SCHEDULE.num_steps} steps "
            f"({counts}), against the bare kernel: with means in the window, without after it.\n\n"
            f"{_steps_table(report['steps'])}\n"
        )
    if report["profile"]:
        parts.append(
            "## Profile\n\nOne execution of each kind of call, `dot_product_attention` (no state) "
            "or `attention_step`: what ran on the GPU, and how long it waited between.\n\n"
            f"{_profile_table(report['profile'])}\n"
        )
    return "\n".join(parts)
