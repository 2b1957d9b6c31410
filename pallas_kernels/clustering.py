"""k-means of the values of each head and the sort by cluster, on NVIDIA GPUs with INT8 products.

A Lloyd step reads the values, or one token in a few of them, twice: once to find the nearest
centroids, whose distances never leave the registers, and once, sorted by cluster, to sum each
cluster's members. The sort is a counting sort: the rank of each token among those of its label in a
tile of 128, sums of the tiles' counts, and one kernel that writes the order. Nothing depends on the
order in which programs run.

Distances are between codes of 7 and 8 bits: their products cost half of those of 16 bits, and the
order keeps as much of the energy (`docs/preprocessing.md`). Centroids are float32 means of the
values.
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
"""Tokens that a program labels or ranks."""
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


def unsupported(batch: int, length: int, heads: int, clusters: int) -> str | None:
    """Why these kernels cannot cluster B x S x K tokens, or `None`. Does not look at the device."""
    if clusters > MAX_CLUSTERS:
        return f"needs at most {MAX_CLUSTERS} clusters, got {clusters}"
    tiles, width = pl.cdiv(length, _TILE), pl.cdiv(clusters + 1, _CHUNK) * _CHUNK
    if batch * heads * tiles * width >= 2**31:
        return "needs fewer than 2^31 counts of labels in tiles of 128 tokens"
    return None


class Labels(NamedTuple):
    """The nearest centroid of the tokens looked at, and what a counting sort by it needs.

    Attributes:
      label: int32 [B, K, n]; k for an invalid token.
      rank: int32 [B, K, n], tokens before it in its tile of 128 with the same label.
      counts: int32 [B, K, tiles, W], tokens of each label in each tile, W > k.
    """

    label: Int[Array, "b k s"]
    rank: Int[Array, "b k s"]
    counts: Int[Array, "b k t w"]


class _Codes(NamedTuple):
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


def _codes(centroids: Float[Array, "b k c h"], dtype: jnp.dtype) -> _Codes:
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
    column = jnp.arange(width)
    base = jnp.pad(jnp.round(constant).astype(jnp.int32), ((0, 0), (0, 0), (0, width - k)))
    base = jnp.where(column < k, base << bits, 2**31 - 1024) + (column // 8 * 2 + column % 2)
    code = jnp.pad(-code.astype(jnp.int8), ((0, 0), (0, 0), (0, width - k), (0, 0)))
    scale = jnp.broadcast_to(scale, shift.shape)
    return _Codes(scale[:, :, 0].astype(dtype), shift[:, :, 0].astype(dtype), code, base, bits)


def _token_codes(rows, scale, shift, interpret: bool):
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


def _label_body(
    values_ref, scale_ref, shift_ref, centroids_ref, base_ref, *refs, static: "_Static", interpret
):
    valid_ref, label_ref = (refs[0] if static.masked else None), refs[-1]
    tile, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    sampled = tile * _TILE + jnp.arange(_TILE)
    row = sampled * static.stride
    inside = row < values_ref.shape[1]
    valid = inside
    if valid_ref is not None:
        valid = inside & (plt.load(valid_ref.at[batch, row], mask=inside, other=0) != 0)
    rows = plt.load(rows_of(values_ref, batch, row, head), mask=valid[:, None], other=0.0)
    scale, shift = (plt.load(ref.at[batch, head, :]) for ref in (scale_ref, shift_ref))
    codes = _token_codes(rows, scale, shift, interpret)
    chunks = base_ref.shape[2] // _CHUNK
    column, channel = jnp.arange(_CHUNK), jnp.arange(values_ref.shape[3])[None, :]

    def nearer(chunk, best):
        some = chunk * _CHUNK + column
        centroids = plt.load(centroids_ref.at[batch, head, some[:, None], channel])
        inner = jnp.dot(codes, centroids.T, preferred_element_type=jnp.int32)
        base = plt.load(base_ref.at[batch, head, some])[None, :]
        distance = (inner * (2 << static.bits) + base).reshape(_TILE, _CHUNK // 8, 4, 2)
        return jnp.minimum(best, jnp.min(jnp.min(distance, 3), 1))

    best = jnp.full((_TILE, 4), 2**31 - 1, jnp.int32)
    best = lax.fori_loop(0, chunks, nearer, best)
    least = jnp.min(best, 1)
    place = best & ((1 << static.bits) - 1)
    candidate = (place >> 1) * 8 + (place & 1) + 2 * jnp.arange(4)[None, :]
    candidate = jnp.where(best == least[:, None], candidate, _NONE)
    label = jnp.where(valid, jnp.minimum(jnp.min(candidate, 1), static.k - 1), static.k)
    plt.store(label_ref.at[batch, head, sampled], label, mask=inside)


class _Static(NamedTuple):
    """What a labelling kernel is made for."""

    k: int
    bits: int
    stride: int
    masked: bool


def _rank_body(label_ref, rank_ref, counts_ref, *, interpret: bool):
    tile, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    width = counts_ref.shape[3]
    column = jnp.arange(pl.next_power_of_2(width))
    zeros = jnp.zeros(column.shape, jnp.int32)
    none = jnp.where(column < width, column, width)
    plt.store(counts_ref.at[batch, head, tile, none], zeros, mask=column < width)
    row = tile * _TILE + jnp.arange(_TILE)
    inside = row < label_ref.shape[2]
    label = plt.load(label_ref.at[batch, head, row], mask=inside, other=_NONE)
    # One bit for each token: those of the same label, and of these the ones before.
    place = jnp.arange(_TILE)
    same = jnp.where(label[:, None] == label[None, :], 1 << (place[:, None] & 31), 0)
    same = jnp.sum(same.reshape(_TILE // 32, 32, _TILE), 1)
    until = place[None, :] - 32 * jnp.arange(_TILE // 32)[:, None]
    before = jnp.where(until <= 0, 0, jnp.where(until >= 32, -1, (1 << (until & 31)) - 1))
    total = jnp.sum(lax.population_count(same), 0)
    rank = jnp.sum(lax.population_count(same & before), 0)
    plt.store(rank_ref.at[batch, head, row], rank, mask=inside)
    if not interpret:  # the interpreter stores one after the other
        plt.debug_barrier()
    # The last token of a label in the tile knows how many there are.
    last = inside & (rank == total - 1)
    plt.store(counts_ref.at[batch, head, tile, jnp.where(last, label, width)], total, mask=last)


def nearest(
    values: Float[Array, "b s k h"],
    centroids: Float[Array, "b k c h"],
    valid: Bool[Array, "b s"] | None = None,
    *,
    stride: int = 1,
    interpret: bool = False,
) -> Labels:
    """The centroid of least squared L2 distance for every `stride`-th token.

    The distance is between values and centroids quantised to 7 and 8 bits: of centroids that are
    about as near, either may be taken.
    """
    batch, length, heads, _ = values.shape
    k = centroids.shape[2]
    reason = unsupported(batch, length, heads, k)
    if reason is not None:
        raise ValueError(f"centroids: {reason}")
    width = -(-(k + 1) // _CHUNK) * _CHUNK
    length = pl.cdiv(length, stride)
    tiles = pl.cdiv(length, _TILE)
    codes = _codes(centroids, values.dtype)
    masks = () if valid is None else (valid.astype(jnp.int8),)
    row = jax.ShapeDtypeStruct((batch, heads, length), jnp.int32)
    counts = jax.ShapeDtypeStruct((batch, heads, tiles, width), jnp.int32)
    static = _Static(k, codes.bits, stride, valid is not None)
    (label,) = launch(
        functools.partial(_label_body, static=static, interpret=interpret),
        (tiles, heads, batch),
        [row],
        (values, *codes[:4], *masks),
        stages=3,
        interpret=interpret,
    )
    rank, counts = launch(
        functools.partial(_rank_body, interpret=interpret),
        (tiles, heads, batch),
        [row, counts],
        (label,),
        interpret=interpret,
    )
    return Labels(label, rank, counts)


class Offsets(NamedTuple):
    """Where sorted tokens go.

    Attributes:
      before: int32 [B, K, tiles, W], tokens of a label in the tiles before.
      first: int32 [B, K, W], position of the first token of a label.
      count: int32 [B, K, W], tokens of a label.
    """

    before: Int[Array, "b k t w"]
    first: Int[Array, "b k w"]
    count: Int[Array, "b k w"]


def _before_body(counts_ref, before_ref, count_ref):
    column = pl.program_id(0) * _CHUNK + jnp.arange(_CHUNK)
    head, batch = pl.program_id(1), pl.program_id(2)
    tiles = counts_ref.shape[2]

    def add(some, total):
        tile = some * _CHUNK + jnp.arange(_CHUNK)
        inside = jnp.broadcast_to(tile[:, None] < tiles, (_CHUNK, _CHUNK))
        tile = jnp.minimum(tile, tiles - 1)[:, None]
        counts = counts_ref.at[batch, head, tile, column[None, :]]
        counts = plt.load(counts, mask=inside, other=0)
        until = total[None, :] + jnp.cumsum(counts, 0)
        tile = jnp.where(inside, tile, tiles)
        plt.store(before_ref.at[batch, head, tile, column[None, :]], until - counts, mask=inside)
        return total + jnp.sum(counts, 0)

    total = lax.fori_loop(0, pl.cdiv(tiles, _CHUNK), add, jnp.zeros(_CHUNK, jnp.int32))
    plt.store(count_ref.at[batch, head, column], total)


def offsets(
    labels: Labels, places: Int[Array, "b k c"] | None = None, *, interpret: bool = False
) -> Offsets:
    """Positions in the stable order by label, or by the label's place; label k comes last."""
    counts = labels.counts
    batch, heads, _, width = counts.shape
    before, count = launch(
        _before_body,
        (width // _CHUNK, heads, batch),
        [
            jax.ShapeDtypeStruct(counts.shape, jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, width), jnp.int32),
        ],
        (counts,),
        interpret=interpret,
    )
    if places is None:
        first = jnp.cumsum(count, -1) - count
    else:
        k = places.shape[-1]
        rest = jnp.broadcast_to(jnp.arange(k, width), (*places.shape[:2], width - k))
        places = jnp.concatenate([places, rest], -1)
        smaller = places[..., None, :] < places[..., :, None]
        first = jnp.sum(jnp.where(smaller, count[..., None, :], 0), -1)
    return Offsets(before, first, count)


