"""Peers' weights written in their other layout, by the published naming rules.

Written from the description of the released files, apart from the models' own layouts, so that
the two can be compared.
"""

import re

import numpy as np

Weights = dict[str, np.ndarray]


def other_layout(name: str, weights: Weights, heads: int) -> Weights:
    """Original names for Wan, HunyuanVideo-1.5 and MiniMax-H3; split names for LongCat-Video."""
    convert = {
        "wan_t2v": _wan,
        "wan_ti2v": _wan,
        "hunyuan_video15": _hunyuan,
        "minimax_h3": _minimax,
        "longcat_video": _longcat,
    }[name]
    return convert(dict(weights), heads)


def _rename(weights: Weights, rules: list[tuple[str, str]]) -> Weights:
    renamed = {}
    for name, array in weights.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        renamed[name] = array
    return renamed


def _fuse(weights: Weights, parts: list[str], whole: str) -> Weights:
    """Concatenates `prefix + part` over the parts into `prefix + whole`, for all prefixes."""
    fused = dict(weights)
    for name in weights:
        if parts[0] in name:
            pieces = [fused.pop(name.replace(parts[0], part)) for part in parts]
            fused[name.replace(parts[0], whole)] = np.concatenate(pieces)
    return fused


def _wan(weights: Weights, heads: int) -> Weights:
    return _rename(
        weights,
        [
            (r"^condition_embedder\.(time|text)_embedder\.linear_1", r"\1_embedding.0"),
            (r"^condition_embedder\.(time|text)_embedder\.linear_2", r"\1_embedding.2"),
            (r"^condition_embedder\.time_proj", "time_projection.1"),
            (r"^scale_shift_table", "head.modulation"),
            (r"^proj_out", "head.head"),
            (r"\.scale_shift_table", ".modulation"),
            (r"\.attn1\.", ".self_attn."),
            (r"\.attn2\.", ".cross_attn."),
            (r"_attn\.to_([qkv])\.", r"_attn.\1."),
            (r"_attn\.to_out\.0", "_attn.o"),
            (r"\.ffn\.net\.0\.proj", ".ffn.0"),
            (r"\.ffn\.net\.2", ".ffn.2"),
            (r"\.norm2\.", ".norm3."),
        ],
    )


def _hunyuan(weights: Weights, heads: int) -> Weights:
    for part in ("weight", "bias"):
        scale, shift = np.split(weights.pop(f"norm_out.linear.{part}"), 2)
        weights[f"final_layer.adaLN_modulation.1.{part}"] = np.concatenate([shift, scale])
    refiner = r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\."
    to = r"txt_in.individual_token_refiner.blocks.\1."
    weights = _rename(
        weights,
        [
            (r"^time_embed\.timestep_embedder\.linear_1", "time_in.mlp.0"),
            (r"^time_embed\.timestep_embedder\.linear_2", "time_in.mlp.2"),
            (refiner + r"attn\.to_out\.0", to + "self_attn_proj"),
            (refiner + r"attn\.to_([qkv])", to + r"self_attn_\2"),
            (refiner + r"ff\.net\.0\.proj", to + "mlp.fc1"),
            (refiner + r"ff\.net\.2", to + "mlp.fc2"),
            (refiner + r"norm_out\.linear", to + "adaLN_modulation.1"),
            (refiner, to),
            (
                r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_1",
                "txt_in.t_embedder.mlp.0",
            ),
            (
                r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_2",
                "txt_in.t_embedder.mlp.2",
            ),
            (r"^context_embedder\.time_text_embed\.text_embedder", "txt_in.c_embedder"),
            (r"^context_embedder\.proj_in", "txt_in.input_embedder"),
            (r"^context_embedder_2\.norm", "byt5_in.layernorm"),
            (r"^context_embedder_2\.linear_", "byt5_in.fc"),
            (r"^image_embedder\.norm_in", "vision_in.proj.0"),
            (r"^image_embedder\.linear_1", "vision_in.proj.1"),
            (r"^image_embedder\.linear_2", "vision_in.proj.3"),
            (r"^image_embedder\.norm_out", "vision_in.proj.4"),
            (r"^x_embedder", "img_in"),
            (r"^cond_type_embed\.", "cond_type_embedding."),
            (r"^proj_out", "final_layer.linear"),
            (r"^transformer_blocks\.", "double_blocks."),
            (r"\.norm1\.linear", ".img_mod.linear"),
            (r"\.norm1_context\.linear", ".txt_mod.linear"),
            (r"\.attn\.to_add_out", ".txt_attn_proj"),
            (r"\.attn\.to_out\.0", ".img_attn_proj"),
            (r"\.attn\.add_([qkv])_proj", r".txt_attn_\1"),
            (r"\.attn\.to_([qkv])", r".img_attn_\1"),
            (r"\.attn\.norm_added_([qk])", r".txt_attn_\1_norm"),
            (r"\.attn\.norm_([qk])", r".img_attn_\1_norm"),
            (r"\.ff_context\.net\.0\.proj", ".txt_mlp.fc1"),
            (r"\.ff_context\.net\.2", ".txt_mlp.fc2"),
            (r"\.ff\.net\.0\.proj", ".img_mlp.fc1"),
            (r"\.ff\.net\.2", ".img_mlp.fc2"),
        ],
    )
    parts = [f"self_attn_{part}." for part in "qkv"]
    return _fuse(weights, parts, "self_attn_qkv.")


