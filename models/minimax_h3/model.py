"""MiniMax-H3 DiT: one packed sequence of text, keyframe, audio and video rows.

Facts of the architecture: diffusers' `MiniMaxH3Transformer3DModel`. There is no cross-attention
and no mask; every row is modulated by its (timestep, modality) pair, times run from 0 (noise) to
1 (clean), and the prediction points at the data.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from vc_jax import AttentionState

from ..attention import (
    NO_CONTROL,
    AttentionControl,
    AttentionFunction,
    LayerInputs,
    ModelState,
    SelfAttention,
    attend,
    attention_function,
)
from ..common import checks, layers
from ..common.base import VideoTransformer, run_blocks, stack_blocks
from ..common.promotion import own_promotion
from ..common.release import Files
from ..common.schedulers import Sampling
from . import tensors
from .config import MINIMAX_H3_SAMPLING, MiniMaxH3Config
from .packing import MODALITIES, PackedLayout


class PlainBlock(nnx.Module):
    """Self-attention and SwiGLU with RMSNorm in front of each: a refiner block as it stands."""

    def __init__(self, config: MiniMaxH3Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        width, heads, size = config.hidden, config.num_heads, config.head_dim
        options: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
        self.norm1 = layers.RMSNorm(width, epsilon=config.epsilon)
        self.norm2 = layers.RMSNorm(width, epsilon=config.epsilon)
        self.qkv = layers.HeadsIn(width, 3, heads, size, bias=False, **options)
        self.q_norm = layers.RMSNorm(size, epsilon=config.qk_epsilon)
        self.k_norm = layers.RMSNorm(size, epsilon=config.qk_epsilon)
        self.out = layers.HeadsOut(heads, size, width, bias=False, **options)
        self.ffn = layers.SwiGlu(width, config.ffn_dim, **options)

    def queries_keys_values(self, x: Array) -> tuple[Array, Array, Array]:
        query, key, value = self.qkv(x)
        return self.q_norm(query), self.k_norm(key), value

    def __call__(self, x: Array, attention: AttentionFunction) -> Array:
        x = x + self.out(attention(*self.queries_keys_values(self.norm1(x))))
        return x + self.ffn(self.norm2(x))


class MiniMaxH3Block(PlainBlock):
    """The same with RoPE, and shift, scale and gate for every (timestep, modality) pair."""

    def __init__(self, config: MiniMaxH3Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        outputs = 6 * MODALITIES * config.hidden
        self.modulation = layers.linear(config.time_dim, outputs, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "b s d"],
        active: Float[Array, "times c"],
        table_rows: Int[Array, "s"],
        rope: tuple[Array, Array],
        self_attention: SelfAttention,
    ) -> tuple[Float[Array, "b s d"], AttentionState | None]:
        """`table_rows` = timestep index · 3 + modality; returns the rows and the state."""
        table = self.modulation(active).reshape(-1, 6, x.shape[-1])
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (
            table[table_rows, index][None].astype(jnp.float32) for index in range(6)
        )
        query, key, value = self.queries_keys_values(layers.modulated(self.norm1, x, shift, scale))
        query, key = layers.rotate_halves(query, *rope), layers.rotate_halves(key, *rope)
        attended, state = self_attention(query, key, value)
        x = layers.add_gated(x, self.out(attended), gate)
        y = self.ffn(layers.modulated(self.norm2, x, ffn_shift, ffn_scale))
        return layers.add_gated(x, y, ffn_gate), state


class MiniMaxH3(VideoTransformer):
    """The MiniMax-H3 transformer (text, keyframes and references to video and audio)."""

    config_class: ClassVar[type] = MiniMaxH3Config
    layouts: ClassVar = {
        "diffusers": tensors.diffusers,
        "original": tensors.original,
    }

    def __init__(self, config: MiniMaxH3Config, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(config, **options)
        width, dtype, exact = config.hidden, self.dtype, jnp.float32
        rows = config.patch_features

        def create(kind: type[PlainBlock]) -> Callable[[nnx.Rngs], PlainBlock]:
            return lambda rngs: kind(config, dtype=dtype, rngs=rngs)

        # Patch projections, time embedding and heads are float32 in the release.
        self.video_in = layers.linear(rows, width, rngs=rngs, dtype=exact)
        self.audio_in = layers.linear(config.audio_channels, width, rngs=rngs, dtype=exact)
        self.text_in = layers.linear(config.text_dim, width, rngs=rngs, dtype=dtype)
        self.time_mlp = layers.Mlp(
            config.freq_dim,
            config.time_hidden,
            config.time_dim,
            layers.silu,
            rngs=rngs,
            dtype=exact,
        )
        self.refiner = stack_blocks(create(PlainBlock), config.num_refiner_layers, rngs)
        self.refiner_norm = layers.RMSNorm(width, epsilon=config.final_epsilon)
        self.blocks = stack_blocks(create(MiniMaxH3Block), config.num_layers, rngs)
        self.final_norm = layers.RMSNorm(width, epsilon=config.final_epsilon)
        self.final_modulation = layers.linear(config.time_dim, 2 * width, rngs=rngs, dtype=dtype)
        self.video_out = layers.linear(width, rows, rngs=rngs, dtype=exact)
        self.audio_out = layers.linear(width, config.audio_channels, rngs=rngs, dtype=exact)

    def time_embedding(self, timestep: ArrayLike) -> Float[Array, "times c"]:
        """Embedding of times in [0, 1], before its SiLU."""
        return self.time_mlp(layers.timestep_embedding(timestep, self.config.freq_dim))

    def rope(self, positions: ArrayLike) -> tuple[Array, Array]:
        """Cosines and sines [S, 3 · rope_freqs] of fractional (t, h, w) positions [S, 3]."""
        count = self.config.rope_freqs
        frequencies = self.config.rope_theta ** (-np.arange(count) / count)
        angles = jnp.asarray(positions, jnp.float32)[..., None] * frequencies.astype(np.float32)
        angles = angles.reshape(angles.shape[0], 3 * count)
        return jnp.cos(angles), jnp.sin(angles)

    def refine_text(self, text: Array) -> Array:
        attention = attention_function(self.cross_attention, "cross_attention")
        x = self.text_in(text.astype(self.dtype))

        def body(block: PlainBlock, x: Array, _: None) -> tuple[Array, None]:
            return block(x, attention), None

        x, _ = run_blocks(self.refiner, body, x, scan=self.scan_layers)
        return self.refiner_norm(x)

    def pack(self, video: Array, audio: Array, text: Array, layout: PackedLayout) -> Array:
        """The packed sequence [B, S, D]; `text` is already refined."""
        packed = jnp.zeros((text.shape[0], len(layout.tags), self.config.hidden), self.dtype)
        packed = packed.at[:, layout.text_indices].set(text)
        video, audio = self.video_in(video), self.audio_in(audio)
        packed = packed.at[:, layout.video_indices].set(video.astype(self.dtype))
        return packed.at[:, layout.audio_indices].set(audio.astype(self.dtype))

    @own_promotion
    def __call__(
        self,
        video: Float[Array, "b v p"],
        audio: Float[Array, "b a q"],
        text: Float[Array, "b l e"],
        timestep: Float[Array, "times"],
        timestep_indices: Int[Array, "s"],
        layout: PackedLayout,
        *,
        control: AttentionControl | None = None,
    ) -> Any:
        """Data-ward velocities of the video and audio rows.

        Args:
          video: patchified rows (c, pt, ph, pw), in the order of `layout.video_indices`:
            conditioning rows first.
          audio: rows in the order of `layout.audio_indices`.
          text: Qwen3-VL rows, in the order of `layout.text_indices`.
          timestep: the distinct times of this pass, in [0, 1].
          timestep_indices: each packed row's index into `timestep`.
          layout: where each row stands, what it is and its rotary position.
          control: state and policies of the self-attention.

        Returns:
          `(video [B, V, p], audio [B, A, q])` in float32, conditioning rows included; and the new
          state as a third if `control` has one.

        Raises:
          ValueError: shapes that do not fit each other, the layout or the model, and indices out
            of range (where they are known: not in a trace), by argument.
        """
        config, control = self.config, control or NO_CONTROL
        batch = video.shape[0] if video.ndim else None
        for name, array in (("video", video), ("audio", audio), ("text", text)):
            checks.check_shape(name, array, self._row_shapes(batch, layout)[name])
        self._check_layout(layout, timestep, timestep_indices)
        timestep_indices = jnp.asarray(timestep_indices, jnp.int32)
        active = jax.nn.silu(self.time_embedding(timestep)).astype(self.dtype)
        table_rows = timestep_indices * MODALITIES + jnp.asarray(layout.tags, jnp.int32)
        rope = self.rope(layout.positions)
        x = self.pack(video, audio, self.refine_text(text), layout)

        def body(
            block: MiniMaxH3Block, x: Array, inputs: LayerInputs
        ) -> tuple[Array, AttentionState | None]:
            state, flag = inputs

            def self_attention(
                query: Array, key: Array, value: Array
            ) -> tuple[Array, AttentionState | None]:
                return attend(
                    self.attention, query, key, value, control, state, flag, mesh=self.mesh
                )

            return block(x, active, table_rows, rope, self_attention)

        x, state = run_blocks(
            self.blocks,
            body,
            x,
            control.per_layer(config.num_layers),
            scan=self.scan_layers,
            remat=self.remat,
            mesh=self.mesh,
        )
        table = self.final_modulation(active).astype(jnp.float32)
        shift, scale = jnp.split(table[timestep_indices][None], 2, axis=-1)
        # Each head needs its own rows only.
        outs = []
        for indices, head in (
            (layout.video_indices, self.video_out),
            (layout.audio_indices, self.audio_out),
        ):
            y = layers.modulated(
                self.final_norm, x[:, indices], shift[:, indices], scale[:, indices]
            )
            outs.append(head(y))
        return tuple(outs) if control.state is None else (*outs, state)

    def release_sampling(self, files: Files | None) -> tuple[Sampling, str]:
        return MINIMAX_H3_SAMPLING, "MiniMax-H3"

    def _row_shapes(self, batch: int | None, layout: PackedLayout) -> dict[str, checks.Dims]:
        config = self.config
        for name in ("text_indices", "audio_indices", "video_indices"):
            if len(getattr(layout, name)) == 0:
                raise ValueError(f"layout.{name}: expected at least one row")
        widths = {
            "video": ("patch_features", config.patch_features),
            "audio": ("audio_channels", config.audio_channels),
            "text": ("text_dim", config.text_dim),
        }
        return {
            name: {"batch": batch, "rows": len(getattr(layout, f"{name}_indices")), width: size}
            for name, (width, size) in widths.items()
        }

    def _check_layout(
        self, layout: PackedLayout, timestep: ArrayLike, timestep_indices: ArrayLike
    ) -> None:
        count = len(layout.tags)
        checks.check_shape("timestep", timestep, {"times": None})
        checks.check_shape("timestep_indices", timestep_indices, {"rows": count})
        checks.check_indices("timestep_indices", timestep_indices, np.shape(timestep)[0])
        checks.check_shape("layout.positions", layout.positions, {"rows": count, "axes": 3})
        checks.check_indices("layout.tags", layout.tags, MODALITIES)
        for name in ("text_indices", "audio_indices", "video_indices"):
            checks.check_indices(f"layout.{name}", getattr(layout, name), count)

    def conditioning_keys(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("text", "layout"), ("keyframe_rows", "keyframe_time")

    def conditioning_shapes(
        self, latents: dict[str, Array], conditioning: dict[str, Any]
    ) -> dict[str, checks.Dims]:
        if sorted(latents) != ["audio", "video"]:
            raise ValueError(f"latents: expected 'video' and 'audio', got {sorted(latents)}")
        layout, video = conditioning["layout"], latents["video"]
        batch = video.shape[0] if video.ndim else None
        shapes = self._row_shapes(batch, layout)
        checks.check_shape("latents['audio']", latents["audio"], shapes["audio"])
        # Of the layout's video rows, the keyframes' are given and the others are latents.
        keyframes, rows = conditioning.get("keyframe_rows"), dict(shapes["video"])
        if keyframes is None:
            checks.check_shape("latents['video']", video, rows)
        checks.check_shape("latents['video']", video, rows | {"rows": None})
        keyframe_rows = rows | {"rows": len(layout.video_indices) - video.shape[1]}
        return {"text": shapes["text"], "keyframe_rows": keyframe_rows, "keyframe_time": {}}

    def sampling_state(self, latents: dict[str, Array], conditioning: dict[str, Any]) -> ModelState:
        return self.init_attention_state(
            latents["video"].shape[0], len(conditioning["layout"].tags)
        )

    @own_promotion
    def denoise(
        self,
        latents: dict[str, Array],
        time: dict[str, Array],
        conditioning: dict[str, Any],
        control: AttentionControl,
    ) -> tuple[dict[str, Array], ModelState | None]:
        """One evaluation for the sampler, in which velocities point away from the data.

        `latents` and `time` have `video` and `audio`. `conditioning`: `text`, `layout`, and with
        keyframes `keyframe_rows` [B, C, p] (noised to `keyframe_time`, 0.999 in the release).
        """
        self.check_conditioning(conditioning)
        layout: PackedLayout = conditioning["layout"]
        video = latents["video"]
        keyframes = conditioning.get("keyframe_rows")
        if keyframes is not None:
            video = jnp.concatenate([keyframes.astype(video.dtype), video], axis=1)
        fixed = jnp.asarray(conditioning.get("keyframe_time", 0.999), jnp.float32)
        times = jnp.stack([time["video"], time["audio"], fixed])
        video_out, audio_out, *state = self(
            video,
            latents["audio"],
            conditioning["text"],
            times,
            jnp.asarray(layout.time_indices),
            layout,
            control=control,
        )
        count = 0 if keyframes is None else keyframes.shape[1]
        velocity = {"video": -video_out[:, count:], "audio": -audio_out}
        return velocity, (state[0] if state else None)
