"""Scales and codes inside a kernel, as the quantisers of the prepared layout define them."""

import jax.numpy as jnp
from jax import lax

from .layout import TINY

MAGIC = 12582912.0
"""1.5 · 2^23: a sum with it leaves the nearest integer, to even, in the low bits of a float32."""


def magnitude_bits(values):
    """|values| as integers of the same order, among which a NaN is the largest."""
    return lax.bitcast_convert_type(values, jnp.int32) & 0x7FFFFFFF


def as_float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


def ordered_bits(values):
    """Floats as integers of the same order, among which a NaN is beyond either infinity."""
    bits = lax.bitcast_convert_type(values + 0.0, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def from_ordered_bits(bits):
    return as_float(bits ^ ((bits >> 31) & 0x7FFFFFFF))


def largest(values, axis: int):
    """The largest along an axis; a NaN wins, which XLA's maximum may drop on the CPU."""
    return from_ordered_bits(jnp.max(ordered_bits(values), axis))


def largest_magnitude(values, axis: int):
    return as_float(jnp.max(magnitude_bits(values), axis))


def group_scale(amax, largest: float):
    return jnp.where(amax <= TINY, 1.0, amax * (1.0 / largest))


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


def round_to_bfloat16(values):
    """To nearest even, kept in float32; finite values stay finite."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF
    # Rounding to infinity: one step of bfloat16 back.
    rounded = jnp.where((rounded & 0x7FFFFFFF) == 0x7F800000, rounded - 0x10000, rounded)
    return jnp.where(is_finite(values), as_float(rounded), values)


def norm(tiles, vectors):
    """L2 norm of the rows of a tile that neither overflows nor underflows on the way."""
    largest = jnp.max(magnitude_bits(vectors), 1)
    exponent = largest & 0x7F800000
    usual = (exponent > 0) & (exponent < 0x7E800000)
    unit = as_float(jnp.where(usual, exponent, 0x3F800000))
    inverse = as_float(jnp.where(usual, 0x7F000000 - exponent, 0x3F800000))
    scaled = vectors * tiles.over_tokens(inverse, "rows")
    return unit * jnp.sqrt(jnp.sum(scaled * scaled, 1))
