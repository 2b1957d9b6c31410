"""What does not fit a model is refused by name, before work is done; nothing is ignored."""

import dataclasses
import functools
import json
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vc_jax.models import VideoDiTConfig
from vc_jax.models.hunyuan_video15 import HunyuanVideo15Config
from vc_jax.models.longcat_video import LongCatVideoConfig
from vc_jax.models.minimax_h3 import MiniMaxH3Config, packed_layout
from vc_jax.models.sampling import sample
from vc_jax.models.wan import I2V_A14B, Wan, WanConfig

from . import golden

model = functools.cache(lambda name: golden.fixture(name).model())


def sampling_case(name: str) -> tuple[Any, dict[str, Any]]:
    """Latents and conditioning that fit."""
    given = golden.fixture(name).arguments("main")
    text = jnp.asarray(given["encoder_hidden_states"])
    if name == "longcat_video":
        return jnp.zeros((2, 16, 3, 10, 14)), {"text": text[:, 0]}
    if name == "hunyuan_video15":
        rest = {
            "condition": jnp.zeros((2, 33, 3, 5, 7)),
            "text": text,
            "text_mask": jnp.asarray(given["encoder_attention_mask"]),
            "byt5": jnp.asarray(given["encoder_hidden_states_2"]),
            "byt5_mask": jnp.asarray(given["encoder_attention_mask_2"]),
            "image": jnp.asarray(given["image_embeds"]),
        }
        return jnp.zeros((2, 32, 3, 5, 7)), rest
    if name == "minimax_h3":
        layout = packed_layout(np.ones(5, np.int32), (2, 4, 6), 3)
        latents = {"video": jnp.zeros((1, 12, 96)), "audio": jnp.zeros((1, 6, 32))}
        return latents, {"text": text[:, :5], "layout": layout}
    return jnp.zeros_like(given["hidden_states"]), {"text": text}


def settings(port: Any, **changes: Any) -> Any:
    unguided = {"guidance": 1.0, "guidance_high_noise": None, "boundary": None, "num_steps": 1}
    return dataclasses.replace(port.sampling, **(unguided | changes))


def refused(name: str, message: str, conditioning: dict[str, Any], latents: Any = None, **options):
    port = model(name)
    latents = sampling_case(name)[0] if latents is None else latents
    with pytest.raises(ValueError, match=message):
        sample(port, latents, conditioning, sampling=settings(port), progress=False, **options)


@pytest.mark.parametrize("name", golden.NAMES)
def test_unknown_and_missing_conditioning_is_refused(name):
    _, conditioning = sampling_case(name)
    unknown = conditioning | {"imgae": conditioning["text"]}
    refused(name, r"conditioning: unknown \['imgae'\]; .* takes .*'text'.* optionally", unknown)
    refused(name, r"conditioning: \['text'\] missing", conditioning | {"text": None})
    del conditioning["text"]
    refused(name, r"conditioning: \['text'\] missing", conditioning)
    latents = sampling_case(name)[0]
    with pytest.raises(ValueError, match="unknown"):
        model(name).denoise(latents, jnp.float32(0), unknown, None)


def test_wan_takes_what_its_channels_are_for():
    port = nnx.eval_shape(
        lambda: Wan(dataclasses.replace(I2V_A14B, num_layers=1), rngs=nnx.Rngs(0))
    )
    text = jnp.zeros((1, 8, 4096))
    with pytest.raises(ValueError, match=r"\['condition'\] missing"):
        port.check_conditioning({"text": text})
    with pytest.raises(ValueError, match=r"unknown \['first_frame'\]"):
        port.check_conditioning({"text": text, "condition": text, "first_frame": text})
    _, conditioning = sampling_case("wan_t2v")
    refused("wan_t2v", r"unknown \['condition'\]", conditioning | {"condition": text})


@pytest.mark.parametrize("name", golden.NAMES)
def test_a_negative_that_would_be_ignored_is_refused(name):
    _, conditioning = sampling_case(name)
    negative = {"text": conditioning["text"]}
    refused(name, "^negative: without guidance", conditioning, negative=negative)


def test_a_negative_of_another_shape_is_refused():
    latents, conditioning = sampling_case("wan_t2v")
    port, shorter = model("wan_t2v"), {"text": conditioning["text"][:, :5]}
    guided = settings(port, guidance=3.0)
    with pytest.raises(ValueError, match=r"negative\['text'\]: expected the shape of conditioning"):
        sample(port, latents, conditioning, negative=shorter, sampling=guided, progress=False)


