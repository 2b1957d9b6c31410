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
_RESIDENT = 264
"""Programs above which each goes through more tiles: what the GPU holds at a time."""
_PARTS = 16
"""Parts of the tokens at most whose sums are merged."""
_AHEAD = 4
"""Parts of the sums that are read at a time."""
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


class Members(NamedTuple):
    """Sums over the tokens of each of up to 64 clusters, in parts of the tokens.

    Attributes:
      total: float32 [B, K, parts, 64, H].
      count: float32 [B, K, parts, 64], how many they are.
    """

    total: Float[Array, "b k p c h"]
    count: Float[Array, "b k p c"]


def _codes_body(tiles, program, *refs, k: int, columns: int, packed: bool, parts: int):
    (by_head,) = program
    if parts:
        centroids_ref, sums_ref, counts_ref, *refs = refs
    else:
        centroids_ref, *refs = refs
    scale_ref, shift_ref, code_ref, base_ref, *new_ref = refs
    # A tile of 64 rows takes half as long to fill.
    kind, held = ("half", CHUNK) if columns <= CHUNK else ("block", BLOCK)
    place = tiles.index(held, kind)
    bits_kept, zero = (7, 192.0) if packed else (23, 64.0)

    def rows_of(number):
        row = jnp.where(number < k, by_head * k + number, -1)
        if not parts:
            return tiles.rows(centroids_ref, row, kind)
        rows, count = _merged(tiles, sums_ref, counts_ref, by_head * parts, parts, number)
        rows = rows * tiles.over_tokens(1.0 / jnp.maximum(count, 1.0), kind)
        # An empty cluster takes its row; the sum of nothing is zero.
        rows = rows + tiles.rows(centroids_ref, jnp.where(count > 0, -1, row), kind)
        tiles.put_rows(new_ref[0], row, rows, kind)
        return rows

    few = rows_of(place) if columns <= held else None

    def over_tiles(count, body, start):
        """`body` of rows, float32 1 at those of centroids, their numbers, and a carry."""

        def step(tile, carry):
            number = tile * held + place
            rows = rows_of(number) if few is None else few
            return body(rows, jnp.where(number < k, 1.0, 0.0), number, carry)

        if few is not None:
            return step(0, start)
        return lax.fori_loop(0, pl.cdiv(count, held), step, start)

    def add(rows, there, number, total):
        del there, number
        return total + jnp.sum(rows, 0)

    zeros = tiles.zeros((tiles.size,), jnp.float32, kind)
    mean = over_tiles(k, add, zeros) * (1.0 / k)

    def spread(rows, there, number, carry):
        del number
        moved = rows - tiles.over_tokens(there, kind) * tiles.over_channels(mean, held, kind)
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
        code = rows * scale + tiles.over_channels(shift - zero, held, kind)
        code = jnp.round(code * _FINER)
        # A centroid that is not finite is at the mean.
        code = jnp.where(jnp.abs(code) < _FAR, jnp.minimum(jnp.maximum(code, -127.0), 127.0), 0.0)
        # The very large bases must stay what they are.
        code = code * tiles.over_tokens(there, kind)
        # _FINER·|x − c|² of token code 64 + x and c = code/_FINER, less _FINER·|x|².
        constant = jnp.sum(code * (code * (1 / _FINER) + 128.0), 1)
        base = jnp.round(constant).astype(jnp.int32) << _BITS
        base = jnp.where(number < k, base, 2**31 - _PHASE) + (number & (_PHASE - 1))
        to = jnp.where(number < columns, by_head * columns + number, -1)
        tiles.put_entries(base_ref, to, base, kind)
        tiles.put_token_codes(code_ref, to, MAGIC - code, kind)
        return carry

    over_tiles(columns, encode, jnp.int32(0))


def _merged(tiles, sums_ref, counts_ref, first, parts: int, number):
    """Sums and numbers of the tokens of clusters, float32 [64, H] and [64], of all parts."""

    def add(group, carry):
        rows, count = carry
        # Several parts are on their way at a time; more would not fit into the registers.
        for part in (group * _AHEAD + i for i in range(_AHEAD)):
            at = jnp.where(part < parts, (first + part) * CHUNK + number, -1)
            count = count + tiles.entries(counts_ref, at, "half")
            rows = rows + tiles.rows(sums_ref, at, "half")
        return rows, count

    rows = tiles.zeros((CHUNK, tiles.size), jnp.float32, "half")
    count = tiles.full(CHUNK, jnp.float32(0), "half")
    return lax.fori_loop(0, pl.cdiv(parts, _AHEAD), add, (rows, count))


def _rounded(values, bits: int):
    """Float32 to `bits` after the leading one, to the nearest, ties up."""
    if bits == 23:
        return values
    some = lax.bitcast_convert_type(values, jnp.int32)
    cut = 23 - bits
    some = ((some + (1 << (cut - 1))) >> cut) << cut
    return lax.bitcast_convert_type(some, jnp.float32)


