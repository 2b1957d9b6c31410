"""What a card's public figures allow an attention kernel: `docs/roofline.md`.

A tile is 128 queries by 128 keys at head dim 128, on one multiprocessor. Its tensor cores have two
products to do, its special function units an exponential a score (ExpCast: none), its schedulers so
many instructions a score. The longest of the three bounds the tile if they overlap perfectly.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from ._results import markdown_table

TILE = 128
SCORES = TILE * TILE
PRODUCT_FLOPS = 2.0 * TILE**3
LANES_PER_CLOCK = 128
"""Instructions of single threads that a multiprocessor issues a clock: four warps of 32."""


@dataclasses.dataclass(frozen=True)
class Card:
    """Public figures of a GPU: dense TFLOP/s at boost clock.

    Attributes:
      multiprocessors, boost_ghz: how many, and the clock that the figures are for.
      bf16: BF16 products, FP32 sums.
      fp8: E4M3 products, FP32 sums.
      fp8_half: E4M3 products, FP16 sums.
      int8: INT8 products; `None`: none worth using.
      fp4: NVFP4 products; `None`: none, NVFP4 runs as float16.
      exponentials: a clock and multiprocessor.
    """

    multiprocessors: int
    boost_ghz: float
    bf16: float
    fp8: float
    fp8_half: float
    int8: float | None
    fp4: float | None
    exponentials: int = 16

    def clocks(self, teraflops: float) -> float:
        """Of one product of a tile at so many TFLOP/s of the whole card."""
        return PRODUCT_FLOPS * self.multiprocessors * self.boost_ghz / (1e3 * teraflops)


CARDS = {
    "RTX 4090": Card(128, 2.52, 165.2, 330.3, 660.6, 660.6, None),
    "L40S": Card(142, 2.52, 362.0, 733.0, 733.0, 733.0, None),
    "RTX 5090": Card(170, 2.41, 209.5, 419.0, 838.0, 838.0, 1676.0),
    "RTX PRO 6000": Card(188, 2.62, 503.8, 1007.6, 1007.6, 1007.6, 2015.2),
    "H100": Card(132, 1.83, 989.4, 1978.9, 1978.9, 1978.9, None),
    "H200": Card(132, 1.83, 989.4, 1978.9, 1978.9, 1978.9, None),
    "B200": Card(148, 1.85, 2250.0, 4500.0, 4500.0, 4500.0, 9000.0),
    "B300": Card(148, 1.92, 2250.0, 4500.0, 4500.0, None, 13500.0, exponentials=32),
}
"""Data sheets as of 2026-12; RTX 5090's and RTX 4090's E4M3 with FP32 sums is half of that with
FP16 sums. B300's clock is assumed."""


class Work(NamedTuple):
    """What a preset's kernel does for a score, in the kernels of this project.

    Attributes:
      exponential: whether it takes the special function unit.
      instructions: of the main loop for a score, from machine code; a BF16 kernel's are assumed.
    """

    exponential: bool
    instructions: float


WORK = {
    "bf16": Work(True, 5.0),
    "int8": Work(False, 8.3),
    "fp8": Work(False, 5.8),
    "nvfp4": Work(True, 10.0),
    "nvfp4 native": Work(True, 6.0),
}
"""`nvfp4 native`: on an FP4 unit, with conversion instructions; no kernel has shown it yet."""


class Budget(NamedTuple):
    """Clocks of a tile on one multiprocessor."""

    tensor: float
    exponential: float
    issue: float

    @property
    def bound(self) -> float:
        return max(self)


def budget(card: Card, preset: str) -> Budget | None:
    """Clocks of a tile; `None` where the card has no such products."""
    if preset == "nvfp4" and card.fp4 is not None:
        preset = "nvfp4 native"
    rates = {
        "bf16": (card.bf16, card.bf16),
        "int8": (card.int8, card.fp8),
        "fp8": (card.fp8_half, card.fp8),
        "nvfp4": (card.bf16, card.bf16),
        "nvfp4 native": (card.fp4, card.fp4),
    }[preset]
    if None in rates:
        return None
    work = WORK[preset]
    return Budget(
        sum(card.clocks(rate) for rate in rates if rate is not None),
        SCORES / card.exponentials if work.exponential else 0.0,
        SCORES * work.instructions / LANES_PER_CLOCK,
    )


def speed_up(card: Card, preset: str) -> float | None:
    """Of the bound of a preset over that of BF16."""
    own, base = budget(card, preset), budget(card, "bf16")
    return None if own is None or base is None else base.bound / own.bound


def card_of(device_kind: str) -> str | None:
    """The card that a device's name says it is."""
    named = device_kind.replace("GeForce ", "")
    return next((name for name in sorted(CARDS, key=len, reverse=True) if name in named), None)


def table() -> str:
    """Markdown: clocks of a tile (tensor / exponential / issue) and the speed-up by preset."""
    presets = ("int8", "fp8", "nvfp4")
    rows = []
    for name, card in CARDS.items():
        cells = [_clocks(budget(card, preset)) for preset in ("bf16", *presets)]
        ratios = [speed_up(card, preset) for preset in presets]
        rows.append((name, *cells, *(None if x is None else f"{x:.2f}" for x in ratios)))
    columns = ("card", "bf16", *presets, *(f"{preset} ×" for preset in presets))
    return markdown_table(columns, rows)


def _clocks(found: Budget | None) -> str | None:
    return None if found is None else " / ".join(f"{x:,.0f}" for x in found)


def report(device_kind: str, about: str, rows: Iterable[dict]) -> str:
    """A block to paste into a report: what was measured beside what the card allows.

    Args:
      about: versions, one line.
      rows: of `bench attention`, with `workload`, `kernel`, `teraflops`, `relative_l2`.
    """
    rows = list(rows)
    card = card_of(device_kind)
    lines = [f"device   {device_kind}", f"versions {about}"]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        own = [row for row in rows if row["workload"] == workload]
        base = max((x["teraflops"] for x in own if "BF16" in x["kernel"]), default=None)
        lines.append(workload)
        for row in own:
            lines.append("  " + _report_row(row, base, card))
    return "\n".join(lines)


def _report_row(row: dict, base: float | None, card: str | None) -> str:
    parts = [f"{row['kernel']:28} {row['teraflops']:7.0f} TFLOP/s"]
    if base is not None:
        parts.append(f"{row['teraflops'] / base:5.2f} x the fastest BF16")
    if row["relative_l2"] is not None:
        parts.append(f"error {100 * row['relative_l2']:.3f} %")
    preset = row["kernel"].removeprefix("vc_jax ").split(",")[0]
    if card is not None and preset in ("int8", "fp8", "nvfp4"):
        allowed = speed_up(CARDS[card], preset)
        parts.append("not bounded here" if allowed is None else f"roofline {allowed:.2f} x")
    return ", ".join(parts)
