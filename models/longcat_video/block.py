"""One layer of LongCat-Video, and the cache of what it computes for conditioning frames."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..attention import AttentionFunction
from ..common import layers
from .config import LongCatVideoConfig


class KVCache(NamedTuple):
    """Keys (after their norm, before RoPE) and values of the conditioning frames.

    Both are [layers, B or 1, S_cond, N, H].
    """

    key: Array
    value: Array


class LongCatBlock(nnx.Module):
    """Modulated self-attention, text cross-attention, modulated SwiGLU."""

    def __init__(self, config: LongCatVideoConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        width, heads, size = config.hidden, config.num_heads, config.head_dim
        options: dict[str, Any] = {"rngs": rngs, "dtype": dtype}

        def norm() -> layers.RMSNorm:
            return layers.RMSNorm(size, epsilon=config.epsilon)

        # Computed in float32 whatever the weights' dtype, as in the peer.
        self.modulation = layers.linear(
            config.time_dim, 6 * width, rngs=rngs, dtype=jnp.float32, param_dtype=dtype
        )
        self.norm = layers.LayerNorm(width, epsilon=config.epsilon)
        self.qkv = layers.HeadsIn(width, 3, heads, size, **options)
        self.q_norm, self.k_norm = norm(), norm()
        self.out = layers.HeadsOut(heads, size, width, **options)
        self.cross_norm = layers.LayerNorm(width, epsilon=config.epsilon, affine=True)
        self.cross_q = layers.HeadsIn(width, 1, heads, size, **options)
        self.cross_kv = layers.HeadsIn(width, 2, heads, size, **options)
        self.cross_q_norm, self.cross_k_norm = norm(), norm()
        self.cross_out = layers.HeadsOut(heads, size, width, **options)
        self.ffn = layers.SwiGlu(width, config.ffn_dim, **options)

    def cross_attention(
        self, x: Array, context: Array, mask: Array | None, attention: AttentionFunction
    ) -> Array:
        query, (key, value) = self.cross_q(x)[0], self.cross_kv(context)
        query, key = self.cross_q_norm(query), self.cross_k_norm(key)
        options = {} if mask is None else {"mask": mask[:, None, None, :]}
        return self.cross_out(attention(query, key, value, **options))

    def __call__[State](
        self,
        x: Float[Array, "b s d"],
        active: Float[Array, "b t c"],
        rope: tuple[Array, Array],
        cached: KVCache | None,
        self_attention: Callable[[Array, Array, Array], tuple[Array, State]],
        text_attention: Callable[["LongCatBlock", Array], Array],
    ) -> tuple[Float[Array, "b s d"], State, KVCache]:
        """One layer.

        Args:
          x: rows of the residual stream.
          active: time embedding after its SiLU, one row a latent frame.
          rope: of the cached rows and then of these.
          cached: keys and values of rows in front of these, or None.
          self_attention: `(query, key, value) -> (out, state)`.
          text_attention: `(block, normed rows) -> rows`, zero where the text is not read.

        Returns:
          The rows, the state, and this layer's own keys and values for a cache.
        """
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = jnp.split(
            self.modulation(active), 6, axis=-1
        )
        query, key, value = self.qkv(layers.modulated(self.norm, x, shift, scale))
        query, key = self.q_norm(query), self.k_norm(key)
        kept = KVCache(key, value)
        if cached is not None:
            key, value = (
                jnp.concatenate(
                    [jnp.broadcast_to(old, (x.shape[0], *old.shape[1:])).astype(new.dtype), new],
                    axis=1,
                )
                for old, new in zip(cached, kept, strict=True)
            )
        own = [table[-x.shape[1] :] for table in rope]
        query, key = layers.rotate_pairs(query, *own), layers.rotate_pairs(key, *rope)
        attended, state = self_attention(query, key, value)
        x = layers.add_gated(x, self.out(attended), gate)
        x = x + text_attention(self, self.cross_norm(x))
        y = self.ffn(layers.modulated(self.norm, x, ffn_shift, ffn_scale))
        return layers.add_gated(x, y, ffn_gate), state, kept
