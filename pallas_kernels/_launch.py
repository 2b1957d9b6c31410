"""One launch of a Mosaic GPU kernel whose programs have roles: each is a warpgroup of its own."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._cluster_tiles import ClusterTiles
from ._tiles_interpreted import InterpretedTiles
from ._varying import vary_together, varying_axes

_TOGETHER = 4096
"""Programs above which each role is launched by itself, with no more registers than it needs."""


@dataclasses.dataclass(frozen=True)
class Role:
    """What some programs of a launch do.

    Attributes:
      body: called with operations on tiles, the indices of a program, and references to the
        arguments and results.
      grid: of its programs, the last axis runs fastest.
      arguments, results: whole arrays; the interpreter adds a row to results with two axes or one.
      size: channels of a token.
    """

    body: Callable[..., None]
    grid: tuple[int, ...]
    arguments: Sequence[Array]
    results: Sequence[jax.ShapeDtypeStruct]
    size: int

    @property
    def programs(self) -> int:
        return math.prod(self.grid)

    def run(self, tiles, program, refs) -> None:
        """The program with a number within the role."""
        indices = []
        for axis in reversed(self.grid[1:]):
            indices.append(lax.rem(program, jnp.int32(axis)))
            program = lax.div(program, jnp.int32(axis))
        self.body(tiles, (program, *reversed(indices)), *refs)


def launch(roles: Sequence[Role], *, interpret: bool = False) -> list[list[Array]]:
    """Run all programs of the roles, in one launch if they are few; the results of each role.

    Results vary over every manual mesh axis that one of the arguments varies over.
    """
    arguments = vary_together(*(x for role in roles for x in role.arguments))
    if interpret:
        return [_interpreted(role) for role in roles]
    if len(roles) > 1 and sum(role.programs for role in roles) > _TOGETHER:
        return [launch([role])[0] for role in roles]
    kind = jax.sharding.ManualAxisType(varying=varying_axes(arguments[0]))
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind)
        for role in roles
        for x in role.results
    ]

    def entry(*refs):
        inputs, outputs = list(refs[: len(arguments)]), list(refs[len(arguments) :])
        program, first = lax.axis_index("programs"), 0
        for role in roles:
            own = [inputs.pop(0) for _ in role.arguments] + [outputs.pop(0) for _ in role.results]
            last = first + role.programs
            inside = (program >= first) & (program < last)
            run = functools.partial(role.run, ClusterTiles(role.size), program - first, own)
            run() if len(roles) == 1 else pl.when(inside)(run)
            first = last

    kernel: Any = plgpu.kernel(
        entry,
        out_type=results,
        grid=(sum(role.programs for role in roles),),
        grid_names=("programs",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    # A kernel counts in 32 bits whatever the caller's setting: that is what its references hold.
    with jax.enable_x64(False):
        flat = list(kernel(*arguments))
    return [[flat.pop(0) for _ in role.results] for role in roles]


def _interpreted(role: Role) -> list[Array]:
    def entry(*refs):
        role.run(InterpretedTiles(role.size), pl.program_id(0), refs)

    def padded(result: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((result.shape[0] + 1, *result.shape[1:]), result.dtype)

    call = pl.pallas_call(
        entry,
        grid=(role.programs,),
        out_shape=[padded(x) for x in role.results],
        interpret=True,
    )
    with jax.enable_x64(False):
        found = call(*role.arguments)
    return [x[:-1] for x in found]
