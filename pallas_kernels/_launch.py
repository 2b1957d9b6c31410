"""Launching kernels written for Pallas's Triton backend, which read rows through an index."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax._src.pallas import core as pallas_core
from jaxtyping import Array

from ._varying import vary_together, varying_axes


@dataclasses.dataclass(frozen=True)
class _CompilerParams(plt.CompilerParams):
    """Triton's parameters under a name of their own: Pallas looks the lowering up by the class."""


def _lower_without_warning(*operands, **parameters):
    """Pallas's lowering for Triton, less the news that this backend will go.

    It is raised while a program is lowered, long after `launch`, and is nothing that a caller of
    this library could act on.
    """
    rule = pallas_core.get_lowering_rule(plt.CompilerParams, "gpu")
    assert rule is not None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Triton backend is deprecated.*")
        return rule(*operands, **parameters)


pallas_core.register_lowering_rule(_CompilerParams, _lower_without_warning, "gpu")


def launch(
    body: Callable,
    grid: tuple[int, ...],
    results: Sequence[jax.ShapeDtypeStruct],
    arguments: Sequence[Array],
    *,
    warps: int = 4,
    stages: int = 1,
    aliases: dict[int, int] | None = None,
    interpret: bool = False,
) -> Sequence[Array]:
    """One kernel launch over whole arrays; the first axis of the grid runs fastest.

    Arguments and results vary over every manual mesh axis that one of the arguments varies over.

    Args:
      aliases: argument whose memory becomes that of a result -> the result.
    """
    arguments = vary_together(*arguments)
    kind = jax.sharding.ManualAxisType(varying=varying_axes(arguments[0]))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind) for x in results]
    return pl.pallas_call(
        body,
        grid=grid,
        out_shape=shapes,
        input_output_aliases=aliases or {},
        compiler_params=_CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
    )(*arguments)


def rows_of(ref, batch, row, head):
    """Rows [n, H] of one head of BTNH tokens."""
    return ref.at[batch, row[:, None], head, jnp.arange(ref.shape[-1])[None, :]]
