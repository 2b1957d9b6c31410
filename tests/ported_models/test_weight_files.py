"""Forms in which released weights come: copies, prefixes, quantised matrices, repositories."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vc_jax.models.common.checkpoint import CheckpointError
from vc_jax.models.longcat_video import LongCatVideo, LongCatVideoConfig
from vc_jax.models.wan import Wan, WanConfig

from . import golden

WAN = WanConfig(num_layers=1, num_heads=1, head_dim=6, ffn_dim=8, text_dim=8)
NAME = "diffusion_pytorch_model.safetensors"
LINEAR = "blocks.0.ffn.net.0.proj"
E4M3 = jnp.float8_e4m3fn


@pytest.fixture(scope="module")
def port() -> Any:
    return golden.random_model(Wan, WAN, dtype=jnp.float32)


@pytest.fixture
def folder(port, tmp_path) -> Path:
    port.to_pretrained(tmp_path / "transformer")
    return tmp_path / "transformer"


def load(path: Path, **options: Any) -> Any:
    return Wan.from_pretrained(path, dtype=jnp.float32, config=WAN, **options)


def same(first: Any, second: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (first, second)))


def write_raw(file: Path, tensors: dict[str, np.ndarray], dtypes: dict[str, str]) -> None:
    """A safetensors file with dtypes that safetensors does not write from NumPy."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        shape, dtype = list(array.shape), dtypes.get(name, "F32")
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def change(folder: Path, **tensors: Any) -> dict[str, np.ndarray]:
    """The file's tensors with the matrix of one linear layer in another form."""
    weights = load_file(folder / NAME)
    del weights[f"{LINEAR}.weight"]
    added = {f"{LINEAR}.{end}": np.asarray(array) for end, array in tensors.items()}
    dtypes = {str(E4M3.dtype): "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8"}
    named = {
        name: dtypes[str(array.dtype)]
        for name, array in added.items()
        if str(array.dtype) in dtypes
    }
    write_raw(folder / NAME, weights | added, named)
    return weights


def matrix(folder: Path) -> np.ndarray:
    return load_file(folder / NAME)[f"{LINEAR}.weight"]


def kernel(model: Any) -> np.ndarray:
    return np.asarray(model.block(0).ffn.fc_in.kernel[...]).T


def test_two_copies_without_an_index_are_refused_and_a_variant_chooses(port, folder):
    weights = load_file(folder / NAME)
    averaged = {name: array + 1 for name, array in weights.items()}
    save_file(averaged, folder / "model_ema.safetensors")
    with pytest.raises(ValueError, match="two copies") as caught:
        load(folder)
    for file in (NAME, "model_ema.safetensors"):
        assert file in str(caught.value)
    assert "pass variant='diffusion_pytorch_model' or 'model_ema'" in str(caught.value)
    same(load(folder, variant="diffusion_pytorch_model"), port)
    for variant in ("ema", "model_ema"):
        np.testing.assert_array_equal(
            kernel(load(folder, variant=variant)), averaged[f"{LINEAR}.weight"]
        )
    with pytest.raises(ValueError, match=r"variant: 'fp16' is none or several of .*model_ema"):
        load(folder, variant="fp16")
    with pytest.raises(ValueError, match=r"variant: .* is a file of its own"):
        load(folder / NAME, variant="ema")
    same(load(folder / NAME), port)


