"""The small pixel-space model that ships with its weights: model, weights, sampler, flow."""

from .model import (
    AttentionInputs,
    VideoDiT,
    VideoDiTConfig,
    create_video_dit,
    default_attention,
)
from .sampler import continue_clip, sample_given, time_grid
from .weights import SHIPPED_WEIGHTS, load_video_dit, save_weights

__all__ = [
    "SHIPPED_WEIGHTS",
    "AttentionInputs",
    "VideoDiT",
    "VideoDiTConfig",
    "continue_clip",
    "create_video_dit",
    "default_attention",
    "load_video_dit",
    "sample_given",
    "save_weights",
    "time_grid",
]