def _minimax(weights: Weights, heads: int) -> Weights:
    weights = _fuse(weights, [f"attn.to_{part}." for part in "qkv"], "attn.qkv_proj.")
    for name, array in weights.items():
        if "qkv_proj" in name:
            rows = array.reshape(3, heads, -1, array.shape[-1])
            weights[name] = rows.swapaxes(0, 1).reshape(array.shape)
        if "ff.net.0.proj" in name:
            value, gate = np.split(array, 2)
            weights[name] = np.concatenate([gate, value])
    weights["rope.inv_freq"] = np.ones(16, np.float32)
    return _rename(
        weights,
        [
            (r"^proj_in\.", "video_patch_proj."),
            (r"^audio_proj_in\.", "audio_patch_proj."),
            (r"^context_embedder\.", "condition_proj."),
            (r"^time_embedder\.linear_1", "time_embedder.proj_in"),
            (r"^time_embedder\.linear_2", "time_embedder.proj_out"),
            (r"^token_refiner\.refiner_blocks", "token_refiner.blocks"),
            (r"^transformer_blocks", "blocks"),
            (r"\.attn\.norm_([qk])", r".attn.\1_norm"),
            (r"\.attn\.to_out\.0", ".attn.out_proj"),
            (r"\.ff\.net\.0\.proj", ".mlp.fc1"),
            (r"\.ff\.net\.2", ".mlp.fc2"),
            (r"^norm_out\.norm", "final_layer.norm"),
            (r"^norm_out\.linear", "final_layer.adaln_proj.linear"),
            (r"^proj_out", "final_layer.video_out"),
            (r"^audio_proj_out", "final_layer.audio_out"),
        ],
    )


def _longcat(weights: Weights, heads: int) -> Weights:
    split = {}
    for name, array in weights.items():
        if ".attn.qkv." in name:
            for part, piece in zip("qkv", np.split(array, 3), strict=True):
                split[name.replace(".attn.qkv.", f".attn.to_{part}.")] = piece
        elif "kv_linear" in name:
            for part, piece in zip("kv", np.split(array, 2), strict=True):
                split[name.replace("kv_linear", f"to_{part}")] = piece
        else:
            split[name] = array
    return _rename(
        split,
        [
            (r"^x_embedder", "patch_embed"),
            (r"^t_embedder\.mlp\.0", "time_embedder.linear_1"),
            (r"^t_embedder\.mlp\.2", "time_embedder.linear_2"),
            (r"^y_embedder\.y_proj\.0", "caption_embedder.linear_1"),
            (r"^y_embedder\.y_proj\.2", "caption_embedder.linear_2"),
            (r"^final_layer\.adaLN_modulation\.1", "final_layer.adaln_linear"),
            (r"^final_layer\.linear", "final_layer.proj"),
            (r"\.adaLN_modulation\.1", ".adaln_linear_1"),
            (r"\.pre_crs_attn_norm", ".norm_cross"),
            (r"\.attn\.proj\.", ".attn.to_out."),
            (r"\.attn\.", ".self_attn."),
            (r"\.cross_attn\.q_linear", ".cross_attn.to_q"),
            (r"\.cross_attn\.proj", ".cross_attn.to_out"),
        ],
    )
