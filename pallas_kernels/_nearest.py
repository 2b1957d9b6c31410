"""The nearest centroid of each token, by products of 8-bit codes, and its rank in the sort.

Distances never leave the registers. They are between codes of tokens (7 bits) and of centroids (8),
relative to the mean of a head's centroids: their products cost half of those of 16 bits, and an
order by them keeps as much of the energy (`docs/fidelity.md`).
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ._counting_sort import Labels, segments_of, width_of
from ._roles import Role, launch
from ._tiles import CHUNK, coded_channels
from .layout import BLOCK

_BITS = 9
"""Of the number of a centroid, beside a distance of 23 bits."""
_PHASE = 1 << _BITS
"""Centroids in shared memory at a time."""
MAX_CLUSTERS = 2048
_FINER = 3.5
"""Units of a centroid's code in one of a token's code."""
_FAR = 3.0e38
_TINY = 2.0**-100


class Codes(NamedTuple):
    """Tokens and centroids of a head as integers, between which distances are compared.

    The code of a token v is v·scale + shift, rounded and within 0…127; 64 stands for the mean of
    the centroids. `centroid` are codes of the centroids, negative and finer. Then the squared
    distance to a centroid c, times a number and less what is the same for all c, is twice the inner
    product of the two codes plus a constant of c. `base` is that constant, shifted to the left by
    9, plus c, modulo 512.

    Attributes:
      scale: [B, K, H], one number a head; the bfloat16 of bfloat16 values, otherwise float32.
      shift: [B, K, H], likewise.
      centroid: int8 [B, K, W, H].
      base: int32 [B, K, W], very large for columns that are no centroid.
    """

    scale: Array
    shift: Array
    centroid: Array
    base: Array


def codes_of(centroids: Float[Array, "b k c h"], dtype: jnp.dtype) -> Codes:
    """Codes of the centroids, and how tokens of a dtype get theirs."""
    k = centroids.shape[2]
    width = -(-k // CHUNK) * CHUNK
    width = width if width <= _PHASE else -(-k // _PHASE) * _PHASE
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
    column = jnp.arange(width)
    base = jnp.pad(jnp.round(constant).astype(jnp.int32), ((0, 0), (0, 0), (0, width - k)))
    base = jnp.where(column < k, base << _BITS, 2**31 - _PHASE) + column % _PHASE
    code = jnp.pad(-code.astype(jnp.int8), ((0, 0), (0, 0), (0, width - k), (0, 0)))
    scale = jnp.broadcast_to(scale, shift.shape)
    return Codes(scale[:, :, 0].astype(dtype), shift[:, :, 0].astype(dtype), code, base)


def _label_body(tiles, program, *refs, shape, k: int, stride: int, share: int):
    values_ref, scale_ref, shift_ref, centroids_ref, base_ref, *masks, label_ref = refs[:-2]
    rank_ref, counts_ref = refs[-2:]
    (length, heads, sampled, segments, width, held), (batch, head, segment) = shape, program
    chunks = held // CHUNK
    phases = pl.cdiv(base_ref.shape[1], chunks)
    by_head = batch * heads + head
    place, flat_place = tiles.index(BLOCK, "rows"), tiles.index(BLOCK, "flat")

    def nearest_of_phase(codes, memory, phase, best):
        found = tiles.full(BLOCK, jnp.int32(2**31 - 1), "rows")

        def nearer_of_chunk(chunk, found):
            distance = tiles.distances(codes, memory, chunk, 2 << _BITS)
            return jnp.minimum(found, jnp.min(distance, 1))

        found = lax.fori_loop(0, chunks, nearer_of_chunk, found)
        # The first of the nearest: a distance of a later phase has to be less.
        distance, label = found >> _BITS, (found & (_PHASE - 1)) + phase * _PHASE
        nearer = distance < best[0]
        return jnp.where(nearer, distance, best[0]), jnp.where(nearer, label, best[1])

    def label_tile(memory, index):
        token = (segment * share + index) * BLOCK + place
        inside = token < sampled
        row = batch * length + token * stride
        valid = inside
        for valid_ref in masks:
            valid = tiles.entries(valid_ref, jnp.where(inside, row, -1), "rows") != 0
        at = jnp.where(valid, row * heads + head, -1)
        codes = tiles.token_codes(values_ref, at, scale_ref, shift_ref, by_head)
        best = (
            tiles.full(BLOCK, jnp.int32(2**31 - 1), "rows"),
            tiles.full(BLOCK, jnp.int32(0), "rows"),
        )
        for phase in range(phases):
            if phases > 1:
                tiles.load_centroids(
                    memory, centroids_ref, base_ref, by_head, phase * (held // CHUNK)
                )
            best = nearest_of_phase(codes, memory, phase, best)
        label = jnp.where(valid, jnp.minimum(best[1], k - 1), k)
        # Tokens past the last one are counted as a label of their own.
        label = jnp.where(inside, label, k + 1)
        label = tiles.flat(label, memory)
        rank = tiles.ranks(label, memory)
        token = (segment * share + index) * BLOCK + flat_place
        to = jnp.where(token < sampled, by_head * sampled + token, -1)
        tiles.put_entries(label_ref, to, label, "flat")
        tiles.put_entries(rank_ref, to, rank, "flat")

    def run(memory):
        tiles.clear_counts(memory)
        if phases == 1:
            tiles.load_centroids(memory, centroids_ref, base_ref, by_head, 0)

        tiles.loop(share, functools.partial(label_tile, memory))
        to = (by_head * segments + segment) * width + tiles.index(width, "flat")
        tiles.put_entries(counts_ref, to, tiles.counts(memory), "flat")

    tiles.with_centroids(held, width, run)


def nearest_labels(
    values: Float[Array, "b s k h"],
    centroids: Float[Array, "b k c h"],
    valid: Bool[Array, "b s"] | None = None,
    *,
    stride: int = 1,
    interpret: bool = False,
) -> Labels:
    """The centroid of least squared L2 distance for every `stride`-th token; k for an invalid one.

    Of centroids that are about as near, either may be taken.
    """
    batch, length, heads, size = values.shape
    k = centroids.shape[2]
    sampled = pl.cdiv(length, stride)
    share, segments = segments_of(sampled, batch * heads)
    width = width_of(k)
    codes = codes_of(centroids, values.dtype)
    columns = codes.base.shape[2]
    chunks = columns // CHUNK
    masks = () if valid is None else (valid.astype(jnp.int32).reshape(-1),)
    body = functools.partial(
        _label_body,
        shape=(length, heads, sampled, segments, width, min(columns, _PHASE)),
        k=k,
        stride=stride,
        share=share,
    )
    entries = jax.ShapeDtypeStruct((batch * heads * sampled,), jnp.int32)
    counts = jax.ShapeDtypeStruct((batch * heads * segments * width,), jnp.int32)
    role = Role(
        body,
        (batch, heads, segments),
        (
            values.reshape(-1, size),
            codes.scale.reshape(-1, size),
            codes.shift.reshape(-1, size),
            codes.centroid[..., coded_channels(size)].reshape(-1, chunks, CHUNK, size),
            codes.base.reshape(-1, chunks, CHUNK),
            *masks,
        ),
        [entries, entries, counts],
        size,
    )
    ((label, rank, counts),) = launch([role], interpret=interpret)
    shape = (batch, heads, sampled)
    return Labels(
        label.reshape(shape), rank.reshape(shape), counts.reshape(batch, heads, segments, width)
    )
