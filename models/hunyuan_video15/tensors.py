"""The two layouts in which HunyuanVideo-1.5 is released: diffusers' and the authors' own.

Tensor names are facts of the released files. What differs between the layouts beyond names is said
at the line that handles it.
"""

import math

from ..common.tensor_map import TensorMap
from .config import HunyuanVideo15Config


def diffusers(config: HunyuanVideo15Config) -> TensorMap:
    tensors = TensorMap()
    width, heads, size = config.hidden, config.num_heads, config.head_dim
    _patches(config, tensors, "x_embedder.proj", "proj_out")
    time = tensors.scope("", "time_embed.")
    _time(config, time, "time_mlp", "timestep_embedder.linear_1", "timestep_embedder.linear_2")
    if config.use_meanflow:
        names = ("timestep_embedder_r.linear_1", "timestep_embedder_r.linear_2")
        _time(config, time, "time_r_mlp", *names)
    tensors.reshaped("condition_types", "cond_type_embed.weight", (3, width))
    # Outputs are (scale, shift); the model's order is (shift, scale).
    tensors.linear("final_modulation", "norm_out.linear", (width, 2 * width), swap_halves=True)
    refiner = tensors.scope("refiner.", "context_embedder.")
    times = refiner.scope("", "time_text_embed.")
    names = ("timestep_embedder.linear_1", "timestep_embedder.linear_2")
    _time(config, times, "time_mlp", *names)
    names = ("text_embedder.linear_1", "text_embedder.linear_2")
    times.mlp("text_mlp", names, (config.text_dim, width, width))
    refiner.linear("proj_in", "proj_in", (config.text_dim, width))
    block = refiner.scope("blocks.", "token_refiner.refiner_blocks.{}.", config.num_refiner_layers)
    block.heads_in("qkv", ["attn.to_q", "attn.to_k", "attn.to_v"], width, heads, size)
    block.heads_out("out", "attn.to_out.0", heads, size, width)
    _refiner_block(config, block, ("ff.net.0.proj", "ff.net.2"), "norm_out.linear")
    byt5 = tensors.scope("byt5.", "context_embedder_2.")
    byt5.layer_norm("norm", "norm", config.byt5_dim)
    _byt5(config, byt5, ("linear_1", "linear_2", "linear_3"))
    _image(config, tensors.scope("image.", "image_embedder."), "norm_in linear_1 linear_2 norm_out")
    blocks = tensors.scope("blocks.", "transformer_blocks.{}.", config.num_layers)
    _stream(
        config,
        blocks.scope("video.", ""),
        ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.norm_q", "attn.norm_k"],
        ["norm1.linear", "ff.net.0.proj", "ff.net.2"],
    )
    _stream(
        config,
        blocks.scope("text.", ""),
        [
            *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
            *("attn.norm_added_q", "attn.norm_added_k"),
        ],
        ["norm1_context.linear", "ff_context.net.0.proj", "ff_context.net.2"],
    )
    return tensors


def original(config: HunyuanVideo15Config) -> TensorMap:
    tensors = TensorMap()
    width, heads, size = config.hidden, config.num_heads, config.head_dim
    _patches(config, tensors, "img_in.proj", "final_layer.linear")
    _time(config, tensors, "time_mlp", "time_in.mlp.0", "time_in.mlp.2")
    if config.use_meanflow:
        _time(config, tensors, "time_r_mlp", "time_r_in.mlp.0", "time_r_in.mlp.2")
    tensors.reshaped("condition_types", "cond_type_embedding.weight", (3, width))
    tensors.linear("final_modulation", "final_layer.adaLN_modulation.1", (width, 2 * width))
    refiner = tensors.scope("refiner.", "txt_in.")
    _time(config, refiner, "time_mlp", "t_embedder.mlp.0", "t_embedder.mlp.2")
    names = ("c_embedder.linear_1", "c_embedder.linear_2")
    refiner.mlp("text_mlp", names, (config.text_dim, width, width))
    refiner.linear("proj_in", "input_embedder", (config.text_dim, width))
    block = refiner.scope(
        "blocks.", "individual_token_refiner.blocks.{}.", config.num_refiner_layers
    )
    block.heads_in("qkv", "self_attn_qkv", width, heads, size, count=3)
    block.heads_out("out", "self_attn_proj", heads, size, width)
    _refiner_block(config, block, ("mlp.fc1", "mlp.fc2"), "adaLN_modulation.1")
    byt5 = tensors.scope("byt5.", "byt5_in.")
    byt5.layer_norm("norm", "layernorm", config.byt5_dim)
    _byt5(config, byt5, ("fc1", "fc2", "fc3"))
    _image(config, tensors.scope("image.", "vision_in."), "proj.0 proj.1 proj.3 proj.4")
    blocks = tensors.scope("blocks.", "double_blocks.{}.", config.num_layers)
    for stream, name in (("video.", "img"), ("text.", "txt")):
        parts = ("q", "k", "v", "proj", "q_norm", "k_norm")
        _stream(
            config,
            blocks.scope(stream, f"{name}_"),
            [f"attn_{part}" for part in parts],
            ["mod.linear", "mlp.fc1", "mlp.fc2"],
        )
    return tensors


def _patches(config: HunyuanVideo15Config, tensors: TensorMap, into: str, out: str) -> None:
    width, volume = config.hidden, math.prod(config.patch)
    kernel = (width, config.in_channels, *config.patch)
    tensors.linear("patch_embedding", into, (config.in_channels * volume, width), kernel=kernel)
    tensors.linear("head", out, (width, config.out_channels * volume))


def _time(
    config: HunyuanVideo15Config, tensors: TensorMap, parameter: str, first: str, second: str
) -> None:
    tensors.mlp(parameter, (first, second), (config.freq_dim, config.hidden, config.hidden))


def _refiner_block(
    config: HunyuanVideo15Config, block: TensorMap, mlp: tuple[str, str], gates: str
) -> None:
    width = config.hidden
    block.layer_norm("norm1", "norm1", width)
    block.layer_norm("norm2", "norm2", width)
    block.mlp("mlp", mlp, (width, int(width * config.refiner_mlp_ratio), width))
    block.linear("gates", gates, (width, 2 * width))


def _byt5(config: HunyuanVideo15Config, byt5: TensorMap, names: tuple[str, str, str]) -> None:
    inner = config.byt5_hidden
    byt5.linear("linear_1", names[0], (config.byt5_dim, inner))
    byt5.linear("linear_2", names[1], (inner, inner))
    byt5.linear("linear_3", names[2], (inner, config.hidden))


def _image(config: HunyuanVideo15Config, image: TensorMap, names: str) -> None:
    norm_in, linear_1, linear_2, norm_out = names.split()
    image.layer_norm("norm_in", norm_in, config.image_dim)
    image.linear("linear_1", linear_1, (config.image_dim, config.image_dim))
    image.linear("linear_2", linear_2, (config.image_dim, config.hidden))
    image.layer_norm("norm_out", norm_out, config.hidden)


def _stream(
    config: HunyuanVideo15Config, stream: TensorMap, attention: list[str], rest: list[str]
) -> None:
    width, heads, size = config.hidden, config.num_heads, config.head_dim
    stream.heads_in("qkv", attention[:3], width, heads, size)
    stream.heads_out("out", attention[3], heads, size, width)
    stream.reshaped("q_norm.scale", f"{attention[4]}.weight", (size,))
    stream.reshaped("k_norm.scale", f"{attention[5]}.weight", (size,))
    stream.linear("modulation", rest[0], (width, 6 * width))
    stream.mlp("mlp", (rest[1], rest[2]), (width, int(width * config.mlp_ratio), width))
