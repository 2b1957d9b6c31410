"""A small pixel-space video diffusion transformer in Flax NNX.

The stand-in for the large video DiTs that low-bit attention is made for: full attention over all
tokens of a clip, head dimension 128, per-head RMS normalisation of queries and keys, 3-axis RoPE,
adaptive layer norm (Peebles & Xie, "DiT", 2023) with one timestep per *frame*, trained by rectified
flow (Liu et al., 2022). A frame whose timestep is 0 is clean: it conditions the others.

The attention is an argument of the call, so the same weights run with any attention function that
has the signature of `jax.nn.dot_product_attention`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from ..common.checks import check_fields, check_head_dim
from ..common.promotion import own_promotion
from .rope import RopeTable, apply_rope, rope_table

_INIT = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")
_SMALL_INIT = nnx.initializers.variance_scaling(0.01, "fan_in", "normal")
_RESIDUAL_INIT = nnx.initializers.variance_scaling(0.25, "fan_in", "normal")
_EPSILON = 1e-6
_TIME_CHANNELS = 256
_TIME_SCALE = 1000.0

Attention = Callable[[Array, Array, Array], Array]


@runtime_checkable
class StatefulAttention(Protocol):
    """Attention that carries a state through the layers (and over the denoising steps)."""

    def __call__(
        self, query: Array, key: Array, value: Array, state: Any, layer: Array, /
    ) -> tuple[Array, Any]:
        """Returns the output [B, S, N, H] and the new state; ``layer`` is a traced int32."""
        ...


class AttentionInputs(NamedTuple):
    """What every layer gave to its attention, each [L, B, S, N, H] in the compute dtype."""

    query: Array
    key: Array
    value: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoDiTConfig:
    """Sizes of a `VideoDiT`. The defaults are those of the shipped weights.

    Attributes:
      channels: colour channels of the video.
      patch: edge of a square patch in pixels; a token is one patch of one frame.
      width: channels of the residual stream.
      num_layers: transformer blocks.
      num_heads: attention heads.
      head_dim: channels of a head.
      mlp_width: hidden channels of a block's MLP.
      rope_theta: see `rope_table`.
      data_std: standard deviation of the pixels in [-1, 1], for the output's preconditioning.
      compute_dtype: dtype of the matrix products and of the attention's inputs. Parameters,
        residual stream, norms, modulation and output are float32 in any case.

    Raises:
      ValueError: a field out of range, by name.
    """

    channels: int = 3
    patch: int = 4
    width: int = 256
    num_layers: int = 8
    num_heads: int = 2
    head_dim: int = 128
    mlp_width: int = 1024
    rope_theta: float = 100.0
    data_std: float = 0.5
    compute_dtype: str = "bfloat16"

    def __post_init__(self):
        check_fields(self)
        check_head_dim(self.head_dim)
        try:
            floating = jnp.issubdtype(jnp.dtype(self.compute_dtype), jnp.floating)
        except TypeError:
            floating = False
        if not floating:
            raise ValueError(f"compute_dtype: expected a float type, got {self.compute_dtype!r}")

    @property
    def patch_channels(self) -> int:
        """Values in one patch."""
        return self.channels * self.patch * self.patch

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Tokens along frames, rows and columns of a video; `ValueError` if it has no grid."""
        if frames < 1 or height < self.patch or width < self.patch:
            raise ValueError(
                f"video must have at least 1 frame of {self.patch}x{self.patch} pixels, "
                f"got {frames} of {height}x{width}"
            )
        if height % self.patch or width % self.patch:
            raise ValueError(
                f"video height and width must be multiples of the patch ({self.patch}), "
                f"got {height}x{width}"
            )
        return frames, height // self.patch, width // self.patch


def default_attention(
    query: Float[Array, "B T N H"], key: Float[Array, "B S N H"], value: Float[Array, "B S N H"]
) -> Float[Array, "B T N H"]:
    """Unquantised attention: cuDNN's on a GPU for 16-bit inputs, XLA's elsewhere."""
    use_cudnn = jax.default_backend() == "gpu" and query.dtype in (jnp.bfloat16, jnp.float16)
    implementation = "cudnn" if use_cudnn else "xla"
    return jax.nn.dot_product_attention(query, key, value, implementation=implementation)


