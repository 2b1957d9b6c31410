"""MiniMax-H3."""

from .config import MINIMAX_H3, MiniMaxH3Config
from .model import MiniMaxH3
from .packing import MODALITIES, PackedLayout, packed_layout

__all__ = [
    "MINIMAX_H3",
    "MODALITIES",
    "MiniMaxH3",
    "MiniMaxH3Config",
    "PackedLayout",
    "packed_layout",
]
