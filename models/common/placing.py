"""Parameters as they come from a file: sent to the device as they are, and arranged there.

The layout's re-ordering is a view of the file (`tensor_map`). What is sent is the file's bytes in
the file's order; scaling, adding, casting and transposing are the device's work, which is many
times faster at it than NumPy on one core.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array

from . import memory
from .tensor_map import Shape

Index = tuple[slice, ...]

_SMALL = 2**18
"""Elements up to which a parameter is put together by NumPy: compiling would take longer."""


class Parameter:
    """A device array that is written piece by piece.

    Two pieces at most are on the way to the device: others would pile up in host memory.

    Args:
      shape, dtype: of the whole parameter.
      place: its sharding; None for the default device. It may be in host memory: then the
        parameter is moved there from the device as a whole.
      stacked: whether its first axis is that of the layers, of which a piece has one.
    """

    def __init__(self, shape: Shape, dtype: Any, place: Sharding | None, *, stacked: bool):
        self._shape, self._dtype, self._stacked = shape, dtype, stacked
        self._finally = place
        self._place = place and place.with_memory_kind(memory.default_kind(place))
        self._host = np.zeros(shape, dtype) if math.prod(shape) <= _SMALL else None
        self._array: Array | None = None
        self._on_the_way: list[Array] = []

    def write(
        self,
        start: Sequence[int],
        values: np.ndarray,
        factors: np.ndarray | None = None,
        addend: np.ndarray | None = None,
    ) -> None:
        """Writes `values · factors + addend`, computed in float32 where there is either.

        Args:
          start: where the piece begins, along all axes of the parameter.
          values: in the axes of the parameter, without the layers' axis; any strides and dtype.
          factors, addend: of the shape of `values`; repeated factors are sent once where NumPy
            knows them as repeated (`numpy.broadcast_to`).
        """
        if self._host is not None:
            sizes = ((1,) if self._stacked else ()) + values.shape
            at = tuple(slice(first, first + size) for first, size in zip(start, sizes, strict=True))
            self._host[at] = _arranged_by_numpy(values, factors, addend)
            return
        sent: list[Array] = []
        piece = self._piece(values, factors, addend, sent)
        if piece.shape == self._shape:
            self._array = piece
        else:
            if self._array is None:
                self._array = jnp.zeros(self._shape, self._dtype, device=self._place)
            update = _update(self._array.sharding, self._stacked)
            self._array = update(self._array, piece, np.asarray(start, np.int32))
        jax.block_until_ready(self._on_the_way)
        self._on_the_way = sent

    def _piece(
        self,
        values: np.ndarray,
        factors: np.ndarray | None,
        addend: np.ndarray | None,
        sent: list[Array],
    ) -> Array:
        def part(index: Index, place: Sharding | None) -> Array:
            of_values, of_factors, of_addend = (
                x if x is None else x[index] for x in (values, factors, addend)
            )
            assert of_values is not None
            return _arranged_on(place, of_values, of_factors, of_addend, self._dtype, sent)

        place = self._place
        if not isinstance(place, NamedSharding):
            return part((), place)
        if self._stacked:
            place = NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))
        indices = place.addressable_devices_indices_map(values.shape)
        parts = [part(i or (), SingleDeviceSharding(device)) for device, i in indices.items()]
        return jax.make_array_from_single_device_arrays(values.shape, place, parts)

    def array(self) -> Array:
        """The parameter, after its last piece."""
        host = self._host
        if host is None:
            assert self._array is not None
            array = self._array
        elif isinstance(self._place, NamedSharding):
            array = jax.make_array_from_callback(self._shape, self._place, lambda i: host[i])
        else:
            array = jax.device_put(host, self._place)
        if self._finally != self._place:
            array = jax.device_put(array, self._finally)
        return jax.block_until_ready(array)


def _arranged_on(
    place: Sharding | None,
    values: np.ndarray,
    factors: np.ndarray | None,
    addend: np.ndarray | None,
    dtype: Any,
    sent: list[Array],
) -> Array:
    """A piece on one device; what is on the way to it is added to `sent`."""
    order = _memory_order(values)
    inverse = tuple(int(axis) for axis in np.argsort(order))
    raw = jax.device_put(np.ascontiguousarray(values.transpose(order)), place)
    sent.append(raw)
    scale = added = None
    if factors is not None:
        once = tuple(slice(1) if stride == 0 else slice(None) for stride in factors.strides)
        scale = np.ascontiguousarray(factors[once].transpose(order), np.float32)
        scale = jax.device_put(scale, place)
    if addend is not None:
        added = _arranged_on(place, addend, None, None, addend.dtype, sent)
    return _arranged(raw, scale, added, inverse, dtype)


def _arranged_by_numpy(
    values: np.ndarray, factors: np.ndarray | None, addend: np.ndarray | None
) -> np.ndarray:
    if factors is not None:
        values = values.astype(np.float32) * factors
    return values if addend is None else values.astype(np.float32) + addend


def _memory_order(view: np.ndarray) -> tuple[int, ...]:
    """The axes of a view, those of the largest strides first: so it lies in memory."""
    return tuple(sorted(range(view.ndim), key=lambda axis: -abs(view.strides[axis])))


@functools.partial(jax.jit, static_argnums=(3, 4))
def _arranged(
    raw: Array, factors: Array | None, addend: Array | None, inverse: tuple[int, ...], dtype: Any
) -> Array:
    if factors is not None:
        raw = raw.astype(jnp.float32) * factors
    # Apart from the transposition: in one loop with it a conversion of FP8 takes a CPU four times
    # as long.
    raw = jax.lax.optimization_barrier(raw.astype(dtype if addend is None else jnp.float32))
    raw = raw.transpose(inverse)
    return raw if addend is None else (raw + addend).astype(dtype)


@functools.cache
def _update(sharding: Sharding, stacked: bool) -> Callable[..., Array]:
    def update(array: Array, piece: Array, start: Array) -> Array:
        starts = [start[axis] for axis in range(array.ndim)]
        return jax.lax.dynamic_update_slice(array, piece[None] if stacked else piece, starts)

    return jax.jit(update, donate_argnums=0, out_shardings=sharding)
