"""Sizes of Wan2.2, its configuration files and how each release is sampled."""

import dataclasses
from typing import Any

from ..common import checks
from ..common.configuration import Fields
from ..common.schedulers import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class WanConfig:
    """Sizes of a Wan model. `in_channels` 36 is I2V: latents, mask and image latents together.

    Raises:
      ValueError: a field out of range, by name.
    """

    num_layers: int
    num_heads: int
    ffn_dim: int
    in_channels: int = 16
    out_channels: int = 16
    head_dim: int = 128
    text_dim: int = 4096
    freq_dim: int = 256
    patch: tuple[int, int, int] = (1, 2, 2)
    cross_attn_norm: bool = True
    epsilon: float = 1e-6
    rope_theta: float = 10_000.0

    def __post_init__(self):
        checks.check_fields(self)
        checks.check_head_dim(self.head_dim)
        checks.check_even(self, "freq_dim")

    @property
    def hidden(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def rope_axes(self) -> tuple[int, int, int]:
        """Channels of a head for (t, h, w): 44, 42, 42 of 128."""
        side = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * side, side, side

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "WanConfig":
        """From the `config.json` of either layout.

        Raises:
          NotImplementedError: a Wan variant with image cross-attention (Wan2.1 I2V).
          NotImplementedError: VACE, Animate, S2V and other models built on Wan, by a field that
            only they have.
          ValueError: another model's configuration, another normalisation of queries and keys, or
            a field out of range.
        """
        config = Fields(config, "Wan", _CLASS_NAMES, _FEATURES)
        if config.get("model_type") not in (None, "t2v", "i2v", "ti2v"):
            raise NotImplementedError(f"model_type: {config['model_type']!r} is not supported")
        if config.get("qk_norm", "rms_norm_across_heads") not in (True, "rms_norm_across_heads"):
            raise ValueError(f"qk_norm: expected rms_norm_across_heads, got {config['qk_norm']!r}")
        original = "dim" in config
        heads = config["num_heads" if original else "num_attention_heads"]
        return cls(
            num_layers=config["num_layers"],
            num_heads=heads,
            head_dim=checks.share_of_heads("dim", config["dim"], heads)
            if original
            else config["attention_head_dim"],
            ffn_dim=config["ffn_dim"],
            in_channels=config["in_dim" if original else "in_channels"],
            out_channels=config["out_dim" if original else "out_channels"],
            text_dim=config.get("text_dim", 4096),
            freq_dim=config.get("freq_dim", 256),
            patch=config.three("patch_size", (1, 2, 2)),
            cross_attn_norm=config.get("cross_attn_norm", True),
            epsilon=config.get("eps", 1e-6),
            rope_theta=config.get("rope_theta", 10_000.0),
        )

    def to_dict(self, layout: str) -> dict[str, Any]:
        common = {
            "num_layers": self.num_layers,
            "ffn_dim": self.ffn_dim,
            "freq_dim": self.freq_dim,
            "text_dim": self.text_dim,
            "patch_size": list(self.patch),
            "cross_attn_norm": self.cross_attn_norm,
            "eps": self.epsilon,
            "rope_theta": self.rope_theta,
        }
        if layout == "original":
            kind = {36: "i2v", 48: "ti2v"}.get(self.in_channels, "t2v")
            return common | {
                "_class_name": "WanModel",
                "model_type": kind,
                "dim": self.hidden,
                "num_heads": self.num_heads,
                "in_dim": self.in_channels,
                "out_dim": self.out_channels,
                "qk_norm": True,
            }
        return common | {
            "_class_name": "WanTransformer3DModel",
            "num_attention_heads": self.num_heads,
            "attention_head_dim": self.head_dim,
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "qk_norm": "rms_norm_across_heads",
        }


_CLASS_NAMES = ("WanTransformer3DModel", "WanModel")
# Image cross-attention (Wan2.1 I2V), learned positions, VACE, Animate, S2V.
_FEATURES = {
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
    "vace_layers": None,
    "vace_in_channels": None,
    "vace_in_dim": None,
    "motion_encoder_dim": None,
    "face_encoder_hidden_dim": None,
    "audio_dim": None,
}

T2V_A14B = WanConfig(num_layers=40, num_heads=40, ffn_dim=13824)

I2V_A14B = dataclasses.replace(T2V_A14B, in_channels=36)

TI2V_5B = WanConfig(num_layers=30, num_heads=24, ffn_dim=14336, in_channels=48, out_channels=48)

T2V_A14B_SAMPLING = Sampling(
    num_steps=40,
    shift=12.0,
    grid="wan",
    solver="unipc",
    guidance=3.0,
    guidance_high_noise=4.0,
    boundary=0.875,
)
I2V_A14B_SAMPLING = dataclasses.replace(
    T2V_A14B_SAMPLING, shift=5.0, guidance=3.5, guidance_high_noise=3.5, boundary=0.9
)
TI2V_5B_SAMPLING = Sampling(num_steps=50, shift=5.0, grid="wan", solver="unipc", guidance=5.0)
WAN_2_1_SAMPLING = TI2V_5B_SAMPLING
"""One transformer of the A14B models' shape; its files name the shift (3 for 480p)."""
