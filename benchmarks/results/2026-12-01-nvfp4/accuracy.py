"""Errors of NVFP4 attention by format of the probabilities, with V-Smooth and without.

    python benchmarks/results/2026-12-01-nvfp4/accuracy.py OUTPUT.json

Heads of the shipped video DiT on the shipped clip and of DINOv2 (`tests/data`), 256 query rows
each, against float64. Q, K and V are quantised as `config="nvfp4"` does in every row.
"""

import json
import math
import pathlib
import sys

import jax.numpy as jnp
import numpy as np

import vc_jax
from vc_jax._quantize import nvfp4_groups
from vc_jax.benchmarks import _fidelity_measures as measures
from vc_jax.benchmarks.fidelity import dit_heads, file_heads, shipped_clip

UNIT = 448.0 * 6.0
STEP, TILE = 256, 128


def groups_of_16(values: np.ndarray) -> np.ndarray:
    found = nvfp4_groups(jnp.asarray(values.reshape(*values.shape[:-1], -1, 16), jnp.float32))
    return np.asarray(found.values(), np.float64).reshape(values.shape)


def probabilities(codes: np.ndarray, how: str) -> np.ndarray:
    """Quantised, unnormalised probabilities of scores in eighths of an octave."""
    length = codes.shape[-1]
    codes = np.pad(codes, ((0, 0), (0, -length % STEP)), constant_values=-1e9)
    top = codes.max(-1, keepdims=True)
    if how == "exact":
        return np.exp2((codes - top) / 8)[:, :length]
    width = TILE if how == "two levels, tile" else STEP
    anchor = codes.reshape(len(codes), -1, width).max(-1)
    if how != "two levels, tile":
        anchor = np.maximum.accumulate(anchor, -1)
    anchor = np.repeat(anchor, width, -1)
    unit = 1.0 if how == "one level" else UNIT
    found = groups_of_16(unit * np.exp2((codes - anchor) / 8)) / unit
    return (found * np.exp2((anchor - top) / 8))[:, :length]


FORMATS = ("exact", "two levels, running", "two levels, tile", "one level")


def errors(head: measures.Head) -> dict[str, float]:
    exact = measures.softmax(measures.exact_scores(head)) @ head.value.astype(np.float64)
    length = len(head.value)
    config = vc_jax.PRESETS["nvfp4"]
    clusters = min(vc_jax.default_clusters(length), length)
    found = {}
    for smooth in (False, True):
        order = np.arange(length)
        if smooth:
            order = measures.orders(head, clusters, config.lloyd_steps)[1]
        query, key, value = measures._restore(head, order, config, smooth)
        codes = query @ key.T
        for how in FORMATS:
            weights = probabilities(codes, how)
            out = weights @ value / weights.sum(-1, keepdims=True)
            error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
            found[f"{'V-Smooth' if smooth else 'plain'}; P {how}"] = float(error)
        keys = measures.softmax(measures.exact_scores(head))[:, order]
        out = keys @ value
        error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
        found[f"{'V-Smooth' if smooth else 'plain'}; V alone"] = float(error)
    return found


def main() -> None:
    clip = shipped_clip(48, 80)
    sets = {f"DiT t={time}": list(dit_heads(clip, time))[::3] for time in (0.9, 0.3)}
    print({name: len(heads) for name, heads in sets.items()}, flush=True)
    root = pathlib.Path(__file__).parents[3]
    sets["DINOv2"] = file_heads(root / "tests/data/dinov2s_bbb_qkv_1k.npz")
    table = {}
    for name, heads in sets.items():
        rows = [errors(head) for head in heads]
        table[name] = {
            "heads": len(rows),
            "keys": len(heads[0].key),
            "per head": {head.name: row for head, row in zip(heads, rows)},
        }
        print(name, len(rows), "heads,", len(heads[0].key), "keys", flush=True)
        for key in rows[0]:
            values = np.array([row[key] for row in rows])
            root_mean = math.sqrt(np.mean(values**2))
            print(f"  {key:32} {100 * root_mean:6.2f} %  {-20 * math.log10(root_mean):5.2f} dB")
        better = np.mean(
            [
                row["V-Smooth; P two levels, running"] < row["plain; P two levels, running"]
                for row in rows
            ]
        )
        print(f"  V-Smooth is better in {100 * better:.0f} % of the heads", flush=True)
    pathlib.Path(sys.argv[1]).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
