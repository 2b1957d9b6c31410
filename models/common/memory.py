"""In which memory of their devices arrays lie: the devices' own, or the host's.

JAX calls them `"device"` and `"pinned_host"`; what a device has is in its `addressable_memories()`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Sharding, SingleDeviceSharding

from .tensor_map import Shape


def check_kind(kind: str) -> None:
    """Refuses a memory that the default device does not have.

    Raises:
      ValueError: names those that it has.
    """
    device = next(iter(_anywhere().device_set))
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if kind not in kinds:
        raise ValueError(f"memory_kind: expected one of {kinds}, got {kind!r}")


def _anywhere() -> Sharding:
    """Where arrays are made that nothing is said of."""
    return SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))


def default_kind(place: Sharding) -> str:
    """The memory that the devices of a sharding compute from."""
    return next(iter(place.device_set)).default_memory().kind


def with_kind(
    place: Sharding | Callable[[str, Shape], Sharding] | None, kind: str
) -> Callable[[str, Shape], Sharding]:
    """A sharding, or a function of name and shape, with another kind of memory."""

    def of(name: str, shape: Shape) -> Sharding:
        there = place(name, shape) if callable(place) else place
        there = _anywhere() if there is None else there
        return there.with_memory_kind(kind)

    return of


def waits(array: Any) -> bool:
    """Whether an array lies in another memory than that which its devices compute from."""
    if isinstance(array, Tracer) or not isinstance(array, jax.Array):
        return False
    return array.sharding.memory_kind != default_kind(array.sharding)


def moved[Tree](tree: Tree, kind: str) -> Tree:
    """A pytree with its arrays in a kind of memory of their devices."""

    def move(array: jax.Array) -> jax.Array:
        return jax.device_put(array, array.sharding.with_memory_kind(kind))

    return jax.tree.map(move, tree)


def on_device[Tree](tree: Tree) -> Tree:
    """A pytree with copies of the arrays that wait in another memory; the others are themselves."""

    def place(array: Any) -> Sharding | None:
        sharding = array.sharding if waits(array) else None
        return sharding and sharding.with_memory_kind(default_kind(sharding))

    leaves, structure = jax.tree.flatten(tree)
    places = [place(leaf) for leaf in leaves]
    copied = [leaf if to is None else jax.device_put(leaf, to) for leaf, to in zip(leaves, places)]
    return jax.tree.unflatten(structure, copied)
