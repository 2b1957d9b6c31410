"""Attention over several devices: batch, heads and tokens spread over a mesh (`docs/scaling.md`).

`jax.shard_map` and JAX's collectives do all of it; inside, each device runs the call of one device.
"""

from ._attention import sharded_attention, sharded_attention_step
from ._communication import Communication, Transfer, communication
from ._explain import ShardedExplanation, explain
from ._plan import Method
from ._ring import merge
from ._state import init_state

__all__ = [
    "Communication",
    "Method",
    "ShardedExplanation",
    "Transfer",
    "communication",
    "explain",
    "init_state",
    "merge",
    "sharded_attention",
    "sharded_attention_step",
]
