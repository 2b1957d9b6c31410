"""Calls on arrays that live on explicit axes of a mesh (the default of `jax.make_mesh`).

An array's type says there how it is sharded, and every operation has to say how its result is. A
call goes through `shard_map` instead: each device computes its own part of the batch, the heads
and the query rows, which need nothing of each other. Keys and values are brought to where their
queries are, along the other axes too; nothing moves where only batch and heads are sharded.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ._arguments import Inputs
from ._config import AttentionConfig
from ._mesh_axes import (
    CallAxes,
    arrays_of,
    explicit_mesh,
    explicit_names,
    inputs_of,
    names_of,
    reshard,
    spec_of,
    state_of,
    whole_along,
)
from ._order import AttentionState


def spread(
    function: Callable[..., Any],
    static: Hashable,
    config: AttentionConfig,
    inputs: Inputs,
    state: AttentionState | None = None,
    step: Array | None = None,
) -> Any:
    """`function(static, inputs, state, step)`, each device on its part where axes are explicit.

    The output is sharded as the query, the normaliser as its first three axes, the state as the
    one that came in.

    Args:
      function: returns `((out, lse), state)`; one of the module's level, so that it is traced once.
      static: hashable.
      config: the numerics; they say whether query rows may be parted.
    """
    mesh = explicit_mesh(inputs, state, step)
    if mesh is None:
        return function(static, inputs, state, step)
    return _spread(function, static, config, mesh, inputs, state, step)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _spread(function, static, config, mesh, inputs: Inputs, state, step):
    own = spec_of(inputs.query)
    names = names_of(own[2])
    parts = math.prod(mesh.shape[name] for name in names)
    copies = parts // math.gcd(parts, inputs.key.shape[2])
    # Balance is by the sizes of the channels over all queries: every device computes all rows.
    rows = None if config.balance_channels else own[1]
    axes = CallAxes(own[0], rows, None, own[2], own[2])
    axes_in = dataclasses.replace(axes, key_heads=None) if copies > 1 else axes

    def local(arrays, state, step):
        inputs, state = inputs_of(arrays, prefix), state_of(state)
        if copies > 1:
            inputs, state = _own_key_heads(inputs, state, names, parts, copies)
        result, state = function(static, inputs, state, step)
        return result, None if state is None else tuple(state)

    prefix = inputs.validity.prefix
    operands = (arrays_of(inputs), None if state is None else tuple(state), step)
    in_specs = (axes_in.of_inputs, None if state is None else axes_in.of_state, PartitionSpec())
    of_state = None if state is None else axes.of_state
    result, new_state = jax.shard_map(
        local,
        mesh=mesh,
        axis_names=explicit_names(mesh),
        in_specs=in_specs,
        out_specs=((axes.of_out, axes.of_lse), of_state),
    )(*reshard(operands, in_specs, mesh))
    result = reshard(result, (own, PartitionSpec(*own[:3])), mesh)
    if state is None:
        return result, None
    assert new_state is not None
    if copies > 1:
        new_state = (*(whole_along(x, 1)[:, ::copies] for x in new_state[:2]), *new_state[2:])
    return result, state_of(reshard(new_state, tuple(map(spec_of, state)), mesh))


def _own_key_heads(
    inputs: Inputs,
    state: AttentionState | None,
    names: tuple[str, ...],
    parts: int,
    copies: int,
) -> tuple[Inputs, AttentionState | None]:
    """On a device that has all key heads: those that its query heads read.

    Every head is taken `copies` times, so that each device has as many.
    """
    size = inputs.key.shape[2] * copies // parts
    head = (lax.axis_index(names) * size + jnp.arange(size)) // copies

    def own(array: Array, axis: int) -> Array:
        return jnp.take(array, head, axis)

    key, value = own(inputs.key, 2), own(inputs.value, 2)
    inputs = dataclasses.replace(inputs, key=key, value=value)
    if state is not None:
        permutation, centroids = own(state.permutation, 1), own(state.centroids, 1)
        state = state._replace(permutation=permutation, centroids=centroids)
    return inputs, state
