"""Full-size models, on a CPU, without their weights; and the configuration files."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vc_jax.models.hunyuan_video15 import HUNYUAN_VIDEO_15, HunyuanVideo15, HunyuanVideo15Config
from vc_jax.models.longcat_video import LONGCAT_VIDEO, LongCatVideo, LongCatVideoConfig
from vc_jax.models.minimax_h3 import MINIMAX_H3, MiniMaxH3, MiniMaxH3Config, packed_layout
from vc_jax.models.wan import I2V_A14B, T2V_A14B, TI2V_5B, Wan, WanConfig

from . import golden

RELEASED: dict[str, tuple[Any, Any, int]] = {
    "Wan2.2-T2V-A14B": (Wan, T2V_A14B, 14_288_491_584),
    "Wan2.2-I2V-A14B": (Wan, I2V_A14B, 14_288_901_184),
    "Wan2.2-TI2V-5B": (Wan, TI2V_5B, 4_999_787_712),
    "HunyuanVideo-1.5": (HunyuanVideo15, HUNYUAN_VIDEO_15, 8_326_608_160),
    "LongCat-Video": (LongCatVideo, LONGCAT_VIDEO, 13_581_071_424),
    "MiniMax-H3": (MiniMaxH3, MINIMAX_H3, 33_122_992_896),
}


def abstract(name: str, **options: Any) -> Any:
    model, config, _ = RELEASED[name]
    return nnx.eval_shape(lambda: model(config, rngs=nnx.Rngs(0), **options))


@pytest.mark.parametrize("name", list(RELEASED))
def test_full_size_models_build_and_have_the_exact_number_of_parameters(name):
    model, config, count = RELEASED[name]
    assert abstract(name).num_parameters() == count
    for layout in model.layouts.values():
        tensors = [tensor for entry in layout(config).entries for tensor in entry.tensors()]
        assert len({tensor for tensor, _ in tensors}) == len(tensors)
        assert sum(math.prod(shape) for _, shape in tensors) == count


def test_minimax_in_its_mixed_precision_is_as_large_as_the_released_files():
    leaves = jax.tree.leaves(nnx.state(abstract("MiniMax-H3")))
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert nbytes == pytest.approx(66.3e9, rel=1e-3)
    layout = MiniMaxH3.layouts["original"](MINIMAX_H3)
    # The released 535 tensors with rope.inv_freq, which is recomputed.
    assert sum(1 for entry in layout.entries for _ in entry.tensors()) == 534


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def full_size_inputs(name: str) -> tuple[tuple[Any, ...], Any]:
    """720p arguments (480p for LongCat) and the shape of the result."""
    batch = array(1, dtype=jnp.float32)
    if name == "HunyuanVideo-1.5":
        masks = [array(1, length, dtype=jnp.int32) for length in (1000, 256)]
        text = (array(1, 1000, 3584), masks[0], array(1, 256, 1472), masks[1])
        return (array(1, 65, 31, 45, 80), batch, *text, array(1, 729, 1152)), (1, 32, 31, 45, 80)
    if name == "MiniMax-H3":
        layout = packed_layout(np.ones(500, np.int32), (37, 48, 84), 207)
        rows = [len(layout.video_indices), len(layout.audio_indices)]
        data = array(1, rows[0], 96), array(1, rows[1], 32), array(1, 500, 5120)
        rest = array(2, dtype=jnp.float32), array(len(layout.tags), dtype=jnp.int32), layout
        return (*data, *rest), (1, rows[0], 96)
    shapes = {
        "Wan2.2-T2V-A14B": (16, 21, 90, 160),
        "Wan2.2-I2V-A14B": (36, 21, 90, 160),
        "Wan2.2-TI2V-5B": (48, 31, 44, 80),
        "LongCat-Video": (16, 24, 60, 104),
    }
    latents = array(1, *shapes[name])
    out = (1, 16, *latents.shape[2:]) if "I2V-A14B" in name else latents.shape
    return (latents, batch, array(1, 512, 4096)), out


@pytest.mark.parametrize("name", list(RELEASED))
def test_full_size_forward_passes_trace_without_large_constants(name):
    model = abstract(name, attention=golden.plain_attention)
    graph, state = nnx.split(model)
    inputs, shape = full_size_inputs(name)

    def forward(state: Any, inputs: Any) -> Any:
        return nnx.merge(graph, state)(*inputs)

    program, out = jax.make_jaxpr(forward, return_shape=True)(state, inputs)
    assert jax.tree.leaves(out)[0].shape == shape
    assert sum(np.asarray(constant).nbytes for constant in program.consts) < 2**20


@pytest.mark.parametrize("name", golden.NAMES)
@pytest.mark.parametrize("layout", ["diffusers", "original"])
def test_configurations_survive_their_files(name, layout):
    config = golden.fixture(name).config()
    written = config.to_dict(layout)
    again = type(config).from_dict(written)
    if isinstance(config, HunyuanVideo15Config):
        # The inner byT5 width is read from the tensors; the original file lacks text widths too.
        assert again.hidden == config.hidden
        assert again.in_channels == config.in_channels
        assert again.rope_axes == config.rope_axes
    else:
        assert again == config


def test_configurations_read_the_released_files():
    wan = {
        "_class_name": "WanModel",
        "model_type": "t2v",
        "dim": 5120,
        "eps": 1e-06,
        "ffn_dim": 13824,
        "freq_dim": 256,
        "in_dim": 16,
        "num_heads": 40,
        "num_layers": 40,
        "out_dim": 16,
        "text_len": 512,
    }
    assert WanConfig.from_dict(wan) == T2V_A14B
    assert WanConfig.from_dict(wan | {"in_dim": 36, "model_type": "i2v"}) == I2V_A14B
    hunyuan = {
        "concat_condition": True,
        "heads_num": 16,
        "hidden_size": 2048,
        "in_channels": 32,
        "mlp_width_ratio": 4,
        "mm_double_blocks_depth": 54,
        "mm_single_blocks_depth": 0,
        "out_channels": 32,
        "patch_size": [1, 1, 1],
        "rope_dim_list": [16, 56, 56],
        "rope_theta": 256,
        "text_states_dim": 3584,
        "use_meanflow": False,
        "vision_states_dim": 1152,
    }
    assert HunyuanVideo15Config.from_dict(hunyuan) == HUNYUAN_VIDEO_15
    longcat = {
        "in_channels": 16,
        "out_channels": 16,
        "hidden_size": 4096,
        "depth": 48,
        "num_heads": 32,
        "caption_channels": 4096,
        "mlp_ratio": 4,
        "adaln_tembed_dim": 512,
        "frequency_embedding_size": 256,
        "patch_size": [1, 2, 2],
        "text_tokens_zero_pad": True,
    }
    assert LongCatVideoConfig.from_dict(longcat) == LONGCAT_VIDEO
    assert LONGCAT_VIDEO.ffn_dim == 11008


CONFIGS = {
    "wan": T2V_A14B,
    "hunyuan": HUNYUAN_VIDEO_15,
    "longcat": LONGCAT_VIDEO,
    "minimax": MINIMAX_H3,
}


@pytest.mark.parametrize("layout", ["diffusers", "original"])
@pytest.mark.parametrize("of", list(CONFIGS))
@pytest.mark.parametrize("given", list(CONFIGS))
def test_another_models_configuration_is_refused_in_one_line(of, given, layout):
    written = CONFIGS[given].to_dict(layout)
    reader = type(CONFIGS[of])
    if of == given:
        assert reader.from_dict(written) == CONFIGS[of]
        return
    with pytest.raises(ValueError, match="_class_name: expected") as named:
        reader.from_dict(written)
    assert written["_class_name"] in str(named.value)
    del written["_class_name"]
    with pytest.raises(ValueError, match=r"configuration of|qk_norm: expected") as unnamed:
        reader.from_dict(written)
    for error in (named, unnamed):
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("class_name", "fields"),
    [
        ("WanVACETransformer3DModel", {"vace_layers": [0, 5], "vace_in_channels": 96}),
        ("WanAnimateTransformer3DModel", {"motion_encoder_dim": 512, "in_channels": 36}),
        ("VaceWanModel", {"vace_in_dim": 96}),
    ],
)
def test_models_built_on_wan_are_refused_by_class_or_by_field(class_name, fields):
    base = T2V_A14B.to_dict("diffusers")
    with pytest.raises(ValueError, match=f"_class_name: .*'{class_name}'"):
        WanConfig.from_dict(base | {"_class_name": class_name} | fields)
    del base["_class_name"]
    with pytest.raises(NotImplementedError, match=next(iter(fields))):
        WanConfig.from_dict(base | fields)


def test_a_hunyuan_with_guidance_embeddings_is_refused():
    for layout, field in (("diffusers", "guidance_embeds"), ("original", "guidance_embed")):
        written = HUNYUAN_VIDEO_15.to_dict(layout) | {field: True}
        with pytest.raises(NotImplementedError, match=f"{field}: True is not supported"):
            HunyuanVideo15Config.from_dict(written)


def test_longcats_avatar_is_refused():
    written = LONGCAT_VIDEO.to_dict("original")
    avatar = {"_class_name": "LongCatVideoAvatarTransformer3DModel"}
    with pytest.raises(ValueError, match="LongCatVideoAvatarTransformer3DModel"):
        LongCatVideoConfig.from_dict(written | avatar)


def test_configurations_refuse_what_is_not_ported():
    base = T2V_A14B.to_dict("diffusers")
    with pytest.raises(NotImplementedError, match="image_dim"):
        WanConfig.from_dict(base | {"image_dim": 1280})
    with pytest.raises(NotImplementedError, match="model_type"):
        WanConfig.from_dict(base | {"model_type": "s2v"})
    with pytest.raises(NotImplementedError, match="mm_single_blocks_depth"):
        HunyuanVideo15Config.from_dict({"heads_num": 16, "mm_single_blocks_depth": 40})
    with pytest.raises(ValueError, match="patch_size"):
        LongCatVideoConfig.from_dict({"patch_size": [2, 2, 2]})
    with pytest.raises(ValueError, match="num_attention_heads: missing"):
        MiniMaxH3Config.from_dict({"num_layers": 50, "num_refiner_layers": 2})
