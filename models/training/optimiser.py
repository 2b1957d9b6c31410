"""Muon for the blocks' matrices, AdamW for everything else.

Muon (Jordan et al., 2024) replaces the momentum of a weight matrix by the nearest orthogonal
matrix, scaled to a fixed root mean square per entry (Liu et al., "Muon is scalable", 2025), so one
learning rate serves both.
"""

import math
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

# Axes of each stacked matrix, the leading one being the layer. Queries, keys and values of a layer
# are three matrices, not one wide one: axis 2 of `qkv` is in neither group.
_MATRICES = {
    ("attention", "qkv"): MuonDimensionNumbers(reduction_axis=1, output_axis=(3, 4)),
    ("attention", "out"): MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=3),
    ("up",): MuonDimensionNumbers(reduction_axis=1, output_axis=2),
    ("down",): MuonDimensionNumbers(reduction_axis=1, output_axis=2),
}


# AdamW's learning rate in relation to Muon's.
_ADAM_SHARE = 0.5


def _path_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    names = (str(getattr(part, "key", getattr(part, "name", part))) for part in path)
    return tuple(name for name in names if name != "value")


def matrix_axes(parameters: Any) -> Any:
    """Muon's dimension numbers of each parameter of a `VideoDiT`; None where AdamW is used."""

    def axes(path, _):
        names = _path_names(path)
        if names[0] != "blocks" or names[-1] != "kernel":
            return None
        return _MATRICES[names[1:-1]]

    return jax.tree_util.tree_map_with_path(axes, parameters)


def build_optimiser(weight_decay: float = 0.01) -> optax.GradientTransformation:
    """Clipped Muon and AdamW at learning rate 1: the caller scales the updates."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            1.0,
            weight_decay=weight_decay,
            adam_learning_rate=_ADAM_SHARE,
            adam_b2=0.95,
            muon_weight_dimension_numbers=matrix_axes,
            consistent_rms=0.2,
        ),
    )


def learning_rate(peak: float, fraction: float, step: int, warmup_steps: int = 100) -> float:
    """Linear warm-up over steps, then a cosine to 2 % of the peak over the training's budget.

    Args:
      peak: highest rate.
      fraction: share of the time budget that has passed, in [0, 1].
      step: optimiser steps done.
      warmup_steps: steps until the peak.
    """
    floor = 0.02
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(max(fraction, 0.0), 1.0)))
    return peak * min(1.0, (step + 1) / warmup_steps) * (floor + (1.0 - floor) * cosine)
