"""Low-bit attention for video diffusion transformers in JAX (VC-Attention, arXiv 2609.15810).

Array axes are named as in `jax.nn.dot_product_attention`: B batch, T query length, S key/value
length, N query heads, K key/value heads, H head dim.
"""

from . import _export as _export
from ._attention import Explanation, dot_product_attention, explain
from ._compare import Comparison, compare
from ._config import PRESETS, AttentionConfig, default_clusters, default_lloyd_stride
from ._expcast import decode_codes, exp_then_cast, expcast
from ._order import AttentionState, init_state, reset
from ._plain import plain_attention
from ._prepare import Prepared4, Restored, prepare, restore
from ._quantize import (
    Nvfp4,
    Quantized,
    dequantize,
    dequantize_nvfp4,
    hadamard_matrix,
    hadamard_rotate,
    mean_key,
    quantize_e4m3,
    quantize_int8,
    quantize_nvfp4,
)
from ._reference import reference_attention
from ._schedule import DenoisingSchedule
from ._state import attention_step
from ._vsmooth import (
    Clusters,
    block_means,
    cluster_order,
    kmeans,
    mean_energy,
    similar_clusters_together,
)
from .pallas_kernels.layout import GROUP_ORDER, Prepared8

__version__ = "0.1.0"

__all__ = [
    "GROUP_ORDER",
    "PRESETS",
    "AttentionConfig",
    "AttentionState",
    "Clusters",
    "Comparison",
    "DenoisingSchedule",
    "Explanation",
    "Nvfp4",
    "Prepared4",
    "Prepared8",
    "Quantized",
    "Restored",
    "attention_step",
    "block_means",
    "cluster_order",
    "compare",
    "decode_codes",
    "default_clusters",
    "default_lloyd_stride",
    "dequantize",
    "dequantize_nvfp4",
    "dot_product_attention",
    "exp_then_cast",
    "expcast",
    "explain",
    "hadamard_matrix",
    "hadamard_rotate",
    "init_state",
    "kmeans",
    "mean_energy",
    "mean_key",
    "plain_attention",
    "prepare",
    "quantize_e4m3",
    "quantize_int8",
    "quantize_nvfp4",
    "reference_attention",
    "reset",
    "restore",
    "similar_clusters_together",
]
