"""Video DiTs in Flax NNX: ports of released ones, a folder each, and a small one that ships.

`vc_jax.models.VideoDiT` and what goes with it is the small one; `vc_jax.models.wan.Wan` and the
other ports are sampled with `vc_jax.models.sampling.sample`.
"""

from .video_dit import (
    SHIPPED_WEIGHTS,
    AttentionInputs,
    VideoDiT,
    VideoDiTConfig,
    continue_clip,
    create_video_dit,
    default_attention,
    load_video_dit,
    sample_given,
    save_weights,
    time_grid,
)

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
