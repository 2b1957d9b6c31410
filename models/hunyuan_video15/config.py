"""Sizes of HunyuanVideo-1.5, its configuration files and how it is sampled."""

import dataclasses
from typing import Any, Literal

from ..common import checks
from ..common.configuration import Fields
from ..common.schedulers import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class HunyuanVideo15Config:
    """Sizes; the defaults are those of every released HunyuanVideo-1.5 transformer.

    `in_channels` counts the latents (32), the condition latents (32) and the mask (1).
    `target_size` (pixels: 640 of 480p, 960 of 720p) and `task` tell the releases apart.

    Raises:
      ValueError: a field out of range, by name.
    """

    num_layers: int = 54
    num_refiner_layers: int = 2
    num_heads: int = 16
    head_dim: int = 128
    in_channels: int = 65
    out_channels: int = 32
    mlp_ratio: float = 4.0
    refiner_mlp_ratio: float = 4.0
    text_dim: int = 3584
    byt5_dim: int = 1472
    byt5_hidden: int = 2048
    image_dim: int = 1152
    freq_dim: int = 256
    patch: tuple[int, int, int] = (1, 1, 1)
    rope_axes: tuple[int, int, int] = (16, 56, 56)
    rope_theta: float = 256.0
    use_meanflow: bool = False
    target_size: int = 640
    task: Literal["t2v", "i2v"] = "t2v"
    epsilon: float = 1e-6

    def __post_init__(self):
        checks.check_fields(self)
        checks.check_even(self, "head_dim", "freq_dim")
        if any(axis % 2 for axis in self.rope_axes) or sum(self.rope_axes) != self.head_dim:
            raise ValueError(
                f"rope_axes: expected three even numbers that sum to head_dim = {self.head_dim}, "
                f"got {self.rope_axes}"
            )

    @property
    def hidden(self) -> int:
        return self.num_heads * self.head_dim

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "HunyuanVideo15Config":
        """From the `config.json` of either layout.

        Raises:
          NotImplementedError: single-stream blocks or guidance embeddings (HunyuanVideo-1.5 has
            none) and other parts that it has one kind of.
          ValueError: another model's configuration, or a field out of range.
        """
        config = Fields(config, "HunyuanVideo-1.5", _CLASS_NAMES, _FEATURES)
        if "heads_num" in config:
            return cls._from_original(config)
        patch = config.get("patch_size", 1)
        return cls(
            num_layers=config["num_layers"],
            num_heads=config["num_attention_heads"],
            head_dim=config["attention_head_dim"],
            in_channels=config["in_channels"],
            out_channels=config["out_channels"],
            mlp_ratio=config["mlp_ratio"],
            text_dim=config["text_embed_dim"],
            image_dim=config["image_embed_dim"],
            patch=(config.get("patch_size_t", 1), patch, patch),
            rope_axes=config.three("rope_axes_dim"),
            rope_theta=config["rope_theta"],
            use_meanflow=config.get("use_meanflow", False),
            target_size=config.get("target_size", 640),
            task=config.get("task_type", "t2v"),
            **({"byt5_dim": config["text_embed_2_dim"]} | _constants(config)),
        )

    @classmethod
    def _from_original(cls, config: Fields) -> "HunyuanVideo15Config":
        resolution = config.get("ideal_resolution") or "480p"
        if resolution not in _TARGET_SIZES:
            raise NotImplementedError(
                f"ideal_resolution: expected one of {sorted(_TARGET_SIZES)}, got {resolution!r}"
            )
        # Condition latents and mask are concatenated to the latents' own channels.
        channels = config["in_channels"]
        channels = 2 * channels + 1 if config.get("concat_condition", True) else channels
        return cls(
            num_layers=config["mm_double_blocks_depth"],
            num_heads=config["heads_num"],
            head_dim=checks.share_of_heads(
                "hidden_size", config["hidden_size"], config["heads_num"]
            ),
            in_channels=channels,
            out_channels=config["out_channels"],
            mlp_ratio=config["mlp_width_ratio"],
            text_dim=config["text_states_dim"],
            image_dim=config["vision_states_dim"],
            patch=config.three("patch_size"),
            rope_axes=config.three("rope_dim_list"),
            rope_theta=config.get("rope_theta", 256.0),
            use_meanflow=config.get("use_meanflow", False),
            target_size=_TARGET_SIZES[resolution],
            task=config.get("ideal_task") or "t2v",
            **_constants(config),
        )

    def to_dict(self, layout: str) -> dict[str, Any]:
        """The `config.json` of a layout.

        Raises:
          ValueError: patches of another height than width, which the diffusers file cannot say.
        """
        constants = {name: getattr(self, name) for name in _CONSTANTS}
        if layout == "original":
            names = {size: name for name, size in _TARGET_SIZES.items()}
            if self.target_size not in names:
                raise ValueError(f"target_size: the original layout has {sorted(names)} only")
            concatenated = self.in_channels % 2 == 1 and self.in_channels > 1
            return constants | {
                "_class_name": "HunyuanVideo_1_5_DiffusionTransformer",
                "mm_double_blocks_depth": self.num_layers,
                "mm_single_blocks_depth": 0,
                "heads_num": self.num_heads,
                "hidden_size": self.hidden,
                "in_channels": self.in_channels // 2 if concatenated else self.in_channels,
                "concat_condition": concatenated,
                "out_channels": self.out_channels,
                "mlp_width_ratio": self.mlp_ratio,
                "text_states_dim": self.text_dim,
                "vision_states_dim": self.image_dim,
                "patch_size": list(self.patch),
                "rope_dim_list": list(self.rope_axes),
                "rope_theta": self.rope_theta,
                "use_meanflow": self.use_meanflow,
                "ideal_resolution": names[self.target_size],
                "ideal_task": self.task,
            }
        if self.patch[1] != self.patch[2]:
            raise ValueError(
                f"patch: the diffusers layout has one size for height and width, got {self.patch}"
            )
        return constants | {
            "_class_name": "HunyuanVideo15Transformer3DModel",
            "num_layers": self.num_layers,
            "num_refiner_layers": self.num_refiner_layers,
            "num_attention_heads": self.num_heads,
            "attention_head_dim": self.head_dim,
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "mlp_ratio": self.mlp_ratio,
            "text_embed_dim": self.text_dim,
            "text_embed_2_dim": self.byt5_dim,
            "image_embed_dim": self.image_dim,
            "patch_size": self.patch[1],
            "patch_size_t": self.patch[0],
            "qk_norm": "rms_norm",
            "rope_axes_dim": list(self.rope_axes),
            "rope_theta": self.rope_theta,
            "use_meanflow": self.use_meanflow,
            "target_size": self.target_size,
            "task_type": self.task,
        }


