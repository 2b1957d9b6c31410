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
from jaxtyping import Array, Bool, Float, Float8e4m3fn, UInt8

CODES_PER_NAT = 8.0 * math.log2(math.e)
BETA = -0.35
"""The paper's shift of the map, in codes: it balances the error of the chord over an octave."""
TOP = 8.0 * 8 + 56 + BETA
"""The map's value at the row maximum, 119.65; it rounds to code 120, which is 256."""
MAX_CODE = 120
PROBABILITY_SCALE = 256.0
"""What a probability of 1 is stored as."""
TOTAL_VARIATION_BOUND = (1 - math.sqrt(0.9290 / 1.0746)) / (1 + math.sqrt(0.9290 / 1.0746))
"""Largest total variation of a row without underflow: with r in [a, b], (√b-√a)/(√b+√a)."""


def expcast(log2_ratio: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The E4M3 byte of `256·2^u`, u <= 0: `clip(RNE(8·(u + 8) + 56 + beta), 0, 120)`.

    Args:
      log2_ratio: u = (s - m)·log2(e), m the maximum of the row. -inf gives 0.

    Returns:
      uint8, to be reinterpreted as `float8_e4m3fn` (`decode_codes`).

    >>> import jax.numpy as jnp
    >>> expcast(jnp.array([0.0, -1.0, -1.6, -8.0, -14.0, -100.0, -jnp.inf])).tolist()
    [120, 112, 107, 56, 8, 0, 0]
    """
    code = jnp.round(8.0 * log2_ratio.astype(jnp.float32) + TOP)
    return jnp.clip(code, 0, MAX_CODE).astype(jnp.uint8)


def exp_then_cast(log2_ratio: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The E4M3 byte of `256·2^u` rounded to nearest even: what ExpCast stands in for."""
    probability = PROBABILITY_SCALE * jnp.exp2(log2_ratio.astype(jnp.float32))
    return lax.bitcast_convert_type(probability.astype(jnp.float8_e4m3fn), jnp.uint8)


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
    """Positive values rounded to float16, subnormals included, kept in float32."""
    subnormal = jnp.round(values * 2.0**24) * 2.0**-24
    return jnp.where(values < 2.0**-14, subnormal, round_to_f16(values))


class Anchor(NamedTuple):
    """How the codes of a row (or of a row and block) are computed from its scores.

    Attributes:
      code: the score, in codes, that maps to `TOP`; the rest of the row lies below.
      bias: what is added to `multiplier·score`: `TOP - code` unless `wide`.
      wide: rows of scores so large that a sum with the bias would lose them: there the largest
        score is subtracted first. Kernels leave such calls to the reference.
    """

    code: Float[Array, "..."]
    bias: Float[Array, "..."]
    wide: Bool[Array, "..."]


WIDE_F16 = 2.0**14
"""Largest score, in codes, up to which float16 scores are biased in one step (1 420 nats)."""
WIDE_F32 = 2.0**19
"""The same for float32 scores (45 000 nats)."""


def anchor(largest: Float[Array, "..."], *, half: bool) -> Anchor:
    """The anchor of rows whose largest score is `largest` codes.

    With float16 scores (`half`) the bias is rounded to float16, never above `TOP - largest`: the
    largest code stays <= 120 however coarse float16 is there.
    """
    wide = jnp.abs(largest) > (WIDE_F16 if half else WIDE_F32)
    if not half:
        return Anchor(largest, jnp.where(wide, TOP, TOP - largest), wide)
    bias = TOP - largest
    bias = round_to_f16(bias - jnp.abs(bias) * 2.0**-11)
    return Anchor(jnp.where(wide, largest, TOP - bias), jnp.where(wide, TOP, bias), wide)


def anchored_codes(
    scores: Float[Array, "... n"],
    below: Float[Array, "... n"],
    multiplier: Float[Array, "... 1"],
    row: Anchor,
) -> UInt8[Array, "... n"]:
    """E4M3 bytes of `multiplier·score + bias` as a kernel rounds them: to float16, to an integer.

    Args:
      scores: products of the codes of queries and keys, float32.
      below: `multiplier·score` minus the score the row is anchored at, in codes, for wide rows.
      multiplier: codes per unit of score.
      row: the row's anchor.
    """
    value = jnp.where(row.wide, below + TOP, multiplier * scores + row.bias)
    return jnp.clip(jnp.round(round_to_f16(value)), 0, MAX_CODE).astype(jnp.uint8)
