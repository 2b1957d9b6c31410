"""Sizes of LongCat-Video, its configuration files and how it is sampled."""

import dataclasses
from typing import Any

from ..common import checks
from ..common.configuration import Fields
from ..common.schedulers import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongCatVideoConfig:
    """Sizes; the defaults are those of the released LongCat-Video.

    `attend_text_pads`: pads are zeroed after the text projection and stay visible (the release);
    otherwise they are masked.

    Raises:
      ValueError: a field out of range, by name.
    """

    num_layers: int = 48
    num_heads: int = 32
    hidden: int = 4096
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    time_dim: int = 512
    freq_dim: int = 256
    mlp_ratio: float = 4
    patch: tuple[int, int, int] = (1, 2, 2)
    attend_text_pads: bool = True
    epsilon: float = 1e-6
    rope_theta: float = 10_000.0

    def __post_init__(self):
        checks.check_fields(self)
        checks.check_head_dim(checks.share_of_heads("hidden", self.hidden, self.num_heads))
        checks.check_even(self, "freq_dim")
        if self.patch[0] != 1:
            raise ValueError(f"patch: expected 1 in time, got {self.patch}")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def ffn_dim(self) -> int:
        """Two thirds of hidden · mlp_ratio, rounded up to a multiple of 256."""
        return -(-int(2 * int(self.hidden * self.mlp_ratio) / 3) // 256) * 256

    @property
    def rope_axes(self) -> tuple[int, int, int]:
        side = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * side, side, side

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "LongCatVideoConfig":
        """From a `config.json`.

        Raises:
          ValueError: patches in time (the release has none, and frames carry a timestep each), or
            a field out of range; another model's configuration.
        """
        config = Fields(config, "LongCat-Video", _CLASS_NAMES, {"audio_window": None})
        patch = config.three("patch_size", (1, 2, 2))
        if patch[0] != 1:
            raise ValueError(f"patch_size: expected 1 in time, got {patch}")
        heads = "num_heads" if "num_heads" in config else "num_attention_heads"
        return cls(
            num_layers=config["depth"],
            num_heads=config[heads],
            hidden=config["hidden_size"],
            in_channels=config["in_channels"],
            out_channels=config["out_channels"],
            text_dim=config["caption_channels"],
            time_dim=config["adaln_tembed_dim"],
            freq_dim=config["frequency_embedding_size"],
            mlp_ratio=config["mlp_ratio"],
            patch=patch,
            attend_text_pads=config.get("text_tokens_zero_pad", True),
            epsilon=config.get("epsilon", 1e-6),
            rope_theta=config.get("rope_theta", 10_000.0),
        )

    def to_dict(self, layout: str) -> dict[str, Any]:
        original = layout == "original"
        return {
            "_class_name": f"LongCat{'Video' if original else ''}Transformer3DModel",
            "depth": self.num_layers,
            "num_heads" if original else "num_attention_heads": self.num_heads,
            "hidden_size": self.hidden,
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "caption_channels": self.text_dim,
            "adaln_tembed_dim": self.time_dim,
            "frequency_embedding_size": self.freq_dim,
            "mlp_ratio": self.mlp_ratio,
            "patch_size": list(self.patch),
            "text_tokens_zero_pad": self.attend_text_pads,
            "epsilon": self.epsilon,
            "rope_theta": self.rope_theta,
        }


_CLASS_NAMES = ("LongCatVideoTransformer3DModel", "LongCatTransformer3DModel")

LONGCAT_VIDEO = LongCatVideoConfig()

LONGCAT_VIDEO_SAMPLING = Sampling(
    num_steps=50, shift=12.0, grid="longcat", guidance=4.0, guidance_form="cfg_zero"
)
