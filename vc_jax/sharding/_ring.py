"""Attention to keys that lie in pieces on several devices: the pieces rotate, their parts merge.

Every device clusters and sorts its own keys. A piece is attended to with its own statistics, and
its normaliser is that of the inputs' scores, so that parts merge whatever the pieces are.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._arguments import Inputs
from .._dispatch import forward, input_gradients, order_of_keys
from .._implementations import Result, Static
from .._mesh_axes import arrays_of, inputs_of
from ..pallas_kernels._varying import vary_together

_KEY_SIDE = (1, 2, 4)
"""Places of key, value and the keys' validity in `arrays_of`."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """`attend`, for keys that lie in pieces along mesh axes.

    Attributes:
      axes: the mesh axes of the ring.
      size: devices along them.
    """

    axes: tuple[str, ...]
    size: int

    def __call__(self, static: Static, inputs: Inputs, order: Array | None = None) -> Result:
        """Attention to all pieces: output in the query's dtype, normaliser or `None`."""
        arrays = _vary(arrays_of(inputs), order)
        result: Any = _attend(self, static, inputs.validity.prefix, arrays, order)
        out, lse = result
        return out, lax.stop_gradient(lse) if static.residual else None

    def rotate(self, arrays: Any, by: int = 1) -> Any:
        """Each device's arrays to the one that comes `by` places later."""
        pairs = [(i, (i + by) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), arrays)


def _vary(tree: Any, *along: Any) -> Any:
    """The arrays of a pytree, varying over every mesh axis that any, or any of `along`, does."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, vary_together(*leaves, along=along))


def merge(
    first: tuple[Float[Array, "b t n h"], Float[Array, "b t n"]],
    second: tuple[Float[Array, "b t n h"], Float[Array, "b t n"]],
) -> tuple[Float[Array, "b t n h"], Float[Array, "b t n"]]:
    """Attention to two sets of keys, given the output and the normaliser of each, float32.

    Where neither set has a valid key the normaliser is -inf and the output stays 0. Start a loop
    over sets with zeros and -inf.
    """
    largest = jnp.maximum(first[1], second[1])
    # Rows that have seen no valid key yet: subtract 0 from their -inf.
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    weights = [jnp.exp(lse - largest) for _, lse in (first, second)]
    total = weights[0] + weights[1]
    share = [(w / jnp.where(total == 0, 1.0, total))[..., None] for w in weights]
    return share[0] * first[0] + share[1] * second[0], largest + jnp.log(total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(ring: Ring, static: Static, prefix: bool, arrays: tuple[Any, ...], order):
    inputs = inputs_of(arrays, prefix)
    piece_static = dataclasses.replace(static, residual=True)
    if static.config.quantized:
        order = order_of_keys(static, inputs, order)

    def attend(piece):
        key_side, order = piece
        given = list(arrays)
        for place, array in zip(_KEY_SIDE, key_side):
            given[place] = array
        return forward(piece_static, inputs_of(tuple(given), prefix), order, jnp.float32)

    def step(carry, _):
        # The next piece travels while this one is attended to.
        piece, so_far = carry
        return (ring.rotate(piece), merge(so_far, attend(piece))), None

    piece = _vary((tuple(arrays[place] for place in _KEY_SIDE), order))
    query = inputs.query
    start = (jnp.zeros(query.shape, jnp.float32), jnp.full(query.shape[:3], -math.inf))
    start = _vary(start, arrays, order)
    (piece, so_far), _ = lax.scan(step, (piece, start), length=ring.size - 1)
    out, lse = merge(so_far, attend(piece))
    return out.astype(query.dtype), lse


def _attend_forward(ring: Ring, static: Static, prefix: bool, arrays, order):
    return _attend(ring, static, prefix, arrays, order), arrays


def _attend_backward(ring: Ring, static: Static, prefix: bool, saved, cotangents):
    """Straight-through, from all pieces on every device; key gradients go back where keys live."""
    del static, prefix
    query, key, value, scale, key_valid, query_valid, poison = saved
    del poison
    pieces = [(key, value, key_valid)]
    pieces += [ring.rotate(pieces[0], by) for by in range(1, ring.size)]
    keys, values = (jnp.concatenate([p[i] for p in pieces], 1) for i in range(2))
    valid = None if key_valid is None else jnp.concatenate([p[2] for p in pieces], 1)
    validity = inputs_of((query, keys, values, scale, valid, query_valid, None), False).validity
    gradients = input_gradients((query, keys, values, scale, validity), cotangents[0])

    def home(gradient: Array) -> Array:
        parts = jnp.split(gradient.astype(jnp.float32), ring.size, 1)
        parts = [ring.rotate(part, -by) for by, part in enumerate(parts)]
        return functools.reduce(operator.add, parts)

    key_gradient, value_gradient = home(gradients[1]), home(gradients[2])
    of_keys = key_gradient.astype(key.dtype), value_gradient.astype(value.dtype)
    return (gradients[0], *of_keys, gradients[3], None, None, None), None


_attend.defvjp(_attend_forward, _attend_backward)
