"""The products of the Hopper kernel in plain JAX, for Pallas's interpreter."""

import dataclasses

import jax

from .._interpreted import InterpretedRegisters, read_operand


@dataclasses.dataclass(frozen=True)
class InterpretedHopper(InterpretedRegisters):
    """Stand-in for `HopperRegisters`."""

    def scores(self, query_ref, key_ref) -> jax.Array:
        return self.products_of(read_operand(query_ref), read_operand(key_ref))

    def weighted_values(self, codes, value_ref) -> jax.Array:
        return self.values_of(codes, read_operand(value_ref))

    def add_means(self, out, pending, means_ref) -> jax.Array:
        return out + self.means_of(pending, read_operand(means_ref)[:8])
