"""`vc-jax bench sharded`: on simulated devices, and the tables of its pieces."""

import jax
import pytest

from vc_jax.benchmarks import _sharded_pieces as pieces
from vc_jax.benchmarks import sharded
from vc_jax.benchmarks._workloads import WORKLOADS

from . import bench_checks, devices


@pytest.mark.parametrize("name", devices.checks(bench_checks))
def test_on_simulated_devices(name):
    failure = devices.results(bench_checks.__name__, 2)[name]
    assert failure is None, failure


def test_one_device_is_refused_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert sharded.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_part_of_a_device():
    clip = WORKLOADS["minimax-h3"]
    assert pieces.part_of(clip, 8, pieces.ULYSSES).heads == 7
    assert pieces.part_of(clip, 8, pieces.RING).length == 9188
    assert pieces.part_of(clip, 16, pieces.ULYSSES) is None


def row(parts: int, kind: str, milliseconds: float) -> dict:
    about = {"clip": "a", "preset": "fp8", "parts": parts, "kind": kind}
    return about | {"milliseconds": milliseconds, "teraflops": 1.0}


def test_a_ring_is_its_steps_and_merges_against_one_device():
    measured = [row(1, pieces.ULYSSES, 80.0), row(4, pieces.RING, 6.0), row(4, pieces.MERGE, 0.5)]
    columns, rows = pieces.pieces_report({"pieces": measured})
    ring = dict(zip(columns, rows[1], strict=True))
    assert ring["a device ms"] == 4 * 6.0 + 3 * 0.5
    assert ring["of one device's rate"] == 20.0 / 25.5
