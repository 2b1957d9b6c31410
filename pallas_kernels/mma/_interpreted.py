"""The ring and the products of the `mma` kernel in plain JAX, for Pallas's interpreter.

Its copies are those of the interpreter, which looks for reads of a slot before its copy has
arrived and copies into one that is being read.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .._interpreted import InterpretedRegisters, read_operand
from .._registers import ROWS
from ..layout import COUNT_ROWS
from ._ring import CHUNK, PARTS, SLOTS, Ring


@dataclasses.dataclass(frozen=True)
class InterpretedMma(InterpretedRegisters):
    """Stand-in for `MmaRegisters`; arrays in device memory reach to the end of the last tile."""

    def load_query(self, query_ref, base, own_ref) -> None:
        own_ref[...] = query_ref[pl.ds(base, ROWS)]

    def scores(self, own_ref, keys_ref) -> jax.Array:
        return self.products_of(own_ref[...].astype(jnp.float32), read_operand(keys_ref))

    def keep(self, own_ref, rows) -> None:
        own_ref[0], own_ref[1] = rows

    def kept(self, own_ref) -> tuple[jax.Array, jax.Array]:
        return own_ref[0], own_ref[1]

    def joined(self, chunks) -> jax.Array:
        return jnp.concatenate(chunks, 1)

    def no_products(self) -> jax.Array:
        return jnp.zeros((ROWS, self.size + COUNT_ROWS), jnp.float32)

    def weighted_values(self, products, codes, values_ref, part: int) -> jax.Array:
        codes = codes[:, part * CHUNK : (part + 1) * CHUNK]
        return products + self.values_of(codes, read_operand(values_ref))

    def add_means(self, out, pending, means_ref) -> jax.Array:
        return out + self.means_of(pending, means_ref[...].astype(jnp.float32).T)

    def store(self, target_ref, values, base) -> None:
        target_ref[pl.ds(base, ROWS)] = values

    def store_rows(self, target_ref, values, base) -> None:
        target_ref[pl.ds(base, ROWS)] = values


@dataclasses.dataclass(frozen=True)
class InterpretedRing(Ring):
    """Stand-in for `Ring`; `slots` are slots of keys, slots of values and a barrier for each."""

    def _slot(self, part: int) -> Any:
        keys, values, _ = self.slots
        return (keys if part < PARTS else values).at[part % SLOTS]

    def _copy(self, source, part: int) -> None:
        arrived = self.slots[2].at[part % SLOTS]
        plgpu.copy_gmem_to_smem(source, self._slot(part), arrived)

    def _commit(self) -> None:
        pass

    def _wait(self, part: int) -> None:
        plgpu.barrier_wait(self.slots[2].at[part % SLOTS])
