"""Keys and values on their way to the `mma` kernel: a ring of slots in shared memory.

A step of 256 keys comes in eight parts of 64 tokens, four of keys and four of values, in the order
in which they are used. All threads copy (`cp.async`, which every GPU from compute capability 8.0 on
has); up to `SLOTS - 1` parts are on their way while one is used.
"""

import dataclasses
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir

from .._registers import inline
from ..layout import COUNT_ROWS, STEP
from . import _instructions as gpu

SLOTS = 4
"""A divisor of the parts of a step, so that a part is always in the same slot."""
CHUNK = 64
"""Tokens of a part."""
PARTS = STEP // CHUNK
"""Parts of keys of a step, and of values."""
STARTS = (1, 1, 0, 0, 3, 1, 1, 1)
"""Copies that are started as each part of a step is taken, of the next parts that were not yet.

None while the scores of the last keys are made: these fill the registers.
"""
_THREADS = 128
_REF: Any = plgpu.RefType


def started(part: int) -> int:
    """Parts from the beginning of a step whose copies are started before a part is taken."""
    return SLOTS - 1 + sum(STARTS[:part])


def slot_bytes(size: int) -> int:
    """Bytes of a slot for a head dim: values with their count rows, or keys, which are less."""
    return (size + COUNT_ROWS) * CHUNK


def _swizzled(row: ir.Value, column: ir.Value, width: int) -> ir.Value:
    """Offset of 16 bytes in rows of 64 or 128; eight rows' same column lie in different banks."""
    line = row if width == 128 else gpu.divided(row, 2)
    column = gpu.xor(column, gpu.rest(line, width // 16))
    return gpu.add(gpu.times(row, width), gpu.times(column, 16))


def read_addresses(ref: ir.Value, width: int) -> list[ir.Value]:
    """This lane's addresses for `load_matrices` of 8 rows, one for each 64 bytes of a row.

    Eight rows further, they are `8 · width` higher.
    """
    base, lane = gpu.shared_address(ref), gpu.rest(gpu.thread(), gpu.WARP)
    row, column = gpu.rest(lane, 8), gpu.divided(lane, 8)
    columns = [gpu.add(column, 4 * part) for part in range(width // 64)]
    return [gpu.add(base, _swizzled(row, column, width)) for column in columns]


def _copy(ctx, source: ir.Value, slot: ir.Value) -> None:
    """Start copying rows of 64 or 128 bytes into a slot, 16 bytes a thread at a time."""
    del ctx
    rows, width = gpu.shape(source)
    pieces = width // 16
    thread, stride = gpu.thread(), gpu.strides(source)[0]
    row, column = gpu.divided(thread, pieces), gpu.rest(thread, pieces)
    target = gpu.add(gpu.shared_address(slot), _swizzled(row, column, width))
    offset = gpu.add(gpu.times(row, stride), gpu.times(column, 16))
    start = gpu.moved(gpu.device_address(source), offset)
    together = _THREADS // pieces
    for first in range(0, rows, together):
        left = (rows - first) * pieces
        only = (thread, left) if left < _THREADS else None
        gpu.copy_16_bytes(target, start, (first * width, first * stride), only)


def _commit(ctx) -> None:
    del ctx
    gpu.commit_copies()


def _arrived(part: int):
    def compute(ctx) -> None:
        del ctx
        gpu.wait_for_copies(started(part) - part - 1)
        utils.warpgroup_barrier()

    return compute


@dataclasses.dataclass(frozen=True)
class Ring:
    """Parts of the keys and values of one key head, step by step.

    Attributes:
      key, value: [P, H] and [H + 8, P] in device memory.
      slots: bytes [SLOTS, ...] in shared memory.
      count: steps.
    """

    key: Any
    value: Any
    slots: Any
    count: Any

    def begin(self) -> None:
        """Start the first parts."""
        for part in range(SLOTS - 1):
            self._start(jnp.int32(0), part)

    def take(self, step, part: int) -> Any:
        """The slot of a part, filled, until the next one is taken; parts are taken in order.

        Starts copies to where parts before this one were, which nobody reads any more.
        """
        self._wait(part)
        first = started(part)
        for ahead in range(first, first + STARTS[part]):
            self._start(step + ahead // (2 * PARTS), ahead % (2 * PARTS))
        return self._slot(part)

    def _start(self, step, part: int) -> None:
        @pl.when(step < self.count)
        def _():
            tokens = pl.ds(step * STEP + part % PARTS * CHUNK, CHUNK)
            source = self.key.at[tokens] if part < PARTS else self.value.at[:, tokens]
            self._copy(source, part)

        self._commit()

    def _slot(self, part: int) -> Any:
        return self.slots.at[part % SLOTS]

    def _copy(self, source, part: int) -> None:
        inline(arg_types=(_REF(), _REF()))(_copy)(source, self._slot(part))

    def _commit(self) -> None:
        inline()(_commit)()

    def _wait(self, part: int) -> None:
        inline()(_arrived(part))()


assert 2 * PARTS % SLOTS == 0
assert sum(STARTS) == 2 * PARTS
assert all(0 < started(p + 1) - p - 1 < SLOTS for p in range(2 * PARTS))
