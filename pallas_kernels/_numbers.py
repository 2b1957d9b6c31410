"""Scales and codes inside a kernel, as the quantisers of the prepared layout define them."""

import jax.numpy as jnp
from jax import lax

_TINY = 2.0**-100
"""Groups whose largest magnitude is at most this have a scale of 1."""
MAGIC = 12582912.0
"""1.5 · 2^23: a sum with it leaves the nearest integer, to even, in the low bits of a float32."""


def magnitude_bits(values):
    """|values| as integers of the same order, among which a NaN is the largest."""
    return lax.bitcast_convert_type(values, jnp.int32) & 0x7FFFFFFF


def as_float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


def largest_magnitude(values, axis: int):
    return as_float(jnp.max(magnitude_bits(values), axis))


def group_scale(amax, largest: float):
    return jnp.where(amax <= _TINY, 1.0, amax * (1.0 / largest))


def power_of_two_at_least(values):
    bits = lax.bitcast_convert_type(values, jnp.int32)
    rounded = as_float(((bits + 0x007FFFFF) >> 23) << 23)
    return jnp.where(is_finite(values), rounded, values)


def is_finite(values):
    return magnitude_bits(values) < 0x7F800000


def round_up_11_bits(values):
    """At least `values`, with 10 bits after the leading one."""
    bits = lax.bitcast_convert_type(values * (1 + 2.0**-11), jnp.int32)
    return as_float((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF)


def norm(tiles, vectors):
    """L2 norm of the rows of a tile that neither overflows nor underflows on the way."""
    largest = jnp.max(magnitude_bits(vectors), 1)
    exponent = largest & 0x7F800000
    usual = (exponent > 0) & (exponent < 0x7E800000)
    unit = as_float(jnp.where(usual, exponent, 0x3F800000))
    inverse = as_float(jnp.where(usual, 0x7F000000 - exponent, 0x3F800000))
    scaled = vectors * tiles.over_tokens(inverse, "rows")
    return unit * jnp.sqrt(jnp.sum(scaled * scaled, 1))
