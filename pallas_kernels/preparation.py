"""Rotation, centring, sorting and 8-bit quantisation of queries, keys and values in few passes.

Kernels for any NVIDIA GPU with FP8 conversions (compute capability 8.9 and up), written for
Pallas's Triton backend: they wait for memory, and this backend reads rows through an index. They
produce the arrays of the prepared layout (`layout.Prepared8`). Memory traffic in passes over an
array of tokens: queries one read, keys one read (and one for their mean), values two.

Each program looks at one head and 128 rows or a step of 256 keys. The rotation is a product with
the Hadamard matrix of +1 and -1 on the tensor core, whose products are exact; its factor is applied
in float32.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float8e4m3fn, Int, Shaped

from ._launch import launch, rows_of
from ._numbers import (
    as_float,
    from_ordered_bits,
    group_scale,
    int8_codes,
    is_finite,
    largest_magnitude,
    magnitude_bits,
    norm,
    ordered_bits,
    power_of_two_at_least,
    round_to_bfloat16,
    round_up_11_bits,
)
from ._rotation import hadamard_signs, rotated, signs_dtype
from ._slots import codes_of, tokens_of_block
from .layout import (
    BLOCK,
    COUNT_ROWS,
    E4M3,
    E4M3_NORM,
    LARGEST_SQUARED,
    LARGEST_UNIT,
    STEP,
    SUM_UNIT,
    TINY,
)

HEAD_DIMS = (64, 128)
TOKEN_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_CHUNK = 16
"""Tiles of 128 tokens that one program of the statistics looks at."""


_QUERY_ROWS, _QUERY_TILES = 64, 16
"""Queries of a tile, and tiles that a program goes through, one on its way while one is used."""
_KEY_STEPS = 4
"""Steps of keys that a program goes through."""
_STAGES = 3


def unsupported(head_dim: int, *token_arrays: jax.ShapeDtypeStruct | Array) -> str | None:
    """Why these kernels cannot take a call, or `None`. Does not look at the device."""
    if head_dim not in HEAD_DIMS:
        return f"needs a head dim of 64 or 128, got {head_dim}"
    for array in token_arrays:
        if array.dtype not in [jnp.dtype(x) for x in TOKEN_DTYPES]:
            return f"needs float32, bfloat16 or float16 tokens, got {array.dtype}"
        # Between these sizes the backend would compute offsets of bytes in 32 bits.
        if any(2**31 <= size <= 2**32 for size in _sizes_of_codes(array.shape)):
            return "needs arrays of codes below 2 or above 4 GiB"
    return None


def _sizes_of_codes(shape: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of the codes of tokens [B, S, K, H] if they are keys, and if they are values."""
    batch, length, heads, head_dim = shape
    stored = batch * heads * pl.cdiv(length, STEP) * STEP
    return stored * head_dim, stored * (head_dim + COUNT_ROWS)


def _optional(refs, present: bool):
    refs = list(refs)
    return (refs.pop(0) if present else None), refs


# --- statistics over all tokens


_STATISTICS = {"sum": 0.0, "squares": 0.0, "high": -(2**31), "low": 2**31 - 1}
"""What there is to know about a channel, and where it starts."""


def _statistics_body(tokens_ref, *refs, wanted: tuple[str, ...], masked: bool, length: int):
    valid_ref, out_refs = _optional(refs, masked)
    head, chunk, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    size = tokens_ref.shape[-1]

    def add(tile, carry):
        row = (chunk * _CHUNK + tile) * BLOCK + jnp.arange(BLOCK)
        inside = row < length
        if valid_ref is not None:
            flag = plt.load(valid_ref.at[batch, row], mask=inside, other=0)
            inside = inside & (flag != 0)
        rows = rows_of(tokens_ref, batch, row, head)
        rows = plt.load(rows, mask=inside[:, None], other=0.0).astype(jnp.float32)
        return tuple(
            _with_rows(name, so_far, rows, inside[:, None])
            for name, so_far in zip(wanted, carry, strict=True)
        )

    start = tuple(jnp.full(size, _STATISTICS[name], _statistics_dtype(name)) for name in wanted)
    totals = lax.fori_loop(0, _CHUNK, add, start)
    for total, out_ref in zip(totals, out_refs, strict=True):
        plt.store(out_ref.at[batch, head, chunk, :], total)


