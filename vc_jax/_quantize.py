"""Quantisers: INT8, E4M3 and NVFP4, and the rotation and centring that come before them.

Every quantiser rounds to nearest even, saturates, and gives finite codes and scales for an all-zero
or denormal group. A scale is what a code is multiplied with to get the value back.
"""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jaxtyping import Array, Bool, Float, Float8e4m3fn, Int, Shaped, UInt8

from ._config import NVFP4_GROUP, check_integer
from ._public import public
from .pallas_kernels.layout import E4M3, SUM_UNIT, TINY

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_NVFP4_TOP_SCALE = 288.0
"""The scale, in E4M3, of the group with the largest magnitude if that is mapped to 6: 1.5 times as
much, for 4, is still within E4M3."""


class Quantized(NamedTuple):
    """Codes and the scale that, multiplied with them, gives the values back.

    `scale` has the rank of `codes`, with size 1 on every axis that shares a scale.
    """

    codes: Shaped[Array, "..."]
    scale: Float[Array, "..."]


def largest_magnitude(
    values: Float[Array, "..."], axis: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Float[Array, "..."]:
    """The largest |value| of each group, float32; a NaN is the largest of all.

    Compared as integers, whose order is that of positive floats: a maximum of floats may drop a
    NaN (XLA's CPU backend does).
    """
    bits = lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    return lax.bitcast_convert_type(jnp.max(bits, axis, keepdims=keepdims), jnp.float32)


def group_scale(amax: Float[Array, "..."], largest: float) -> Float[Array, "..."]:
    """`amax / largest`; 1 for a group so small that the quotient would lose its precision.

    A NaN or an infinity among the values makes the scale NaN or infinite, so that it shows.
    """
    return jnp.where(amax <= TINY, 1.0, amax / largest)


def saturate_e4m3(values: Float[Array, "..."]) -> Float8e4m3fn[Array, "..."]:
    """Values (FP32) as E4M3, round to nearest even, clipped to ±448."""
    return jnp.clip(values, -E4M3_MAX, E4M3_MAX).astype(E4M3)


@public
def quantize_int8(values: Float[Array, "..."], axis: int | tuple[int, ...] = -1) -> Quantized:
    """INT8 codes in [-127, 127] with one FP32 scale `amax / 127` per group.

    Args:
      values: any shape, float.
      axis: the axes that share a scale: the last one for a scale per token, a block's token and
        channel axes for a scale per block.

    Returns:
      `Quantized(codes int8, scale float32)`, the scale with size 1 along `axis`.

    >>> import jax.numpy as jnp
    >>> codes, scale = quantize_int8(jnp.array([[1.0, -2.0, 0.5]]))
    >>> codes.tolist()
    [[64, -127, 32]]
    """
    values = values.astype(jnp.float32)
    scale = group_scale(largest_magnitude(values, axis, True), 127.0)
    return Quantized(jnp.clip(jnp.round(values / scale), -127, 127).astype(jnp.int8), scale)


@public
def quantize_e4m3(values: Float[Array, "..."], axis: int | tuple[int, ...] = -1) -> Quantized:
    """E4M3 codes with one FP32 scale `amax / 448` per group.

    Args:
      values: any shape, float.
      axis: the axes that share a scale: the last for a scale per token, the token axis for a scale
        per channel, all of them for one per tensor.

    Returns:
      `Quantized(codes float8_e4m3fn, scale float32)`, the scale with size 1 along `axis`.
    """
    values = values.astype(jnp.float32)
    scale = group_scale(largest_magnitude(values, axis, True), E4M3_MAX)
    return Quantized(saturate_e4m3(values / scale), scale)


@public
def dequantize(quantized: Quantized) -> Float[Array, "..."]:
    """Codes times scale, float32."""
    return quantized.codes.astype(jnp.float32) * quantized.scale


class Nvfp4(NamedTuple):
    """NVFP4 along the last axis, of length n: see `quantize_nvfp4`.

    Attributes:
      codes: uint8 [..., n / 2], two E2M1 codes a byte, the even element in the low nibble.
      scales: float8_e4m3fn [..., n / 16], one scale per 16 elements.
      global_scale: float32, size 1 on the axes that share it.
    """

    codes: UInt8[Array, "..."]
    scales: Float8e4m3fn[Array, "..."]
    global_scale: Float[Array, "..."]


def encode_e2m1(values: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Values (FP32) as 4-bit E2M1 codes (sign in bit 3), nearest even, clipped to ±6."""
    magnitude = jnp.abs(values)
    code = jnp.zeros(values.shape, jnp.uint8)
    # A midpoint belongs to the neighbour whose mantissa bit is 0: below it for every other one.
    for middle, goes_up in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (0, 1, 0, 1, 0, 1, 0)):
        above = magnitude >= middle if goes_up else magnitude > middle
        code = code + above.astype(jnp.uint8)
    return code | (jnp.signbit(values).astype(jnp.uint8) << 3)


def decode_e2m1(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """The float32 values of 4-bit E2M1 codes (one code a byte, sign in bit 3)."""
    # From the bits, not from a table: a gather is slow on a CPU.
    bits = codes.astype(jnp.uint32)
    exponent, mantissa = (bits >> 1) & 3, bits & 1
    normal = lax.bitcast_convert_type((exponent + 126) << 23 | mantissa << 22, jnp.float32)
    magnitude = jnp.where(exponent == 0, 0.5 * mantissa.astype(jnp.float32), normal)
    return jnp.where(bits & 8, -magnitude, magnitude)


def pack_nibbles(codes: UInt8[Array, "... n"]) -> UInt8[Array, "... n/2"]:
    """Two 4-bit codes a byte along the last axis, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: UInt8[Array, "... n"]) -> UInt8[Array, "... 2*n"]:
    """The inverse of `pack_nibbles`."""
    return jnp.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


@public
def quantize_nvfp4(
    values: Float[Array, "... n"], global_axes: int | tuple[int, ...] | None = None
) -> Nvfp4:
    """NVFP4 along the last axis: E2M1 codes, an E4M3 scale per 16 elements, an FP32 global scale.

    A group's scale maps its largest magnitude to 6 or to 4, the largest and the second largest
    code: whichever loses less (squared error), 6 of equals. E2M1 has nothing between 4 and 6, so a
    group with values at five sixths of its largest is better off with 4. The global scale is
    `amax / (288 * 6)`: the largest group's scale is exact in E4M3 for 6, and in range for 4.

    Args:
      values: [..., n], float, n a multiple of 16.
      global_axes: the axes that share a global scale; `None`: all.

    Raises:
      ValueError: n is not a multiple of 16.
    """
    n = values.shape[-1]
    if n % NVFP4_GROUP:
        raise ValueError(f"values must have a last axis that is a multiple of 16, got {n}")
    values = values.astype(jnp.float32)
    largest = largest_magnitude(values, global_axes, True)
    global_scale = group_scale(largest, _NVFP4_TOP_SCALE * E2M1_MAX)
    groups = (values / global_scale).reshape(*values.shape[:-1], n // NVFP4_GROUP, NVFP4_GROUP)
    codes, scales = _closest_groups(groups)
    return Nvfp4(pack_nibbles(codes.reshape(values.shape)), scales, global_scale)


class _Groups(NamedTuple):
    """E2M1 codes (one a byte) and E4M3 scales of groups that are in units of the global scale."""

    codes: UInt8[Array, "... g 16"]
    scales: Float8e4m3fn[Array, "... g"]

    def values(self) -> Float[Array, "... g 16"]:
        return decode_e2m1(self.codes) * self.scales.astype(jnp.float32)[..., None]


def nvfp4_groups(groups: Float[Array, "... g 16"], largest_code: float = E2M1_MAX) -> _Groups:
    """Groups in units of the global scale, the largest magnitude of each at `largest_code`."""
    scales = saturate_e4m3(largest_magnitude(groups, -1) / largest_code)
    step = scales.astype(jnp.float32)[..., None]
    scaled = jnp.where(step > 0, groups / jnp.where(step > 0, step, 1.0), 0.0)
    return _Groups(encode_e2m1(scaled), scales)


def _closest_groups(groups: Float[Array, "... g 16"]) -> _Groups:
    """Groups with their largest at 6 or at 4, whichever is nearer to them."""
    six, four = nvfp4_groups(groups), nvfp4_groups(groups, 4.0)
    lost, lost_by_four = (jnp.sum((x.values() - groups) ** 2, -1) for x in (six, four))
    better = lost_by_four < lost
    return _Groups(
        jnp.where(better[..., None], four.codes, six.codes),
        lax.select(better, four.scales, six.scales),
    )


@public
def dequantize_nvfp4(quantized: Nvfp4) -> Float[Array, "... n"]:
    """The float32 values of `quantize_nvfp4`'s result."""
    return nvfp4_codes(quantized) * quantized.global_scale


def nvfp4_codes(quantized: Nvfp4) -> Float[Array, "... n"]:
    """NVFP4 in units of its global scale, float32, all exact in bfloat16 and in float16."""
    scales = jnp.repeat(quantized.scales.astype(jnp.float32), NVFP4_GROUP, -1)
    return decode_e2m1(unpack_nibbles(quantized.codes)) * scales


def hadamard_matrix(size: int) -> npt.NDArray[np.float32]:
    """The orthonormal Hadamard matrix of a head size (float32, [size, size], read-only).

    Sylvester order, scaled by the root of its order. A size that is no power of two gets a block
    diagonal of its largest power-of-two factor (96 = 3 blocks of 32).

    Raises:
      ValueError: `size` is not an integer >= 1.

    >>> hadamard_matrix(2).round(3).tolist()
    [[0.7070000171661377, 0.7070000171661377], [0.7070000171661377, -0.7070000171661377]]
    """
    return _sylvester(check_integer("size", size, 1))


@functools.cache
def _sylvester(size: int) -> npt.NDArray[np.float32]:
    order = size & -size
    matrix = np.ones((1, 1), np.float64)
    while matrix.shape[0] < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    result = np.kron(np.eye(size // order), matrix / math.sqrt(order)).astype(np.float32)
    result.flags.writeable = False  # all callers share it
    return result


@public
def hadamard_rotate(vectors: Float[Array, "... h"]) -> Float[Array, "... h"]:
    """Vectors times `hadamard_matrix` along the last axis, in float32 at highest precision."""
    matrix = jnp.asarray(hadamard_matrix(vectors.shape[-1]))
    return jnp.matmul(vectors.astype(jnp.float32), matrix, precision=lax.Precision.HIGHEST)


@public
def mean_key(
    key: Float[Array, "b s k h"], key_valid: Bool[Array, "b s"] | None = None
) -> Float[Array, "b k h"]:
    """The mean over valid tokens of each channel of each head, float32; 0 where none is valid."""
    key = key.astype(jnp.float32)
    if key_valid is not None:
        key = jnp.where(key_valid[:, :, None, None], key, 0.0)
    # In smaller units, in which the sum of up to 2^20 values of any size is finite.
    total = jnp.sum(key * SUM_UNIT, axis=1)
    return total / count_of(key, key_valid) * (1.0 / SUM_UNIT)


def count_of(
    tokens: Float[Array, "b s k h"], valid: Bool[Array, "b s"] | None
) -> Float[Array, "b 1 1"]:
    """Valid tokens of each batch row, at least 1, float32."""
    if valid is None:
        return jnp.full((tokens.shape[0], 1, 1), tokens.shape[1], jnp.float32)
    count = jnp.sum(valid, 1, dtype=jnp.int32)
    return jnp.maximum(count, 1).astype(jnp.float32)[:, None, None]


def power_of_two(exponent: Int[Array, "..."]) -> Float[Array, "..."]:
    """2 to an integer power from -126 to 127, exactly."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def power_of_two_at_least(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """The smallest power of two that is >= each (positive, normal) value, exactly.

    NaN and infinities pass through.
    """
    values = values.astype(jnp.float32)
    exponent = (lax.bitcast_convert_type(values, jnp.int32) + 0x007FFFFF) >> 23
    rounded = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return jnp.where(jnp.isfinite(values), rounded, values)


def round_to_bfloat16(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Values rounded to bfloat16's grid, kept in float32; finite ones stay finite.

    A cast back and forth would not do: XLA removes it where excess precision is allowed.
    """
    most = float(jnp.finfo(jnp.bfloat16).max)
    bounded = jnp.where(jnp.isfinite(values), jnp.clip(values, -most, most), values)
    return lax.reduce_precision(bounded, exponent_bits=8, mantissa_bits=7)
