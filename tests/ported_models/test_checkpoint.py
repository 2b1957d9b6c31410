"""Reading and writing checkpoints: laziness, errors, shards, exact round trips."""

import copy
import json
import pickle
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from vc_jax.models.common import checkpoint
from vc_jax.models.common.checkpoint import CheckpointError
from vc_jax.models.minimax_h3 import MiniMaxH3
from vc_jax.models.wan import Wan, WanConfig

from . import golden

WIDE = WanConfig(num_layers=6, num_heads=4, ffn_dim=2048, text_dim=64, freq_dim=32)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A model of 6 layers in shards of about 24 MB, and the folder."""
    folder = tmp_path_factory.mktemp("wide")
    port = golden.random_model(Wan, WIDE, dtype=jnp.float32)
    port.to_pretrained(folder, max_shard_bytes=24 * 10**6)
    return port, folder


@pytest.mark.parametrize("name", golden.NAMES)
def test_a_model_pickles_and_copies(name):
    port = golden.fixture(name).model(attention="int8", cross_attention="bf16")
    for again in (pickle.loads(pickle.dumps(port)), copy.deepcopy(port)):
        assert nnx.graphdef(again) == nnx.graphdef(port)
        jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (again, port)))


@pytest.mark.parametrize("name", golden.NAMES)
@pytest.mark.parametrize("layout", ["diffusers", "original"])
def test_round_trip_is_exact(name, layout, tmp_path):
    port = golden.fixture(name).model()
    port.to_pretrained(tmp_path / "first", layout=layout)
    again = type(port).from_pretrained(tmp_path / "first", dtype=jnp.float32)
    assert again.config == port.config
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (again, port)))
    again.to_pretrained(tmp_path / "second", layout=layout)
    first, second = (
        load_file(tmp_path / folder / "diffusion_pytorch_model.safetensors")
        for folder in ("first", "second")
    )
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("name", golden.NAMES)
def test_writing_the_peers_own_layout_gives_the_peers_file(name, tmp_path):
    data = golden.fixture(name)
    layout = "original" if name == "longcat_video" else "diffusers"
    data.model().to_pretrained(tmp_path, layout=layout)
    written = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    theirs = load_file(data.weights)
    assert written.keys() == theirs.keys()
    for key, array in theirs.items():
        np.testing.assert_array_equal(written[key], array.astype(np.float32), err_msg=key)


def test_bfloat16_goes_in_and_out_unchanged(tmp_path):
    port = golden.random_model(Wan, WanConfig(num_layers=1, num_heads=1, ffn_dim=8, text_dim=8))
    port.to_pretrained(tmp_path)
    again = Wan.from_pretrained(tmp_path)
    assert again.head.kernel.dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (again, port)))


def test_shards_and_index_hold_the_whole_model(sharded):
    port, folder = sharded
    index = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert all(file.stat().st_size < 25 * 10**6 for file in files)
    again = Wan.from_pretrained(folder, dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (again, port)))


def test_loading_holds_less_than_a_shard_in_host_memory(sharded):
    """NumPy reports its buffers to tracemalloc; the devices' own arrays are not among them."""
    _, folder = sharded
    largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    Wan.from_pretrained(folder)  # what is compiled stays in memory
    tracemalloc.start()
    Wan.from_pretrained(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"peak {peak / 1e6:.1f} MB, largest shard {largest / 1e6:.1f} MB")
    assert peak < 1.3 * largest


def test_all_differences_come_in_one_error(tmp_path):
    data = golden.fixture("wan_t2v")
    weights = load_file(data.weights)
    del weights["blocks.1.attn1.to_q.bias"], weights["proj_out.weight"]
    weights["blocks.0.lora.weight"] = np.zeros(3, np.float32)
    weights["blocks.0.norm2.weight"] = np.zeros(7, np.float32)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        data.model(path=tmp_path / "model.safetensors")
    error = caught.value
    assert error.missing == ["blocks.1.attn1.to_q.bias", "proj_out.weight"]
    assert error.unexpected == ["blocks.0.lora.weight"]
    assert error.misshapen == ["blocks.0.norm2.weight: (7,), expected (256,)"]
    for name in (*error.missing, *error.unexpected, *error.misshapen):
        assert name in str(error)


def test_tensors_that_the_models_do_not_need_are_ignored(tmp_path):
    data = golden.fixture("wan_t2v")
    weights = load_file(data.weights) | {
        "blocks.0.attn2.norm_added_q.weight": np.zeros(4, np.float32)
    }
    save_file(weights, tmp_path / "model.safetensors")
    assert isinstance(data.model(path=tmp_path / "model.safetensors"), Wan)


def test_an_index_that_names_an_absent_shard_is_refused(sharded, tmp_path):
    _, folder = sharded
    index = "diffusion_pytorch_model.safetensors.index.json"
    (tmp_path / index).write_text((folder / index).read_text())
    with pytest.raises(FileNotFoundError, match="names absent files"):
        checkpoint.Reader(tmp_path)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors"):
        Wan.from_pretrained(tmp_path)


def test_a_file_without_a_configuration_needs_one(tmp_path):
    weights = load_file(golden.fixture("minimax_h3").weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match="pass config="):
        MiniMaxH3.from_pretrained(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "folders", [("transformer", "transformer_2"), ("high_noise_model", "low_noise_model")]
)
def test_wan_experts_are_found_in_either_layout(folders, tmp_path):
    port = golden.fixture("wan_t2v").model()
    for scale, folder in enumerate(folders, 1):
        port.head.bias.set_value(jnp.full_like(port.head.bias[...], scale))
        port.to_pretrained(tmp_path / folder)
    high, low = Wan.experts_from_pretrained(tmp_path, dtype=jnp.float32)
    biases = [float(jnp.mean(nnx.state(expert.head)["bias"][...])) for expert in (high, low)]
    assert biases == [1.0, 2.0]
    with pytest.raises(FileNotFoundError, match="no pair of experts"):
        Wan.experts_from_pretrained(tmp_path / folders[0])


def test_writing_over_other_weights_is_refused(sharded):
    port, folder = sharded
    with pytest.raises(ValueError, match="already holds safetensors"):
        port.to_pretrained(folder)


def test_an_unknown_layout_is_refused(sharded, tmp_path):
    with pytest.raises(ValueError, match=r"layout: expected one of .*diffusers"):
        sharded[0].to_pretrained(tmp_path, layout="flax")


def test_parameters_take_the_sharding_that_is_asked_for():
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    asked = {}

    def place(name: str, shape: tuple[int, ...]) -> NamedSharding:
        # Heads of the fused projections over the tensor axis, the rest on every device.
        heads = name == "blocks.qkv.kernel"
        spec = PartitionSpec(None, None, None, "tensor") if heads else PartitionSpec()
        asked[name] = shape
        return NamedSharding(mesh, spec)

    port = golden.fixture("wan_t2v").model(sharding=place)
    assert asked["blocks.qkv.kernel"] == (2, 256, 3, 2, 128)
    assert port.blocks.qkv.kernel.sharding.spec == PartitionSpec(None, None, None, "tensor")
    assert all(isinstance(leaf.sharding, NamedSharding) for leaf in jax.tree.leaves(port))
