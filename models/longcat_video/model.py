"""LongCat-Video DiT: modulation per latent frame, text cross-attention, conditioning frames.

Facts of the architecture: the published code (`longcat_video/modules`). With clean conditioning
frames in front, their rows attend only to themselves and skip the text, the others attend to all;
a cache of the conditioning frames' keys and values gives the same result. The 720p refinement
stage of the release uses block-sparse attention; here it is dense.
"""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from vc_jax import AttentionState

from ..attention import (
    NO_CONTROL,
    AttentionControl,
    ModelState,
    attend,
    attention_to_text,
)
from ..common import checks, layers
from ..common.base import VideoTransformer, run_blocks, stack_blocks
from ..common.promotion import own_promotion
from ..common.release import Files
from ..common.schedulers import Sampling
from . import tensors
from .block import KVCache, LongCatBlock
from .config import LONGCAT_VIDEO_SAMPLING, LongCatVideoConfig

States = dict[str, AttentionState]
"""By call: `noise` attends to all keys, `cond` (if there is one) to the conditioning frames."""


class LongCatVideo(VideoTransformer):
    """The LongCat-Video transformer: text-to-video, image-to-video and continuation."""

    config_class: ClassVar[type] = LongCatVideoConfig
    layouts: ClassVar = {
        "diffusers": tensors.diffusers,
        "original": tensors.original,
    }
    batch_axes: ClassVar[dict[str, int]] = {"kv_cache": 1}

    def __init__(self, config: LongCatVideoConfig, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(config, **options)
        width, exact = config.hidden, jnp.float32
        volume, time_dim = math.prod(config.patch), config.time_dim
        self.patch_embedding = layers.linear(
            config.in_channels * volume, width, rngs=rngs, dtype=self.dtype
        )
        self.time_mlp = layers.Mlp(
            config.freq_dim, time_dim, time_dim, layers.silu, rngs=rngs, dtype=exact
        )
        self.text_mlp = layers.Mlp(
            config.text_dim, width, width, layers.gelu_tanh, rngs=rngs, dtype=self.dtype
        )
        self.blocks = stack_blocks(
            lambda rngs: LongCatBlock(config, dtype=self.dtype, rngs=rngs), config.num_layers, rngs
        )
        self.final_norm = layers.LayerNorm(width, epsilon=config.epsilon)
        self.final_modulation = layers.linear(time_dim, 2 * width, rngs=rngs, dtype=exact)
        self.head = layers.linear(width, config.out_channels * volume, rngs=rngs, dtype=exact)

    def time_embedding(
        self, timestep: ArrayLike, frames: int, clean: int = 0
    ) -> Float[Array, "b t c"]:
        """Embedding of a timestep [B] or [B, T], one row a latent frame, before its SiLU.

        The first `clean` frames are at time 0. The timestep is rounded to the model's dtype
        first, as the peer does.
        """
        timestep = jnp.asarray(timestep).astype(self.dtype)
        if timestep.ndim == 1:
            timestep = jnp.broadcast_to(timestep[:, None], (timestep.shape[0], frames))
        if timestep.ndim != 2 or timestep.shape[1] != frames:
            raise ValueError(f"timestep: expected [B] or [B, {frames}], got {timestep.shape}")
        timestep = jnp.where(jnp.arange(frames) < clean, 0, timestep)
        return self.time_mlp(layers.timestep_embedding(timestep, self.config.freq_dim))

    def context(self, text: Array, text_mask: Array | None) -> tuple[Array, Array | None]:
        """Projected text rows, and the mask that the cross-attention has to apply."""
        if text_mask is None:
            return self.text_mlp(text.astype(self.dtype)), None
        keep, text = checks.keep_mask("text_mask", text_mask, text)
        rows = self.text_mlp(text.astype(self.dtype))
        rows = jnp.where(keep[..., None], rows, 0)
        return rows, None if self.config.attend_text_pads else keep

    def rope(self, grid: tuple[int, ...]) -> tuple[Array, Array]:
        return layers.grid_rope(grid, self.config.rope_axes, self.config.rope_theta)

    def init_attention_state(self, batch: int, kv_length: int, cond_length: int = 0) -> States:
        """States of the two self-attention calls: `noise` (all keys), and `cond` if
        `cond_length` conditioning rows go through the model (not through a cache)."""
        states: dict[str, Any] = {"noise": super().init_attention_state(batch, kv_length)}
        if cond_length:
            states["cond"] = super().init_attention_state(batch, cond_length)
        return states

    @own_promotion
    def __call__(
        self,
        latents: Float[Array, "b c t h w"],
        timestep: ArrayLike,
        text: Float[Array, "b l e"],
        text_mask: ArrayLike | None = None,
        *,
        num_cond_latents: int = 0,
        kv_cache: KVCache | None = None,
        return_kv: bool = False,
        skip_cross_attention: bool = False,
        control: AttentionControl | None = None,
    ) -> Any:
        """Prediction at a timestep; its sign is the model's own (the sampler negates it).

        Args:
          latents: with `kv_cache`, the noisy frames only.
          timestep: [B] or one a latent frame [B, T], 0..1000; conditioning frames in `latents`
            get 0.
          text: UMT5 rows.
          text_mask: keep-mask [B, L], or None for no pads.
          num_cond_latents: clean frames at the front of `latents`, or in the cache.
          kv_cache: keys and values of the conditioning frames, from `return_kv`.
          return_kv: also return a `KVCache` of `latents` (then all of them conditioning frames).
          skip_cross_attention: leave the text out (to fill a cache).
          control: state (see `init_attention_state`) and policies of the self-attention.

        Returns:
          [B, out_channels, T, H, W] in float32; then the cache if `return_kv`; then the new state
          if `control` has one (a tuple if there is more than one).

        Raises:
          ValueError: arguments that do not fit, by name.
        """
        config, control = self.config, control or NO_CONTROL
        grid = layers.latent_grid(latents, config.patch, config.in_channels)
        self._check_inputs(latents, timestep, text, text_mask)
        rows_per_frame = grid[1] * grid[2]
        cond_rows = 0 if kv_cache is not None else num_cond_latents * rows_per_frame
        if num_cond_latents < 0 or cond_rows >= grid[0] * rows_per_frame:
            raise ValueError(f"num_cond_latents: {num_cond_latents} of {grid[0]} latent frames")
        if kv_cache is not None:
            self._check_cache(kv_cache, latents.shape[0], num_cond_latents * rows_per_frame)
        clean = 0 if kv_cache is not None else num_cond_latents
        active = jax.nn.silu(self.time_embedding(timestep, grid[0], clean))
        context, mask = self.context(text, None if text_mask is None else jnp.asarray(text_mask))
        cross = attention_to_text(self.cross_attention, self.mesh)
        # Frames in a cache come before these.
        before = 0 if kv_cache is None else num_cond_latents
        rope = self.rope((before + grid[0], *grid[1:]))
        x = self.patch_embedding(layers.patchify(latents, config.patch).astype(self.dtype))

        def text_attention(block: LongCatBlock, normed: Array) -> Array:
            if skip_cross_attention:
                return jnp.zeros_like(normed)
            rows = block.cross_attention(normed[:, cond_rows:], context, mask, cross)
            return jnp.pad(rows, ((0, 0), (cond_rows, 0), (0, 0)))

        def body(
            block: LongCatBlock, x: Array, inputs: tuple[tuple[States | None, Any], KVCache | None]
        ) -> tuple[Array, tuple[States | None, KVCache | None]]:
            (state, flag), cached = inputs

            def self_attention(
                query: Array, key: Array, value: Array
            ) -> tuple[Array, States | None]:
                return self._self_attention(query, key, value, cond_rows, control, state, flag)

            x, state, kept = block(x, active, rope, cached, self_attention, text_attention)
            return x, (state, kept if return_kv else None)

        per_layer = (control.per_layer(config.num_layers), kv_cache)
        options: dict[str, Any] = {"scan": self.scan_layers, "remat": self.remat}
        x, (state, kept) = run_blocks(self.blocks, body, x, per_layer, mesh=self.mesh, **options)
        shift, scale = jnp.split(self.final_modulation(active), 2, axis=-1)
        rows = self.head(layers.modulated(self.final_norm, x.astype(jnp.float32), shift, scale))
        out = layers.unpatchify(rows, grid, config.patch, channels_first=False)
        results = (out, *([kept] if return_kv else []))
        results = (*results, *([] if control.state is None else [state]))
        return results if len(results) > 1 else out

    def _check_inputs(
        self, latents: Array, timestep: ArrayLike, text: Array, text_mask: ArrayLike | None
    ) -> None:
        batch, frames = {"batch": latents.shape[0]}, latents.shape[2]
        checks.check_shape("timestep", timestep, batch, batch | {"frames": frames})
        checks.check_shape("text", text, batch | {"rows": None, "text_dim": self.config.text_dim})
        if text_mask is not None:
            checks.check_shape("text_mask", text_mask, batch | {"rows of text": text.shape[1]})

    def _check_cache(self, cache: KVCache, batch: int, rows: int) -> None:
        config = self.config
        dims = {
            "layers": config.num_layers,
            "batch": batch,
            "num_cond_latents · rows a frame": rows,
            "heads": config.num_heads,
            "head_dim": config.head_dim,
        }
        for name, array in zip(("key", "value"), cache, strict=True):
            checks.check_shape(f"kv_cache.{name}", array, dims, dims | {"batch": 1})

    def _self_attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        cond_rows: int,
        control: AttentionControl,
        state: States | None,
        flag: Bool[Array, ""] | None,
    ) -> tuple[Array, States | None]:
        """One call, or two when conditioning rows stand in front: they see only themselves."""
        states: dict[str, Any] = state if state is not None else {"noise": None, "cond": None}
        if cond_rows and "cond" not in states:
            raise ValueError("control.state: needs `cond`; see init_attention_state")
        where: dict[str, Any] = {"mesh": self.mesh}
        attended, noise_state = attend(
            self.attention,
            query[:, cond_rows:],
            key,
            value,
            control,
            states["noise"],
            flag,
            **where,
        )
        new: dict[str, Any] = {"noise": noise_state}
        if cond_rows:
            query, key, value = (x[:, :cond_rows] for x in (query, key, value))
            of_cond, new["cond"] = attend(
                self.attention, query, key, value, control, states["cond"], flag, **where
            )
            attended = jnp.concatenate([of_cond, attended], axis=1)
        return attended, None if state is None else new

    def release_sampling(self, files: Files | None) -> tuple[Sampling, str]:
        return LONGCAT_VIDEO_SAMPLING, "LongCat-Video"

    def conditioning_keys(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("text",), ("text_mask", "cond_latents", "kv_cache")

    def conditioning_shapes(
        self, latents: Array, conditioning: dict[str, Any]
    ) -> dict[str, checks.Dims]:
        config = self.config
        layers.latent_grid(latents, config.patch, config.in_channels)
        batch, channels, _, height, width = latents.shape
        text = {"batch": batch, "rows": None, "text_dim": config.text_dim}
        checks.check_shape("conditioning['text']", conditioning["text"], text)
        rows = conditioning["text"].shape[1]
        frames = {"batch": batch, "channels": channels, "t": None, "h": height, "w": width}
        return {"text_mask": {"batch": batch, "rows of text": rows}, "cond_latents": frames}

    def sampling_state(self, latents: Array, conditioning: dict[str, Any]) -> ModelState:
        frame = math.prod(layers.latent_grid(latents, self.config.patch)[1:])
        frames, cache = conditioning.get("cond_latents"), conditioning.get("kv_cache")
        rows = latents.shape[2] * frame + (0 if cache is None else cache.key.shape[2])
        cond = 0 if frames is None else frames.shape[2] * frame
        return self.init_attention_state(latents.shape[0], rows, cond)

    def impose(self, latents: Array, conditioning: dict[str, Any]) -> Array:
        """Latents with the clean conditioning frames put in front."""
        frames = conditioning.get("cond_latents")
        if frames is None:
            return latents
        rest = latents[:, :, frames.shape[2] :]
        return jnp.concatenate([frames.astype(latents.dtype), rest], axis=2)

    @own_promotion
    def denoise(
        self,
        latents: Array,
        time: Array,
        conditioning: dict[str, Any],
        control: AttentionControl,
    ) -> tuple[Array, ModelState | None]:
        """One evaluation for the sampler. `conditioning`: `text`, `text_mask` (optional), and for
        continuation `cond_latents` [B, C, n, H, W], or `kv_cache` of those frames."""
        self.check_conditioning(conditioning)
        frames, cache = conditioning.get("cond_latents"), conditioning.get("kv_cache")
        if frames is not None and cache is not None:
            raise ValueError("conditioning: cond_latents or their kv_cache, not both")
        count = 0 if frames is None else frames.shape[2]
        if cache is not None:
            patch = self.config.patch
            count = cache.key.shape[2] * patch[1] * patch[2] // math.prod(latents.shape[3:])
        timestep = jnp.broadcast_to(time, (latents.shape[0],))
        out = self(
            latents,
            timestep,
            conditioning["text"],
            conditioning.get("text_mask"),
            num_cond_latents=count,
            kv_cache=cache,
            control=control,
        )
        out, state = out if control.state is not None else (out, None)
        return -out, state
