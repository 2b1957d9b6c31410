"""Low-bit attention for MaxDiffusion's Wan, through its kernel registry.

    from vc_jax.models import maxdiffusion
    maxdiffusion.register("vc_fp8", "fp8")       # then run with attention=vc_fp8

The registry calls `kernel(query, key, value, context)`: self-attention gives [B, N, S, H] with
RoPE applied, cross-attention [B, S, N·H]; the result is [B, S, N·H]. The kernel applies the scale
and shards itself over `context["mesh"]`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.spmd import logical_to_mesh_axes
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from .attention import AttentionLike, attention_function, check_attention
from .common.checks import check_index, check_shape
from .common.promotion import own_promotion

Kernel = Callable[[Array, Array, Array, dict[str, Any]], Array]


def attention_kernel(
    attention: AttentionLike = "int8",
    *,
    cross_attention: AttentionLike = "bf16",
    min_key_length: int = 4096,
) -> Kernel:
    """A function for the registry.

    Args:
      attention: for self-attention: a preset's name, a `vc_jax.AttentionConfig`, or a callable
        like `jax.nn.dot_product_attention`.
      cross_attention: for cross-attention, and for fewer keys than `min_key_length` (MaxDiffusion
        applies its own `flash_min_seq_length` to its built-in kernels only).
      min_key_length: see `cross_attention`; 0 for none.

    Returns:
      The kernel. It raises `NotImplementedError` for causal attention, and `ValueError` for shapes
      that do not fit each other or the context's `heads` (and `dim_head`, if it has one). The
      batch and heads follow the mesh axes that the context's logical names map to; so do the query
      rows, with all keys on every device. An axis that does not divide batch or heads is left out.

    Raises:
      ValueError: an unknown preset or a negative length, by argument.
      TypeError: not an attention, or a length that is no integer, by argument.
    """
    check_attention(attention)
    check_attention(cross_attention, "cross_attention")
    check_index("min_key_length", min_key_length, None)

    @own_promotion
    def kernel(query: Array, key: Array, value: Array, context: dict[str, Any]) -> Array:
        if context.get("is_causal"):
            raise NotImplementedError("is_causal: video attention is not causal")
        _check_inputs(query, key, value, context)
        crossing = query.ndim == 3
        query, key, value = (_split_heads(x, context["heads"]) for x in (query, key, value))
        short = key.shape[1] < min_key_length
        chosen = cross_attention if crossing or short else attention
        attend = functools.partial(attention_function(chosen), scale=context.get("scale"))
        mask = context.get("attention_mask")
        if mask is not None:
            mask = mask.astype(bool)[:, None, None, :]
        mesh = context.get("mesh")
        if mesh is None or mesh.size == 1:
            out = attend(query, key, value, mask=mask)
        else:
            out = _sharded(attend, query, key, value, mask, mesh, context)
        out = out.reshape(*out.shape[:2], -1)
        name = context.get("residual_checkpoint_name")
        return out if name is None else checkpoint_name(out, name)

    return kernel


def register(name: str, attention: AttentionLike = "int8", **options: Any) -> None:
    """Registers `attention_kernel(attention, **options)`; select it with `attention=<name>`.

    Raises:
      ValueError: a name with "ring" or "ulysses" in it: MaxDiffusion changes its sharding rules
        for these. Also as `attention_kernel`.
      TypeError: as `attention_kernel`.
      ImportError: MaxDiffusion is not installed.
    """
    if "ring" in name or "ulysses" in name:
        raise ValueError(f"name: {name!r} contains 'ring' or 'ulysses'")
    kernel = attention_kernel(attention, **options)
    from maxdiffusion.models import attention_flax  # type: ignore[import-not-found]

    attention_flax.register_kernel(name)(kernel)


def _check_inputs(query: Array, key: Array, value: Array, context: dict[str, Any]) -> None:
    """Both layouts of the registry; the context's sizes have to be those of the arrays."""
    heads, size = context["heads"], context.get("dim_head")
    batch = query.shape[0] if query.ndim else None
    if query.ndim == 4:
        size = query.shape[3] if size is None else size
        split = {"batch": batch, "context['heads']": heads, "rows": None, "head_dim": size}
        check_shape("query", query, split)
        check_shape("key", key, split)
        check_shape("value", value, split | {"rows": key.shape[2]})
        rows = key.shape[2]
    else:
        check_shape("query", query, {"batch": batch, "rows": None, "heads · head_dim": None})
        width = query.shape[2] if size is None else heads * size
        if width % heads:
            raise ValueError(
                f"query: expected a width that is a multiple of context['heads'] = {heads}, "
                f"got {width}"
            )
        flat = {"batch": batch, "rows": None, "context['heads'] · head_dim": width}
        check_shape("query", query, flat)
        check_shape("key", key, flat)
        check_shape("value", value, flat | {"rows": key.shape[1]})
        rows = key.shape[1]
    mask = context.get("attention_mask")
    if mask is not None:
        shapes = [{"batch": size, "keys": rows} for size in (batch, 1)]
        check_shape("context['attention_mask']", mask, *shapes)


def _split_heads(x: Array, heads: int) -> Array:
    """Either layout of the registry to [B, S, N, H]."""
    if x.ndim == 4:
        return x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], heads, -1)


def _sharded(
    attend: Callable[..., Array],
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    mesh: Mesh,
    context: dict[str, Any],
) -> Array:
    # Logical names are (batch, heads, length, head_dim); an unknown one maps to None.
    axes = logical_to_mesh_axes(context["axis_names_q"]) or (None,) * 4
    batch = _dividing(axes[0], mesh, query.shape[0])
    heads = _dividing(axes[1], mesh, query.shape[2])
    rows = axes[2]
    length = query.shape[1]
    query = jnp.pad(query, ((0, 0), (0, -length % _size(rows, mesh)), (0, 0), (0, 0)))
    of_query, of_keys = (PartitionSpec(batch, r, heads, None) for r in (rows, None))
    operands, specs = [query, key, value], [of_query, of_keys, of_keys]
    if mask is not None:
        mask = jnp.broadcast_to(mask, (query.shape[0], *mask.shape[1:]))
        operands.append(mask)
        specs.append(PartitionSpec(batch, None, None, None))

    def local(query: Array, key: Array, value: Array, mask: Array | None = None) -> Array:
        return attend(query, key, value, mask=mask)

    out = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=of_query)(*operands)
    return out[:, :length]


def _size(axis: Any, mesh: Mesh) -> int:
    names = () if axis is None else (axis,) if isinstance(axis, str) else axis
    size = 1
    for name in names:
        size *= mesh.shape[name]
    return size


def _dividing(axis: Any, mesh: Mesh, length: int) -> Any:
    return axis if length % _size(axis, mesh) == 0 else None