def _statistics_dtype(name: str):
    return jnp.float32 if name in ("sum", "squares") else jnp.int32


def _with_rows(name: str, so_far, rows, inside):
    """A statistic with some more rows; those outside hold zeros."""
    if name == "sum":
        return so_far + jnp.sum(rows * SUM_UNIT, 0)
    if name == "squares":
        bounded = jnp.minimum(jnp.maximum(rows, -LARGEST_SQUARED), LARGEST_SQUARED)
        return so_far + jnp.sum(jnp.where(is_finite(rows), bounded * bounded, 0.0), 0)
    bits = jnp.where(inside, ordered_bits(rows), _STATISTICS[name])
    if name == "high":
        return jnp.maximum(so_far, jnp.max(bits, 0))
    return jnp.minimum(so_far, jnp.min(bits, 0))


def channel_statistics(
    tokens: Float[Array, "b s k h"],
    valid: Bool[Array, "b s"] | None = None,
    wanted: tuple[str, ...] = ("sum",),
    *,
    interpret: bool = False,
) -> list[Float[Array, "b k h"]]:
    """What is known about each channel over the valid tokens, float32, in one pass.

    Sums run in a fixed order: results do not change from run to run.

    Args:
      wanted: of `"sum"` (times `layout.SUM_UNIT`), `"squares"` (their sum; of magnitudes up to
        `layout.LARGEST_SQUARED`, of what is not finite 0), `"high"` and `"low"` (the largest and
        the least value; NaN where no token is valid). A NaN shows in `"high"` or `"low"`.
    """
    batch, length, heads, size = tokens.shape
    chunks = pl.cdiv(length, BLOCK * _CHUNK)
    masks = () if valid is None else (valid.astype(jnp.int8),)
    parts = launch(
        functools.partial(_statistics_body, wanted=wanted, masked=valid is not None, length=length),
        (heads, chunks, batch),
        [
            jax.ShapeDtypeStruct((batch, heads, chunks, size), _statistics_dtype(name))
            for name in wanted
        ],
        (tokens, *masks),
        interpret=interpret,
    )
    reduce = {"high": jnp.max, "low": jnp.min}
    return [
        from_ordered_bits(reduce[name](part, 2)) if name in reduce else jnp.sum(part, 2)
        for name, part in zip(wanted, parts, strict=True)
    ]


# --- the basis of queries and keys


def _basis(
    balance: Float[Array, "b k h"] | None, shape: tuple[int, int], size: int, dtype, rotate: bool
) -> tuple[Array, ...]:
    """What tokens are multiplied with: a matrix a head [B, K, H, H], its rows balanced; without
    rotation the balance itself [B, K, H], or nothing.
    """
    if not rotate:
        return () if balance is None else (balance,)
    matrix = hadamard_signs(size, signs_dtype(dtype))
    if balance is None:
        return (jnp.broadcast_to(matrix, (*shape, size, size)),)
    return (matrix * balance[..., None].astype(matrix.dtype),)


def _in_basis(tokens, basis):
    """Rows in the basis of their head, float32, before the rotation's factor."""
    if basis is None or basis.ndim == 2:
        return rotated(tokens, basis)
    return tokens.astype(jnp.float32) * basis[None, :]


# --- queries


