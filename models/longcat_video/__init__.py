"""LongCat-Video."""

from .block import KVCache
from .config import LONGCAT_VIDEO, LongCatVideoConfig
from .model import LongCatVideo

__all__ = ["LONGCAT_VIDEO", "KVCache", "LongCatVideo", "LongCatVideoConfig"]
