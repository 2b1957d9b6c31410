"""`vc-jax bench memory` on a tiny model."""

import json

import numpy as np

from vc_jax import _cli
from vc_jax.benchmarks import memory

from .test_end_to_end import TINY


def test_it_loads_samples_and_compares(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "missing_gpu", lambda: None)
    monkeypatch.setitem(memory.VIDEO_MODELS, memory.MODEL, TINY[memory.MODEL])
    output = tmp_path / "results"
    assert _cli.main(["bench", "memory", "--output", str(output), "--attention", "bf16"]) == 0
    report = json.loads((output / "memory.json").read_text())
    assert [row["file"] for row in report["loading"]] == ["F32", "BF16"]
    sizes = [row["GB"] for row in report["loading"]]
    assert np.isclose(sizes[0], 2 * sizes[1])
    assert report["experts"]["finite"]
    assert report["same_bits"]
    assert "GB of file a second" in capsys.readouterr().out
    assert (output / "memory.md").read_text().startswith("# Weights on their way")


def test_bits_that_differ_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "missing_gpu", lambda: None)
    for name, value in (("measure_loading", {}), ("measure_experts", {}), ("same_bits", False)):
        monkeypatch.setattr(memory, name, lambda *_, value=value: value)
    assert memory.main(["--output", str(tmp_path / "results")]) == 1