def _query_body(query_ref, factor_ref, unit_ref, limit_ref, *refs, turned: bool, groups: int):
    basis_ref, outputs = _optional(refs, turned)
    codes_ref, scale_ref, excess_ref = outputs
    first, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    basis = None if basis_ref is None else plt.load(basis_ref.at[batch, head // groups])
    limit = plt.load(limit_ref.at[batch, head // groups])
    factor = factor_ref[0]
    if codes_ref.dtype != jnp.int8:
        factor = factor * plt.load(unit_ref.at[batch, head // groups])

    def quantise(tile, carry):
        row = (first * _QUERY_TILES + tile) * _QUERY_ROWS
        row = row + jnp.arange(_QUERY_ROWS)
        inside = row < query_ref.shape[1]
        rows = plt.load(rows_of(query_ref, batch, row, head), mask=inside[:, None], other=0.0)
        codes, scale = _query_codes(_in_basis(rows, basis), factor, codes_ref.dtype)
        within = jnp.where(is_finite(scale), jnp.minimum(scale, limit), jnp.nan)
        plt.store(codes_of(codes_ref, batch, head, row), codes, mask=inside[:, None])
        plt.store(scale_ref.at[batch, head, row], within, mask=inside)
        plt.store(excess_ref.at[batch, head, row], scale / within, mask=inside)
        return carry

    lax.fori_loop(0, _QUERY_TILES, quantise, 0)


def _query_codes(rows, factor, code_dtype):
    """Codes of rows times a factor of either sign, and the positive scale of each row."""
    size = jnp.abs(factor)
    if code_dtype == jnp.int8:
        scale = group_scale(largest_magnitude(rows, 1) * size, 127.0)
        return int8_codes(rows * (factor / scale)[:, None]), scale
    length = norm(rows) * size
    # Codes of queries with next to no effect shrink instead of leaving float16.
    scale = jnp.maximum(length * (1 / E4M3_NORM), 2.0**-13)
    scale = jnp.where(length <= 0, LARGEST_UNIT, jnp.where(length == length, scale, length))
    scale = round_up_11_bits(scale)
    return (rows * (factor / scale)[:, None]).astype(E4M3), scale


def quantize_queries(
    query: Float[Array, "b t n h"],
    unit: Float[Array, "b k"],
    limit: Float[Array, "b k"],
    balance: Float[Array, "b k h"] | None = None,
    *,
    scale: Float[Array, ""] | float,
    rotate: bool,
    code_dtype,
    interpret: bool = False,
) -> tuple[Shaped[Array, "b n t h"], Float[Array, "b n t"], Float[Array, "b n t"]]:
    """Queries times `scale`, balanced, rotated, as codes with a scale per token.

    Args:
      unit: what E4M3 queries are multiplied with beforehand: the unit of the key scales.
      limit: the largest query scale.
      balance: powers of two that the channels are multiplied with, exact in the queries' dtype;
        `None`: 1.
      scale: of either sign.

    Returns:
      codes [B, N, T, H]; scales within the limit; what the limit took, as a factor.
    """
    batch, length, heads, size = query.shape
    factor = jnp.asarray(scale, jnp.float32) * (1 / math.sqrt(size) if rotate else 1.0)
    basis = _basis(balance, unit.shape, size, query.dtype, rotate)
    row = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    body = functools.partial(_query_body, turned=bool(basis), groups=heads // unit.shape[1])
    codes, scales, excess = launch(
        body,
        (pl.cdiv(length, _QUERY_ROWS * _QUERY_TILES), heads, batch),
        [jax.ShapeDtypeStruct((batch, heads, length, size), code_dtype), row, row],
        (query, factor.reshape(1), unit, limit, *basis),
        stages=_STAGES,
        interpret=interpret,
    )
    return codes, scales, excess


# --- keys


def _key_body(key_ref, count_ref, *refs, ordered: bool, centred: bool, turned: bool, rotate: bool):
    order_ref, refs = _optional(refs, ordered)
    mean_ref, refs = _optional(refs, centred)
    basis_ref, (codes_ref, scale_ref) = _optional(refs, turned)
    first, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    basis = None if basis_ref is None else plt.load(basis_ref.at[batch, head])
    size = key_ref.shape[3]
    count = plt.load(count_ref.at[batch])
    factor = 1 / math.sqrt(size) if rotate else 1.0
    slots = jnp.arange(BLOCK)

    def quantise(index, first_scale):
        step = first * _KEY_STEPS + (index >> 1)
        block = index & 1
        held = tokens_of_block(
            (order_ref, count_ref), batch, head, step, block, key_ref.shape[1], slots
        )
        rows = plt.load(rows_of(key_ref, batch, held.index, head))
        rows = _in_basis(rows, basis) * factor
        if mean_ref is not None:
            rows = rows - plt.load(mean_ref.at[batch, head, :])[None, :]
        if codes_ref.dtype == jnp.int8:
            amax = as_float(jnp.max(jnp.max(magnitude_bits(rows), 1), 0))
            scale = group_scale(amax, 127.0)
        else:
            amax = largest_magnitude(norm(rows), 0)
            scale = power_of_two_at_least(group_scale(amax, E4M3_NORM))
        live = step * STEP < count
        scale = jnp.where(live & ~(amax <= TINY), scale, 0.0)
        # A second block without a valid key holds codes of the step's first key.
        dead = (block == 1) & (step * STEP + BLOCK >= count)
        scale = jnp.where(dead, first_scale, scale)
        # Nothing of an unknown token may get into codes of nothing.
        inverse = 1.0 / jnp.where(scale == 0, 1.0, scale)
        scaled = jnp.where(scale == 0, 0.0, rows * inverse)
        codes = int8_codes(scaled) if codes_ref.dtype == jnp.int8 else scaled.astype(E4M3)
        slot = step * STEP + block * BLOCK + slots
        stored = step < scale_ref.shape[2] // 2
        plt.store(codes_of(codes_ref, batch, head, slot), codes, mask=stored)
        plt.store(scale_ref.at[batch, head, step * 2 + block], scale, mask=stored)
        return scale

    lax.fori_loop(0, 2 * _KEY_STEPS, quantise, jnp.float32(0))


def quantize_keys(
    key: Float[Array, "b s k h"],
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    mean: Float[Array, "b k h"] | None,
    balance: Float[Array, "b k h"] | None = None,
    *,
    rotate: bool,
    code_dtype,
    interpret: bool = False,
) -> tuple[Shaped[Array, "b k p h"], Float[Array, "b k j"]]:
    """Keys in their order, less the mean, balanced, rotated, as codes with a scale per block.

    Args:
      count: valid keys of each batch row, the first so many of the order.
      order: position -> token; `None`: as they are.
      mean: subtracted first; `None`: nothing.
      balance: powers of two that the channels are divided by, exact in the keys' dtype; `None`: 1.

    Returns:
      codes [B, K, P, H], P a multiple of 256; scales [B, K, P / 128].
    """
    batch, length, heads, size = key.shape
    steps = pl.cdiv(length, STEP)
    inverse = None if balance is None else 1.0 / balance
    if mean is not None and inverse is not None:
        mean = mean * inverse
    if mean is not None and rotate:
        signs = hadamard_signs(size, jnp.float32)
        mean = jnp.matmul(mean, signs, precision=lax.Precision.HIGHEST) / math.sqrt(size)
    basis = _basis(inverse, (batch, heads), size, key.dtype, rotate)
    optional = [x for x in (order, mean) if x is not None]
    codes, scales = launch(
        functools.partial(
            _key_body,
            ordered=order is not None,
            centred=mean is not None,
            turned=bool(basis),
            rotate=rotate,
        ),
        (pl.cdiv(steps, _KEY_STEPS), heads, batch),
        [
            jax.ShapeDtypeStruct((batch, heads, steps * STEP, size), code_dtype),
            jax.ShapeDtypeStruct((batch, heads, steps * 2), jnp.float32),
        ],
        (key, count, *optional, *basis),
        stages=_STAGES,
        interpret=interpret,
    )
    return codes, scales


# --- values


def _value_statistics_body(value_ref, count_ref, *refs, ordered: bool):
    order_ref, (mean_ref, largest_ref) = _optional(refs, ordered)
    block, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    slots = jnp.arange(BLOCK)
    held = tokens_of_block(
        (order_ref, count_ref), batch, head, block // 2, block % 2, value_ref.shape[1], slots
    )
    valid = held.valid[:, None]
    rows = plt.load(rows_of(value_ref, batch, held.index, head), mask=valid, other=0.0)
    rows = rows.astype(jnp.float32)
    inside = jnp.sum(held.valid.astype(jnp.float32), 0)
    mean = jnp.sum(rows * SUM_UNIT, 0) * (1.0 / SUM_UNIT / jnp.maximum(inside, 1.0))
    mean = round_to_bfloat16(mean)
    # Half of it, which is finite for all finite values.
    residual = jnp.where(valid, rows * 0.5 - (mean * 0.5)[None, :], 0.0)
    plt.store(mean_ref.at[batch, head, block, :], mean)
    plt.store(largest_ref.at[batch, head, block, :], largest_magnitude(residual, 0))


def value_statistics(
    value: Float[Array, "b s k h"],
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "b k j h"], Float[Array, "b k h"]]:
    """Mean of each 128-value block, and half of each channel's largest residual, both float32.

    The means are exact in bfloat16: what rounding cuts off is in the residuals.
    """
    batch, length, heads, size = value.shape
    blocks = pl.cdiv(length, STEP) * 2
    shape = jax.ShapeDtypeStruct((batch, heads, blocks, size), jnp.float32)
    means, largest = launch(
        functools.partial(_value_statistics_body, ordered=order is not None),
        (blocks, heads, batch),
        [shape, shape],
        (value, count, *(() if order is None else (order,))),
        interpret=interpret,
    )
    return means, largest_magnitude(largest, 2)


def _value_body(value_ref, count_ref, inverse_ref, *refs, ordered: bool):
    order_ref, (mean_ref, codes_ref) = _optional(refs, ordered)
    block, head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    size = value_ref.shape[3]
    # Tokens are read in the order in which a group of 16 is stored.
    place = jnp.arange(BLOCK)
    slots = (place & ~14) | ((place & 2) << 2) | ((place & 12) >> 1)
    held = tokens_of_block(
        (order_ref, count_ref), batch, head, block // 2, block % 2, value_ref.shape[1], slots
    )
    valid = held.valid[:, None]
    rows = plt.load(rows_of(value_ref, batch, held.index, head), mask=valid, other=0.0)
    scaled = rows.astype(jnp.float32) * plt.load(inverse_ref.at[batch, head, :])[None, :]
    own = block * (1 if mean_ref.shape[2] > 1 else 0)
    mean = plt.load(mean_ref.at[batch, head, own, :]).astype(jnp.float32)
    codes = jnp.where(valid, scaled - mean[None, :], 0.0).astype(E4M3)
    columns = block * BLOCK + place
    channel = jnp.arange(size)[:, None]
    plt.store(codes_ref.at[batch, head, channel, columns[None, :]], codes.T)
    row = jnp.arange(COUNT_ROWS)
    counts = held.valid[None, :] & ((row & 1) == (block & 1))[:, None]
    plt.store(
        codes_ref.at[batch, head, size + row[:, None], columns[None, :]],
        counts.astype(jnp.float32).astype(E4M3),
    )


def quantize_values(
    value: Float[Array, "b s k h"],
    count: Int[Array, " b"],
    order: Int[Array, "b k s"] | None,
    means: Float[Array, "b k j h"],
    scale: Float[Array, "b k h"],
    *,
    interpret: bool = False,
) -> Float8e4m3fn[Array, "b k h+8 p"]:
    """Values in their order, less a mean, as transposed codes over count rows.

    Args:
      means: of each block, or one of all values (J = 1), in units of `scale`, bfloat16 or float32.
      scale: of each channel, a power of two.
    """
    batch, length, heads, size = value.shape
    blocks = pl.cdiv(length, STEP) * 2
    ordered = () if order is None else (order,)
    (codes,) = launch(
        functools.partial(_value_body, ordered=order is not None),
        (blocks, heads, batch),
        [jax.ShapeDtypeStruct((batch, heads, size + COUNT_ROWS, blocks * BLOCK), E4M3)],
        (value, count, 1.0 / scale, *ordered, means),
        warps=2,
        interpret=interpret,
    )
    return codes
