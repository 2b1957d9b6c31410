"""HunyuanVideo-1.5."""

from .config import (
    HUNYUAN_VIDEO_15,
    SAMPLING_720P_I2V,
    SAMPLING_720P_T2V,
    HunyuanVideo15Config,
)
from .model import HunyuanVideo15

__all__ = [
    "HUNYUAN_VIDEO_15",
    "SAMPLING_720P_I2V",
    "SAMPLING_720P_T2V",
    "HunyuanVideo15",
    "HunyuanVideo15Config",
]
