"""What an attention call computes: one frozen configuration, and the names of the usual ones."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import numpy as np

from .pallas_kernels.layout import BLOCK

NVFP4_GROUP = 16
"""Elements that share a scale."""

QkFormat = Literal["none", "int8", "e4m3", "nvfp4"]
PvFormat = Literal["none", "e4m3", "nvfp4"]
Softmax = Literal["expcast", "expcast_running", "exp"]


def shown(value: Any) -> str:
    """A wrong value as one line of an error: an array by its dtype and shape."""
    if isinstance(value, (np.ndarray, jax.Array)) and value.ndim:
        return f"{value.dtype} {list(value.shape)}"
    return repr(value)


def check_integer(name: str, number: Any, low: int) -> int:
    """A Python or NumPy integer of at least `low`, as a Python one."""
    whole = isinstance(number, (int, np.integer)) and not isinstance(number, bool)
    if not whole or number < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {shown(number)}")
    return int(number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The numerics of an attention call. Hashable, so it can be a static argument of `jax.jit`.

    The configuration fixes *what* is computed; the implementation only how fast.

    Attributes:
      qk: number format of queries and keys. `"int8"`: one scale per query token and per block of
        128 keys. `"e4m3"`: the same granularity, scores rounded to float16. `"nvfp4"`: E2M1 with
        one E4M3 scale per 16 channels. `"none"`: the dtype of the inputs.
      pv: number format of probabilities and values. `"e4m3"`: one scale per value channel.
        `"nvfp4"`: E2M1 with one E4M3 scale per 16 keys. `"none"`: the dtype of the inputs.
      softmax: how a score becomes an 8-bit probability. `"expcast"`: one affine map to the E4M3
        code, against the row maximum of each 256 keys (block-anchored). `"expcast_running"`: the
        same map against the running row maximum, as in the paper. `"exp"`: exponential, then cast.
      center_keys: subtract the mean key (over valid tokens) before quantisation.
      balance_channels: multiply each channel of the queries, and divide that of the keys, by a
        power of two that makes them about equally large (`vc_jax.channel_balance`), before the
        rotation. Changes no score, but the error of one where a few channels of the keys are large:
        for such layers. Costs a pass over queries and keys, and makes the rows of a head share
        something: the sizes are of all queries, padded ones too.
      rotate: rotate queries and keys by the same orthonormal Hadamard matrix.
      smooth_values: V-Smooth: cluster the values, sort keys and values by cluster, and quantise
        what is left of each 128-token block after its mean.
      clusters: number of clusters; `None` takes `vc_jax.default_clusters(S)`.
      lloyd_steps: Lloyd iterations of a clustering that starts from rows of the values.
      warm_lloyd_steps: Lloyd iterations of one that starts from earlier centroids.
      lloyd_stride: a Lloyd iteration looks at every `lloyd_stride`-th valid token; `None` takes
        `vc_jax.default_lloyd_stride(S, k)`.

    Raises:
      ValueError: for an unknown value or a combination that is not defined, naming the field.
    """

    qk: QkFormat = "int8"
    pv: PvFormat = "e4m3"
    softmax: Softmax = "expcast"
    center_keys: bool = True
    balance_channels: bool = False
    rotate: bool = True
    smooth_values: bool = True
    clusters: int | None = None
    lloyd_steps: int = 3
    warm_lloyd_steps: int = 1
    lloyd_stride: int | None = None

    def __post_init__(self):
        for name, allowed in (("qk", QkFormat), ("pv", PvFormat), ("softmax", Softmax)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(
                    f"AttentionConfig.{name} must be one of {get_args(allowed)}, "
                    f"got {getattr(self, name)!r}"
                )
        for name in ("center_keys", "balance_channels", "rotate", "smooth_values"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"AttentionConfig.{name} must be True or False, got {getattr(self, name)!r}"
                )
        pairs = {"none": ("none",), "int8": ("e4m3",), "e4m3": ("e4m3",), "nvfp4": ("nvfp4",)}
        if self.pv not in pairs[self.qk]:
            raise ValueError(
                f"AttentionConfig.pv must be {pairs[self.qk][0]!r} when qk is {self.qk!r}, "
                f"got {self.pv!r}"
            )
        if self.qk == "nvfp4" and self.softmax != "exp":
            raise ValueError(
                "AttentionConfig.softmax must be 'exp' for NVFP4 probabilities: ExpCast maps a "
                f"score to an E4M3 code only, got {self.softmax!r}"
            )
        idle = {
            "softmax": "exp",
            "center_keys": False,
            "balance_channels": False,
            "rotate": False,
            "smooth_values": False,
        }
        for name, off in idle.items():
            if self.qk == "none" and getattr(self, name) != off:
                raise ValueError(
                    f"AttentionConfig.{name} must be {off!r} when qk is 'none': it would change "
                    f"nothing, got {getattr(self, name)!r}"
                )
        least = {"clusters": 1, "lloyd_steps": 1, "warm_lloyd_steps": 0, "lloyd_stride": 1}
        for name, low in least.items():
            number = getattr(self, name)
            if number is None and name in ("clusters", "lloyd_stride"):
                continue
            number = check_integer(f"AttentionConfig.{name}", number, low)
            object.__setattr__(self, name, number)
            if not self.smooth_values and number != type(self).__dataclass_fields__[name].default:
                raise ValueError(
                    f"AttentionConfig.{name} must be left out when smooth_values is False: it "
                    f"would change nothing, got {number!r}"
                )

    @property
    def quantized(self) -> bool:
        """Whether anything is quantised at all."""
        return self.qk != "none"

    @property
    def clustered(self) -> bool:
        """Whether a call needs an order of the keys from clustering."""
        return self.quantized and self.smooth_values


def check_head_dim(name: str, head_dim: int, config: AttentionConfig) -> None:
    """Raise `ValueError` unless a configuration has groups for a head dim."""
    if config.qk == "nvfp4" and head_dim % NVFP4_GROUP:
        raise ValueError(
            f"{name} must have a head dim that is a multiple of {NVFP4_GROUP} for NVFP4, "
            f"got {head_dim}"
            if name != "head_dim"
            else f"head_dim must be a multiple of {NVFP4_GROUP} for NVFP4, got {head_dim}"
        )


PRESETS: dict[str, AttentionConfig] = {
    "bf16": AttentionConfig(
        qk="none",
        pv="none",
        softmax="exp",
        center_keys=False,
        rotate=False,
        smooth_values=False,
    ),
    "int8": AttentionConfig(qk="int8", pv="e4m3"),
    "fp8": AttentionConfig(qk="e4m3", pv="e4m3"),
    "nvfp4": AttentionConfig(qk="nvfp4", pv="nvfp4", softmax="exp"),
}
"""The named configurations."""


def resolve_config(config: AttentionConfig | str) -> AttentionConfig:
    """The configuration behind a preset's name; a configuration passes through.

    Raises:
      ValueError: an unknown name.
      TypeError: neither a configuration nor a name.
    """
    if isinstance(config, AttentionConfig):
        return config
    if isinstance(config, str):
        if config in PRESETS:
            return PRESETS[config]
        raise ValueError(f"config must be one of {sorted(PRESETS)}, got {config!r}")
    raise TypeError(
        f"config must be an AttentionConfig or one of {sorted(PRESETS)}, "
        f"got {type(config).__name__}"
    )


def default_clusters(kv_length: int) -> int:
    """Clusters for S keys: one per block of 128 tokens up to 128 blocks, then one per two blocks.

    With clusters in a chain of similar ones, more of them take more energy out of the values, up to
    about one per block; beyond half of that the gain is small, and the cost grows with their number
    (`docs/fidelity.md` has the measurements).

    Raises:
      ValueError: `kv_length` is not an integer >= 1.
    """
    kv_length = check_integer("kv_length", kv_length, 1)
    blocks = -(-kv_length // BLOCK)
    return max(min(blocks, 128), blocks // 2)


def default_lloyd_stride(kv_length: int, clusters: int) -> int:
    """Spacing of the tokens that a Lloyd iteration looks at: 48 a cluster, one in four at least.

    As many place a centroid well enough: on values of the shipped video DiT block means then hold
    98 % of the energy that they hold after converged k-means over all tokens (`docs/fidelity.md`).

    Raises:
      ValueError: an argument is not an integer >= 1.
    """
    kv_length = check_integer("kv_length", kv_length, 1)
    clusters = check_integer("clusters", clusters, 1)
    return max(1, min(4, kv_length // (48 * clusters)))
