"""The 8-bit prepared layout: what preprocessing writes, kernels read and the reference defines.

Lengths: B batch, T queries, S keys, N query heads, K key heads, H head dim, P stored keys (S
rounded up to steps of 256), n = P / 128 blocks. Keys and values are in the order of the call
(sorted by cluster or sequence order), valid ones first; query head `i` reads key head
`i // (N / K)`.

* `score = query_scale[t] · key_scale[block] · (query_codes[t] · key_codes[s])` is the attention
  score in *codes*, eighths of an octave: the softmax scale and 8·log2(e) are in `query_scale`.
* INT8 queries and keys: scale `amax / 127` per token and per block. E4M3: codes of a token have an
  L2 norm of at most 255, so no product of two leaves float16; `key_scale` is a power of two and
  `query_scale` has 11 significant bits, so their product is exact in float16.
* No product of a query's and a key's scale exceeds a quarter: scores stay within float16 (E4M3,
  +-16 384 codes, 1 420 nats) and keep their resolution in float32 (INT8, 45 000 nats). Larger
  logits are scaled down to that; keys that this brings closer are nearer to each other than the
  number formats can tell apart there.
* A slot without a valid key, in a step that has one, holds the codes of the first key of its
  block, or of its step if its block has none: it can raise no maximum, so a kernel needs no mask.
  Its value codes are zero. Codes and scales of steps without a valid key are zero.
* `value_codes` are transposed and, inside each group of 16 tokens, in the order `GROUP_ORDER`:
  stored token `p` is token `GROUP_ORDER[p]`. Four packed 8-bit probabilities of a Hopper score
  fragment then are a fragment of the next product's left operand.
* Eight more rows under the transposed values count: even ones hold 1 at valid keys of even blocks,
  odd ones at valid keys of odd blocks, else 0. Their products with the probabilities are the row
  sums of the two blocks of a step.
* `value = value_scale · (codes + block_means[block])`, `value_scale` a power of two.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float8e4m3fn, Float32, Int32, Shaped

E4M3 = jnp.float8_e4m3fn
BLOCK = 128
"""Keys that share a scale and a mean."""
STEP = 256
"""Keys of a step of the softmax: the granularity of row maxima and of promotion to float32. Stored
keys are a multiple of it."""
COUNT_ROWS = 8
"""Rows under the transposed values that count valid keys."""
GROUP_ORDER = np.array([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
"""Stored position in a group of 16 value tokens -> token of the group."""
E4M3_NORM = 240.0
"""L2 norm of a token's codes before rounding; rounding adds at most 1/16: 255² < 65 504."""
LARGEST_UNIT = 0.25
"""Codes that a unit of a code product may stand for."""
TOP = 119.65
"""What the largest score of a row is mapped to, in codes: 8·8 + 56 - 0.35 (ExpCast's shift); it
rounds to E4M3's code 120, which is 256."""
PROBABILITY_SCALE = 256.0
"""What a probability of 1 is stored as."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Prepared8:
    """8-bit prepared inputs of one attention call; see the module's text.

    Attributes:
      query_codes: int8 or float8_e4m3fn [B, N, T, H].
      query_scale: float32 [B, N, T].
      key_codes: as the queries' [B, K, P, H], P a multiple of 256, N a multiple of K.
      key_scale: float32 [B, K, n].
      value_codes: float8_e4m3fn [B, K, H + 8, P], the last 8 rows count.
      value_scale: float32 [B, K, H].
      block_means: bfloat16 [B, K, n, H], in units of `value_scale`; `None` without V-Smooth, which
        is faster.
      kv_count: int32 [B], valid keys, the first ones of each batch row.
      score_excess: float32 [B, N, T], what a row's scores were divided by to stay within range; 1
        but for logits beyond it. The normaliser is that of the scores times this.
    """

    query_codes: Shaped[Array, "b n t h"]
    query_scale: Float32[Array, "b n t"]
    key_codes: Shaped[Array, "b k p h"]
    key_scale: Float32[Array, "b k j"]
    value_codes: Float8e4m3fn[Array, "b k h+8 p"]
    value_scale: Float32[Array, "b k h"]
    block_means: BFloat16[Array, "b k j h"] | None
    kv_count: Int32[Array, " b"]
    score_excess: Float32[Array, "b n t"]
