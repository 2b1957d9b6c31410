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
from ._launch import Role, launch
from ._numbers import MAGIC
from ._tiles import CHUNK
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
      scale: float32 [B·K, H], one number a head; for bfloat16 values one of bfloat16.
      shift: float32 [B·K, H], likewise.
      centroid: int8 [B·K, chunks, 64, H], channels in the order of coded columns.
      base: int32 [B·K, chunks, 64], very large for columns that are no centroid.
    """

    scale: Array
    shift: Array
    centroid: Array
    base: Array


def _codes_body(tiles, program, centroids_ref, *refs, k: int, columns: int, packed: bool):
    scale_ref, shift_ref, code_ref, base_ref = refs
    (by_head,) = program
    place = tiles.index(BLOCK, "block")
    bits_kept, zero = (7, 192.0) if packed else (23, 64.0)

    def over_tiles(count, body, start):
        """`body` of rows, float32 1 at those of centroids, their numbers, and a carry."""

        def step(tile, carry):
            number = tile * BLOCK + place
            row = jnp.where(number < k, by_head * k + number, -1)
            rows = tiles.rows(centroids_ref, row, "block")
            return body(rows, jnp.where(number < k, 1.0, 0.0), number, carry)

        return lax.fori_loop(0, pl.cdiv(count, BLOCK), step, start)

    def add(rows, there, number, total):
        del there, number
        return total + jnp.sum(rows, 0)

    zeros = tiles.zeros((tiles.size,), jnp.float32, "block")
    mean = over_tiles(k, add, zeros) * (1.0 / k)

    def spread(rows, there, number, carry):
        del number
        moved = rows - tiles.over_tokens(there, "block") * tiles.over_channels(mean, BLOCK, "block")
        largest, squares = carry
        return jnp.maximum(largest, tiles.largest(moved, 0)), squares + jnp.sum(moved * moved, 0)

    largest, squares = over_tiles(k, spread, (zeros, zeros))
    amax = tiles.largest(largest, 0)
    rms = jnp.sqrt(jnp.sum(squares, 0) * (1.0 / (k * tiles.size)))
    # There are codes for tokens twice as far from the mean as the farthest centroid is, unless that
    # is an outlier, which must not take the codes from all others.
    most = jnp.minimum(amax, 8.0 * rms)
    most = jnp.where((most > _TINY) & (amax < _FAR), most, 1.0)
    scale = _rounded(32.0 / most, bits_kept)
    shift = _rounded(zero - mean * scale, bits_kept)
    tiles.put_channels(scale_ref, by_head, zeros + scale)
    tiles.put_channels(shift_ref, by_head, shift)

    def encode(rows, there, number, carry):
        # What shift and scale lost by rounding is lost here too, so that it does not matter.
        code = rows * scale + tiles.over_channels(shift - zero, BLOCK, "block")
        code = jnp.round(code * _FINER)
        # A centroid that is not finite is at the mean.
        code = jnp.where(jnp.abs(code) < _FAR, jnp.minimum(jnp.maximum(code, -127.0), 127.0), 0.0)
        # The very large bases must stay what they are.
        code = code * tiles.over_tokens(there, "block")
        # _FINER·|x − c|² of token code 64 + x and c = code/_FINER, less _FINER·|x|².
        constant = jnp.sum(code * (code * (1 / _FINER) + 128.0), 1)
        base = jnp.round(constant).astype(jnp.int32) << _BITS
        base = jnp.where(number < k, base, 2**31 - _PHASE) + (number & (_PHASE - 1))
        to = jnp.where(number < columns, by_head * columns + number, -1)
        tiles.put_entries(base_ref, to, base, "block")
        tiles.put_token_codes(code_ref, to, MAGIC - code)
        return carry

    over_tiles(columns, encode, jnp.int32(0))


def _rounded(values, bits: int):
    """Float32 to `bits` after the leading one, to the nearest, ties up."""
    if bits == 23:
        return values
    some = lax.bitcast_convert_type(values, jnp.int32)
    cut = 23 - bits
    some = ((some + (1 << (cut - 1))) >> cut) << cut
    return lax.bitcast_convert_type(some, jnp.float32)


def codes_of(
    centroids: Float[Array, "b k c h"], dtype: jnp.dtype, *, interpret: bool = False
) -> Codes:
    """Codes of the centroids, and how tokens of a dtype get theirs."""
    batch, heads, k, size = centroids.shape
    columns = pl.cdiv(k, CHUNK) * CHUNK
    columns = columns if columns <= _PHASE else pl.cdiv(k, _PHASE) * _PHASE
    packed = dtype == jnp.bfloat16
    channels = jax.ShapeDtypeStruct((batch * heads, size), jnp.float32)
    role = Role(
        functools.partial(_codes_body, k=k, columns=columns, packed=packed),
        (batch * heads,),
        (centroids.reshape(-1, size),),
        [
            *(channels, channels),
            jax.ShapeDtypeStruct((batch * heads * columns, size), jnp.int8),
            jax.ShapeDtypeStruct((batch * heads * columns,), jnp.int32),
        ],
        size,
    )
    ((scale, shift, code, base),) = launch([role], interpret=interpret)
    chunks = (batch * heads, columns // CHUNK, CHUNK)
    return Codes(scale, shift, code.reshape(*chunks, size), base.reshape(chunks))


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
    codes = codes_of(centroids, values.dtype, interpret=interpret)
    columns = codes.base.shape[1] * CHUNK
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
            *codes,
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
