"""Padded text, conditioning frames and packed sequences: what may not matter does not."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vc_jax.models.hunyuan_video15 import HunyuanVideo15, HunyuanVideo15Config
from vc_jax.models.minimax_h3 import packed_layout
from vc_jax.models.wan import Wan

from . import golden


def hunyuan(arguments: dict[str, Any], **options: Any) -> Any:
    return golden.run(golden.fixture("hunyuan_video15").model(**options), arguments)


def test_hunyuan_pads_change_nothing_whatever_they_hold():
    arguments = golden.fixture("hunyuan_video15").arguments("main")
    expected = hunyuan(arguments)
    for suffix in ("", "_2"):
        text = arguments[f"encoder_hidden_states{suffix}"].copy()
        text[arguments[f"encoder_attention_mask{suffix}"] == 0] = np.nan
        arguments[f"encoder_hidden_states{suffix}"] = text
    np.testing.assert_array_equal(hunyuan(arguments), expected)


def test_hunyuan_without_any_text_is_finite():
    arguments = golden.fixture("hunyuan_video15").arguments("text_only")
    for suffix in ("", "_2"):
        mask = arguments[f"encoder_attention_mask{suffix}"]
        arguments[f"encoder_attention_mask{suffix}"] = np.zeros_like(mask)
    assert np.isfinite(hunyuan(arguments)).all()


def test_hunyuan_gives_key_lengths_and_no_mask_to_the_joint_attention():
    given: list[dict[str, Any]] = []

    def spy(query: Any, key: Any, value: Any, **options: Any) -> Any:
        given.append(options)
        return golden.plain_attention(query, key, value, **options)

    arguments = golden.fixture("hunyuan_video15").arguments("main")
    port = golden.fixture("hunyuan_video15").model(attention=spy)
    jax.eval_shape(lambda arguments: golden.call(port, arguments), arguments)
    assert [set(options) for options in given] == [{"key_value_seq_lengths"}]


def test_hunyuan_items_with_and_without_image_share_a_batch():
    """Each item decides for itself whether it has image rows."""
    data = golden.fixture("hunyuan_video15")
    with_image, without = data.arguments("main"), data.arguments("text_only")
    mixed = {key: np.stack([with_image[key][0], without[key][1]]) for key in with_image}
    result = hunyuan(mixed)
    assert golden.relative_l2(result[0], data.expected("main/sample")[0]) < 1e-4
    assert golden.relative_l2(result[1], data.expected("text_only/sample")[1]) < 1e-4


def test_hunyuan_meanflow_adds_a_second_time():
    config = HunyuanVideo15Config(
        num_layers=1, num_heads=1, head_dim=8, rope_axes=(4, 2, 2), use_meanflow=True
    )
    port = golden.random_model(HunyuanVideo15, config, dtype=jnp.float32)
    one = port.time_embedding(jnp.array([500.0]), jnp.array([100.0]))
    other = port.time_embedding(jnp.array([500.0]), jnp.array([400.0]))
    assert not np.allclose(one, other)
    with pytest.raises(ValueError, match="timestep_r"):
        port.time_embedding(jnp.array([500.0]))
    names = [name for entry in port.layouts["original"](config).entries for name in entry.names]
    assert "time_r_in.mlp.0.weight" in names


def test_hunyuan_refuses_masks_of_another_shape():
    arguments = golden.fixture("hunyuan_video15").arguments("main")
    arguments["encoder_attention_mask_2"] = np.ones((2, 24))
    with pytest.raises(ValueError, match=r"byt5_mask: expected \[batch=2, rows of byt5=12\]"):
        hunyuan(arguments)


def test_wan_attends_the_zero_rows_after_the_prompt():
    data = golden.fixture("wan_t2v")
    arguments = data.arguments("main")
    port = data.model()
    whole = golden.run(port, arguments)
    cut = arguments | {"encoder_hidden_states": arguments["encoder_hidden_states"][:, :17]}
    # The manifest puts the cost of masking them at 0.2.
    assert golden.relative_l2(golden.run(port, cut), whole) > 0.05


def test_wan_takes_one_timestep_a_latent_frame():
    """What TI2V-5B is given per token can be given per latent frame."""
    data = golden.fixture("wan_ti2v")
    arguments = data.arguments("main")
    frames = arguments["timestep"].reshape(1, 4, 36)[:, :, 0]
    port = data.model()
    result = golden.run(port, arguments | {"timestep": frames})
    assert golden.relative_l2(result, data.expected("main/sample")) < 7.5e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": np.zeros((1, 48, 4, 8, 17), np.float32)}, "not divisible by the patch"),
        (
            {"hidden_states": np.zeros((1, 16, 4, 8, 18), np.float32)},
            r"latents: expected \[batch, channels=48, t, h, w\], got \[1, 16, 4, 8, 18\]",
        ),
        ({"hidden_states": np.zeros((48, 4, 8, 18), np.float32)}, "latents: expected"),
        ({"timestep": np.zeros((1, 7), np.float32)}, "timestep: 7 entries"),
        ({"timestep": np.zeros((1, 1, 1), np.float32)}, "timestep: expected"),
    ],
)
def test_wan_names_arguments_of_another_shape(change, message):
    data = golden.fixture("wan_ti2v")
    port: Wan = data.model()
    arguments = data.arguments("main") | change
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: golden.call(port, arguments))


def test_longcat_names_frames_and_caches_that_do_not_fit():
    data = golden.fixture("longcat_video")
    port = data.model()
    main, cached = data.arguments("main"), data.arguments("cache_use")
    for given, message in (
        (main | {"num_cond_latents": 3}, "num_cond_latents: 3 of 3"),
        (cached | {"num_cond_latents": 2}, r"kv_cache\.key: expected"),
        (
            cached | {"timestep": np.zeros((2, 3), np.float32)},
            r"expected \[batch=2\] or \[batch=2, frames=2\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(functools.partial(golden.call, port, given))


def test_longcat_conditioning_frames_do_not_see_the_noisy_ones():
    data = golden.fixture("longcat_video")
    port = data.model()
    arguments = data.arguments("continuation")
    latents = arguments["hidden_states"]
    noisier = latents + np.float32([0.0, 1.0, 1.0]).reshape(3, 1, 1)
    before, after = (golden.run(port, arguments | {"hidden_states": x}) for x in (latents, noisier))
    np.testing.assert_array_equal(before[:, :, 0], after[:, :, 0])
    assert not np.allclose(before[:, :, 1:], after[:, :, 1:])


def test_minimax_layout_is_the_peers():
    data = golden.fixture("minimax_h3")
    for case, keyframes in (("main", ("first",)), ("no_keyframe", ())):
        arguments, notes = data.arguments(case), data.case(case)["notes"]
        tags = arguments["token_tags"][: len(arguments["text_indices"])]
        layout = packed_layout(
            tags,
            tuple(notes["latent_grid_t_h_w"]),
            len(arguments["audio_indices"]) // 2,
            keyframes=keyframes,
        )
        np.testing.assert_allclose(layout.positions, arguments["position_ids"], atol=1e-12)
        np.testing.assert_array_equal(layout.tags, arguments["token_tags"])
        for part in ("text", "audio", "video"):
            indices = getattr(layout, f"{part}_indices")
            np.testing.assert_array_equal(indices, arguments[f"{part}_indices"])
        # Rows that share a time in the peer share one here.
        pairs = set(zip(layout.time_indices.tolist(), arguments["timestep_indices"].tolist()))
        assert len(pairs) == len(arguments["timestep"])


def test_minimax_last_keyframe_stands_at_the_last_frame():
    """A span of 5/3 before the end of the clip, whose frames span 1, 4, 4, 4, 4 pixel frames."""
    layout = packed_layout([1, 1, 1], (7, 2, 2), 1, keyframes=("last",))
    assert layout.positions[3, 0] == pytest.approx(3 + 5 / 3 * (1 + 4 * 4 + 1 + 4) - 5 / 3)
    np.testing.assert_array_equal(layout.time_indices[:4], [0, 0, 0, 2])


def test_minimax_layout_names_what_does_not_fit():
    with pytest.raises(ValueError, match="keyframes"):
        packed_layout([1], (2, 2, 2), 1, keyframes=("middle",))
    with pytest.raises(ValueError, match="grid"):
        packed_layout([1], (2, 3, 2), 1)


def test_minimax_names_rows_that_do_not_fit_the_layout():
    data = golden.fixture("minimax_h3")
    port, arguments = data.model(), data.arguments("main")
    arguments["audio_hidden_states"] = np.zeros((1, 5, 32), np.float32)
    with pytest.raises(ValueError, match=r"audio: expected \[batch=1, rows=22"):
        jax.eval_shape(lambda: golden.call(port, arguments))
