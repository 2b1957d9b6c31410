"""ExpCast: the E4M3 byte of a probability by one affine map of its score (paper, section 4).

The bits of a positive E4M3 number are close to 8·log2 of its value, so the byte of `256·exp(s - m)`
is close to an affine function of `s`: no exponential is evaluated. Scores are measured in *codes*:
one code is an eighth of an octave, `8·log2(e)` codes are one nat.

Kernels evaluate the map in float32 or float16, round its value to float16 and then to an integer;
`anchored_codes` does exactly that, `expcast` rounds once, as the formula of the paper says.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float8e4m3fn, UInt8

from ._public import public
from .pallas_kernels.layout import PROBABILITY_SCALE, TOP

CODES_PER_NAT = 8.0 * math.log2(math.e)
MAX_CODE = 120
NAN_CODE = 127
F16_MAX = 65504.0
TOTAL_VARIATION_BOUND = (1 - math.sqrt(0.9290 / 1.0746)) / (1 + math.sqrt(0.9290 / 1.0746))
"""Largest total variation of a row without underflow: with r in [a, b], (√b-√a)/(√b+√a)."""


@public
def expcast(log2_ratio: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The E4M3 byte of `256·2^u`, u <= 0: `clip(RNE(8·(u + 8) + 56 + beta), 0, 120)`.

    Args:
      log2_ratio: u = (s - m)·log2(e), m the maximum of the row. -inf gives 0.

    Returns:
      uint8, to be reinterpreted as `float8_e4m3fn` (`decode_codes`); a NaN stays a NaN.

    >>> import jax.numpy as jnp
    >>> expcast(jnp.array([0.0, -1.0, -1.6, -8.0, -14.0, -100.0, -jnp.inf])).tolist()
    [120, 112, 107, 56, 8, 0, 0]
    """
    return _to_byte(8.0 * log2_ratio.astype(jnp.float32) + TOP)


def _to_byte(code: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Codes rounded to nearest even and clipped; E4M3's NaN for a NaN, which must not be hidden."""
    byte = jnp.clip(jnp.round(code), 0, MAX_CODE)
    return jnp.where(jnp.isnan(code), NAN_CODE, byte).astype(jnp.uint8)


@public
def exp_then_cast(log2_ratio: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The E4M3 byte of `256·2^u` rounded to nearest even: what ExpCast stands in for."""
    probability = PROBABILITY_SCALE * jnp.exp2(log2_ratio.astype(jnp.float32))
    return lax.bitcast_convert_type(probability.astype(jnp.float8_e4m3fn), jnp.uint8)


@public
def decode_codes(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """The float32 values of E4M3 bytes."""
    return as_e4m3(codes).astype(jnp.float32)


def as_e4m3(codes: UInt8[Array, "..."]) -> Float8e4m3fn[Array, "..."]:
    """Bytes reinterpreted as E4M3."""
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)


def round_to_f16(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Values rounded to float16's normal grid, kept in float32; overflow gives infinities.

    A cast back and forth would not do: XLA removes it where excess precision is allowed.
    """
    return lax.reduce_precision(values, exponent_bits=5, mantissa_bits=10)


def f16_multiplier(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Positive values rounded to float16, subnormals included, saturating, kept in float32."""
    values = jnp.minimum(values, F16_MAX)
    subnormal = jnp.round(values * 2.0**24) * 2.0**-24
    return jnp.where(values < 2.0**-14, subnormal, round_to_f16(values))


class Anchor(NamedTuple):
    """How the codes of a row (or of a row and step) are computed from its scores.

    Attributes:
      code: the score, in codes, that maps to `TOP`; the largest is at or below it.
      bias: `TOP - code`, which is added to `multiplier·score`.
    """

    code: Float[Array, "..."]
    bias: Float[Array, "..."]


def anchor(largest: Float[Array, "..."], *, half: bool) -> Anchor:
    """The anchor of rows whose largest score is `largest` codes.

    With float16 scores (`half`) the bias is rounded to float16, never above `TOP - largest`: the
    largest code stays <= 120 however coarse float16 is there.
    """
    bias = TOP - largest
    if not half:
        return Anchor(largest, bias)
    bias = round_to_f16(jnp.clip(bias - jnp.abs(bias) * 2.0**-11, -F16_MAX, F16_MAX))
    return Anchor(TOP - bias, bias)


def anchored_codes(
    scores: Float[Array, "... n"], multiplier: Float[Array, "..."], row: Anchor
) -> UInt8[Array, "... n"]:
    """E4M3 bytes of `multiplier·score + bias` as a kernel rounds them: to float16, to an integer.

    Args:
      scores: products of the codes of queries and keys, float32.
      multiplier: codes per unit of score, of each or of all.
      row: the row's anchor.
    """
    return _to_byte(round_to_f16(multiplier * scores + row.bias))
