"""How Hopper's tensor core sums products of E4M3 numbers into float16.

Found from scores that the hardware computed (131 072 of each head dim, all of which this model
reproduces): 32 products and the sum so far are brought to the largest of their exponents, cut off
13 bits below it, added, and rounded to float16. A product's exponent is the sum of its factors'
exponents, so a product of mantissas above 2 does not count as larger.
"""

import jax.numpy as jnp
from jax import Array, lax

_CHANNELS = 32
_KEPT_BITS = 13
_SMALLEST = -99


def _exponent(values: Array, lowest: int) -> Array:
    """floor(log2 |x|), at least `lowest`; of a zero, an exponent below all others."""
    _, exponent = jnp.frexp(values)
    return jnp.where(values == 0, _SMALLEST, jnp.maximum(exponent - 1, lowest))


def half_products(query: Array, key: Array) -> Array:
    """Scores [B, K, G, T, J] of E4M3 codes [B, K, G, T, H] and [B, K, J, H] (as float32)."""
    total = jnp.zeros((*query.shape[:-1], key.shape[2]), jnp.float32)
    for first in range(0, query.shape[-1], _CHANNELS):
        q = query[..., None, first : first + _CHANNELS]
        k = key[:, :, None, None, :, first : first + _CHANNELS]
        exponents = _exponent(q, -6) + _exponent(k, -6)
        exponents = jnp.where((q == 0) | (k == 0), _SMALLEST, exponents)
        largest = jnp.maximum(jnp.max(exponents, -1), _exponent(total, -24))
        unit = jnp.ldexp(jnp.ones_like(total), largest - _KEPT_BITS)
        terms = jnp.trunc(q * k / unit[..., None]) * unit[..., None]
        total = jnp.sum(terms, -1) + jnp.trunc(total / unit) * unit
        total = lax.reduce_precision(total, 5, 10)
    return total
