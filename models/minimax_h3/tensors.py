"""The two layouts in which MiniMax-H3 is released: diffusers' and the authors' own.

Tensor names are facts of the released files. What differs between the layouts beyond names is said
at the line that handles it.
"""

import math

from ..common.tensor_map import TensorMap
from .config import MiniMaxH3Config


def diffusers(config: MiniMaxH3Config) -> TensorMap:
    tensors = TensorMap()
    width = config.hidden
    names = "proj_in audio_proj_in context_embedder proj_out audio_proj_out"
    _outer(config, tensors, names, ("time_embedder.linear_1", "time_embedder.linear_2"))
    tensors.reshaped("refiner_norm.scale", "token_refiner.final_norm.weight", (width,))
    tensors.reshaped("final_norm.scale", "norm_out.norm.weight", (width,))
    tensors.linear("final_modulation", "norm_out.linear", (config.time_dim, 2 * width))
    for block in _blocks(config, tensors, "transformer_blocks", "token_refiner.refiner_blocks"):
        attention = block.scope("", "attn.")
        heads = (width, config.num_heads, config.head_dim)
        attention.heads_in("qkv", ["to_q", "to_k", "to_v"], *heads, bias=False)
        _attention(config, attention, "norm_q norm_k to_out.0")
        # Rows of the fused layer are [value; gate].
        _ffn(config, block, "ff.net.0.proj", "ff.net.2", gate_first=False)
    return tensors


def original(config: MiniMaxH3Config) -> TensorMap:
    tensors = TensorMap(ignore=["rope.inv_freq"])
    width = config.hidden
    names = (
        "video_patch_proj audio_patch_proj condition_proj "
        "final_layer.video_out final_layer.audio_out"
    )
    _outer(config, tensors, names, ("time_embedder.proj_in", "time_embedder.proj_out"))
    tensors.reshaped("refiner_norm.scale", "token_refiner.final_norm.weight", (width,))
    tensors.reshaped("final_norm.scale", "final_layer.norm.weight", (width,))
    tensors.linear(
        "final_modulation", "final_layer.adaln_proj.linear", (config.time_dim, 2 * width)
    )
    for block in _blocks(config, tensors, "blocks", "token_refiner.blocks"):
        attention = block.scope("", "attn.")
        heads = (width, config.num_heads, config.head_dim)
        # Rows are interleaved by head: [head 0: q, k, v; head 1: q, k, v; ...].
        attention.heads_in("qkv", "qkv_proj", *heads, bias=False, count=3, interleaved=True)
        _attention(config, attention, "q_norm k_norm out_proj")
        # Rows of the fused layer are [gate; value].
        _ffn(config, block, "mlp.fc1", "mlp.fc2", gate_first=True)
    return tensors


def _outer(config: MiniMaxH3Config, tensors: TensorMap, names: str, time: tuple[str, str]) -> None:
    width, rows = config.hidden, config.in_channels * math.prod(config.patch)
    video, audio, text, video_out, audio_out = names.split()
    tensors.linear("video_in", video, (rows, width))
    tensors.linear("audio_in", audio, (config.audio_channels, width))
    tensors.linear("text_in", text, (config.text_dim, width))
    tensors.linear("video_out", video_out, (width, rows))
    tensors.linear("audio_out", audio_out, (width, config.audio_channels))
    tensors.mlp("time_mlp", time, (config.freq_dim, config.time_hidden, config.time_dim))


def _blocks(
    config: MiniMaxH3Config, tensors: TensorMap, blocks: str, refiner: str
) -> tuple[TensorMap, TensorMap]:
    """Scopes of the main blocks (modulation and norms declared) and of the refiner's."""
    width = config.hidden
    main = tensors.scope("blocks.", f"{blocks}.{{}}.", config.num_layers)
    main.linear("modulation", "adaln_proj.linear", (config.time_dim, 18 * width))
    scopes = main, tensors.scope("refiner.", f"{refiner}.{{}}.", config.num_refiner_layers)
    for scope in scopes:
        scope.reshaped("norm1.scale", "norm1.weight", (width,))
        scope.reshaped("norm2.scale", "norm2.weight", (width,))
    return scopes


def _attention(config: MiniMaxH3Config, attention: TensorMap, names: str) -> None:
    q_norm, k_norm, out = names.split()
    size = config.head_dim
    attention.reshaped("q_norm.scale", f"{q_norm}.weight", (size,))
    attention.reshaped("k_norm.scale", f"{k_norm}.weight", (size,))
    attention.heads_out("out", out, config.num_heads, size, config.hidden, bias=False)


def _ffn(
    config: MiniMaxH3Config, block: TensorMap, fused: str, out: str, *, gate_first: bool
) -> None:
    width, inner = config.hidden, config.ffn_dim
    block.gate_value("ffn.gate_value", [fused], width, inner, gate_first=gate_first)
    block.linear("ffn.fc_out", out, (inner, width), bias=False)
