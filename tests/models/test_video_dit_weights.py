"""Weights files: round trip, metadata, and errors that list every difference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from vc_jax.models.video_dit import VideoDiTConfig
from vc_jax.models.video_dit.weights import (
    fill_parameters,
    load_video_dit,
    named_parameters,
    save_weights,
)

TINY = VideoDiTConfig(width=24, num_layers=2, num_heads=1, head_dim=12, mlp_width=32, patch=2)


@pytest.fixture
def saved(tmp_path, random_model):
    parameters = nnx.state(random_model(TINY), nnx.Param)
    path = tmp_path / "weights.safetensors"
    save_weights(path, parameters, TINY)
    return path, parameters


def test_weights_come_back_as_saved_up_to_16_bits(saved):
    path, parameters = saved
    model = load_video_dit(path)
    assert model.config == TINY
    loaded = named_parameters(nnx.state(model, nnx.Param))
    assert loaded.keys() == named_parameters(parameters).keys()
    for name, array in named_parameters(parameters).items():
        assert loaded[name].dtype == jnp.float32
        np.testing.assert_array_equal(
            loaded[name], array.astype(jnp.bfloat16).astype(jnp.float32), err_msg=name
        )


def test_file_holds_16_bit_tensors_named_by_their_path(saved):
    tensors = load_file(saved[0])
    assert tensors["blocks.attention.qkv.kernel"].shape == (2, 24, 3, 1, 12)
    assert {str(array.dtype) for array in tensors.values()} == {"bfloat16"}


def test_saving_leaves_no_partial_file(saved):
    assert [path.name for path in saved[0].parent.iterdir()] == ["weights.safetensors"]


def test_loaded_model_computes_what_the_saved_one_did(saved, random_model):
    path, parameters = saved
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), parameters)
    definition, _ = nnx.split(random_model(TINY), nnx.Param)
    video, t = jnp.ones((1, 2, 4, 4, 3)), jnp.full((1, 2), 0.3)
    expected = nnx.merge(definition, rounded)(video, t)
    np.testing.assert_array_equal(load_video_dit(path)(video, t), expected)


def test_compute_dtype_can_be_chosen_at_loading(saved):
    assert load_video_dit(saved[0], compute_dtype="float32").config.compute_dtype == "float32"


def test_every_difference_is_listed(saved):
    path, parameters = saved
    tensors = load_file(path)
    del tensors["embed.bias"], tensors["output.kernel"]
    tensors["extra.kernel"] = np.zeros(3, np.float32)
    tensors["time_in.bias"] = np.zeros((2, 2), np.float32)
    with pytest.raises(ValueError, match="do not fit") as error:
        fill_parameters(parameters, tensors)
    message = str(error.value)
    assert "missing embed.bias" in message
    assert "missing output.kernel" in message
    assert "unexpected extra.kernel" in message
    assert "time_in.bias has shape (2, 2), expected (24,)" in message


def test_missing_file_and_foreign_files_are_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.safetensors"):
        load_video_dit(tmp_path / "nowhere.safetensors")
    text = tmp_path / "text.safetensors"
    text.write_text("this is no weights file")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_video_dit(text)
    foreign = tmp_path / "foreign.safetensors"
    save_file({"a": np.zeros(2, np.float32)}, foreign)
    with pytest.raises(ValueError, match="no VideoDiT configuration"):
        load_video_dit(foreign)