def test_a_variant_has_shards_and_an_index_of_its_own(port, folder):
    weights = load_file(folder / NAME)
    names = sorted(weights)
    stem, weight_map = "diffusion_pytorch_model.fp16", {}
    for number, part in enumerate((names[:5], names[5:]), 1):
        file = f"{stem}-0000{number}-of-00002.safetensors"
        save_file({name: 2 * weights[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    with pytest.raises(ValueError, match="two copies"):
        load(folder)
    expected = 2 * weights[f"{LINEAR}.weight"]
    np.testing.assert_array_equal(kernel(load(folder, variant="fp16")), expected)
    # The index of a variant names its files only.
    index = folder / "diffusion_pytorch_model.safetensors.index.fp16.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    np.testing.assert_array_equal(kernel(load(folder, variant="fp16")), expected)
    same(load(folder, variant="diffusion_pytorch_model"), port)


def test_shards_that_share_a_tensor_are_refused(folder):
    weights = load_file(folder / NAME)
    for number in (1, 2):
        save_file(weights, folder / f"model-0000{number}-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"model-00001-of-00002.* and model-00002.* both hold"):
        load(folder, variant="model")


def test_files_without_an_index_that_share_no_tensor_are_one_model(port, folder):
    weights = load_file(folder / NAME)
    half = len(weights) // 2
    for number, names in enumerate((list(weights)[:half], list(weights)[half:])):
        save_file({name: weights[name] for name in names}, folder / f"part{number}.safetensors")
    (folder / NAME).unlink()
    same(load(folder), port)


@pytest.mark.parametrize("dtype", [E4M3, jnp.float8_e5m2])
def test_fp8_without_scales_is_its_numbers(dtype, folder):
    quantised = matrix(folder).astype(dtype)
    change(folder, weight=quantised)
    np.testing.assert_array_equal(kernel(load(folder)), quantised.astype(np.float32))
    assert Wan.from_pretrained(folder).block(0).ffn.fc_in.kernel.dtype == jnp.bfloat16


@pytest.mark.parametrize("scale_name", ["scale_weight", "weight_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (8,), (8, 1)])
def test_scaled_fp8_is_dequantised(scale_name, shape, folder):
    scale = np.random.default_rng(0).uniform(0.5, 2.0, shape).astype(np.float32)
    quantised = matrix(folder).astype(E4M3)
    note = np.frombuffer(b'{"format": "float8_e4m3fn"}', np.uint8)
    extra = {scale_name: scale, "input_scale": np.float32(3.0), "comfy_quant": note}
    change(folder, weight=quantised, **extra)
    rows = scale.reshape(-1, 1) if scale.size > 1 else scale.reshape(())
    np.testing.assert_array_equal(kernel(load(folder)), quantised.astype(np.float32) * rows)


def test_a_mark_of_scaled_fp8_is_no_tensor_of_the_model(folder):
    weights = change(folder, weight=matrix(folder).astype(E4M3), scale_weight=np.float32(2.0))
    quantised = np.zeros((8, 6), E4M3)
    tensors = weights | {
        f"{LINEAR}.weight": quantised,
        f"{LINEAR}.scale_weight": np.float32(2.0),
        "scaled_fp8": np.zeros(2, E4M3),
    }
    prefixed = {f"model.diffusion_model.{name}": array for name, array in tensors.items()}
    names = ("scaled_fp8", f"{LINEAR}.weight")
    types = {f"model.diffusion_model.{name}": "F8_E4M3" for name in names}
    write_raw(folder / NAME, prefixed, types)
    assert not kernel(load(folder)).any()


def test_int8_is_read_with_its_scale_only(folder):
    weight = matrix(folder)
    scale = (np.abs(weight).max(1) / 127).astype(np.float32)
    codes = np.round(weight / scale[:, None]).astype(np.int8)
    for end in ("weight", "weight_int8"):
        change_in = {end: codes, "weight_scale": scale}
        original = load_file(folder / NAME)
        change(folder, **change_in)
        np.testing.assert_array_equal(
            kernel(load(folder)), codes.astype(np.float32) * scale[:, None]
        )
        save_file(original, folder / NAME)
    change(folder, weight=codes)
    with pytest.raises(ValueError, match=rf"{re.escape(LINEAR)}.weight: I8 without its scale"):
        load(folder)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": np.zeros((8, 6), np.uint8)}, "weight: U8 is not supported"),
        (
            {"weight": np.zeros((8, 6), np.int8), "weight_scale": np.ones((8, 2), np.float32)},
            r"weight_scale: expected one number or one for each of the 8 rows, got F32 \[8, 2\]",
        ),
        (
            {
                "weight": np.zeros((8, 6), np.int8),
                "weight_scale": np.float32(1.0),
                "comfy_quant": np.frombuffer(b'{"format": "int8_tensorwise", "convrot": 1}', "u1"),
            },
            "comfy_quant: .*convrot.* is not supported",
        ),
    ],
)
def test_numbers_that_cannot_be_read_are_refused(tensors, message, folder):
    change(folder, **tensors)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_scale_of_a_matrix_that_is_not_quantised_is_unexpected(folder):
    change(folder, weight=matrix(folder), weight_scale=np.float32(2.0))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert caught.value.unexpected == [f"{LINEAR}.weight_scale"]


def test_longcat_int8_is_read(tmp_path):
    config = LongCatVideoConfig(num_layers=1, num_heads=1, hidden=6, text_dim=4, time_dim=4)
    port = golden.random_model(LongCatVideo, config, dtype=jnp.float32)
    port.to_pretrained(tmp_path, layout="original")
    tensors = {}
    for name, weight in load_file(tmp_path / NAME).items():
        if name.endswith(".weight") and weight.ndim == 2 and name != "final_layer.linear.weight":
            scale = np.maximum(np.abs(weight).max(1), 1e-8) / 127
            tensors[f"{name}_int8"] = np.round(weight / scale[:, None]).astype(np.int8)
            tensors[f"{name}_scale"] = scale.astype(np.float32)
        else:
            tensors[name] = weight
    save_file(tensors, tmp_path / NAME)
    again = LongCatVideo.from_pretrained(tmp_path, dtype=jnp.float32)
    for loaded, exact in zip(*map(jax.tree.leaves, (again, port)), strict=True):
        bound = np.abs(np.asarray(exact)).max() / 127
        assert np.abs(np.asarray(loaded) - np.asarray(exact)).max() <= bound


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model."])
def test_a_single_files_prefix_is_understood(prefix, port, folder):
    weights = load_file(folder / NAME)
    prefixed = {prefix + name: array for name, array in weights.items()}
    other = {"first_stage_model.encoder.weight": np.zeros(2, np.float32)}
    save_file(prefixed | other, folder / NAME)
    same(load(folder), port)
    save_file(prefixed | {"lora.up": np.zeros(2, np.float32)}, folder / NAME)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert (caught.value.missing, caught.value.unexpected) == ([], ["lora.up"])
    save_file(prefixed | {f"{LINEAR}.weight": np.zeros(2, np.float32)}, folder / NAME)
    with pytest.raises(ValueError, match="with and without the prefix"):
        load(folder)


def test_a_repositorys_root_names_its_transformers(port, folder):
    root = folder.parent
    (root / "vae").mkdir()
    save_file({"x": np.zeros(1, np.float32)}, root / "vae/model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"is a repository; pass .*\['transformer'\]"):
        load(root)
    port.to_pretrained(root / "transformer/480p_t2v")
    (folder / NAME).unlink()
    with pytest.raises(FileNotFoundError, match=r"\['transformer/480p_t2v'\]"):
        load(root)


def test_a_path_that_is_nothing_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file or folder Wan-AI/Wan2\.2.*download it"):
        load(Path("Wan-AI/Wan2.2-T2V-A14B-Diffusers"))
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        load(tmp_path / "absent")
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected a \.safetensors file or a folder"):
        load(tmp_path / "model.gguf")