def codes_of(
    centroids: Float[Array, "b k c h"],
    dtype: jnp.dtype,
    members: Members | None = None,
    *,
    interpret: bool = False,
) -> tuple[Codes, Float[Array, "b k c h"]]:
    """Codes of the centroids and how tokens of a dtype get theirs; and the centroids.

    Args:
      members: of the clusters, whose means are the centroids; an empty one takes that given.
    """
    batch, heads, k, size = centroids.shape
    columns = pl.cdiv(k, CHUNK) * CHUNK
    columns = columns if columns <= _PHASE else pl.cdiv(k, _PHASE) * _PHASE
    packed = dtype == jnp.bfloat16
    channels = jax.ShapeDtypeStruct((batch * heads, size), jnp.float32)
    arguments, parts, new = [centroids.reshape(-1, size)], 0, []
    if members is not None:
        parts = members.total.shape[2]
        arguments += [members.total.reshape(-1, size), members.count.reshape(-1)]
        new.append(jax.ShapeDtypeStruct((batch * heads * k, size), jnp.float32))
    role = Role(
        functools.partial(_codes_body, k=k, columns=columns, packed=packed, parts=parts),
        (batch * heads,),
        arguments,
        [
            *(channels, channels),
            jax.ShapeDtypeStruct((batch * heads * columns, size), jnp.int8),
            jax.ShapeDtypeStruct((batch * heads * columns,), jnp.int32),
            *new,
        ],
        size,
    )
    ((scale, shift, code, base, *found),) = launch([role], interpret=interpret)
    chunks = (batch * heads, columns // CHUNK, CHUNK)
    codes = Codes(scale, shift, code.reshape(*chunks, size), base.reshape(chunks))
    return codes, found[0].reshape(centroids.shape) if found else centroids


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


def label_role(
    values: Float[Array, "b s k h"],
    codes: Codes,
    k: int,
    valid: Bool[Array, "b s"] | None = None,
    *,
    stride: int = 1,
) -> Role:
    """Programs that label every `stride`-th token by codes of k centroids."""
    batch, length, heads, size = values.shape
    sampled = pl.cdiv(length, stride)
    share, segments = segments_of(sampled, batch * heads)
    width = width_of(k)
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
    return Role(
        body,
        (batch, heads, segments),
        (values.reshape(-1, size), *codes, *masks),
        [entries, entries, counts],
        size,
    )


def labels_of(values: Float[Array, "b s k h"], found: list[Array], k: int) -> Labels:
    """The results of `label_role`."""
    label, rank, counts = found
    lead = (values.shape[0], values.shape[2])
    counts = counts.reshape(*lead, -1, width_of(k))
    return Labels(label.reshape(*lead, -1), rank.reshape(*lead, -1), counts)


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
    k = centroids.shape[2]
    codes, _ = codes_of(centroids, values.dtype, interpret=interpret)
    role = label_role(values, codes, k, valid, stride=stride)
    (found,) = launch([role], interpret=interpret)
    return labels_of(values, found, k)


# --- a few clusters


def _members_body(tiles, program, *refs, shape, k: int, stride: int, share: int):
    values_ref, scale_ref, shift_ref, centroids_ref, base_ref, *masks, total_ref, count_ref = refs
    (length, heads, sampled, parts), (batch, head, part) = shape, program
    by_head = batch * heads + head
    place, row = tiles.index(BLOCK, "rows"), tiles.index(CHUNK, "rows")

    def add(memory, kept, index, carry):
        token = (part * share + index) * BLOCK + place
        inside = token < sampled
        source = batch * length + token * stride
        valid = inside
        for valid_ref in masks:
            valid = tiles.entries(valid_ref, jnp.where(inside, source, -1), "rows") != 0
        at = jnp.where(valid, source * heads + head, -1)
        tiles.hold_members(kept, tiles.rows(values_ref, at, "rows"))
        codes = tiles.token_codes(values_ref, at, scale_ref, shift_ref, by_head)
        nearest = jnp.min(tiles.distances(codes, memory, 0, 2 << _BITS), 1)
        label = jnp.minimum(nearest & (_PHASE - 1), k - 1)
        member = tiles.membership(jnp.where(valid, label, CHUNK), memory)
        total, count = carry
        return tiles.add_members(total, member, kept), count + jnp.sum(member, 1)

    def run(memory, kept):
        tiles.load_centroids(memory, centroids_ref, base_ref, by_head, 0)
        nothing = tiles.zeros((CHUNK, tiles.size), jnp.float32, "rows")
        start = (nothing, tiles.full(CHUNK, jnp.float32(0), "rows"))
        add_tile = functools.partial(add, memory, kept)
        total, count = lax.fori_loop(0, share, add_tile, start)
        to = (by_head * parts + part) * CHUNK + row
        tiles.put_sums(total_ref, to, total)
        tiles.put_entries(count_ref, to, count, "rows")

    tiles.with_centroids(
        CHUNK,
        BLOCK,
        lambda memory: tiles.with_members(values_ref.dtype, lambda kept: run(memory, kept)),
    )


def sum_members(
    values: Float[Array, "b s k h"],
    codes: Codes,
    k: int,
    valid: Bool[Array, "b s"] | None = None,
    *,
    stride: int = 1,
    interpret: bool = False,
) -> Members:
    """Sums over the tokens of each of up to 64 clusters, without labels: a Lloyd step's half.

    A product on the tensor core, of 0 and 1 with 16-bit values, exact but for the order of sums. A
    value that is not finite counts as zero.
    """
    batch, length, heads, size = values.shape
    sampled = pl.cdiv(length, stride)
    tiles = pl.cdiv(sampled, BLOCK)
    share = pl.cdiv(tiles, min(_PARTS, max(1, _RESIDENT // (batch * heads))))
    parts = pl.cdiv(tiles, share)
    masks = () if valid is None else (valid.astype(jnp.int32).reshape(-1),)
    shape = (length, heads, sampled, parts)
    lead = batch * heads * parts * CHUNK
    role = Role(
        functools.partial(_members_body, shape=shape, k=k, stride=stride, share=share),
        (batch, heads, parts),
        (values.reshape(-1, size), *codes, *masks),
        [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((lead, size), (lead,))],
        size,
    )
    ((total, count),) = launch([role], interpret=interpret)
    shape = (batch, heads, parts, CHUNK)
    return Members(total.reshape(*shape, size), count.reshape(shape))
