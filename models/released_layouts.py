"""The layouts in which the four models are released: diffusers' and the authors' own.

Tensor names are facts of the released files. What differs between two layouts of a model beyond
names is said at the line that handles it.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .layout import Layout

if TYPE_CHECKING:
    from .hunyuan_config import HunyuanVideo15Config
    from .longcat_video import LongCatVideoConfig
    from .minimax_h3 import MiniMaxH3Config
    from .wan import WanConfig


def _patch_kernel(config, width: int) -> tuple[int, ...]:
    return (width, config.in_channels, *config.patch)


# --- Wan2.2 ---------------------------------------------------------------------------------------


def wan_diffusers(config: "WanConfig") -> Layout:
    layout = _wan_common(config)
    width, rows_out = config.hidden, config.out_channels * math.prod(config.patch)
    embedder = layout.scope("", "condition_embedder.")
    text, time = "text_embedder.linear_", "time_embedder.linear_"
    embedder.mlp("text_mlp", (f"{text}1", f"{text}2"), (config.text_dim, width, width))
    embedder.mlp("time_mlp", (f"{time}1", f"{time}2"), (config.freq_dim, width, width))
    embedder.linear("time_projection", "time_proj", (width, 6 * width))
    layout.linear("head", "proj_out", (width, rows_out))
    layout.reshaped("final_modulation", "scale_shift_table", (1, 2, width), (2, width))
    block = layout.scope("blocks.", "blocks.{}.", config.num_layers)
    block.reshaped("modulation", "scale_shift_table", (1, 6, width), (6, width))
    names = ["to_q", "to_k", "to_v", "to_out.0"]
    _wan_attention(config, block, ("attn1.", "attn2."), names)
    if config.cross_attn_norm:
        block.layer_norm("cross_norm", "norm2", width)
    block.mlp("ffn", ("ffn.net.0.proj", "ffn.net.2"), (width, config.ffn_dim, width))
    return layout


def wan_original(config: "WanConfig") -> Layout:
    layout = _wan_common(config)
    width, rows_out = config.hidden, config.out_channels * math.prod(config.patch)
    text, time = ("text_embedding.0", "text_embedding.2"), ("time_embedding.0", "time_embedding.2")
    layout.mlp("text_mlp", text, (config.text_dim, width, width))
    layout.mlp("time_mlp", time, (config.freq_dim, width, width))
    layout.linear("time_projection", "time_projection.1", (width, 6 * width))
    layout.linear("head", "head.head", (width, rows_out))
    layout.reshaped("final_modulation", "head.modulation", (1, 2, width), (2, width))
    block = layout.scope("blocks.", "blocks.{}.", config.num_layers)
    block.reshaped("modulation", "modulation", (1, 6, width), (6, width))
    _wan_attention(config, block, ("self_attn.", "cross_attn."), ["q", "k", "v", "o"])
    # The authors call the norms 1, 3, 2 in order of use: the affine one before cross-attention is
    # norm3 here and norm2 in diffusers.
    if config.cross_attn_norm:
        block.layer_norm("cross_norm", "norm3", width)
    block.mlp("ffn", ("ffn.0", "ffn.2"), (width, config.ffn_dim, width))
    return layout


def _wan_common(config: "WanConfig") -> Layout:
    rows_in, width = config.in_channels * math.prod(config.patch), config.hidden
    layout = Layout(ignore=[".norm_added_q.weight"])
    kernel = _patch_kernel(config, width)
    layout.linear("patch_embedding", "patch_embedding", (rows_in, width), kernel=kernel)
    return layout


def _wan_attention(
    config: "WanConfig", block: Layout, scopes: tuple[str, str], names: Sequence[str]
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


# --- HunyuanVideo-1.5 -----------------------------------------------------------------------------


def hunyuan_diffusers(config: "HunyuanVideo15Config") -> Layout:
    layout = Layout()
    width, heads, size = config.hidden, config.num_heads, config.head_dim
    _hunyuan_patches(config, layout, "x_embedder.proj", "proj_out")
    time = layout.scope("", "time_embed.")
    _hunyuan_time(
        config, time, "time_mlp", "timestep_embedder.linear_1", "timestep_embedder.linear_2"
    )
    if config.use_meanflow:
        names = ("timestep_embedder_r.linear_1", "timestep_embedder_r.linear_2")
        _hunyuan_time(config, time, "time_r_mlp", *names)
    layout.reshaped("condition_types", "cond_type_embed.weight", (3, width))
    # Outputs are (scale, shift); the model's order is (shift, scale).
    layout.linear("final_modulation", "norm_out.linear", (width, 2 * width), swap_halves=True)
    refiner = layout.scope("refiner.", "context_embedder.")
    times = refiner.scope("", "time_text_embed.")
    names = ("timestep_embedder.linear_1", "timestep_embedder.linear_2")
    _hunyuan_time(config, times, "time_mlp", *names)
    names = ("text_embedder.linear_1", "text_embedder.linear_2")
    times.mlp("text_mlp", names, (config.text_dim, width, width))
    refiner.linear("proj_in", "proj_in", (config.text_dim, width))
    block = refiner.scope("blocks.", "token_refiner.refiner_blocks.{}.", config.num_refiner_layers)
    block.heads_in("qkv", ["attn.to_q", "attn.to_k", "attn.to_v"], width, heads, size)
    block.heads_out("out", "attn.to_out.0", heads, size, width)
    _hunyuan_refiner_block(config, block, ("ff.net.0.proj", "ff.net.2"), "norm_out.linear")
    byt5 = layout.scope("byt5.", "context_embedder_2.")
    byt5.layer_norm("norm", "norm", config.byt5_dim)
    _hunyuan_byt5(config, byt5, ("linear_1", "linear_2", "linear_3"))
    _hunyuan_image(
        config, layout.scope("image.", "image_embedder."), "norm_in linear_1 linear_2 norm_out"
    )
    blocks = layout.scope("blocks.", "transformer_blocks.{}.", config.num_layers)
    _hunyuan_stream(
        config,
        blocks.scope("video.", ""),
        ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.norm_q", "attn.norm_k"],
        ["norm1.linear", "ff.net.0.proj", "ff.net.2"],
    )
    _hunyuan_stream(
        config,
        blocks.scope("text.", ""),
        [
            *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
            *("attn.norm_added_q", "attn.norm_added_k"),
        ],
        ["norm1_context.linear", "ff_context.net.0.proj", "ff_context.net.2"],
    )
    return layout


def hunyuan_original(config: "HunyuanVideo15Config") -> Layout:
    layout = Layout()
    width, heads, size = config.hidden, config.num_heads, config.head_dim
    _hunyuan_patches(config, layout, "img_in.proj", "final_layer.linear")
    _hunyuan_time(config, layout, "time_mlp", "time_in.mlp.0", "time_in.mlp.2")
    if config.use_meanflow:
        _hunyuan_time(config, layout, "time_r_mlp", "time_r_in.mlp.0", "time_r_in.mlp.2")
    layout.reshaped("condition_types", "cond_type_embedding.weight", (3, width))
    layout.linear("final_modulation", "final_layer.adaLN_modulation.1", (width, 2 * width))
    refiner = layout.scope("refiner.", "txt_in.")
    _hunyuan_time(config, refiner, "time_mlp", "t_embedder.mlp.0", "t_embedder.mlp.2")
    names = ("c_embedder.linear_1", "c_embedder.linear_2")
    refiner.mlp("text_mlp", names, (config.text_dim, width, width))
    refiner.linear("proj_in", "input_embedder", (config.text_dim, width))
    block = refiner.scope(
        "blocks.", "individual_token_refiner.blocks.{}.", config.num_refiner_layers
    )
    block.heads_in("qkv", "self_attn_qkv", width, heads, size, count=3)
    block.heads_out("out", "self_attn_proj", heads, size, width)
    _hunyuan_refiner_block(config, block, ("mlp.fc1", "mlp.fc2"), "adaLN_modulation.1")
    byt5 = layout.scope("byt5.", "byt5_in.")
    byt5.layer_norm("norm", "layernorm", config.byt5_dim)
    _hunyuan_byt5(config, byt5, ("fc1", "fc2", "fc3"))
    _hunyuan_image(config, layout.scope("image.", "vision_in."), "proj.0 proj.1 proj.3 proj.4")
    blocks = layout.scope("blocks.", "double_blocks.{}.", config.num_layers)
    for stream, name in (("video.", "img"), ("text.", "txt")):
        parts = ("q", "k", "v", "proj", "q_norm", "k_norm")
        _hunyuan_stream(
            config,
            blocks.scope(stream, f"{name}_"),
            [f"attn_{part}" for part in parts],
            ["mod.linear", "mlp.fc1", "mlp.fc2"],
        )
    return layout


def _hunyuan_patches(config: "HunyuanVideo15Config", layout: Layout, into: str, out: str) -> None:
    width, volume = config.hidden, math.prod(config.patch)
    kernel = _patch_kernel(config, width)
    layout.linear("patch_embedding", into, (config.in_channels * volume, width), kernel=kernel)
    layout.linear("head", out, (width, config.out_channels * volume))


def _hunyuan_time(
    config: "HunyuanVideo15Config", layout: Layout, parameter: str, first: str, second: str
) -> None:
    layout.mlp(parameter, (first, second), (config.freq_dim, config.hidden, config.hidden))


def _hunyuan_refiner_block(
    config: "HunyuanVideo15Config", block: Layout, mlp: tuple[str, str], gates: str
) -> None:
    width = config.hidden
    block.layer_norm("norm1", "norm1", width)
    block.layer_norm("norm2", "norm2", width)
    block.mlp("mlp", mlp, (width, int(width * config.refiner_mlp_ratio), width))
    block.linear("gates", gates, (width, 2 * width))


def _hunyuan_byt5(
    config: "HunyuanVideo15Config", byt5: Layout, names: tuple[str, str, str]
) -> None:
    inner = config.byt5_hidden
    byt5.linear("linear_1", names[0], (config.byt5_dim, inner))
    byt5.linear("linear_2", names[1], (inner, inner))
    byt5.linear("linear_3", names[2], (inner, config.hidden))


def _hunyuan_image(config: "HunyuanVideo15Config", image: Layout, names: str) -> None:
    norm_in, linear_1, linear_2, norm_out = names.split()
    image.layer_norm("norm_in", norm_in, config.image_dim)
    image.linear("linear_1", linear_1, (config.image_dim, config.image_dim))
    image.linear("linear_2", linear_2, (config.image_dim, config.hidden))
    image.layer_norm("norm_out", norm_out, config.hidden)


def _hunyuan_stream(
    config: "HunyuanVideo15Config", stream: Layout, attention: list[str], rest: list[str]
) -> None:
    width, heads, size = config.hidden, config.num_heads, config.head_dim
    stream.heads_in("qkv", attention[:3], width, heads, size)
    stream.heads_out("out", attention[3], heads, size, width)
    stream.reshaped("q_norm.scale", f"{attention[4]}.weight", (size,))
    stream.reshaped("k_norm.scale", f"{attention[5]}.weight", (size,))
    stream.linear("modulation", rest[0], (width, 6 * width))
    stream.mlp("mlp", (rest[1], rest[2]), (width, int(width * config.mlp_ratio), width))


# --- LongCat-Video --------------------------------------------------------------------------------


def longcat_original(config: "LongCatVideoConfig") -> Layout:
    layout = Layout()
    width, heads, size = config.hidden, config.num_heads, config.head_dim
    time, text = (
        ("t_embedder.mlp.0", "t_embedder.mlp.2"),
        ("y_embedder.y_proj.0", "y_embedder.y_proj.2"),
    )
    _longcat_outer(config, layout, "x_embedder.proj", time, text)
    final = layout.scope("", "final_layer.")
    final.linear("final_modulation", "adaLN_modulation.1", (config.time_dim, 2 * width))
    final.linear("head", "linear", (width, config.out_channels * math.prod(config.patch)))
    block = layout.scope("blocks.", "blocks.{}.", config.num_layers)
    block.linear("modulation", "adaLN_modulation.1", (config.time_dim, 6 * width))
    block.layer_norm("cross_norm", "pre_crs_attn_norm", width)
    # Fused rows are [3, heads, head_dim] and [2, heads, head_dim].
    block.heads_in("qkv", "attn.qkv", width, heads, size, count=3)
    block.heads_in("cross_q", "cross_attn.q_linear", width, heads, size, count=1)
    block.heads_in("cross_kv", "cross_attn.kv_linear", width, heads, size, count=2)
    _longcat_block(config, block, ("attn.proj", "cross_attn.proj"), "attn")
    return layout


def longcat_diffusers(config: "LongCatVideoConfig") -> Layout:
    """The split layout that diffusers-style runtimes (FastVideo, sglang) convert the release to."""
    layout = Layout()
    width, heads, size = config.hidden, config.num_heads, config.head_dim
    time = ("time_embedder.linear_1", "time_embedder.linear_2")
    text = ("caption_embedder.linear_1", "caption_embedder.linear_2")
    _longcat_outer(config, layout, "patch_embed.proj", time, text)
    final = layout.scope("", "final_layer.")
    final.linear("final_modulation", "adaln_linear", (config.time_dim, 2 * width))
    final.linear("head", "proj", (width, config.out_channels * math.prod(config.patch)))
    block = layout.scope("blocks.", "blocks.{}.", config.num_layers)
    block.linear("modulation", "adaln_linear_1", (config.time_dim, 6 * width))
    block.layer_norm("cross_norm", "norm_cross", width)
    names = ["to_q", "to_k", "to_v"]
    block.heads_in("qkv", [f"self_attn.{name}" for name in names], width, heads, size)
    block.heads_in("cross_q", ["cross_attn.to_q"], width, heads, size)
    block.heads_in("cross_kv", [f"cross_attn.{name}" for name in names[1:]], width, heads, size)
    _longcat_block(config, block, ("self_attn.to_out", "cross_attn.to_out"), "self_attn")
    return layout


def _longcat_outer(
    config: "LongCatVideoConfig",
    layout: Layout,
    patches: str,
    time: tuple[str, str],
    text: tuple[str, str],
) -> None:
    width, rows_in = config.hidden, config.in_channels * math.prod(config.patch)
    kernel = _patch_kernel(config, width)
    layout.linear("patch_embedding", patches, (rows_in, width), kernel=kernel)
    layout.mlp("time_mlp", time, (config.freq_dim, config.time_dim, config.time_dim))
    layout.mlp("text_mlp", text, (config.text_dim, width, width))


def _longcat_block(
    config: "LongCatVideoConfig", block: Layout, outs: tuple[str, str], attention: str
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


# --- MiniMax-H3 -----------------------------------------------------------------------------------


def minimax_diffusers(config: "MiniMaxH3Config") -> Layout:
    layout = Layout()
    width = config.hidden
    names = "proj_in audio_proj_in context_embedder proj_out audio_proj_out"
    _minimax_outer(config, layout, names, ("time_embedder.linear_1", "time_embedder.linear_2"))
    layout.reshaped("refiner_norm.scale", "token_refiner.final_norm.weight", (width,))
    layout.reshaped("final_norm.scale", "norm_out.norm.weight", (width,))
    layout.linear("final_modulation", "norm_out.linear", (config.time_dim, 2 * width))
    for block in _minimax_blocks(
        config, layout, "transformer_blocks", "token_refiner.refiner_blocks"
    ):
        attention = block.scope("", "attn.")
        heads = (width, config.num_heads, config.head_dim)
        attention.heads_in("qkv", ["to_q", "to_k", "to_v"], *heads, bias=False)
        _minimax_attention(config, attention, "norm_q norm_k to_out.0")
        # Rows of the fused layer are [value; gate].
        _minimax_ffn(config, block, "ff.net.0.proj", "ff.net.2", gate_first=False)
    return layout


def minimax_original(config: "MiniMaxH3Config") -> Layout:
    layout = Layout(ignore=["rope.inv_freq"])
    width = config.hidden
    names = (
        "video_patch_proj audio_patch_proj condition_proj "
        "final_layer.video_out final_layer.audio_out"
    )
    _minimax_outer(config, layout, names, ("time_embedder.proj_in", "time_embedder.proj_out"))
    layout.reshaped("refiner_norm.scale", "token_refiner.final_norm.weight", (width,))
    layout.reshaped("final_norm.scale", "final_layer.norm.weight", (width,))
    layout.linear("final_modulation", "final_layer.adaln_proj.linear", (config.time_dim, 2 * width))
    for block in _minimax_blocks(config, layout, "blocks", "token_refiner.blocks"):
        attention = block.scope("", "attn.")
        heads = (width, config.num_heads, config.head_dim)
        # Rows are interleaved by head: [head 0: q, k, v; head 1: q, k, v; ...].
        attention.heads_in("qkv", "qkv_proj", *heads, bias=False, count=3, interleaved=True)
        _minimax_attention(config, attention, "q_norm k_norm out_proj")
        # Rows of the fused layer are [gate; value].
        _minimax_ffn(config, block, "mlp.fc1", "mlp.fc2", gate_first=True)
    return layout


def _minimax_outer(
    config: "MiniMaxH3Config", layout: Layout, names: str, time: tuple[str, str]
) -> None:
    width, rows = config.hidden, config.in_channels * math.prod(config.patch)
    video, audio, text, video_out, audio_out = names.split()
    layout.linear("video_in", video, (rows, width))
    layout.linear("audio_in", audio, (config.audio_channels, width))
    layout.linear("text_in", text, (config.text_dim, width))
    layout.linear("video_out", video_out, (width, rows))
    layout.linear("audio_out", audio_out, (width, config.audio_channels))
    layout.mlp("time_mlp", time, (config.freq_dim, config.time_hidden, config.time_dim))


def _minimax_blocks(
    config: "MiniMaxH3Config", layout: Layout, blocks: str, refiner: str
) -> tuple[Layout, Layout]:
    """Scopes of the main blocks (modulation and norms declared) and of the refiner's."""
    width = config.hidden
    main = layout.scope("blocks.", f"{blocks}.{{}}.", config.num_layers)
    main.linear("modulation", "adaln_proj.linear", (config.time_dim, 18 * width))
    scopes = main, layout.scope("refiner.", f"{refiner}.{{}}.", config.num_refiner_layers)
    for scope in scopes:
        scope.reshaped("norm1.scale", "norm1.weight", (width,))
        scope.reshaped("norm2.scale", "norm2.weight", (width,))
    return scopes


def _minimax_attention(config: "MiniMaxH3Config", attention: Layout, names: str) -> None:
    q_norm, k_norm, out = names.split()
    size = config.head_dim
    attention.reshaped("q_norm.scale", f"{q_norm}.weight", (size,))
    attention.reshaped("k_norm.scale", f"{k_norm}.weight", (size,))
    attention.heads_out("out", out, config.num_heads, size, config.hidden, bias=False)


def _minimax_ffn(
    config: "MiniMaxH3Config", block: Layout, fused: str, out: str, *, gate_first: bool
) -> None:
    width, inner = config.hidden, config.ffn_dim
    block.gate_value("ffn.gate_value", [fused], width, inner, gate_first=gate_first)
    block.linear("ffn.fc_out", out, (inner, width), bias=False)
