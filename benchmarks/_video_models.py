"""The ported models at full size, with the inputs of one denoising step at their 720p shape.

Weights and inputs are random. Batch 1, one conditional evaluation: where a release uses
classifier-free guidance, a denoising step costs two of these.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..models import hunyuan_video15, longcat_video, minimax_h3, wan
from ..models.common.base import VideoTransformer
from ._workloads import Workload

Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class VideoModel:
    """A model and the shapes of one step.

    Attributes:
      name, title: on the command line, and in tables.
      kind, config: the module and its sizes.
      what: the video, in words.
      latents: shape of the latents, or shapes by name.
      conditioning: shapes of the float entries of the conditioning; a name that ends in `_mask` is
        a mask of ones, so that no key is a pad.
      text_rows: text rows in a packed sequence (MiniMax-H3).
      grid: latent frames, height and width of a packed sequence (MiniMax-H3).
    """

    name: str
    title: str
    kind: type[VideoTransformer]
    config: Any
    what: str
    latents: tuple[int, ...] | Shapes
    conditioning: Shapes
    text_rows: int = 0
    grid: tuple[int, int, int] | None = None

    def with_layers(self, layers: int | None) -> "VideoModel":
        """The same with another depth."""
        if layers is None:
            return self
        return dataclasses.replace(self, config=dataclasses.replace(self.config, num_layers=layers))

    def graph(self, attention: Any, **options: Any) -> tuple[Any, Any]:
        """Graph definition and abstract parameters of the model with an attention."""
        create: Any = self.kind
        model = nnx.eval_shape(
            lambda: create(self.config, attention=attention, rngs=nnx.Rngs(0), **options)
        )
        return nnx.split(model)

    def layout(self) -> minimax_h3.PackedLayout | None:
        """Where the rows of a packed sequence stand."""
        if self.grid is None:
            return None
        assert isinstance(self.latents, dict)
        channels = 2
        layout = minimax_h3.packed_layout(
            np.ones(self.text_rows, np.int32),
            self.grid,
            self.latents["audio"][1] // channels,
            patch=self.config.patch,
            audio_channels=channels,
        )
        assert len(layout.video_indices) == self.latents["video"][1]
        return layout

    def inputs(self, seed: int = 1) -> tuple[Any, Any, dict[str, Any]]:
        """Random latents, the time and the conditioning that `denoise` takes."""
        named = self.latents if isinstance(self.latents, dict) else {"": self.latents}
        drawn = named | {k: v for k, v in self.conditioning.items() if not k.endswith("_mask")}
        keys = jax.random.split(jax.random.key(seed), len(drawn))
        values: dict[str, Any] = {
            name: jax.random.normal(key, shape, jnp.float32)
            for key, (name, shape) in zip(keys, drawn.items(), strict=True)
        }
        conditioning: dict[str, Any] = {
            name: jnp.ones(shape, jnp.int32)
            if name.endswith("_mask")
            else values[name].astype(jnp.bfloat16)
            for name, shape in self.conditioning.items()
        }
        if self.grid is None:
            return values[""], jnp.float32(900.0), conditioning
        conditioning["layout"] = jax.tree.map(jnp.asarray, self.layout())
        time = {name: jnp.float32(0.1) for name in named}
        return {name: values[name] for name in named}, time, conditioning

    @property
    def rows(self) -> int:
        """Keys of the self-attention (joint attention: of video and text)."""
        layout = self.layout()
        if layout is not None:
            return len(layout.tags)
        assert not isinstance(self.latents, dict)
        video = math.prod(
            size // step for size, step in zip(self.latents[2:], self.config.patch, strict=True)
        )
        joint = ("text", "byt5", "image") if "byt5" in self.conditioning else ()
        return video + sum(self.conditioning[name][1] for name in joint)

    @property
    def workload(self) -> Workload:
        """The self-attention call of one layer."""
        return Workload(self.name, self.rows, self.config.num_heads, self.config.head_dim)


_TEXT = {"text": (1, 512, 4096)}
_HUNYUAN = {
    "condition": (1, 33, 31, 45, 80),
    "text": (1, 1000, 3584),
    "text_mask": (1, 1000),
    "byt5": (1, 256, 1472),
    "byt5_mask": (1, 256),
    "image": (1, 729, 1152),
}

VIDEO_MODELS = {
    entry.name: entry
    for entry in (
        VideoModel(
            "wan-a14b",
            "Wan2.2-A14B, one expert",
            wan.Wan,
            wan.T2V_A14B,
            "81 frames of 720x1280",
            (1, 16, 21, 90, 160),
            _TEXT,
        ),
        VideoModel(
            "wan-5b",
            "Wan2.2-TI2V-5B",
            wan.Wan,
            wan.TI2V_5B,
            "121 frames of 704x1280, text to video",
            (1, 48, 31, 44, 80),
            _TEXT,
        ),
        VideoModel(
            "hunyuan-1.5",
            "HunyuanVideo-1.5",
            hunyuan_video15.HunyuanVideo15,
            hunyuan_video15.HUNYUAN_VIDEO_15,
            "121 frames of 720x1280, image to video, 1,985 text and image rows, all valid",
            (1, 32, 31, 45, 80),
            _HUNYUAN,
        ),
        VideoModel(
            "longcat",
            "LongCat-Video",
            longcat_video.LongCatVideo,
            longcat_video.LONGCAT_VIDEO,
            "93 frames of 480x832",
            (1, 16, 24, 60, 104),
            _TEXT,
        ),
        VideoModel(
            "minimax-h3",
            "MiniMax-H3",
            minimax_h3.MiniMaxH3,
            minimax_h3.MINIMAX_H3,
            "243 frames of 768x1344 with sound, 114 text rows",
            {"video": (1, 72 * 24 * 42, 96), "audio": (1, 810, 32)},
            {"text": (1, 114, 5120)},
            text_rows=114,
            grid=(72, 48, 84),
        ),
    )
}


def random_parameters(abstract: Any, seed: int | jax.Array = 0) -> Any:
    """Parameters of the given shapes and dtypes; to be jitted, so that they are made in place.

    Matrices have a deviation of 0.02. A stacked one is made layer by layer: nothing is held twice,
    or as a whole in float32. Biases and scales of norms are those of a new model, but for
    modulations: with a new model's gates of next to nothing, no error of the attention would show
    in the output, so what is added to a modulation has a deviation of 0.5.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    made = []
    for number, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path)
        if "modulation']" in name and "['kernel']" not in name:
            made.append(_random(leaf, seed, number, 0.5, stacked=False))
        elif "['bias']" in name or "['scale']" in name:
            made.append(jnp.full(leaf.shape, 0.0 if "['bias']" in name else 1.0, leaf.dtype))
        else:
            made.append(_random(leaf, seed, number, 0.02, stacked="['blocks']" in name))
    return jax.tree.unflatten(structure, made)


def _random(
    leaf: jax.ShapeDtypeStruct, seed: int | jax.Array, number: int, deviation: float, stacked: bool
) -> jax.Array:
    """A uniform tensor of mean 0: hashed places, which compile at once and need no memory."""
    shape = leaf.shape[1:] if stacked else leaf.shape

    def make(layer: int | jax.Array) -> jax.Array:
        stream = _hashed(jnp.uint32(seed) + _hashed(jnp.uint32(1000 * number) + layer))
        place = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
        share = _hashed(place ^ stream).astype(jnp.float32) * 2.0**-32
        return ((share - 0.5) * (math.sqrt(12.0) * deviation)).astype(leaf.dtype)

    return jax.lax.map(make, jnp.arange(leaf.shape[0], dtype=jnp.uint32)) if stacked else make(0)


def _hashed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 that scatters its bits (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
