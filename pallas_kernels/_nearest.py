"""The nearest centroid of each token, by products of 8-bit codes.

Distances never leave the registers. They are between codes of tokens (7 bits) and of centroids (8),
relative to the mean of a head's centroids: their products cost half of those of 16 bits, and an
order by them keeps as much of the energy (`docs/fidelity.md`).
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._launch import launch, rows_of
from ._numbers import int8_codes

_TILE = 128
"""Tokens that a program labels."""
_CHUNK = 64
"""Centroids whose distances exist at a time."""
MAX_CLUSTERS = 2048
"""Beside a distance of 23 bits there is room for 9 bits, which tell one column in four."""
_FINER = 3.5
"""Units of a centroid's code in one of a token's code."""
_FAR = 3.0e38
_TINY = 2.0**-100
"""Centroids that are not farther apart have codes of zero."""
_NONE = 2**30


class Codes(NamedTuple):
    """Tokens and centroids of a head as integers, between which distances are compared.

    The code of a token v is v·scale + shift, rounded and within 0…127; 64 stands for the mean of
    the centroids. `centroid` are codes of the centroids, negative and finer. Then the squared
    distance to a centroid c, times a number and less what is the same for all c, is twice the inner
    product of the two codes plus a constant of c. `base` is that constant, shifted to the left by
    `bits`, plus the place of c among the centroids of its column.

    Attributes:
      scale: [B, K, H], one number a head; the bfloat16 of bfloat16 values, otherwise float32.
      shift: [B, K, H], likewise.
      centroid: int8 [B, K, W, H].
      base: int32 [B, K, W], very large for columns that are no centroid.
      bits: of the places in a column.
    """

    scale: Array
    shift: Array
    centroid: Array
    base: Array
    bits: int


def codes_of(centroids: Float[Array, "b k c h"], dtype: jnp.dtype) -> Codes:
    """Codes of the centroids, and how tokens of a dtype get theirs."""
    k = centroids.shape[2]
    width = -(-k // _CHUNK) * _CHUNK
    bits = (width // 4 - 1).bit_length()
    packed = dtype == jnp.bfloat16
    dtype, bits_kept, zero = (jnp.bfloat16, 7, 192.0) if packed else (jnp.float32, 23, 64.0)
    mean = jnp.mean(centroids, 2, keepdims=True)
    moved = centroids - mean
    amax = jnp.max(jnp.abs(moved), (2, 3), keepdims=True)
    rms = jnp.sqrt(jnp.mean(moved**2, (2, 3), keepdims=True))
    # There are codes for tokens twice as far from the mean as the farthest centroid is, unless that
    # is an outlier, which must not take the codes from all others.
    most = jnp.minimum(amax, 8.0 * rms)
    most = jnp.where((most > _TINY) & (amax < _FAR), most, 1.0)
    round_as = functools.partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=bits_kept)
    scale = round_as(32.0 / most)
    shift = round_as(zero - mean * scale)
    # What shift and scale lost by rounding is lost here too, so that it does not matter.
    code = centroids * scale + (shift - zero)
    code = jnp.clip(jnp.round(code * _FINER), -127.0, 127.0)
    code = jnp.where(jnp.isnan(code), 0.0, code)
    # _FINER·|x − c|² of token code 64 + x and c = code/_FINER, less _FINER·|x|².
    constant = jnp.sum(code * (code * (1 / _FINER) + 128.0), -1)
    # Pairs of neighbours in turns over four columns, as tensor cores hand products to threads: a
    # thread then keeps the least distance of a column without asking another one.
    column = jnp.arange(width, dtype=jnp.int32)
    base = jnp.pad(jnp.round(constant).astype(jnp.int32), ((0, 0), (0, 0), (0, width - k)))
    base = jnp.where(column < k, base << bits, 2**31 - 1024) + (column // 8 * 2 + column % 2)
    code = jnp.pad(-code.astype(jnp.int8), ((0, 0), (0, 0), (0, width - k), (0, 0)))
    scale = jnp.broadcast_to(scale, shift.shape)
    return Codes(scale[:, :, 0].astype(dtype), shift[:, :, 0].astype(dtype), code, base, bits)


def token_codes(rows, scale, shift, interpret: bool):
    """Codes int8 of rows [n, H]."""
    if rows.dtype != jnp.bfloat16:
        codes = rows.astype(jnp.float32) * scale[None, :] + shift[None, :]
        return int8_codes(jnp.minimum(jnp.maximum(codes, 0.0), 127.0))
    if interpret:
        codes = rows.astype(jnp.float32) * scale.astype(jnp.float32)[None, :]
        codes = (codes + shift.astype(jnp.float32)[None, :]).astype(jnp.bfloat16)
        codes = jnp.minimum(jnp.maximum(codes.astype(jnp.float32), 128.0), 255.0)
        return int8_codes(codes - 128.0)
    scale = jnp.broadcast_to(scale[None, :], rows.shape)
    shift = jnp.broadcast_to(shift[None, :], rows.shape)
    (codes,) = plt.elementwise_inline_asm(
        _TOKEN_CODES,
        args=[rows, scale, shift],
        constraints="=r,r,r,r,r,r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(rows.shape, jnp.int8)],
    )
    return codes


_TOKEN_CODES = """{
.reg .b32 low, high, least, most;
mov.b32 least, 0x43004300;
mov.b32 most, 0x437F437F;
fma.rn.bf16x2 low, $1, $3, $5;
fma.rn.bf16x2 high, $2, $4, $6;
max.bf16x2 low, low, least;
max.bf16x2 high, high, least;
min.bf16x2 low, low, most;
min.bf16x2 high, high, most;
prmt.b32 $0, low, high, 0x6420;
}"""
"""Four codes: between 128 and 255, a bfloat16 is an integer, and its low byte that less 128."""


def _label_body(*refs, k: int, bits: int, stride: int, interpret: bool):
    values_ref, scale_ref, shift_ref, centroids_ref, base_ref, *masks, label_ref = refs
    tile, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    sampled = tile * _TILE + jnp.arange(_TILE)
    row = sampled * stride
    inside = row < values_ref.shape[1]
    valid = inside
    for valid_ref in masks:
        valid = inside & (plt.load(valid_ref.at[batch, row], mask=inside, other=0) != 0)
    rows = plt.load(rows_of(values_ref, batch, row, head), mask=valid[:, None], other=0.0)
    scale, shift = (plt.load(ref.at[batch, head, :]) for ref in (scale_ref, shift_ref))
    codes = token_codes(rows, scale, shift, interpret)
    chunks = base_ref.shape[2] // _CHUNK
    column, channel = jnp.arange(_CHUNK), jnp.arange(values_ref.shape[3])[None, :]

    def nearer(chunk, best):
        some = chunk * _CHUNK + column
        centroids = plt.load(centroids_ref.at[batch, head, some[:, None], channel])
        inner = jnp.dot(codes, centroids.T, preferred_element_type=jnp.int32)
        base = plt.load(base_ref.at[batch, head, some])[None, :]
        distance = (inner * (2 << bits) + base).reshape(_TILE, _CHUNK // 8, 4, 2)
        return jnp.minimum(best, jnp.min(jnp.min(distance, 3), 1))

    best = jnp.full((_TILE, 4), 2**31 - 1, jnp.int32)
    best = lax.fori_loop(0, chunks, nearer, best)
    least = jnp.min(best, 1)
    place = best & ((1 << bits) - 1)
    candidate = (place >> 1) * 8 + (place & 1) + 2 * jnp.arange(4)[None, :]
    candidate = jnp.where(best == least[:, None], candidate, _NONE)
    label = jnp.where(valid, jnp.minimum(jnp.min(candidate, 1), k - 1), k)
    plt.store(label_ref.at[batch, head, sampled], label, mask=inside)


def nearest_labels(
    values: Float[Array, "b s k h"],
    centroids: Float[Array, "b k c h"],
    valid: Bool[Array, "b s"] | None = None,
    *,
    stride: int = 1,
    interpret: bool = False,
) -> Int[Array, "b k n"]:
    """The centroid of least squared L2 distance for every `stride`-th token; k for an invalid one.

    Of centroids that are about as near, either may be taken.
    """
    batch, length, heads, _ = values.shape
    length = pl.cdiv(length, stride)
    codes = codes_of(centroids, values.dtype)
    masks = () if valid is None else (valid.astype(jnp.int8),)
    body = functools.partial(
        _label_body, k=centroids.shape[2], bits=codes.bits, stride=stride, interpret=interpret
    )
    (label,) = launch(
        body,
        (pl.cdiv(length, _TILE), heads, batch),
        [jax.ShapeDtypeStruct((batch, heads, length), jnp.int32)],
        (values, *codes[:4], *masks),
        stages=3,
        interpret=interpret,
    )
    return label
