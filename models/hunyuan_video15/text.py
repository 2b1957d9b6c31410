"""The text side of HunyuanVideo-1.5: what turns three encoders' rows into the text stream."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from ..attention import AttentionFunction
from ..common import layers
from ..common.base import run_blocks, stack_blocks
from .config import HunyuanVideo15Config


class RefinerBlock(nnx.Module):
    """Self-attention and SiLU feed-forward over text rows, both gated by the time and the text."""

    def __init__(self, config: HunyuanVideo15Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        width, heads, size = config.hidden, config.num_heads, config.head_dim
        options: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
        self.norm1 = layers.LayerNorm(width, epsilon=config.epsilon, affine=True)
        self.norm2 = layers.LayerNorm(width, epsilon=config.epsilon, affine=True)
        self.qkv = layers.HeadsIn(width, 3, heads, size, **options)
        self.out = layers.HeadsOut(heads, size, width, **options)
        inner = int(width * config.refiner_mlp_ratio)
        self.mlp = layers.Mlp(width, inner, width, layers.silu, **options)
        self.gates = layers.linear(width, 2 * width, **options)

    def __call__(
        self, x: Array, condition: Array, mask: Array, attention: AttentionFunction
    ) -> Array:
        gates = self.gates(jax.nn.silu(condition).astype(x.dtype)).astype(jnp.float32)
        gate, mlp_gate = jnp.split(gates[:, None], 2, axis=-1)
        query, key, value = self.qkv(self.norm1(x))
        attended = attention(query, key, value, mask=mask[:, None, None, :])
        x = layers.add_gated(x, self.out(attended), gate)
        return layers.add_gated(x, self.mlp(self.norm2(x)), mlp_gate)


class Refiner(nnx.Module):
    """Projects the first text encoder's rows and refines them with two small blocks."""

    def __init__(self, config: HunyuanVideo15Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        width = config.hidden
        self.freq_dim, self.dtype = config.freq_dim, jnp.dtype(dtype)
        self.time_mlp = layers.Mlp(
            config.freq_dim, width, width, layers.silu, rngs=rngs, dtype=jnp.float32
        )
        self.text_mlp = layers.Mlp(
            config.text_dim, width, width, layers.silu, rngs=rngs, dtype=dtype
        )
        self.proj_in = layers.linear(config.text_dim, width, rngs=rngs, dtype=dtype)
        self.blocks = stack_blocks(
            lambda rngs: RefinerBlock(config, dtype=dtype, rngs=rngs),
            config.num_refiner_layers,
            rngs,
        )

    def __call__(
        self,
        text: Array,
        mask: Array,
        timestep: Array,
        attention: AttentionFunction,
        *,
        scan: bool = True,
    ) -> Array:
        weights = mask.astype(jnp.float32)[..., None]
        # Pads may hold anything; an item without text must not divide by zero.
        text = jnp.where(mask[..., None], text, 0)
        total = jnp.sum(text.astype(jnp.float32) * weights, axis=1)
        pooled = total / jnp.maximum(jnp.sum(weights, axis=1), 1.0)
        condition = self.time_mlp(layers.timestep_embedding(timestep, self.freq_dim))
        condition = condition + self.text_mlp(pooled.astype(self.dtype)).astype(jnp.float32)

        def body(block: RefinerBlock, x: Array, _: None) -> tuple[Array, None]:
            return block(x, condition, mask, attention), None

        x = self.proj_in(text.astype(self.dtype))
        return run_blocks(self.blocks, body, x, scan=scan)[0]


class ByT5Projection(nnx.Module):
    """LayerNorm and three dense layers with exact GELU for the byT5 rows."""

    def __init__(self, config: HunyuanVideo15Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        inner = config.byt5_hidden
        options: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
        self.norm = layers.LayerNorm(config.byt5_dim, epsilon=1e-5, affine=True)
        self.linear_1 = layers.linear(config.byt5_dim, inner, **options)
        self.linear_2 = layers.linear(inner, inner, **options)
        self.linear_3 = layers.linear(inner, config.hidden, **options)

    def __call__(self, x: Array) -> Array:
        x = layers.gelu_exact(self.linear_1(self.norm(x)))
        return self.linear_3(layers.gelu_exact(self.linear_2(x)))


class ImageProjection(nnx.Module):
    """Norm, two dense layers with exact GELU, norm for the image encoder's rows."""

    def __init__(self, config: HunyuanVideo15Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        options: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
        self.norm_in = layers.LayerNorm(config.image_dim, epsilon=1e-5, affine=True)
        self.linear_1 = layers.linear(config.image_dim, config.image_dim, **options)
        self.linear_2 = layers.linear(config.image_dim, config.hidden, **options)
        self.norm_out = layers.LayerNorm(config.hidden, epsilon=1e-5, affine=True)

    def __call__(self, x: Array) -> Array:
        x = layers.gelu_exact(self.linear_1(self.norm_in(x)))
        return self.norm_out(self.linear_2(x))
