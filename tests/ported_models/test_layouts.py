"""The traps of the released layouts, each on a small tensor whose rows say what they are."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vc_jax.models.common import layers
from vc_jax.models.common.tensor_map import Entry, TensorMap
from vc_jax.models.hunyuan_video15 import HunyuanVideo15, HunyuanVideo15Config
from vc_jax.models.hunyuan_video15 import tensors as hunyuan_tensors
from vc_jax.models.longcat_video import LongCatVideo, LongCatVideoConfig
from vc_jax.models.longcat_video import tensors as longcat_tensors
from vc_jax.models.minimax_h3 import MiniMaxH3, MiniMaxH3Config
from vc_jax.models.minimax_h3 import tensors as minimax_tensors
from vc_jax.models.wan import Wan, WanConfig
from vc_jax.models.wan import tensors as wan_tensors

WAN = WanConfig(num_layers=2, num_heads=2, head_dim=6, ffn_dim=5, text_dim=4)
HUNYUAN = HunyuanVideo15Config(
    num_layers=2, num_heads=2, head_dim=6, rope_axes=(2, 2, 2), text_dim=3, image_dim=3, byt5_dim=3
)
LONGCAT = LongCatVideoConfig(num_layers=2, num_heads=2, hidden=12, text_dim=3, time_dim=4)
MINIMAX = MiniMaxH3Config(
    num_layers=2, num_heads=3, head_dim=6, rope_freqs=1, hidden=5, ffn_dim=2, text_dim=3
)
MODELS = {
    Wan: WAN,
    HunyuanVideo15: HUNYUAN,
    LongCatVideo: LONGCAT,
    MiniMaxH3: dataclasses.replace(MINIMAX, time_hidden=4, time_dim=4),
}


def entry(layout: TensorMap, parameter: str) -> Entry:
    return next(entry for entry in layout.entries if entry.parameter == parameter)


def rows(count: int, columns: int | None = None) -> np.ndarray:
    """A tensor whose row r holds r everywhere."""
    numbers = np.arange(count, dtype=np.float32)
    return numbers if columns is None else np.repeat(numbers[:, None], columns, axis=1)


def test_minimax_raw_queries_keys_values_are_interleaved_by_head():
    heads, size, width = 3, 6, 5
    load = entry(minimax_tensors.original(MINIMAX), "blocks.qkv.kernel").load
    kernel = load(rows(heads * 3 * size, width))
    assert kernel.shape == (width, 3, heads, size)
    for head in range(heads):
        for part in range(3):  # query, key, value
            for channel in range(size):
                row = head * 3 * size + part * size + channel
                assert (kernel[:, part, head, channel] == row).all()


def test_longcat_fused_rows_are_part_then_head_then_channel():
    heads, size, width = 2, 6, 12
    layout = longcat_tensors.original(LONGCAT)
    for parameter, parts in (("blocks.qkv", 3), ("blocks.cross_kv", 2)):
        kernel = entry(layout, f"{parameter}.kernel").load(rows(parts * heads * size, width))
        bias = entry(layout, f"{parameter}.bias").load(rows(parts * heads * size))
        for part in range(parts):
            for head in range(heads):
                expected = part * heads * size + head * size + np.arange(size)
                np.testing.assert_array_equal(kernel[0, part, head], expected)
                np.testing.assert_array_equal(bias[part, head], expected)


def test_hunyuan_original_refiner_rows_are_query_key_value():
    load = entry(hunyuan_tensors.original(HUNYUAN), "refiner.blocks.qkv.kernel").load
    kernel = load(rows(36, 12))
    assert [kernel[0, part, 0, 0] for part in range(3)] == [0, 12, 24]


@pytest.mark.parametrize(
    ("layout", "gate_rows"),
    [
        (minimax_tensors.diffusers, [2, 3]),  # [value; gate]
        (minimax_tensors.original, [0, 1]),  # [gate; value]
    ],
)
def test_minimax_gate_is_found_in_either_order(layout, gate_rows):
    kernel = entry(layout(MINIMAX), "blocks.ffn.gate_value").load(rows(4, 5))
    np.testing.assert_array_equal(kernel[0, 0], gate_rows)
    np.testing.assert_array_equal(kernel[0, 1], [row for row in range(4) if row not in gate_rows])


def test_swiglu_applies_silu_to_the_gate_only():
    glu = layers.SwiGlu(1, 1, rngs=nnx.Rngs(0), dtype=jnp.float32)
    glu.gate_value.set_value(jnp.array([[[2.0], [3.0]]]))
    glu.fc_out.kernel.set_value(jnp.ones((1, 1)))
    out = glu(jnp.ones((1, 1, 1)))
    assert float(out[0, 0, 0]) == pytest.approx(3.0 * 2.0 / (1.0 + np.exp(-2.0)))


def test_longcat_gate_is_w1_and_value_is_w3():
    gate_value = entry(longcat_tensors.original(LONGCAT), "blocks.ffn.gate_value")
    assert gate_value.names == ("blocks.{}.ffn.w1.weight", "blocks.{}.ffn.w3.weight")
    hidden = LONGCAT.ffn_dim
    kernel = gate_value.load(np.zeros((hidden, 12)), np.ones((hidden, 12)))
    assert (kernel[:, 0] == 0).all()
    assert (kernel[:, 1] == 1).all()


def test_hunyuan_final_shift_and_scale_change_places_between_layouts():
    width = HUNYUAN.hidden
    for layout, shift_rows in (
        (hunyuan_tensors.original, np.arange(width)),  # shift, scale
        (hunyuan_tensors.diffusers, np.arange(width, 2 * width)),  # scale, shift
    ):
        declared = layout(HUNYUAN)
        kernel = entry(declared, "final_modulation.kernel").load(rows(2 * width, width))
        bias = entry(declared, "final_modulation.bias").load(rows(2 * width))
        np.testing.assert_array_equal(kernel[0, :width], shift_rows)
        np.testing.assert_array_equal(bias[:width], shift_rows)


def test_wan_norm_before_cross_attention_is_norm2_or_norm3():
    names = {
        wan_tensors.diffusers: "blocks.{}.norm2.weight",
        wan_tensors.original: "blocks.{}.norm3.weight",
    }
    for layout, name in names.items():
        assert entry(layout(WAN), "blocks.cross_norm.scale").names == (name,)
        declared = {name for e in layout(WAN).entries for name in e.names}
        assert sum(".norm2" in name or ".norm3" in name for name in declared) == 2


def test_wan_qk_norm_runs_over_all_heads_together():
    norm = layers.RMSNorm(2, 3, epsilon=0.0)
    x = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    np.testing.assert_allclose(norm(x), x / np.sqrt(91.0 / 6.0), rtol=1e-6)
    per_head = layers.RMSNorm(3, epsilon=0.0)
    scales = np.sqrt([[14.0 / 3.0], [77.0 / 3.0]])
    np.testing.assert_allclose(per_head(x), x / scales, rtol=1e-6)


def test_patch_embedding_is_the_peers_convolution():
    config = dataclasses.replace(WAN, in_channels=3)
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(config.hidden, 3, 1, 2, 2)).astype(np.float32)
    latents = jnp.asarray(generator.normal(size=(1, 3, 2, 4, 6)), jnp.float32)
    convolved = jax.lax.conv_general_dilated(latents, jnp.asarray(weight), (1, 2, 2), "VALID")
    expected = convolved.reshape(1, config.hidden, -1).swapaxes(1, 2)
    kernel = entry(wan_tensors.original(config), "patch_embedding.kernel").load(weight)
    np.testing.assert_allclose(layers.patchify(latents, (1, 2, 2)) @ kernel, expected, atol=1e-5)


@pytest.mark.parametrize("channels_first", [True, False])
def test_unpatchify_places_channels_first_or_last_within_a_row(channels_first):
    patch, grid, channels = (1, 2, 2), (1, 1, 2), 3
    token = np.zeros((1, 2, 12), np.float32)
    # Channel 2, lower left pixel of the second patch.
    column = 2 * 4 + 2 if channels_first else 2 * channels + 2
    token[0, 1, column] = 1.0
    out = layers.unpatchify(jnp.asarray(token), grid, patch, channels_first=channels_first)
    assert out.shape == (1, channels, 1, 2, 4)
    assert np.argwhere(np.asarray(out) == 1.0).tolist() == [[0, 2, 0, 1, 2]]


def test_rope_pairs_neighbours_and_rope_halves_pairs_across():
    x = jnp.arange(1.0, 7.0).reshape(1, 1, 1, 6)
    cos, sin = jnp.zeros((1, 2)), jnp.ones((1, 2))  # a quarter turn
    turned = layers.rotate_halves(x, cos, sin)[0, 0, 0]
    np.testing.assert_array_equal(turned, [-3, -4, 1, 2, 5, 6])  # channels 4, 5 untouched
    cos, sin = jnp.zeros((1, 3)), jnp.ones((1, 3))
    np.testing.assert_array_equal(layers.rotate_pairs(x, cos, sin)[0, 0, 0], [-2, 1, -4, 3, -6, 5])


def test_timestep_embedding_has_cosines_first():
    np.testing.assert_allclose(layers.timestep_embedding(0.0, 6), [1, 1, 1, 0, 0, 0])


@pytest.mark.parametrize("model", list(MODELS), ids=lambda model: model.__name__)
def test_parts_that_the_peers_keep_in_float32_stay_float32(model):
    abstract: Any = nnx.eval_shape(lambda: model(MODELS[model], rngs=nnx.Rngs(0)))
    kept = {
        Wan: ["time_mlp", "time_projection", "blocks.modulation", "final_modulation"],
        HunyuanVideo15: ["time_mlp", "refiner.time_mlp"],
        LongCatVideo: ["time_mlp", "final_modulation", "head"],
        MiniMaxH3: ["time_mlp", "video_in", "audio_in", "video_out", "audio_out"],
    }[model]
    for path, leaf in nnx.to_flat_state(nnx.state(abstract)):
        name = ".".join(map(str, path))
        norm = name.endswith(".scale") or "norm" in name
        exact = norm or any(name.startswith(f"{part}.") or name == part for part in kept)
        assert leaf.get_value().dtype == (jnp.float32 if exact else jnp.bfloat16), name


@pytest.mark.parametrize("model", list(MODELS), ids=lambda model: model.__name__)
def test_every_layout_declares_every_parameter_once_and_inverts(model):
    config = MODELS[model]
    abstract = nnx.eval_shape(lambda: model(config, rngs=nnx.Rngs(0)))
    shapes = {
        ".".join(map(str, path)): leaf.get_value().shape
        for path, leaf in nnx.to_flat_state(nnx.state(abstract))
    }
    for layout in model.layouts.values():
        declared = layout(config).entries
        assert sorted(e.parameter for e in declared) == sorted(shapes)
        for e in declared:
            tensors = [
                np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in e.shapes
            ]
            parameter = e.load(*tensors)
            assert parameter.shape == shapes[e.parameter][0 if e.layers is None else 1 :]
            for saved, tensor in zip(e.save(parameter), tensors, strict=True):
                np.testing.assert_array_equal(saved, tensor)