def cut_patches(
    video: Float[Array, "B F height width C"], patch: int
) -> Float[Array, "B F tokens patch_channels"]:
    """Cuts every frame into patches in row-major order."""
    b, f, h, w, c = video.shape
    cut = video.reshape(b, f, h // patch, patch, w // patch, patch, c)
    return cut.transpose(0, 1, 2, 4, 3, 5, 6).reshape(b, f, -1, patch * patch * c)


def join_patches(
    tokens: Float[Array, "B F tokens patch_channels"], height: int, width: int, patch: int
) -> Float[Array, "B F height width C"]:
    """The inverse of `cut_patches`."""
    b, f = tokens.shape[:2]
    cut = tokens.reshape(b, f, height // patch, width // patch, patch, patch, -1)
    return cut.transpose(0, 1, 2, 4, 3, 5, 6).reshape(b, f, height, width, -1)


def time_features(t: Float[Array, "B F"]) -> Float[Array, "B F features"]:
    """Sinusoids of a timestep in [0, 1], float32 [B, F, 256]."""
    half = _TIME_CHANNELS // 2
    frequencies = jnp.exp(-math.log(1e4) / half * jnp.arange(half, dtype=jnp.float32))
    angles = t.astype(jnp.float32)[..., None] * _TIME_SCALE * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def _layer_norm(x: Array) -> Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + _EPSILON)


def _modulate(x: Array, shift: Array, scale: Array) -> Array:
    return _layer_norm(x) * (1.0 + scale) + shift


class HeadRMSNorm(nnx.Module):
    """RMS norm over the channels of each head, with one learned scale per channel."""

    def __init__(self, head_dim: int):
        self.scale = nnx.Param(jnp.ones((head_dim,), jnp.float32))

    def __call__(self, x: Float[Array, "B S N H"]) -> Float[Array, "B S N H"]:
        """Normalises in float32 and returns the dtype of ``x``."""
        wide = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + _EPSILON)
        return (wide * inverse * self.scale[...]).astype(x.dtype)


class SelfAttention(nnx.Module):
    """The projections around an attention function."""

    def __init__(self, config: VideoDiTConfig, *, rngs: nnx.Rngs):
        heads = (config.num_heads, config.head_dim)
        linear = functools.partial(
            nnx.LinearGeneral, dtype=jnp.dtype(config.compute_dtype), rngs=rngs
        )
        self.qkv = linear(config.width, (3, *heads), kernel_init=_INIT)
        self.query_norm = HeadRMSNorm(config.head_dim)
        self.key_norm = HeadRMSNorm(config.head_dim)
        self.out = linear(heads, config.width, axis=(-2, -1), kernel_init=_RESIDUAL_INIT)

    def project(self, x: Float[Array, "B S D"], rope: RopeTable) -> AttentionInputs:
        """Query and key (normalised, then turned by RoPE) and value, each [B, S, N, H]."""
        query, key, value = jnp.moveaxis(self.qkv(x), -3, 0)
        query = apply_rope(self.query_norm(query), rope)
        key = apply_rope(self.key_norm(key), rope)
        return AttentionInputs(query, key, value)


class Block(nnx.Module):
    """Attention and MLP, each between an adaptive layer norm and a gate."""

    def __init__(self, config: VideoDiTConfig, *, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, dtype=jnp.dtype(config.compute_dtype), rngs=rngs)
        self.attention = SelfAttention(config, rngs=rngs)
        self.up = linear(config.width, config.mlp_width, kernel_init=_INIT)
        self.down = linear(config.mlp_width, config.width, kernel_init=_RESIDUAL_INIT)
        # This block's own offsets to the modulation that all blocks share.
        self.modulation = nnx.Param(jnp.zeros((6, config.width), jnp.float32))

    def __call__(
        self,
        x: Float[Array, "B F tokens D"],
        shared_modulation: Float[Array, "B F 6 D"],
        rope: RopeTable,
        attend: Callable[[AttentionInputs], tuple[Array, Any]],
    ) -> tuple[Float[Array, "B F tokens D"], Any]:
        """Returns the new residual stream and whatever ``attend`` returned beside its output."""
        b, f, tokens, d = x.shape
        modulation = (shared_modulation + self.modulation[...])[:, :, :, None, :]
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = jnp.moveaxis(modulation, 2, 0)

        normed = _modulate(x, shift_1, scale_1).reshape(b, f * tokens, d)
        inputs = self.attention.project(normed, rope)
        attended, extra = attend(inputs)
        update = self.attention.out(attended).reshape(b, f, tokens, d)
        x = x + (1.0 + gate_1) * update.astype(jnp.float32)

        hidden = jax.nn.gelu(self.up(_modulate(x, shift_2, scale_2)))
        return x + (1.0 + gate_2) * self.down(hidden).astype(jnp.float32), extra


