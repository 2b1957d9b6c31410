"""Video DiTs in Flax NNX: the small shipped one, its weights, its sampler and its training."""

from .sampler import sample, sample_given, time_grid
from .video_dit import (
    AttentionInputs,
    VideoDiT,
    VideoDiTConfig,
    create_video_dit,
    default_attention,
)
from .weights import SHIPPED_WEIGHTS, load_video_dit, save_weights

__all__ = [
    "SHIPPED_WEIGHTS",
    "AttentionInputs",
    "VideoDiT",
    "VideoDiTConfig",
    "create_video_dit",
    "default_attention",
    "load_video_dit",
    "sample",
    "sample_given",
    "save_weights",
    "time_grid",
]