def test_an_entry_of_none_is_as_if_left_out():
    latents, conditioning = sampling_case("wan_t2v")
    port = model("wan_t2v")
    latents, text = latents[:, :, :1, :4, :4], {"text": conditioning["text"]}
    results = [
        sample(port, latents, given, sampling=settings(port), progress=False)
        for given in (text, text | {"first_frame": None})
    ]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("wan_ti2v", {"text": (2, 21, 40)}, r"conditioning\['text'\]: expected \[batch=1, rows"),
        ("wan_ti2v", {"first_frame": (1, 48, 2, 8, 18)}, r"'first_frame'\]: expected .*t=1"),
        ("hunyuan_video15", {"condition": (2, 32, 3, 5, 7)}, r"'condition'\]: .*channels=33"),
        ("longcat_video", {"cond_latents": (1, 16, 1, 10, 14)}, r"'cond_latents'\]: .*batch=2"),
        ("longcat_video", {"text_mask": (2, 5)}, r"'text_mask'\]: .*rows of text=22"),
        ("minimax_h3", {"keyframe_rows": (1, 6, 96)}, r"'keyframe_rows'\]: expected .*rows=0"),
        ("minimax_h3", {"text": (1, 5, 47)}, r"'text'\]: .*text_dim=48\], got \[1, 5, 47\]"),
    ],
)
def test_conditioning_of_another_shape_is_named(name, change, message):
    _, conditioning = sampling_case(name)
    refused(name, message, conditioning | {key: jnp.zeros(shape) for key, shape in change.items()})


def test_latents_of_another_shape_are_named():
    for name in ("wan_t2v", "hunyuan_video15", "longcat_video"):
        refused(
            name, r"latents: expected \[batch, channels", sampling_case(name)[1], jnp.zeros((2, 5))
        )
    latents, conditioning = sampling_case("minimax_h3")
    refused("minimax_h3", "latents: expected 'video' and 'audio'", conditioning, {"video": 0.0})
    fewer = latents | {"video": latents["video"][:, 1:]}
    refused("minimax_h3", r"latents\['video'\]: expected .*rows=12", conditioning, fewer)


TEXT = "encoder_hidden_states"
SHAPES: list[tuple[str, dict[str, Any], str]] = [
    ("wan_t2v", {"timestep": (1,)}, r"timestep: expected \[batch=2\] or .*groups\], got \[1\]"),
    ("wan_t2v", {"timestep": (3,)}, r"timestep: expected \[batch=2\]"),
    ("wan_t2v", {"timestep": ()}, r"timestep: expected \[batch=2\]"),
    ("wan_t2v", {TEXT: (1, 26, 48)}, r"text: expected \[batch=2, rows, text_dim=48\]"),
    ("wan_t2v", {TEXT: (2, 26, 47)}, r"text: expected .* got \[2, 26, 47\]"),
    ("wan_t2v", {TEXT: (2, 48)}, r"text: expected .* got \[2, 48\]"),
    ("hunyuan_video15", {"timestep": (1,)}, r"timestep: expected \[batch=2\], got \[1\]"),
    ("hunyuan_video15", {TEXT: (2, 48)}, r"text: expected"),
    ("hunyuan_video15", {TEXT: (2, 24, 40)}, r"text: expected .*text_dim=48"),
    ("hunyuan_video15", {"encoder_hidden_states_2": (2, 12, 41)}, r"byt5: expected .*byt5_dim=40"),
    ("hunyuan_video15", {"encoder_attention_mask": (24,)}, r"text_mask: expected"),
    ("hunyuan_video15", {"image_embeds": (2, 9, 31)}, r"image: expected .*image_dim=32\]"),
    ("hunyuan_video15", {"image_embeds": (1, 9, 32)}, r"image: expected \[batch=2"),
    ("hunyuan_video15", {"hidden_states": (2, 64, 3, 5, 7)}, r"latents: expected .*channels=65"),
    ("longcat_video", {"timestep": (1,)}, r"timestep: expected \[batch=2\] or .*frames=3\]"),
    ("longcat_video", {"timestep": (1, 3)}, r"timestep: expected"),
    ("longcat_video", {TEXT: (1, 1, 22, 48)}, r"text: expected \[batch=2"),
    ("longcat_video", {TEXT: (2, 1, 22, 40)}, r"text: expected .*text_dim=48"),
    ("longcat_video", {"encoder_attention_mask": (2, 21)}, r"text_mask: expected"),
    ("longcat_video", {"hidden_states": (2, 8, 3, 10, 14)}, r"latents: expected .*channels=16"),
    ("minimax_h3", {TEXT: (1, 19, 40)}, r"text: expected .*text_dim=48"),
    ("minimax_h3", {TEXT: (2, 19, 48)}, r"text: expected \[batch=1"),
    ("minimax_h3", {"hidden_states": (1, 120, 95)}, r"video: expected .*patch_features=96"),
    ("minimax_h3", {"hidden_states": (120, 96)}, r"video: expected"),
    ("minimax_h3", {"audio_hidden_states": (1, 22, 31)}, r"audio: expected .*audio_channels=32"),
    ("minimax_h3", {"timestep": (1, 3)}, r"timestep: expected \[times\]"),
    ("minimax_h3", {"timestep": (2,)}, r"timestep_indices: expected values in \[0, 1\]"),
    ("minimax_h3", {"position_ids": (160, 3)}, r"layout\.positions: expected \[rows=161"),
]


