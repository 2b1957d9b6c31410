"""Wan2.2 (T2V-A14B, I2V-A14B, TI2V-5B)."""

from .config import I2V_A14B, T2V_A14B, TI2V_5B, WanConfig
from .model import Wan

__all__ = ["I2V_A14B", "T2V_A14B", "TI2V_5B", "Wan", "WanConfig"]
