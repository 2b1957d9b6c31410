"""HunyuanVideo-1.5 video DiT: joint attention of video and text streams, with padded text.

Facts of the architecture: the published code and diffusers' `HunyuanVideo15Transformer3DModel`.
The text rows of an item are reordered to [valid image, valid byT5, valid text, pads], so that a
prefix length says the same as the peer's dense mask: the joint attention takes
`key_value_seq_lengths` and no mask.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from vc_jax import AttentionState

from ..attention import (
    NO_CONTROL,
    AttentionControl,
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
from .config import (
    SAMPLING_480P,
    SAMPLING_720P_I2V,
    SAMPLING_720P_T2V,
    SAMPLING_STEP_DISTILLED,
    HunyuanVideo15Config,
)
from .text import ByT5Projection, ImageProjection, Refiner

Rows = tuple[Array, Array]
"""Of the video stream and of the text stream."""


class Stream(nnx.Module):
    """One stream (video or text) of a joint block: its own projections, norms, feed-forward."""

    def __init__(self, config: HunyuanVideo15Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        width, heads, size = config.hidden, config.num_heads, config.head_dim
        options: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
        self.norm = layers.LayerNorm(width, epsilon=config.epsilon)
        self.modulation = layers.linear(width, 6 * width, **options)
        self.qkv = layers.HeadsIn(width, 3, heads, size, **options)
        self.q_norm = layers.RMSNorm(size, epsilon=config.epsilon)
        self.k_norm = layers.RMSNorm(size, epsilon=config.epsilon)
        self.out = layers.HeadsOut(heads, size, width, **options)
        inner = int(width * config.mlp_ratio)
        self.mlp = layers.Mlp(width, inner, width, layers.gelu_tanh, **options)

    def modulations(self, condition: Float[Array, "b 1 d"]) -> list[Float[Array, "b 1 d"]]:
        """shift, scale, gate of the attention, then of the feed-forward; `condition` has SiLU."""
        rows = self.modulation(condition).astype(jnp.float32)
        return jnp.split(rows, 6, axis=-1)

    def queries_keys_values(self, x: Array, shift: Array, scale: Array) -> tuple[Array, ...]:
        query, key, value = self.qkv(layers.modulated(self.norm, x, shift, scale))
        return self.q_norm(query), self.k_norm(key), value

    def finish(self, x: Array, attended: Array, modulations: list[Array]) -> Array:
        gate, shift, scale, mlp_gate = modulations
        x = layers.add_gated(x, self.out(attended), gate)
        y = self.mlp(layers.modulated(self.norm, x, shift, scale))
        return layers.add_gated(x, y, mlp_gate)


class JointBlock(nnx.Module):
    """Two streams with one attention over [video ; text]; RoPE turns video rows only."""

    def __init__(self, config: HunyuanVideo15Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.video = Stream(config, dtype=dtype, rngs=rngs)
        self.text = Stream(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        video: Float[Array, "b s d"],
        text: Float[Array, "b l d"],
        condition: Float[Array, "b 1 d"],
        rope: tuple[Array, Array],
        joint_attention: SelfAttention,
    ) -> tuple[Float[Array, "b s d"], Float[Array, "b l d"], AttentionState | None]:
        video_shift, video_scale, *video_rest = self.video.modulations(condition)
        text_shift, text_scale, *text_rest = self.text.modulations(condition)
        query, key, value = self.video.queries_keys_values(video, video_shift, video_scale)
        query, key = layers.rotate_pairs(query, *rope), layers.rotate_pairs(key, *rope)
        of_text = self.text.queries_keys_values(text, text_shift, text_scale)
        joined = [
            jnp.concatenate(pair, axis=1) for pair in zip((query, key, value), of_text, strict=True)
        ]
        attended, state = joint_attention(*joined)
        rows = video.shape[1]
        video = self.video.finish(video, attended[:, :rows], video_rest)
        return video, self.text.finish(text, attended[:, rows:], text_rest), state


class HunyuanVideo15(VideoTransformer):
    """The HunyuanVideo-1.5 transformer (text- and image-to-video, 480p and 720p)."""

    config_class: ClassVar[type] = HunyuanVideo15Config
    layouts: ClassVar = {
        "diffusers": tensors.diffusers,
        "original": tensors.original,
    }

    def __init__(self, config: HunyuanVideo15Config, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(config, **options)
        width, dtype, exact = config.hidden, self.dtype, jnp.float32
        volume = math.prod(config.patch)

        def time_mlp() -> layers.Mlp:
            return layers.Mlp(config.freq_dim, width, width, layers.silu, rngs=rngs, dtype=exact)

        self.patch_embedding = layers.linear(
            config.in_channels * volume, width, rngs=rngs, dtype=dtype
        )
        self.time_mlp = time_mlp()
        self.time_r_mlp = time_mlp() if config.use_meanflow else None
        self.refiner = Refiner(config, dtype=dtype, rngs=rngs)
        self.byt5 = ByT5Projection(config, dtype=dtype, rngs=rngs)
        self.image = ImageProjection(config, dtype=dtype, rngs=rngs)
        self.condition_types = nnx.Param(
            0.02 * jax.random.normal(rngs.params(), (3, width), jnp.float32).astype(dtype)
        )
        self.blocks = stack_blocks(
            lambda rngs: JointBlock(config, dtype=dtype, rngs=rngs), config.num_layers, rngs
        )
        self.final_norm = layers.LayerNorm(width, epsilon=config.epsilon)
        self.final_modulation = layers.linear(width, 2 * width, rngs=rngs, dtype=dtype)
        self.head = layers.linear(width, config.out_channels * volume, rngs=rngs, dtype=dtype)

    @classmethod
    def adapt_config(
        cls, config: HunyuanVideo15Config, shapes: dict[str, tuple[int, ...]]
    ) -> HunyuanVideo15Config:
        """The released configurations do not say how wide the byT5 projection is, those in the
        original layout not how deep and wide the refiner."""
        found: dict[str, Any] = {}
        for name in ("context_embedder_2.linear_1.weight", "byt5_in.fc1.weight"):
            if name in shapes and len(shapes[name]) == 2:
                found["byt5_hidden"], found["byt5_dim"] = shapes[name]
        for block, fc_in in (
            ("context_embedder.token_refiner.refiner_blocks", "ff.net.0.proj"),
            ("txt_in.individual_token_refiner.blocks", "mlp.fc1"),
        ):
            layers = {
                name for name in shapes if re.fullmatch(rf"{block}\.\d+\.norm1\.weight", name)
            }
            if layers:
                found["num_refiner_layers"] = len(layers)
            inner = shapes.get(f"{block}.0.{fc_in}.weight")
            if inner and inner[0] != int(config.hidden * config.refiner_mlp_ratio):
                found["refiner_mlp_ratio"] = inner[0] / config.hidden
        return dataclasses.replace(config, **found)

    def time_embedding(
        self, timestep: ArrayLike, timestep_r: ArrayLike | None = None
    ) -> Float[Array, "b d"]:
        embedding = self.time_mlp(layers.timestep_embedding(timestep, self.config.freq_dim))
        if (self.time_r_mlp is None) != (timestep_r is None):
            raise ValueError("timestep_r: needed by a MeanFlow model, and by no other")
        if self.time_r_mlp is not None and timestep_r is not None:
            embedding = embedding + self.time_r_mlp(
                layers.timestep_embedding(timestep_r, self.config.freq_dim)
            )
        return embedding

    def rope(self, grid: tuple[int, ...]) -> tuple[Array, Array]:
        return layers.grid_rope(grid, self.config.rope_axes, self.config.rope_theta)

    def text_rows(
        self,
        timestep: Array,
        text: Array,
        text_mask: Array,
        byt5: Array,
        byt5_mask: Array,
        image: Array,
    ) -> tuple[Float[Array, "b l d"], Int[Array, "b"]]:
        """The text stream's input, valid rows first, and how many of them are valid."""
        attention = attention_function(self.cross_attention, "cross_attention")
        keep, text = checks.keep_mask("text_mask", text_mask, text)
        keep_byt5, byt5 = checks.keep_mask("byt5_mask", byt5_mask, byt5)
        masks = [keep, keep_byt5]
        # An item without image rows (all zero) keeps them as pads, as in the peer.
        has_image = jnp.any(image != 0, axis=(1, 2))
        masks.append(jnp.broadcast_to(has_image[:, None], image.shape[:2]))
        byt5 = jnp.where(masks[1][..., None], byt5, 0).astype(self.dtype)
        parts = [
            self.refiner(text, masks[0], timestep, attention, scan=self.scan_layers),
            self.byt5(byt5),
            jnp.where(masks[2][..., None], self.image(image.astype(self.dtype)), 0),
        ]
        parts = [part + kind for part, kind in zip(parts, self.condition_types[...], strict=True)]
        parts[:2] = [jnp.where(m[..., None], p, 0) for p, m in zip(parts, masks[:2], strict=False)]
        rows = jnp.concatenate(parts[::-1], axis=1)
        valid = jnp.concatenate(masks[::-1], axis=1)
        order = jnp.argsort(~valid, axis=1, stable=True)
        rows = jnp.take_along_axis(rows, order[..., None], axis=1)
        return rows, jnp.sum(valid, axis=1, dtype=jnp.int32)

    def run_joint_blocks(
        self,
        video: Array,
        text: Array,
        lengths: Array,
        embedding: Array,
        rope: tuple[Array, Array],
        control: AttentionControl,
    ) -> tuple[Array, Array, AttentionState | None]:
        """All joint blocks; `lengths` counts the valid text rows. Returns video, text, state."""
        condition = jax.nn.silu(embedding)[:, None].astype(self.dtype)
        lengths = lengths + video.shape[1]

        def body(
            block: JointBlock, carry: Rows, inputs: LayerInputs
        ) -> tuple[Rows, AttentionState | None]:
            state, flag = inputs

            def joint_attention(
                query: Array, key: Array, value: Array
            ) -> tuple[Array, AttentionState | None]:
                return attend(
                    self.attention,
                    query,
                    key,
                    value,
                    control,
                    state,
                    flag,
                    key_value_seq_lengths=lengths,
                    mesh=self.mesh,
                )

            video, text, state = block(*carry, condition, rope, joint_attention)
            return (video, text), state

        (video, text), state = run_blocks(
            self.blocks,
            body,
            (video, text),
            control.per_layer(self.config.num_layers),
            scan=self.scan_layers,
            remat=self.remat,
            mesh=self.mesh,
        )
        return video, text, state

    @own_promotion
    def __call__(
        self,
        latents: Float[Array, "b c t h w"],
        timestep: ArrayLike,
        text: Float[Array, "b l e"],
        text_mask: ArrayLike,
        byt5: Float[Array, "b m f"],
        byt5_mask: ArrayLike,
        image: Float[Array, "b i g"],
        *,
        timestep_r: ArrayLike | None = None,
        control: AttentionControl | None = None,
    ) -> Any:
        """Velocity at a timestep.

        Args:
          latents: latents, condition latents and mask, `in_channels` together.
          timestep: [B], 0..1000, used in float32.
          text, text_mask: rows of the first text encoder and their keep-mask [B, L]; what masked
            rows hold does not matter.
          byt5, byt5_mask: the byT5 rows, likewise; an item may have none.
          image: rows of the image encoder; all zero for an item of text-to-video.
          timestep_r: [B], the second time of MeanFlow models.
          control: state and policies of the joint attention.

        Returns:
          [B, out_channels, T, H, W] in float32, and the new state if `control` has one.

        Raises:
          ValueError: shapes that do not fit, by argument.
        """
        config, control = self.config, control or NO_CONTROL
        grid = layers.latent_grid(latents, config.patch, config.in_channels)
        text_mask, byt5_mask = jnp.asarray(text_mask), jnp.asarray(byt5_mask)
        conditioning = {"text": text, "text_mask": text_mask, "byt5": byt5, "byt5_mask": byt5_mask}
        times = {"timestep": timestep} | ({} if timestep_r is None else {"timestep_r": timestep_r})
        shapes = self._input_shapes(latents, text, byt5)
        for name, array in (times | conditioning | {"image": image}).items():
            checks.check_shape(name, array, shapes[name])
        timestep = jnp.asarray(timestep, jnp.float32)
        embedding = self.time_embedding(timestep, timestep_r)
        rows, lengths = self.text_rows(timestep, text, text_mask, byt5, byt5_mask, image)
        x = self.patch_embedding(layers.patchify(latents, config.patch).astype(self.dtype))
        x, _, state = self.run_joint_blocks(x, rows, lengths, embedding, self.rope(grid), control)
        modulation = self.final_modulation(jax.nn.silu(embedding).astype(self.dtype))
        shift, scale = jnp.split(modulation[:, None].astype(jnp.float32), 2, axis=-1)
        y = self.head(layers.modulated(self.final_norm, x, shift, scale)).astype(jnp.float32)
        out = layers.unpatchify(y, grid, config.patch, channels_first=True)
        return out if control.state is None else (out, state)

    def _input_shapes(self, latents: Array, text: Array, byt5: Array) -> dict[str, checks.Dims]:
        """Shapes of everything beside the latents; masks follow the rows that they are of."""
        config, batch = self.config, {"batch": latents.shape[0]}
        shapes: dict[str, checks.Dims] = {"timestep": batch, "timestep_r": batch}
        for name, dim in (("text", "text_dim"), ("byt5", "byt5_dim"), ("image", "image_dim")):
            shapes[name] = batch | {"rows": None, dim: getattr(config, dim)}
        for name, rows in (("text", text), ("byt5", byt5)):
            checks.check_shape(name, rows, shapes[name])
            shapes[f"{name}_mask"] = batch | {f"rows of {name}": rows.shape[1]}
        return shapes

    @property
    def needs_next_time(self) -> bool:
        return self.config.use_meanflow

    def release_sampling(self, files: Files | None) -> tuple[Sampling, str]:
        """The authors' configurations do not say that a model is distilled; folders' names do."""
        config = self.config
        if config.use_meanflow:
            return SAMPLING_STEP_DISTILLED, "HunyuanVideo-1.5, step-distilled (use_meanflow)"
        if config.target_size < 960:
            sampling, name = SAMPLING_480P, "480p"
        elif config.task == "t2v":
            sampling, name = SAMPLING_720P_T2V, "720p from text"
        else:
            sampling, name = SAMPLING_720P_I2V, "720p from an image"
        folder = files.folder if files else Path()
        if "distilled" in (folder.parent.name if folder.name == "transformer" else folder.name):
            sampling = dataclasses.replace(sampling, guidance=1.0)
            name = f"{name}, distilled (by the folder's name)"
        return sampling, f"HunyuanVideo-1.5 {name}"

    def conditioning_keys(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("condition", "text", "text_mask", "byt5", "byt5_mask", "image"), ()

    def conditioning_shapes(
        self, latents: Array, conditioning: dict[str, Array]
    ) -> dict[str, checks.Dims]:
        config = self.config
        layers.latent_grid(latents, config.patch, config.out_channels)
        batch, channels, *size = latents.shape
        video = {"batch": batch, "channels": config.in_channels - channels}
        shapes = self._input_shapes(latents, conditioning["text"], conditioning["byt5"])
        return shapes | {"condition": video | dict(zip("thw", size, strict=True))}

    def sampling_state(self, latents: Array, conditioning: dict[str, Array]) -> ModelState:
        rows = math.prod(layers.latent_grid(latents, self.config.patch))
        rows += sum(conditioning[name].shape[1] for name in ("text", "byt5", "image"))
        return self.init_attention_state(latents.shape[0], rows)

    @own_promotion
    def denoise(
        self,
        latents: Array,
        time: Array,
        conditioning: dict[str, Array],
        control: AttentionControl,
        *,
        next_time: Array | None = None,
    ) -> tuple[Array, ModelState | None]:
        """One evaluation for the sampler. `conditioning`: `condition` [B, 33, T, H, W] (condition
        latents and mask), `text`, `text_mask`, `byt5`, `byt5_mask`, `image`. A MeanFlow model
        predicts the mean velocity between `time` and `next_time`, the time after the step."""
        self.check_conditioning(conditioning)
        rest = dict(conditioning)
        condition = rest.pop("condition").astype(latents.dtype)
        latents = jnp.concatenate([latents, condition], axis=1)
        timestep = jnp.broadcast_to(time, (latents.shape[0],))
        if next_time is not None:
            next_time = jnp.broadcast_to(next_time, (latents.shape[0],))
        out = self(latents, timestep, **rest, timestep_r=next_time, control=control)
        return out if control.state is not None else (out, None)
