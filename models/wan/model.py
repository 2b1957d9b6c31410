"""Wan2.2 video DiT (T2V-A14B, I2V-A14B, TI2V-5B): self-attention, text cross-attention, GELU.

Facts of the architecture: the peer's published code (Wan2.2, `wan/modules/model.py`; diffusers'
`WanTransformer3DModel`). Query and key norms run over all heads together; zero text rows pass
through the text embedding and are attended; the cross-attention branch has no gate.
"""

import math
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from vc_jax import AttentionState

from ..attention import (
    NO_CONTROL,
    AttentionControl,
    AttentionFunction,
    LayerInputs,
    ModelState,
    SelfAttention,
    attend,
    attention_to_text,
)
from ..common import checks, layers
from ..common.base import VideoTransformer, run_blocks, stack_blocks
from ..common.promotion import own_promotion
from ..common.release import Files
from ..common.schedulers import Sampling
from . import tensors
from .config import (
    I2V_A14B_SAMPLING,
    T2V_A14B_SAMPLING,
    TI2V_5B_SAMPLING,
    WAN_2_1_SAMPLING,
    WanConfig,
)


class WanBlock(nnx.Module):
    """Modulated self-attention, cross-attention to text, modulated feed-forward."""

    def __init__(self, config: WanConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        width, heads, size = config.hidden, config.num_heads, config.head_dim
        options: dict[str, Any] = {"rngs": rngs, "dtype": dtype}

        def norm() -> layers.RMSNorm:
            return layers.RMSNorm(heads, size, epsilon=config.epsilon)

        self.norm = layers.LayerNorm(width, epsilon=config.epsilon)
        self.modulation = nnx.Param(
            jax.random.normal(rngs.params(), (6, width), jnp.float32) / math.sqrt(width)
        )
        self.qkv = layers.HeadsIn(width, 3, heads, size, **options)
        self.q_norm, self.k_norm = norm(), norm()
        self.out = layers.HeadsOut(heads, size, width, **options)
        self.cross_norm = (
            layers.LayerNorm(width, epsilon=config.epsilon, affine=True)
            if config.cross_attn_norm
            else None
        )
        self.cross_q = layers.HeadsIn(width, 1, heads, size, **options)
        self.cross_kv = layers.HeadsIn(width, 2, heads, size, **options)
        self.cross_q_norm, self.cross_k_norm = norm(), norm()
        self.cross_out = layers.HeadsOut(heads, size, width, **options)
        self.ffn = layers.Mlp(width, config.ffn_dim, width, layers.gelu_tanh, **options)

    def queries_keys_values(self, x: Array, rope: tuple[Array, Array]) -> tuple[Array, ...]:
        query, key, value = self.qkv(x)
        query = layers.rotate_pairs(self.q_norm(query), *rope)
        return query, layers.rotate_pairs(self.k_norm(key), *rope), value

    def cross_attention(self, x: Array, context: Array, attention: AttentionFunction) -> Array:
        query, (key, value) = self.cross_q(x)[0], self.cross_kv(context)
        query, key = self.cross_q_norm(query), self.cross_k_norm(key)
        return self.cross_out(attention(query, key, value))

    def __call__(
        self,
        x: Float[Array, "b s d"],
        modulation: Float[Array, "b g 6 d"],
        context: Float[Array, "b l d"],
        rope: tuple[Array, Array],
        self_attention: SelfAttention,
        cross_attention: AttentionFunction,
    ) -> tuple[Float[Array, "b s d"], AttentionState | None]:
        """`self_attention(query, key, value) -> (out, state)`; returns the rows and the state."""
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = jnp.moveaxis(
            modulation + self.modulation[...], -2, 0
        )
        query, key, value = self.queries_keys_values(
            layers.modulated(self.norm, x, shift, scale), rope
        )
        attended, state = self_attention(query, key, value)
        x = layers.add_gated(x, self.out(attended), gate)
        normed = x if self.cross_norm is None else self.cross_norm(x)
        x = x + self.cross_attention(normed, context, cross_attention)
        y = self.ffn(layers.modulated(self.norm, x, ffn_shift, ffn_scale))
        return layers.add_gated(x, y, ffn_gate), state


class Wan(VideoTransformer):
    """A Wan2.2 transformer (one expert of an A14B model, or the 5B model)."""

    config_class: ClassVar[type] = WanConfig
    layouts: ClassVar = {
        "diffusers": tensors.diffusers,
        "original": tensors.original,
    }

    def __init__(self, config: WanConfig, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(config, **options)
        width, exact = config.hidden, jnp.float32
        rows_in = config.in_channels * math.prod(config.patch)
        rows_out = config.out_channels * math.prod(config.patch)
        self.patch_embedding = layers.linear(rows_in, width, rngs=rngs, dtype=self.dtype)
        self.text_mlp = layers.Mlp(
            config.text_dim, width, width, layers.gelu_tanh, rngs=rngs, dtype=self.dtype
        )
        self.time_mlp = layers.Mlp(
            config.freq_dim, width, width, layers.silu, rngs=rngs, dtype=exact
        )
        self.time_projection = layers.linear(width, 6 * width, rngs=rngs, dtype=exact)
        self.blocks = stack_blocks(
            lambda rngs: WanBlock(config, dtype=self.dtype, rngs=rngs), config.num_layers, rngs
        )
        self.final_norm = layers.LayerNorm(width, epsilon=config.epsilon)
        self.final_modulation = nnx.Param(
            jax.random.normal(rngs.params(), (2, width), jnp.float32) / math.sqrt(width)
        )
        self.head = layers.linear(width, rows_out, rngs=rngs, dtype=self.dtype)

    @classmethod
    def experts_from_pretrained(cls, path: str | Path, **options: Any) -> tuple[Self, Self]:
        """The high- and the low-noise expert of an A14B model.

        Args:
          path: the repository's folder, with `transformer` and `transformer_2` (diffusers) or
            `high_noise_model` and `low_noise_model` (original).
          **options: as for `from_pretrained`; `loras` are merged into both. For LoRAs of one, load
            the experts from their own folders.

        Raises:
          FileNotFoundError: neither pair of folders.
        """
        for names in (("transformer", "transformer_2"), ("high_noise_model", "low_noise_model")):
            high, low = (Path(path) / name for name in names)
            if high.is_dir() and low.is_dir():
                return cls.from_pretrained(high, **options), cls.from_pretrained(low, **options)
        raise FileNotFoundError(f"path: no pair of experts in {path}")

    def time_embedding(self, timestep: ArrayLike) -> Float[Array, "b g d"]:
        """Embedding of a timestep [B] or [B, G], before its SiLU."""
        timestep = jnp.asarray(timestep)
        if timestep.ndim == 1:
            timestep = timestep[:, None]
        if timestep.ndim != 2:
            raise ValueError(f"timestep: expected [B] or [B, G], got {timestep.shape}")
        return self.time_mlp(layers.timestep_embedding(timestep, self.config.freq_dim))

    def rope(self, grid: tuple[int, ...]) -> tuple[Array, Array]:
        return layers.grid_rope(grid, self.config.rope_axes, self.config.rope_theta)

    @own_promotion
    def __call__(
        self,
        latents: Float[Array, "b c t h w"],
        timestep: ArrayLike,
        text: Float[Array, "b l e"],
        *,
        control: AttentionControl | None = None,
    ) -> Any:
        """Velocity at a timestep.

        Args:
          latents: all `in_channels` (for I2V-A14B: latents, mask, image latents).
          timestep: 0..1000, [B], or [B, G] with one entry for each G-th part of the rows in
            (t, h, w) order: one a latent frame, or one a token (TI2V-5B gives 0 to the tokens of
            the clean first frame).
          text: UMT5 rows; the zero rows after the prompt are attended, as in the peer.
          control: state and policies of the self-attention.

        Returns:
          [B, out_channels, T, H, W] in float32, and the new state if `control` has one.

        Raises:
          ValueError: shapes that do not fit, by argument.
        """
        config, control = self.config, control or NO_CONTROL
        grid = layers.latent_grid(latents, config.patch, config.in_channels)
        batch = {"batch": latents.shape[0]}
        checks.check_shape("timestep", timestep, batch, batch | {"groups": None})
        checks.check_shape("text", text, batch | {"rows": None, "text_dim": config.text_dim})
        rope = self.rope(grid)
        embedding = self.time_embedding(timestep)
        modulation = self.time_projection(jax.nn.silu(embedding))
        modulation = modulation.reshape(*modulation.shape[:2], 6, config.hidden)
        context = self.text_mlp(text.astype(self.dtype))
        cross = attention_to_text(self.cross_attention, self.mesh)
        x = self.patch_embedding(layers.patchify(latents, config.patch).astype(self.dtype))

        def body(
            block: WanBlock, x: Array, inputs: LayerInputs
        ) -> tuple[Array, AttentionState | None]:
            state, flag = inputs

            def self_attention(
                query: Array, key: Array, value: Array
            ) -> tuple[Array, AttentionState | None]:
                return attend(
                    self.attention, query, key, value, control, state, flag, mesh=self.mesh
                )

            return block(x, modulation, context, rope, self_attention, cross)

        x, state = run_blocks(
            self.blocks,
            body,
            x,
            control.per_layer(config.num_layers),
            scan=self.scan_layers,
            remat=self.remat,
            mesh=self.mesh,
        )
        shift, scale = jnp.moveaxis(embedding[:, :, None] + self.final_modulation[...], 2, 0)
        rows = self.head(layers.modulated(self.final_norm, x, shift, scale)).astype(jnp.float32)
        out = layers.unpatchify(rows, grid, config.patch, channels_first=False)
        return out if control.state is None else (out, state)

    def release_sampling(self, files: Files | None) -> tuple[Sampling, str]:
        if self.config.in_channels == 48:
            return TI2V_5B_SAMPLING, "Wan2.2-TI2V-5B"
        index = files.index() if files else None
        if index and index[0].get("boundary_ratio") is None:
            return WAN_2_1_SAMPLING, "Wan2.1 (model_index.json has no boundary_ratio)"
        if self.config.in_channels == 36:
            return I2V_A14B_SAMPLING, "Wan2.2-I2V-A14B"
        return T2V_A14B_SAMPLING, "Wan2.2-T2V-A14B"

    def conditioning_keys(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if self.config.in_channels > self.config.out_channels:
            return ("text", "condition"), ()
        return ("text",), ("first_frame",)

    def conditioning_shapes(
        self, latents: Array, conditioning: dict[str, Array]
    ) -> dict[str, checks.Dims]:
        config = self.config
        layers.latent_grid(latents, config.patch, config.out_channels)
        batch, channels, *size = latents.shape
        video = {"batch": batch, "channels": channels} | dict(zip("thw", size, strict=True))
        return {
            "text": {"batch": batch, "rows": None, "text_dim": config.text_dim},
            "first_frame": video | {"t": 1},
            "condition": video | {"channels": config.in_channels - channels},
        }

    def sampling_state(self, latents: Array, conditioning: dict[str, Array]) -> ModelState:
        rows = math.prod(layers.latent_grid(latents, self.config.patch))
        return self.init_attention_state(latents.shape[0], rows)

    def impose(self, latents: Array, conditioning: dict[str, Array]) -> Array:
        """Latents with the clean first frame of image-to-video (TI2V-5B) put in."""
        first = conditioning.get("first_frame")
        if first is None:
            return latents
        return jnp.concatenate([first.astype(latents.dtype), latents[:, :, 1:]], axis=2)

    @own_promotion
    def denoise(
        self,
        latents: Array,
        time: Array,
        conditioning: dict[str, Array],
        control: AttentionControl,
    ) -> tuple[Array, ModelState | None]:
        """One evaluation for the sampler. `conditioning`: `text`, and for image-to-video
        `first_frame` [B, C, 1, H, W] (TI2V-5B) or `condition` [B, 20, T, H, W] (I2V-A14B)."""
        self.check_conditioning(conditioning)
        batch, frames = latents.shape[0], latents.shape[2] // self.config.patch[0]
        timestep = jnp.broadcast_to(time, (batch, 1))
        if conditioning.get("first_frame") is not None:
            timestep = jnp.broadcast_to(time, (batch, frames)).at[:, 0].set(0.0)
        if "condition" in conditioning:
            condition = conditioning["condition"].astype(latents.dtype)
            latents = jnp.concatenate([latents, condition], axis=1)
        out = self(latents, timestep, conditioning["text"], control=control)
        return out if control.state is not None else (out, None)