def _order_body(label_ref, rank_ref, before_ref, first_ref, order_ref):
    tile, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row = tile * _TILE + jnp.arange(_TILE)
    inside = row < label_ref.shape[2]
    label = plt.load(label_ref.at[batch, head, row], mask=inside, other=0)
    rank = plt.load(rank_ref.at[batch, head, row], mask=inside, other=0)
    before = plt.load(before_ref.at[batch, head, tile, label])
    first = plt.load(first_ref.at[batch, head, label])
    position = jnp.where(inside, first + before + rank, label_ref.shape[2])
    plt.store(order_ref.at[batch, head, position], row, mask=inside)


def order_by(labels: Labels, where: Offsets, *, interpret: bool = False) -> Int[Array, "b k s"]:
    """The stable permutation that sorts tokens by label: position -> token."""
    batch, heads, length = labels.label.shape
    (order,) = launch(
        _order_body,
        (pl.cdiv(length, _TILE), heads, batch),
        [jax.ShapeDtypeStruct((batch, heads, length), jnp.int32)],
        (labels.label, labels.rank, where.before, where.first),
        interpret=interpret,
    )
    return order


def _update_body(values_ref, order_ref, first_ref, count_ref, centroids_ref, new_ref, *, stride):
    cluster, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    length, size = order_ref.shape[2], values_ref.shape[3]
    first = plt.load(first_ref.at[batch, head, cluster])
    count = plt.load(count_ref.at[batch, head, cluster])

    def add(chunk, total):
        place = chunk * _TILE + jnp.arange(_TILE)
        inside = place < count
        row = plt.load(
            order_ref.at[batch, head, jnp.minimum(first + place, length - 1)], mask=inside, other=0
        )
        rows = rows_of(values_ref, batch, row * stride, head)
        rows = plt.load(rows, mask=inside[:, None], other=0.0)
        return total + jnp.sum(rows.astype(jnp.float32), 0)

    total = lax.fori_loop(0, (count + (_TILE - 1)) // _TILE, add, jnp.zeros(size, jnp.float32))
    old = plt.load(centroids_ref.at[batch, head, cluster, :])
    mean = total / jnp.maximum(count, 1).astype(jnp.float32)
    plt.store(new_ref.at[batch, head, cluster, :], jnp.where(count > 0, mean, old))


def cluster_means(
    values: Float[Array, "b s k h"],
    order: Int[Array, "b k s"],
    where: Offsets,
    centroids: Float[Array, "b k c h"],
    *,
    stride: int = 1,
    interpret: bool = False,
) -> Float[Array, "b k c h"]:
    """The float32 mean of each cluster's tokens; an empty one keeps its centroid.

    `order` counts in tokens looked at, one in `stride`.
    """
    batch, heads, k, _ = centroids.shape
    (new,) = launch(
        functools.partial(_update_body, stride=stride),
        (k, heads, batch),
        [jax.ShapeDtypeStruct(centroids.shape, jnp.float32)],
        (values, order, where.first, where.count, centroids),
        interpret=interpret,
    )
    return new


def _ordered(values):
    """Floats as integers of the same order, whose minimum takes fewer instructions."""
    bits = lax.bitcast_convert_type(values + 0.0, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _chain_body(distance_ref, start_ref, places_ref, *, k: int, width: int):
    head = pl.program_id(0)
    column = jnp.arange(width)
    current = plt.load(start_ref.at[head])

    def visit(place, carry):
        left, current = carry
        plt.store(places_ref.at[head, current], place)
        left = jnp.where(column == current, _FAR, left)
        row = plt.load(distance_ref.at[head, current, column], mask=column < k, other=_FAR)
        # The distance to a centroid that is not finite is less than to one that has its place.
        row = jnp.where(row < 0.5 * _FAR, row, 0.5 * _FAR)
        distance = _ordered(jnp.where(left > 0, _FAR, row))
        least = jnp.min(distance, 0)
        nearest_one = jnp.min(jnp.where(distance <= least, column, _NONE), 0)
        return left, jnp.minimum(nearest_one, k - 1)

    start = jnp.where(column < k, 0.0, _FAR)
    lax.fori_loop(0, k, visit, (start, current))


def chain(centroids: Float[Array, "b k c h"], *, interpret: bool = False) -> Int[Array, "b k c"]:
    """A place for each cluster along a greedy chain: always on to the nearest one that is left.

    It starts at the centroid farthest from their mean.
    """
    batch, heads, k, size = centroids.shape
    rows = centroids.reshape(-1, k, size)
    inner = jnp.einsum("bih,bjh->bij", rows, rows, precision=lax.Precision.HIGHEST)
    square = jnp.diagonal(inner, axis1=1, axis2=2)
    distance = square[:, :, None] - 2.0 * inner + square[:, None]
    start = jnp.argmax(jnp.sum((rows - jnp.mean(rows, 1, keepdims=True)) ** 2, -1), -1)
    (places,) = launch(
        functools.partial(_chain_body, k=k, width=pl.next_power_of_2(k)),
        (batch * heads,),
        [jax.ShapeDtypeStruct((batch * heads, k), jnp.int32)],
        (distance, start.astype(jnp.int32)),
        warps=1,
        interpret=interpret,
    )
    return places.reshape(batch, heads, k)


def kmeans(
    values: Float[Array, "b s k h"],
    centroids: Float[Array, "b k c h"],
    steps: int,
    valid: Bool[Array, "b s"] | None = None,
    *,
    stride: int = 1,
    interpret: bool = False,
) -> tuple[Labels, Float[Array, "b k c h"]]:
    """`steps` Lloyd steps from the given centroids: labels by the last centroids, and those.

    A Lloyd step looks at one token in `stride`; the labels are of all tokens.
    """
    for _ in range(steps):
        labels = nearest(values, centroids, valid, stride=stride, interpret=interpret)
        where = offsets(labels, interpret=interpret)
        order = order_by(labels, where, interpret=interpret)
        centroids = cluster_means(
            values, order, where, centroids, stride=stride, interpret=interpret
        )
    return nearest(values, centroids, valid, interpret=interpret), centroids


def cluster_order(
    values: Float[Array, "b s k h"],
    centroids: Float[Array, "b k c h"],
    steps: int,
    valid: Bool[Array, "b s"] | None = None,
    *,
    stride: int = 1,
    interpret: bool = False,
) -> tuple[Int[Array, "b k s"], Float[Array, "b k c h"]]:
    """k-means from the given centroids, and the order of tokens by cluster along the chain."""
    labels, centroids = kmeans(values, centroids, steps, valid, stride=stride, interpret=interpret)
    where = offsets(labels, chain(centroids, interpret=interpret), interpret=interpret)
    return order_by(labels, where, interpret=interpret), centroids