@pytest.mark.parametrize(("name", "change", "message"), SHAPES)
def test_inputs_of_another_shape_are_named(name, change, message):
    given = golden.fixture(name).arguments("main")
    given |= {key: np.zeros(shape, np.float32) for key, shape in change.items()}
    with pytest.raises(ValueError, match=f"^{message}"):
        jax.eval_shape(lambda: golden.call(model(name), given))


def test_minimax_layouts_out_of_range_are_named():
    given = golden.fixture("minimax_h3").arguments("main")
    for key, name in (("video_indices", "video_indices"), ("token_tags", "tags")):
        with pytest.raises(ValueError, match=rf"layout\.{name}: expected values in"):
            golden.call(model("minimax_h3"), given | {key: given[key] + 161})


@pytest.mark.parametrize("name", golden.NAMES)
@pytest.mark.parametrize("argument", ["attention", "cross_attention"])
def test_an_unknown_attention_is_refused_before_anything_is_loaded(name, argument, tmp_path):
    kind, config = golden.CLASSES[name], golden.fixture(name).config()
    for value, error in (("int9", ValueError), (3, TypeError), (None, TypeError)):
        with pytest.raises(error, match=f"^{argument}: expected"):
            kind(config, rngs=nnx.Rngs(0), **{argument: value})
        # The folder is empty: the argument is looked at before the files.
        with pytest.raises(error, match=f"^{argument}: expected"):
            kind.from_pretrained(tmp_path, **{argument: value})


def test_a_model_wants_its_own_configuration():
    with pytest.raises(TypeError, match="config: expected a WanConfig, got LongCatVideoConfig"):
        Wan(LongCatVideoConfig(), rngs=nnx.Rngs(0))  # type: ignore[arg-type]


CONFIGS: list[Any] = [
    WanConfig(num_layers=1, num_heads=1, ffn_dim=8),
    HunyuanVideo15Config(),
    LongCatVideoConfig(),
    MiniMaxH3Config(),
    VideoDiTConfig(),
]
PATCHES = [(1, 2), (1, 2, 0), [1, 2, 0], 2, (1, 2, 2.0)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_every_size_of_a_configuration_is_checked(config):
    wrong = {
        int: (0, -1, 1.5, None, "1", True),
        float: (0.0, float("nan"), None),
        bool: (None, 1),
        str: (None, "int8", "no dtype"),
        tuple[int, int, int]: PATCHES,
    }
    for field in dataclasses.fields(config):
        for value in wrong.get(field.type, ("no such kind", 1)):
            with pytest.raises(ValueError, match=f"^{field.name}: expected .* got"):
                dataclasses.replace(config, **{field.name: value})


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_a_configuration_comes_back_from_json_and_from_a_pickle(config):
    read = type(config)(**json.loads(json.dumps(dataclasses.asdict(config))))
    assert read == config == pickle.loads(pickle.dumps(config))
    assert hash(read) == hash(config)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (CONFIGS[0], {"head_dim": 63}, "head_dim: expected an even number >= 6, got 63"),
        (CONFIGS[0], {"head_dim": 4}, "head_dim: expected"),
        (CONFIGS[0], {"freq_dim": 255}, "freq_dim: expected an even number"),
        (CONFIGS[1], {"head_dim": 127}, "head_dim: expected an even number"),
        (CONFIGS[1], {"head_dim": 64}, "rope_axes: expected three even numbers that sum to"),
        (CONFIGS[1], {"rope_axes": (15, 57, 56)}, "rope_axes: expected three even numbers"),
        (CONFIGS[2], {"num_heads": 33}, "hidden: expected a multiple of the 33 heads, got 4096"),
        (CONFIGS[2], {"hidden": 32 * 63}, "head_dim: expected an even number"),
        (CONFIGS[2], {"patch": (2, 2, 2)}, "patch: expected 1 in time"),
        (CONFIGS[3], {"head_dim": 127}, "head_dim: expected an even number"),
        (CONFIGS[3], {"rope_freqs": 22}, "rope_freqs: expected at most a sixth of head_dim = 128"),
        (CONFIGS[4], {"head_dim": 15}, "head_dim: expected an even number"),
    ],
)
def test_heads_that_make_no_model_are_named(config, changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(config, **changes)


def test_widths_in_files_are_multiples_of_the_heads():
    wan = CONFIGS[0].to_dict("original")
    with pytest.raises(ValueError, match="dim: expected a multiple of the 3 heads, got 128"):
        WanConfig.from_dict(wan | {"num_heads": 3})
    hunyuan = CONFIGS[1].to_dict("original")
    with pytest.raises(ValueError, match="hidden_size: expected a multiple of the 7 heads"):
        HunyuanVideo15Config.from_dict(hunyuan | {"heads_num": 7})
