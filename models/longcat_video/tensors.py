"""The two layouts in which LongCat-Video is released: diffusers' and the authors' own.

Tensor names are facts of the released files. What differs between the layouts beyond names is said
at the line that handles it.
"""

import math

from ..common.tensor_map import TensorMap
from .config import LongCatVideoConfig


def original(config: LongCatVideoConfig) -> TensorMap:
    tensors = TensorMap()
    width, heads, size = config.hidden, config.num_heads, config.head_dim
    time, text = (
        ("t_embedder.mlp.0", "t_embedder.mlp.2"),
        ("y_embedder.y_proj.0", "y_embedder.y_proj.2"),
    )
    _outer(config, tensors, "x_embedder.proj", time, text)
    final = tensors.scope("", "final_layer.")
    final.linear("final_modulation", "adaLN_modulation.1", (config.time_dim, 2 * width))
    final.linear("head", "linear", (width, config.out_channels * math.prod(config.patch)))
    block = tensors.scope("blocks.", "blocks.{}.", config.num_layers)
    block.linear("modulation", "adaLN_modulation.1", (config.time_dim, 6 * width))
    block.layer_norm("cross_norm", "pre_crs_attn_norm", width)
    # Fused rows are [3, heads, head_dim] and [2, heads, head_dim].
    block.heads_in("qkv", "attn.qkv", width, heads, size, count=3)
    block.heads_in("cross_q", "cross_attn.q_linear", width, heads, size, count=1)
    block.heads_in("cross_kv", "cross_attn.kv_linear", width, heads, size, count=2)
    _block(config, block, ("attn.proj", "cross_attn.proj"), "attn")
    return tensors


def diffusers(config: LongCatVideoConfig) -> TensorMap:
    """The split layout that diffusers-style runtimes (FastVideo, sglang) convert the release to."""
    tensors = TensorMap()
    width, heads, size = config.hidden, config.num_heads, config.head_dim
    time = ("time_embedder.linear_1", "time_embedder.linear_2")
    text = ("caption_embedder.linear_1", "caption_embedder.linear_2")
    _outer(config, tensors, "patch_embed.proj", time, text)
    final = tensors.scope("", "final_layer.")
    final.linear("final_modulation", "adaln_linear", (config.time_dim, 2 * width))
    final.linear("head", "proj", (width, config.out_channels * math.prod(config.patch)))
    block = tensors.scope("blocks.", "blocks.{}.", config.num_layers)
    block.linear("modulation", "adaln_linear_1", (config.time_dim, 6 * width))
    block.layer_norm("cross_norm", "norm_cross", width)
    names = ["to_q", "to_k", "to_v"]
    block.heads_in("qkv", [f"self_attn.{name}" for name in names], width, heads, size)
    block.heads_in("cross_q", ["cross_attn.to_q"], width, heads, size)
    block.heads_in("cross_kv", [f"cross_attn.{name}" for name in names[1:]], width, heads, size)
    _block(config, block, ("self_attn.to_out", "cross_attn.to_out"), "self_attn")
    return tensors


def _outer(
    config: LongCatVideoConfig,
    tensors: TensorMap,
    patches: str,
    time: tuple[str, str],
    text: tuple[str, str],
) -> None:
    width, rows_in = config.hidden, config.in_channels * math.prod(config.patch)
    kernel = (width, config.in_channels, *config.patch)
    tensors.linear("patch_embedding", patches, (rows_in, width), kernel=kernel)
    tensors.mlp("time_mlp", time, (config.freq_dim, config.time_dim, config.time_dim))
    tensors.mlp("text_mlp", text, (config.text_dim, width, width))


def _block(
    config: LongCatVideoConfig, block: TensorMap, outs: tuple[str, str], attention: str
) -> None:
    width, heads, size = config.hidden, config.num_heads, config.head_dim
    block.heads_out("out", outs[0], heads, size, width)
    block.heads_out("cross_out", outs[1], heads, size, width)
    for part, name in (("", attention), ("cross_", "cross_attn")):
        block.reshaped(f"{part}q_norm.scale", f"{name}.q_norm.weight", (size,))
        block.reshaped(f"{part}k_norm.scale", f"{name}.k_norm.weight", (size,))
    # w1 is the gate and w3 the value.
    block.gate_value("ffn.gate_value", ["ffn.w1", "ffn.w3"], width, config.ffn_dim, gate_first=True)
    block.linear("ffn.fc_out", "ffn.w2", (config.ffn_dim, width), bias=False)
