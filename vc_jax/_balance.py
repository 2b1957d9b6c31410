"""Balanced channels: a power of two per channel from the keys to the queries, which is exact.

A score is a sum over channels, so multiplying a channel of the queries and dividing that of the
keys by the same number changes nothing. It changes what quantisation loses: the error of a
quantised score goes with the norms of its query and key, and the product of the mean squared norms
is least where every channel of the queries is as large as that of the keys. A layer whose keys have
a few large channels, in which its queries are small, loses most of its precision without it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._public import public
from ._quantize import count_of, power_of_two
from .pallas_kernels.layout import LARGEST_SQUARED

_DEAD_ZONE = 0.25
"""Octaves by which a channel may be off, beyond half of one, before it is balanced: small gains
measured as noise, and most channels of most layers keep a factor of 1."""
_MOST_OCTAVES = 12.0
"""Factors from 2^-12 to 2^12: float16 has them too, and a product with one is exact."""


def bounded_squares(tokens: Float[Array, "..."]) -> Float[Array, "..."]:
    """Squares, float32; of what is not finite 0, so that one token does not spoil all others."""
    tokens = tokens.astype(jnp.float32)
    bounded = jnp.clip(tokens, -LARGEST_SQUARED, LARGEST_SQUARED)
    return jnp.where(jnp.isfinite(tokens), bounded * bounded, 0.0)


def mean_squares(
    tokens: Float[Array, "b s k h"], valid: Bool[Array, "b s"] | None = None
) -> Float[Array, "b k h"]:
    """The mean square over valid tokens of each channel of each head, float32."""
    squares = bounded_squares(tokens)
    if valid is not None:
        squares = jnp.where(valid[:, :, None, None], squares, 0.0)
    return jnp.sum(squares, 1) / count_of(tokens, valid)


@public
def channel_balance(
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    key_valid: Bool[Array, "b s"] | None = None,
    *,
    key_mean: Float[Array, "b k h"] | None = None,
) -> Float[Array, "b k h"]:
    """What `prepare` takes as `balance`: powers of two that even out queries and keys.

    Args:
      query, key: BTNH and BSKH. Bytes of invalid keys do not matter.
      key_valid: [B, S]; `None`: all.
      key_mean: what is subtracted from the keys; `None`: nothing.

    Returns:
      float32 [B, K, H], from 2^-12 to 2^12.
    """
    return balance_of(mean_squares(query), mean_squares(key, key_valid), key_mean)


def balance_of(
    query_squares: Float[Array, "b n h"],
    key_squares: Float[Array, "b k h"],
    key_mean: Float[Array, "b k h"] | None = None,
) -> Float[Array, "b k h"]:
    """What queries are multiplied with and keys divided by, a power of two per channel.

    Near the root of the quotient of the two root mean squares (of the centred keys, where they are
    centred), relative to the median over the channels: a factor that all have would change nothing.

    Args:
      query_squares, key_squares: from `mean_squares`; all N / K query heads of a key head count.
      key_mean: what is subtracted from the keys; `None`: nothing.
    """
    batch, heads, size = key_squares.shape
    query_squares = jnp.mean(query_squares.reshape(batch, heads, -1, size), 2)
    if key_mean is not None:
        # The difference of two large numbers is trusted down to a few times its rounding.
        squared_mean = jnp.square(jnp.clip(key_mean, -LARGEST_SQUARED, LARGEST_SQUARED))
        key_squares = jnp.maximum(key_squares - squared_mean, squared_mean * 2.0**-16)
    bounded = 2.0**-6 * LARGEST_SQUARED**2
    usual = (jnp.max(key_squares, -1) < bounded) & (jnp.max(query_squares, -1) < bounded)
    octaves = 0.25 * (_log2(key_squares) - _log2(query_squares))
    octaves = octaves - jnp.median(octaves, -1, keepdims=True)
    octaves = jnp.sign(octaves) * jnp.maximum(jnp.abs(octaves) - _DEAD_ZONE, 0.0)
    octaves = jnp.clip(jnp.round(octaves), -_MOST_OCTAVES, _MOST_OCTAVES)
    # Sizes beyond what can be squared are not known.
    usual = usual[..., None] & jnp.isfinite(octaves)
    return power_of_two(jnp.where(usual, octaves, 0.0).astype(jnp.int32))


def _log2(squares: Float[Array, "b k h"]) -> Float[Array, "b k h"]:
    """log2 of mean squares, an empty channel 48 octaves (24 of its values) below the largest."""
    largest = jnp.max(squares, -1, keepdims=True)
    least = jnp.maximum(largest * 2.0**-48, float(jnp.finfo(jnp.float32).tiny))
    return jnp.log2(jnp.maximum(squares, least))
