"""Where the slots of the prepared layout take their tokens from, and where their codes go."""

from typing import Any, NamedTuple

import jax.experimental.pallas.triton as plt
import jax.numpy as jnp

from .layout import BLOCK, STEP


class Tokens(NamedTuple):
    """What the slots of a step hold.

    Attributes:
      index: int32 [128], the token of each slot.
      valid: bool [128], whether it is a valid one.
    """

    index: Any
    valid: Any


def tokens_of_block(refs, batch, head, step, block, length: int, slots) -> Tokens:
    """The tokens of a block of a step, stand-ins for missing ones included (prepared layout)."""
    order_ref, count_ref = refs
    count = plt.load(count_ref.at[batch])
    first_of_step = step * STEP
    first_of_block = first_of_step + block * BLOCK
    slot = first_of_block + slots
    stand_in = jnp.where(first_of_block < count, first_of_block, first_of_step)
    stand_in = jnp.where(stand_in < count, stand_in, 0)
    valid = slot < count
    source = jnp.where(valid, slot, stand_in)
    if order_ref is not None:
        source = plt.load(order_ref.at[batch, head, source])
    # An order that is none must not make the GPU read elsewhere.
    return Tokens(jnp.minimum(jnp.maximum(source, 0), length - 1), valid)


def codes_of(ref, batch, head, row):
    """Rows [128, H] of one head of head-major codes."""
    return ref.at[batch, head, row[:, None], jnp.arange(ref.shape[-1])[None, :]]