# Pixels of the square that the authors' resolutions have as much area as.
_TARGET_SIZES = {"480p": 640, "720p": 960}

_CLASS_NAMES = ("HunyuanVideo15Transformer3DModel", "HunyuanVideo_1_5_DiffusionTransformer")
# Each with the value that the releases have.
_FEATURES = {
    "mm_single_blocks_depth": 0,
    "num_single_layers": 0,
    "guidance_embed": False,
    "guidance_embeds": False,
    "text_pool_type": None,
    "pooled_projection_dim": None,
    "text_projection": "single_refiner",
    "vision_projection": "linear",
    "glyph_byT5_v2": True,
    "use_cond_type_embedding": True,
    "is_reshape_temporal_channels": False,
    "mlp_act_type": "gelu_tanh",
    "qkv_bias": True,
    "qk_norm_type": "rms",
}
# Fields that the releases' files leave out, at least in one layout: written under our names.
_CONSTANTS = (
    "num_refiner_layers",
    "refiner_mlp_ratio",
    "byt5_dim",
    "byt5_hidden",
    "freq_dim",
    "epsilon",
)


def _constants(config: dict[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in _CONSTANTS if name in config}


HUNYUAN_VIDEO_15 = HunyuanVideo15Config()

SAMPLING_480P = Sampling(num_steps=50, shift=5.0, grid="flow", guidance=6.0)
SAMPLING_720P_T2V = dataclasses.replace(SAMPLING_480P, shift=9.0)
SAMPLING_720P_I2V = dataclasses.replace(SAMPLING_480P, shift=7.0)
SAMPLING_STEP_DISTILLED = dataclasses.replace(SAMPLING_480P, num_steps=12, shift=7.0, guidance=1.0)
"""Of the MeanFlow release (480p, from an image)."""
