"""The products of the Hopper kernel: `wgmma`, one warpgroup at a time, waited for at once."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .._registers import INT8_START, ROWS, Registers
from ..layout import COUNT_ROWS, STEP


@dataclasses.dataclass(frozen=True)
class HopperRegisters(Registers):
    """`Registers` with products whose right operands are in shared memory."""

    def scores(self, query_ref, key_ref) -> Any:
        """Products of 64 queries and 256 keys."""
        dtype, start = (jnp.int32, INT8_START) if self.integer else (jnp.float16, 0)
        accumulator = plgpu.ACC.init(self.full((ROWS, STEP), start, dtype))
        return pl.run_state(lambda acc: plgpu.wgmma(acc, query_ref, key_ref.transpose((1, 0))))(
            accumulator
        )

    def weighted_values(self, codes: jax.Array, value_ref) -> Any:
        """Products of 64 rows of codes and 256 values, row sums in the last columns."""
        columns = self.size + COUNT_ROWS
        return pl.run_state(lambda acc: plgpu.wgmma(acc, codes, value_ref.transpose((1, 0))))(
            plgpu.ACC.init(self.full((ROWS, columns), 0))
        )

    def add_means(self, out, pending, means_ref) -> Any:
        """Add the means of eight blocks (`means_ref` holds them twice), weighted."""
        weights = self.mean_weights(pending)
        return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, means_ref))(plgpu.ACC.init(out))
