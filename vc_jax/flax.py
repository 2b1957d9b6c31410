"""Low-bit attention for Flax's attention layers.

`attention_fn("int8")` goes where `nnx.MultiHeadAttention` and Linen's
`nn.MultiHeadDotProductAttention` take their `attention_fn`. Importing `vc_jax` does not import
Flax, and this module does not need it either: it only speaks the layers' calling convention.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vc_jax._attention import dot_product_attention
from vc_jax._config import AttentionConfig, resolve_config
from vc_jax._implementations import check_implementation


@dataclasses.dataclass(frozen=True)
class FlaxAttention:
    """An attention function with Flax's calling convention; see `attention_fn`.

    Equal for equal settings, so a layer that holds one is not compiled anew for another.

    Attributes:
      config: the numerics.
      scale: of the scores; `None`: 1/sqrt(H).
      implementation: `None` for the fastest one, or a name.
    """

    config: AttentionConfig
    scale: float | None = None
    implementation: str | None = None

    def __call__(
        self,
        query: Float[Array, "*b t n h"],
        key: Float[Array, "*b s k h"],
        value: Float[Array, "*b s k h"],
        bias: None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: None = None,
        qk_attn_weights_einsum: None = None,
        attn_weights_value_einsum: None = None,
        *,
        query_seq_lengths: Int[Array, "*b"] | Sequence[int] | None = None,
        key_value_seq_lengths: Int[Array, "*b"] | Sequence[int] | None = None,
    ) -> Float[Array, "*b t n h"]:
        """Attention of any number of batch axes.

        Args:
          query: [..., T, N, H].
          key, value: [..., S, K, H], N a multiple of K.
          mask: broadcastable to [..., N, T, S]; bool, or 0 and 1 of any dtype, as
            `make_attention_mask` returns. What `vc_jax.dot_product_attention` says of masks holds.
          broadcast_dropout, dropout_rng: matter only for dropout, which is not supported.
          dropout_rate, deterministic: a rate above 0 raises unless `deterministic`.
          dtype: dtype of the attention's inputs and output; `None`: the inputs' common one.
          promote_dtype: brings query, key and value to `dtype` in place of the usual promotion.
          query_seq_lengths, key_value_seq_lengths: valid prefix of each row, of the batch's shape.
          Others: must have the value that changes nothing.

        Returns:
          [..., T, N, H]. A query without a valid key gives zeros (Flax's own function gives the
          mean of the values there).

        Raises:
          NotImplementedError: an argument that cannot be honoured, by name.
          TypeError, ValueError: as `vc_jax.dot_product_attention`.
        """
        del broadcast_dropout, dropout_rng
        if dropout_rate > 0.0 and not deterministic:
            raise NotImplementedError(
                "dropout_rate is not supported unless deterministic: the attention weights that "
                f"it would drop never exist as an array; got {dropout_rate}"
            )
        self._refuse(
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        if precision not in (None, "default", jax.lax.Precision.DEFAULT):
            raise NotImplementedError(
                f"precision is not supported: the config fixes that of the products, got "
                f"{precision}"
            )
        if module is not None:
            raise NotImplementedError(
                "module is not supported: there are no attention weights to sow in it"
            )
        if force_fp32_for_softmax and self.config.quantized:
            raise NotImplementedError(
                "force_fp32_for_softmax is not supported: the config fixes the softmax, and only "
                "'bf16' computes it in float32"
            )
        promote = promote_dtype or _promote_dtype
        query, key, value = promote((query, key, value), dtype=dtype)
        lead = query.shape[:-3]
        if len(lead) > 1:
            _check_batch(lead, query=query, key=key, value=value)
            query, key, value = (_flat(x, lead) for x in (query, key, value))
        out = dot_product_attention(
            query,
            key,
            value,
            bias,
            None if mask is None else _mask(mask, lead),
            config=self.config,
            scale=self.scale,
            is_causal=is_causal,
            query_seq_lengths=_lengths("query_seq_lengths", query_seq_lengths, lead),
            key_value_seq_lengths=_lengths("key_value_seq_lengths", key_value_seq_lengths, lead),
            implementation=self.implementation,
        )
        assert isinstance(out, jax.Array)
        return out.reshape(*lead, *out.shape[-3:])

    def _refuse(self, **arguments: Any) -> None:
        for name, argument in arguments.items():
            if argument is not None:
                raise NotImplementedError(
                    f"{name} is not supported: the attention does its own products"
                )


def attention_fn(
    config: AttentionConfig | str = "int8",
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> FlaxAttention:
    """Low-bit attention as an `attention_fn` for Flax's layers, NNX and Linen.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import vc_jax.flax
    >>> layer = nnx.MultiHeadAttention(
    ...     num_heads=2, in_features=64, decode=False, rngs=nnx.Rngs(0),
    ...     attention_fn=vc_jax.flax.attention_fn("int8"),
    ... )
    >>> layer(jnp.ones((1, 200, 64))).shape
    (1, 200, 64)

    Args:
      config: an `AttentionConfig` or a preset's name.
      scale: of the scores; `None`: 1/sqrt(H), as in Flax.
      implementation: as in `vc_jax.dot_product_attention`.

    Raises:
      TypeError, ValueError: a wrong argument, by name.
    """
    check_implementation(implementation)
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float, np.number)):
            raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
        scale = float(scale)
        if not math.isfinite(scale):
            raise ValueError(f"scale must be finite, got {scale}")
    return FlaxAttention(resolve_config(config), scale, implementation)


def _promote_dtype(arrays: Sequence[Array], *, dtype: Any) -> tuple[Array, ...]:
    """The arrays in `dtype`, or in their common one."""
    dtype = jnp.result_type(*arrays) if dtype is None else jnp.dtype(dtype)
    return tuple(jnp.asarray(array, dtype) for array in arrays)


def _check_batch(lead: tuple[int, ...], **arrays: Array) -> None:
    for name, array in arrays.items():
        if array.shape[:-3] != lead:
            raise ValueError(
                f"{name} must have the batch axes of query, {lead}, got shape {array.shape}"
            )


def _flat(array: Array, lead: tuple[int, ...]) -> Array:
    """One batch axis in place of several."""
    return array.reshape(-1, *array.shape[len(lead) :])


def _mask(mask: Array, lead: tuple[int, ...]) -> Array:
    """A mask that broadcasts from the right, as [B or 1, N or 1, T or 1, S] (or without B)."""
    if not hasattr(mask, "shape") or not hasattr(mask, "reshape"):
        raise TypeError(f"mask must be an array, got {type(mask).__name__}")
    shape = jnp.shape(mask)
    rank = len(lead) + 3
    if len(shape) > rank or len(shape) == 0:
        raise ValueError(f"mask must be broadcastable to [..., N, T, S], got shape {shape}")
    mask = mask.reshape((1,) * (rank - len(shape)) + shape)
    if len(lead) <= 1:
        return mask
    if any(got not in (1, want) for got, want in zip(mask.shape, lead)):
        raise ValueError(f"mask must have batch axes that broadcast to {lead}, got shape {shape}")
    if not any(got > 1 for got in mask.shape[: len(lead)]):
        return mask.reshape(1, *mask.shape[-3:])
    full = (*lead, *mask.shape[-3:])
    # A known mask stays known: broadcasting it must not make it a tracer.
    with jax.ensure_compile_time_eval():
        return _flat(jnp.broadcast_to(mask, full), lead)


def _lengths(name: str, lengths: Any, lead: tuple[int, ...]) -> Any:
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if lengths.shape != lead:
        raise ValueError(f"{name} must have the shape of the batch, {lead}, got {lengths.shape}")
    return lengths.reshape(-1) if lead else lengths
