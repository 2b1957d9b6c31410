"""The two layouts in which Wan2.2 is released: diffusers' and the authors' own.

Tensor names are facts of the released files. What differs between the layouts beyond names is said
at the line that handles it.
"""

import math
from collections.abc import Sequence

from ..common.tensor_map import TensorMap
from .config import WanConfig


def diffusers(config: WanConfig) -> TensorMap:
    tensors = _common(config)
    width, rows_out = config.hidden, config.out_channels * math.prod(config.patch)
    embedder = tensors.scope("", "condition_embedder.")
    text, time = "text_embedder.linear_", "time_embedder.linear_"
    embedder.mlp("text_mlp", (f"{text}1", f"{text}2"), (config.text_dim, width, width))
    embedder.mlp("time_mlp", (f"{time}1", f"{time}2"), (config.freq_dim, width, width))
    embedder.linear("time_projection", "time_proj", (width, 6 * width))
    tensors.linear("head", "proj_out", (width, rows_out))
    tensors.reshaped("final_modulation", "scale_shift_table", (1, 2, width), (2, width))
    block = tensors.scope("blocks.", "blocks.{}.", config.num_layers)
    block.reshaped("modulation", "scale_shift_table", (1, 6, width), (6, width))
    names = ["to_q", "to_k", "to_v", "to_out.0"]
    _attention(config, block, ("attn1.", "attn2."), names)
    if config.cross_attn_norm:
        block.layer_norm("cross_norm", "norm2", width)
    block.mlp("ffn", ("ffn.net.0.proj", "ffn.net.2"), (width, config.ffn_dim, width))
    return tensors


def original(config: WanConfig) -> TensorMap:
    tensors = _common(config)
    width, rows_out = config.hidden, config.out_channels * math.prod(config.patch)
    text, time = ("text_embedding.0", "text_embedding.2"), ("time_embedding.0", "time_embedding.2")
    tensors.mlp("text_mlp", text, (config.text_dim, width, width))
    tensors.mlp("time_mlp", time, (config.freq_dim, width, width))
    tensors.linear("time_projection", "time_projection.1", (width, 6 * width))
    tensors.linear("head", "head.head", (width, rows_out))
    tensors.reshaped("final_modulation", "head.modulation", (1, 2, width), (2, width))
    block = tensors.scope("blocks.", "blocks.{}.", config.num_layers)
    block.reshaped("modulation", "modulation", (1, 6, width), (6, width))
    _attention(config, block, ("self_attn.", "cross_attn."), ["q", "k", "v", "o"])
    # The authors call the norms 1, 3, 2 in order of use: the affine one before cross-attention is
    # norm3 here and norm2 in diffusers.
    if config.cross_attn_norm:
        block.layer_norm("cross_norm", "norm3", width)
    block.mlp("ffn", ("ffn.0", "ffn.2"), (width, config.ffn_dim, width))
    return tensors


def _common(config: WanConfig) -> TensorMap:
    rows_in, width = config.in_channels * math.prod(config.patch), config.hidden
    tensors = TensorMap(ignore=[".norm_added_q.weight"])
    kernel = (width, config.in_channels, *config.patch)
    tensors.linear("patch_embedding", "patch_embedding", (rows_in, width), kernel=kernel)
    return tensors


def _attention(
    config: WanConfig, block: TensorMap, scopes: tuple[str, str], names: Sequence[str]
) -> None:
    width, heads, size = config.hidden, config.num_heads, config.head_dim
    q, k, v, out = names
    for part, attention in (
        ("", block.scope("", scopes[0])),
        ("cross_", block.scope("", scopes[1])),
    ):
        if part:
            attention.heads_in("cross_q", [q], width, heads, size)
            attention.heads_in("cross_kv", [k, v], width, heads, size)
        else:
            attention.heads_in("qkv", [q, k, v], width, heads, size)
        attention.heads_out(f"{part}out", out, heads, size, width)
        # Queries and keys are normalised over all heads together: one scale a channel.
        attention.reshaped(f"{part}q_norm.scale", "norm_q.weight", (width,), (heads, size))
        attention.reshaped(f"{part}k_norm.scale", "norm_k.weight", (width,), (heads, size))
