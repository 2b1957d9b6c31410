"""Sizes of MiniMax-H3, its configuration files and how it is sampled."""

import dataclasses
import math
from typing import Any

from ..common import checks
from ..common.configuration import Fields
from ..common.schedulers import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxH3Config:
    """Sizes; the defaults are those of the released MiniMax-H3.

    Raises:
      ValueError: a field out of range, by name.
    """

    num_layers: int = 50
    num_refiner_layers: int = 2
    num_heads: int = 56
    head_dim: int = 128
    hidden: int = 5376
    ffn_dim: int = 14336
    in_channels: int = 24
    audio_channels: int = 32
    patch: tuple[int, int, int] = (1, 2, 2)
    text_dim: int = 5120
    freq_dim: int = 256
    time_hidden: int = 5376
    time_dim: int = 2688
    rope_freqs: int = 16
    rope_theta: float = 10_000.0
    epsilon: float = 1e-5
    qk_epsilon: float = 1e-5
    final_epsilon: float = 1e-5

    def __post_init__(self):
        checks.check_fields(self)
        checks.check_even(self, "head_dim", "freq_dim")
        if 6 * self.rope_freqs > self.head_dim:
            raise ValueError(
                f"rope_freqs: expected at most a sixth of head_dim = {self.head_dim}, "
                f"got {self.rope_freqs}"
            )

    @property
    def patch_features(self) -> int:
        """Values in a video row."""
        return self.in_channels * math.prod(self.patch)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "MiniMaxH3Config":
        """From the `config.json` of either layout.

        Raises:
          ValueError: a size that the configuration does not give, another model's configuration,
            or a field out of range.
        """
        config = Fields(config, "MiniMax-H3", _CLASS_NAMES, {})
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            names = _NAMES.get(field.name, (field.name,))
            found = [name for name in names if name in config]
            if found or field.name not in _OPTIONAL:
                values[field.name] = config[(*found, *names)[0]]
        values["patch"] = config.three("patch_size", (1, 2, 2))
        return cls(**values)

    def to_dict(self, layout: str) -> dict[str, Any]:
        index = 1 if layout == "original" else 0
        values = dataclasses.asdict(self)
        return {"_class_name": _CLASS_NAMES[index]} | {
            _NAMES[name][index] if name in _NAMES else name: value for name, value in values.items()
        }


# In diffusers' and in the authors' layout.
_CLASS_NAMES = ("MiniMaxH3Transformer3DModel", "MiniMaxH3DiTModel")

# Names of a field in the diffusers and in the original configuration, where they differ from ours.
_NAMES = {
    "num_refiner_layers": ("num_refiner_layers", "token_refiner_num_layers"),
    "num_heads": ("num_attention_heads", "num_attention_heads"),
    "head_dim": ("attention_head_dim", "attention_head_dim"),
    "hidden": ("hidden_size", "hidden_size"),
    "ffn_dim": ("ffn_dim", "ffn_hidden_size"),
    "in_channels": ("in_channels", "latents_dim"),
    "audio_channels": ("audio_in_channels", "audio_latents_dim"),
    "patch": ("patch_size", "patch_size"),
    "freq_dim": ("freq_dim", "timestep_input_dim"),
    "time_dim": ("time_embed_dim", "time_embed_dim"),
    "time_hidden": ("time_embed_hidden_dim", "time_embed_hidden_size"),
    "rope_freqs": ("rope_freq_dim", "rope_inv_freq_len"),
    "epsilon": ("norm_eps", "norm_eps"),
    "qk_epsilon": ("qk_norm_eps", "qk_norm_eps"),
    "final_epsilon": ("final_norm_eps", "final_norm_eps"),
}

# Constants of the model that a configuration may leave out.
_OPTIONAL = ("patch", "rope_theta", "epsilon", "qk_epsilon", "final_epsilon")

MINIMAX_H3 = MiniMaxH3Config()

MINIMAX_H3_SAMPLING = Sampling(num_steps=49, shift=12.0, audio_shift=3.0, grid="minimax")