class VideoDiT(nnx.Module):
    """Predicts the rectified-flow velocity (noise minus data) of a partly noisy video.

    Any number of frames and any frame size that is a multiple of the patch is accepted. The blocks'
    parameters are stacked on a leading layer axis and scanned: one block is compiled.
    """

    def __init__(self, config: VideoDiTConfig, *, rngs: nnx.Rngs):
        self.config = config
        width = config.width
        linear = functools.partial(nnx.Linear, rngs=rngs, kernel_init=_INIT)
        self.embed = linear(config.patch_channels, width, dtype=jnp.dtype(config.compute_dtype))
        self.clean_embedding = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.time_in = linear(_TIME_CHANNELS, width)
        self.time_out = linear(width, width)
        self.modulation = nnx.Linear(width, 6 * width, kernel_init=_SMALL_INIT, rngs=rngs)
        self.final_modulation = nnx.Linear(width, 2 * width, kernel_init=_SMALL_INIT, rngs=rngs)
        self.output = nnx.Linear(
            width, config.patch_channels, kernel_init=nnx.initializers.zeros, rngs=rngs
        )

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.blocks = stack(rngs)

    @own_promotion
    def __call__(
        self,
        video: Float[Array, "B F height width C"],
        t: Float[Array, "B F"],
        *,
        attention: Attention | None = None,
    ) -> Float[Array, "B F height width C"]:
        """The velocity of every pixel, float32.

        Args:
          video: pixels in about [-1, 1] where clean, ``(1 - t) * data + t * noise`` elsewhere.
          t: timestep of each frame in [0, 1]; exactly 0 marks a clean (condition) frame. The
            velocity of a clean frame means nothing.
          attention: a function of query, key and value, each [B, S, N, H] with S = all tokens of
            the clip; `default_attention` if None.

        Raises:
          ValueError: shapes do not fit each other or the patch.
        """
        attend = attention or default_attention
        return self._forward(video, t, lambda q, k, v, state, _: (attend(q, k, v), state), None)[0]

    @own_promotion
    def with_state(
        self,
        video: Float[Array, "B F height width C"],
        t: Float[Array, "B F"],
        state: Any,
        *,
        attention: StatefulAttention,
    ) -> tuple[Float[Array, "B F height width C"], Any]:
        """`__call__` with an attention that reads and writes a state, layer after layer.

        ``state`` is any pytree of arrays whose structure, shapes and dtypes ``attention`` keeps. It
        travels in the carry of the scan over layers; ``attention`` gets the layer's traced index.
        """
        velocity, state, _ = self._forward(video, t, attention, state)
        return velocity, state

    @own_promotion
    def attention_inputs(
        self,
        video: Float[Array, "B F height width C"],
        t: Float[Array, "B F"],
        *,
        attention: Attention | None = None,
    ) -> tuple[Float[Array, "B F height width C"], AttentionInputs]:
        """`__call__`, and the query, key and value of every layer, stacked on a leading axis."""
        attend = attention or default_attention
        velocity, _, inputs = self._forward(
            video, t, lambda q, k, v, state, _: (attend(q, k, v), state), None, collect=True
        )
        return velocity, inputs

    def _forward(
        self,
        video: Array,
        t: Array,
        attention: StatefulAttention,
        state: Any,
        *,
        collect: bool = False,
    ) -> tuple[Array, Any, Any]:
        grid = self._check(video, t)
        t = t.astype(jnp.float32)
        video = video.astype(jnp.float32)
        rope = rope_table(grid, self.config.head_dim, self.config.rope_theta)
        time = jax.nn.silu(self.time_out(jax.nn.silu(self.time_in(time_features(t)))))
        modulation = self.modulation(time).reshape(*t.shape, 6, self.config.width)
        clean = (t == 0.0)[:, :, None, None] * self.clean_embedding[...]
        x = self.embed(cut_patches(video, self.config.patch)).astype(jnp.float32) + clean

        definition, parameters = nnx.split(self.blocks)

        def run_block(carry, layer_and_parameters):
            x, state = carry
            layer, parameters = layer_and_parameters
            block = nnx.merge(definition, parameters)

            def attend(inputs):
                out, new_state = attention(inputs.query, inputs.key, inputs.value, state, layer)
                return out, (new_state, inputs if collect else None)

            x, (state, inputs) = block(x, modulation, rope, attend)
            return (x, state), inputs

        layers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        (x, state), inputs = lax.scan(run_block, (x, state), (layers, parameters))

        shift, scale = jnp.split(self.final_modulation(time)[:, :, None], 2, axis=-1)
        tokens = self.output(_modulate(x, shift, scale))
        raw = join_patches(tokens, video.shape[2], video.shape[3], self.config.patch)
        return self._velocity(video, t, raw), state, inputs

    def _velocity(self, video: Array, t: Array, raw: Array) -> Array:
        """Adds to the network's output the best linear guess of the velocity.

        For data of standard deviation s and unit noise, the least-squares estimate of the velocity
        from one noisy pixel is ``(t - (1-t) s^2) / ((1-t)^2 s^2 + t^2)`` times that pixel, and the
        variance left over is ``s^2 / ((1-t)^2 s^2 + t^2)``. The network predicts that remainder at
        unit variance (the preconditioning of Karras et al., 2022, for this noise schedule).
        """
        t = t[:, :, None, None, None]
        power = self.config.data_std**2
        total = (1.0 - t) ** 2 * power + t**2
        return (t - (1.0 - t) * power) / total * video + jnp.sqrt(power / total) * raw

    def _check(self, video: Array, t: Array) -> tuple[int, int, int]:
        if video.ndim != 5 or video.shape[-1] != self.config.channels:
            raise ValueError(
                f"video must be [B, F, height, width, {self.config.channels}], got {video.shape}"
            )
        if t.shape != video.shape[:2]:
            raise ValueError(f"t must be [B, F] = {video.shape[:2]}, got {t.shape}")
        return self.config.grid(*video.shape[1:4])


def create_video_dit(config: VideoDiTConfig, seed: int = 0) -> VideoDiT:
    """A freshly initialised model, made in one compiled call (many times faster than op by op)."""
    return nnx.jit(lambda: VideoDiT(config, rngs=nnx.Rngs(seed)))()
