"""How far each configuration is from exact attention, on the caller's own tensors."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._arguments import check_arguments
from ._attention import dot_product_attention
from ._config import AttentionConfig
from ._mesh_axes import whole_along
from ._tracing import own_promotion


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Error of one configuration per head, NumPy [B, N].

    Attributes:
      relative_l2: |out - exact| / |exact| over rows and channels.
      cosine: cosine of the angle between them.
      gain: `out · exact / |exact|²`, 1 when nothing is lost systematically.
      worst_row_l2: the largest |out - exact| / |exact| of a single row, over its channels. NaN or
        infinite if any row's is, so that one bad row among many shows.
      worst_row: that row's index along T, int.
    """

    relative_l2: np.ndarray
    cosine: np.ndarray
    gain: np.ndarray
    worst_row_l2: np.ndarray
    worst_row: np.ndarray

    def _worst(self) -> str:
        batch, head = np.unravel_index(np.argmax(self.worst_row_l2), self.worst_row_l2.shape)
        return f"{self.worst_row[batch, head]} of head {head} of batch {batch}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Comparison):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]
        pairs = [(getattr(self, name), getattr(other, name)) for name in names]
        return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]  # As of arrays.

    def __str__(self) -> str:
        return (
            f"relative L2 {self.relative_l2.mean():.4f} (worst head {self.relative_l2.max():.4f}, "
            f"worst row {self.worst_row_l2.max():.4f}: row {self._worst()}), "
            f"cosine {self.cosine.mean():.6f}, gain {self.gain.mean():.5f}"
        )


def error_measures(
    out: Float[Array | np.ndarray, "b t n h"],
    exact: Float[Array | np.ndarray, "b t n h"],
    rows: np.ndarray | None = None,
) -> Comparison:
    """Errors per head; an exact output of zeros gives error 0 or inf.

    Args:
      rows: int [t], which rows these are, for `worst_row`; `None`: the first ones.
    """
    got, want = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (out, exact))
    inner, energy = (got * want).sum(-1), (want**2).sum(-1)
    error, size = ((got - want) ** 2).sum(-1), (got**2).sum(-1)
    of_rows = _relative(error, energy)
    worst = np.argmax(of_rows, -1)
    inner, energy, error, size = (x.sum(-1) for x in (inner, energy, error, size))
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = np.where(error == 0, 1.0, inner / np.sqrt(energy * size))
        gain = np.where(error == 0, 1.0, inner / energy)
    return Comparison(
        _relative(error, energy),
        cosine,
        gain,
        np.take_along_axis(of_rows, worst[..., None], -1)[..., 0],
        worst if rows is None else rows[worst],
    )


def _relative(error: np.ndarray, energy: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, np.sqrt(error / energy))


@own_promotion
def compare(
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k h"],
    configs: AttentionConfig
    | str
    | Sequence[AttentionConfig | str]
    | Mapping[str, AttentionConfig | str],
    *,
    rows: int = 1024,
    **arguments,
) -> dict[str | AttentionConfig, Comparison]:
    """The error of each configuration against exact attention, per head.

    Args:
      query, key, value: as in `dot_product_attention`; the caller's own tensors.
      configs: configurations or presets' names, one or several, or a mapping of labels to them.
      rows: number of query rows, spread evenly over T, that are compared.
      arguments: further keyword arguments of `dot_product_attention` (mask, scale, lengths of
        keys); an `implementation` is that of the configurations, exact attention takes XLA.

    The rows are computed by themselves. Where channels are balanced, by the sizes of the queries'
    channels, the error of few rows is not quite that of all.

    Returns:
      For each label (the mapping's keys, or the configurations themselves) a `Comparison`. Exact
      attention is computed in float32 at highest precision from the same inputs.

    Raises:
      ValueError: no rows, or `query_seq_lengths`, which do not go with sampled rows.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"rows must be an integer >= 1, got {rows!r}")
    idle = {"query_seq_lengths": None, "return_residual": False, "state": None}
    for name in (*idle, "config"):
        if name in arguments and (name == "config" or arguments[name] is not idle[name]):
            raise ValueError(f"{name} cannot be passed to compare")
    check_arguments(query, key, value)
    if isinstance(configs, AttentionConfig | str):
        configs = [configs]
    if not isinstance(configs, Iterable):
        raise TypeError(
            "configs must be a configuration, a preset's name, several of them, or a mapping to "
            f"them, got {type(configs).__name__}"
        )
    labelled = dict(configs) if isinstance(configs, Mapping) else {c: c for c in configs}
    axis = query.ndim - 3
    chosen = np.unique(np.linspace(0, query.shape[axis] - 1, rows).round().astype(int))
    sample = jnp.take(whole_along(jnp.asarray(query), axis), chosen, axis)

    if arguments.get("mask") is not None:
        arguments["mask"] = _rows_of_mask(arguments["mask"], query.shape[axis], chosen)
    implementation = arguments.pop("implementation", None)

    def batched(x):
        return x if x.ndim == 4 else x[None]

    def run(config, *tensors, implementation=None):
        out = dot_product_attention(
            *tensors, config=config, implementation=implementation, **arguments
        )
        assert isinstance(out, jax.Array)
        return batched(out.astype(jnp.float32))

    tensors = (sample.astype(jnp.float32), jnp.asarray(key), jnp.asarray(value))
    exact_tensors = jax.tree.map(lambda x: x.astype(jnp.float32), tensors)
    exact = run("bf16", *exact_tensors, implementation="xla")
    return {
        label: error_measures(
            run(config, sample, *tensors[1:], implementation=implementation), exact, chosen
        )
        for label, config in labelled.items()
    }


def _rows_of_mask(mask: Any, length: int, chosen: np.ndarray) -> Any:
    """The chosen rows of a mask that has an axis of queries."""
    shape = getattr(mask, "shape", ())
    if len(shape) < 2 or shape[-2] != length or length == 1:
        return mask
    return mask[..., chosen, :]
