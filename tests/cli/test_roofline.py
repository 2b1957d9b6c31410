"""The roofline: its arithmetic, its page, and the block of `vc-jax bench attention`."""

import pathlib

import pytest

from vc_jax.benchmarks import _roofline

PAGE = pathlib.Path(__file__).parents[2] / "docs/roofline.md"


def test_budgets_of_a_tile_are_those_worked_out_by_hand():
    # 4 · 128³ operations at 4 096 a clock, 128² exponentials at 16, 8.3 instructions at 128.
    hopper = _roofline.budget(_roofline.CARDS["H200"], "bf16")
    assert hopper.tensor == pytest.approx(2048, rel=0.001)
    assert hopper.exponential == 1024
    int8 = _roofline.budget(_roofline.CARDS["H200"], "int8")
    assert int8.tensor == pytest.approx(1024, rel=0.001)
    assert int8.exponential == 0
    assert int8.bound == int8.issue == pytest.approx(1062.4)
    assert _roofline.speed_up(_roofline.CARDS["H200"], "int8") == pytest.approx(1.93, abs=0.01)


def test_sums_in_float32_cost_a_geforce_card_half_its_rate():
    card = _roofline.CARDS["RTX 5090"]
    scores, values = card.clocks(card.fp8_half), card.clocks(card.fp8)
    assert _roofline.budget(card, "fp8").tensor == pytest.approx(scores + values)
    assert values == 2 * scores


def test_a_card_without_a_format_has_no_bound_for_it():
    assert _roofline.budget(_roofline.CARDS["B300"], "int8") is None
    assert _roofline.speed_up(_roofline.CARDS["B300"], "int8") is None
    assert _roofline.speed_up(_roofline.CARDS["RTX 4090"], "nvfp4") == pytest.approx(1)


def test_the_page_has_the_table_of_the_module():
    assert _roofline.table() in PAGE.read_text()


@pytest.mark.parametrize(
    ("kind", "card"),
    [
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_cards_are_known_by_their_device_names(kind, card):
    assert _roofline.card_of(kind) == card


def test_the_block_to_paste_holds_speed_error_and_what_the_card_allows():
    rows = [
        {"workload": "s4k", "kernel": "cuDNN BF16", "teraflops": 500.0, "relative_l2": 0.002},
        {"workload": "s4k", "kernel": "vc_jax fp8", "teraflops": 900.0, "relative_l2": 0.004},
        {"workload": "s4k", "kernel": "FP8 GEMM", "teraflops": 1200.0, "relative_l2": None},
    ]
    block = _roofline.report("NVIDIA H200", "vc-jax 0, jax 0", rows)
    ours = next(line for line in block.splitlines() if "vc_jax fp8" in line)
    assert "1.80 x the fastest BF16" in ours
    assert "error 0.400 %" in ours
    assert "roofline 2.00 x" in ours
    unknown = _roofline.report("some other GPU", "vc-jax 0, jax 0", rows)
    assert "roofline" not in unknown
