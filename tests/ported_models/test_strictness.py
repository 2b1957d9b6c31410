"""What a new user stumbles over: masks of another kind, a second model that does not fit, files
that are not whole, configurations that are written and read."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vc_jax
from vc_jax.models.attention import AttentionControl
from vc_jax.models.hunyuan_video15 import HunyuanVideo15Config
from vc_jax.models.longcat_video import LongCatVideo, LongCatVideoConfig
from vc_jax.models.minimax_h3 import MiniMaxH3Config, packed_layout
from vc_jax.models.sampling import sample
from vc_jax.models.wan import Wan, WanConfig

from . import golden
from .test_bad_arguments import model, sampling_case, settings

CONFIGS = [
    WanConfig(num_layers=1, num_heads=1, ffn_dim=8),
    HunyuanVideo15Config(),
    LongCatVideoConfig(),
    MiniMaxH3Config(),
]
OTHER = {
    "hidden": 2048,
    "patch": (1, 4, 4),
    "rope_axes": (32, 48, 48),
    "rope_freqs": 8,
    "in_channels": 44,
    "target_size": 960,
    "task": "i2v",
}
"""Other values of fields that go with others; elsewhere twice, or not, what it was."""


def changed(config, name):
    value = getattr(config, name)
    other = not value if isinstance(value, bool) else OTHER.get(name, 2 * value)
    together = {"rope_axes": (32, 112, 112)} if name == "head_dim" else {}
    together = {key: v for key, v in together.items() if hasattr(config, key)}
    if isinstance(config, WanConfig | LongCatVideoConfig | MiniMaxH3Config):
        together = {}
    return dataclasses.replace(config, **{name: other}, **together)


FIELDS = [
    pytest.param(config, field.name, id=f"{type(config).__name__}.{field.name}")
    for config in CONFIGS
    for field in dataclasses.fields(config)
]


@pytest.mark.parametrize("layout", ["diffusers", "original"])
@pytest.mark.parametrize(("config", "name"), FIELDS)
def test_every_field_that_is_written_is_read_back(config, name, layout):
    config = changed(config, name)
    read = type(config).from_dict(json.loads(json.dumps(config.to_dict(layout))))
    assert read == config


@pytest.mark.parametrize("channels", [1, 2, 33, 64, 65])
def test_hunyuans_channels_are_read_back(channels):
    config = HunyuanVideo15Config(in_channels=channels)
    assert HunyuanVideo15Config.from_dict(config.to_dict("original")) == config


def test_what_a_file_cannot_say_is_refused_when_it_is_written():
    config = HunyuanVideo15Config(patch=(1, 2, 4))
    assert HunyuanVideo15Config.from_dict(config.to_dict("original")) == config
    with pytest.raises(ValueError, match="patch: the diffusers layout has one size"):
        config.to_dict("diffusers")


@pytest.mark.parametrize("layout", ["diffusers", "original"])
@pytest.mark.parametrize("name", golden.NAMES)
def test_a_model_of_other_constants_is_the_same_after_reloading(name, layout, tmp_path):
    config = golden.fixture(name).config()
    theta = {} if name == "hunyuan_video15" else {"rope_theta": 77.0}
    config = dataclasses.replace(config, epsilon=1e-3, **theta)
    if name == "hunyuan_video15":
        config = dataclasses.replace(config, freq_dim=32, num_refiner_layers=1, byt5_hidden=24)
        config = dataclasses.replace(config, refiner_mlp_ratio=2.0)
    port = golden.random_model(golden.CLASSES[name], config, dtype=jnp.float32)
    port.to_pretrained(tmp_path, layout=layout)
    again = type(port).from_pretrained(tmp_path, dtype=jnp.float32)
    assert again.config == config
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (again, port)))


MASKS = [("hunyuan_video15", "text_mask"), ("hunyuan_video15", "byt5_mask")]
MASKS += [("longcat_video", "text_mask")]
PEERS = {"text_mask": "encoder_attention_mask", "byt5_mask": "encoder_attention_mask_2"}


@pytest.mark.parametrize(("name", "mask"), MASKS)
@pytest.mark.parametrize("wrong", [-1e9, 0.3, -np.inf, np.nan, 2])
def test_a_mask_that_is_none_is_refused(name, mask, wrong):
    given = golden.fixture(name).arguments("main")
    additive = np.zeros(given[PEERS[mask]].shape, np.float32)
    additive[:, -2:] = wrong
    with pytest.raises(ValueError, match=f"^{mask}: expected only 0 and 1"):
        golden.call(model(name), given | {PEERS[mask]: additive})
    latents, conditioning = sampling_case(name)
    conditioning["text_mask"] = jnp.zeros(conditioning["text"].shape[:2])
    conditioning[mask] = jnp.zeros(conditioning[mask].shape).at[:, -2:].set(wrong)
    with pytest.raises(ValueError, match=rf"^conditioning\['{mask}'\]: expected only 0 and 1"):
        sample(model(name), latents, conditioning, sampling=settings(model(name)), progress=False)


@pytest.mark.parametrize(("name", "mask"), MASKS)
def test_a_traced_mask_that_is_none_turns_its_item_to_nan(name, mask):
    given = golden.fixture(name).arguments("main")
    keep = np.ones(given[PEERS[mask]].shape, np.float32)
    keep[1, -2:] = -1e9
    out = golden.run(model(name), given | {PEERS[mask]: keep})
    out = out[0] if isinstance(out, tuple) else out
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


@pytest.mark.parametrize("name", ["high_precision_layers", "bf16_steps_mask"])
def test_flags_are_flags(name):
    port = model("wan_t2v")
    latents, conditioning = sampling_case("wan_t2v")
    count = port.config.num_layers if name == "high_precision_layers" else 1
    flags = {name: np.full(count, 0.3)}
    with pytest.raises(ValueError, match=f"^{name}: expected only 0 and 1"):
        sample(port, latents, conditioning, sampling=settings(port), progress=False, **flags)
    control = AttentionControl(step=0, **flags)
    with pytest.raises(ValueError, match=f"^control.{name}: expected only 0 and 1"):
        control.per_layer(port.config.num_layers)


EXPERT = WanConfig(num_layers=1, num_heads=1, head_dim=16, ffn_dim=16, text_dim=8, freq_dim=8)
TWO_STEPS = {"num_steps": 2, "boundary": 0.5, "shift": 1.0}


def expert(attention="bf16", dtype=jnp.float32, **changes):
    config = dataclasses.replace(EXPERT, **changes)
    return Wan(config, attention=attention, dtype=dtype, rngs=nnx.Rngs(0))


def sampled(high, low):
    latents = jax.random.normal(jax.random.key(0), (1, 16, 2, 8, 8))
    given = settings(high, **TWO_STEPS)
    assert given.high_noise().tolist() == [True, False]
    text = {"text": jnp.ones((1, 3, 8))}
    return sample(high, latents, text, sampling=given, low_noise_model=low, progress=False)


def test_experts_of_different_precision_run_in_both_orders():
    exact = sampled(expert(), expert())
    for high, low in (
        (expert("int8"), expert("bf16")),
        (expert("bf16", dtype=jnp.bfloat16), expert("int8")),
        # Each has a state of its own: they need not have the same number of clusters.
        (expert("int8"), expert(vc_jax.AttentionConfig(clusters=7))),
    ):
        assert golden.relative_l2(sampled(high, low), exact) < 0.15


def test_an_expert_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"^low_noise_model: .*num_layers 2 in place of 1"):
        sampled(expert(), expert(num_layers=2))
    with pytest.raises(TypeError, match=r"^low_noise_model: expected a Wan, got LongCatVideo"):
        sampled(
            expert(), nnx.eval_shape(lambda: LongCatVideo(LongCatVideoConfig(), rngs=nnx.Rngs(0)))
        )


def test_empty_axes_are_named():
    for name, arguments in (
        ("num_audio_latents", (np.ones(5), (2, 4, 6), 0)),
        ("text_tags", (np.ones(0), (2, 4, 6), 3)),
        ("grid", (np.ones(5), (0, 4, 6), 3)),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected at least one row"):
            packed_layout(*arguments)
    latents, conditioning = sampling_case("minimax_h3")
    layout = dataclasses.replace(conditioning["layout"], audio_indices=np.zeros(0, np.int64))
    silent = latents | {"audio": latents["audio"][:, :0]}
    port = model("minimax_h3")
    with pytest.raises(ValueError, match=r"^layout.audio_indices: expected at least one row"):
        sample(port, silent, conditioning | {"layout": layout}, sampling=settings(port))
    latents, conditioning = sampling_case("wan_t2v")
    port = model("wan_t2v")
    with pytest.raises(ValueError, match=r"^latents: expected .* got"):
        sample(port, latents[:, :, :0], conditioning, sampling=settings(port))
    with pytest.raises(ValueError, match=r"'text'\]: expected"):
        sample(port, latents, {"text": conditioning["text"][:, :0]}, sampling=settings(port))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan")
    expert(num_layers=2).to_pretrained(folder, max_shard_bytes=4000)
    return folder


BROKEN = [
    ("config.json", b"{", r"config\.json is not JSON"),
    ("config.json", b"[]", r"config\.json holds no JSON object but a list"),
    ("config.json", b"{}", r"config\.json: .* missing; this is no configuration of"),
    ("config.json", b'{"num_layers": "two", "dim": 16, "num_heads": 1}', r"config\.json"),
    ("diffusion_pytorch_model.safetensors.index.json", b"\xff", r"index\.json is not JSON"),
    ("diffusion_pytorch_model.safetensors.index.json", b"{}", r"index\.json has no weight_map"),
    ("shard", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ("shard", None, r"00002-of-\d+\.safetensors is not a whole safetensors file"),
    ("shard", b"", r"00002-of-\d+\.safetensors is not a whole safetensors file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_a_broken_file_is_named(folder, tmp_path, name, content, message):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (target,) = tmp_path.glob("*00002-of*") if name == "shard" else [tmp_path / name]
    target.write_bytes(target.read_bytes()[:-7] if content is None else content)
    with pytest.raises(ValueError, match=message):
        Wan.from_pretrained(tmp_path)


def test_a_dtype_of_integers_is_named_at_once(tmp_path):
    for dtype in (jnp.int8, "int4", bool, "no type"):
        with pytest.raises(ValueError, match=r"^dtype: expected a float type"):
            Wan.from_pretrained(tmp_path, dtype=dtype)
        with pytest.raises(ValueError, match=r"^dtype: expected a float type"):
            expert(dtype=dtype)
