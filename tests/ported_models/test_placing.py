"""Parameters arranged on the device are those that NumPy arranges, from any file."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vc_jax.models.common import checkpoint, placing
from vc_jax.models.common.tensor_files import TensorFile
from vc_jax.models.common.tensor_map import TensorMap

from .test_weight_files import write_raw

HEADS, SIZE, WIDTH, LAYERS = 3, 4, 10, 2
NUMBERS = ("F32", "BF16", "F16", "F8_E4M3", "scaled F8_E4M3", "scaled I8")
DTYPES = {"F32": "f4", "F16": "f2", "I8": "i1", "BF16": jnp.bfloat16, "F8_E4M3": jnp.float8_e4m3fn}


def every_kind() -> TensorMap:
    """All the ways in which tensors become a parameter."""
    tensors = TensorMap()
    tensors.linear("conv", "conv", (12, WIDTH), kernel=(WIDTH, 3, 1, 2, 2))
    tensors.linear("swapped", "swapped", (WIDTH, 6), swap_halves=True)
    block = tensors.scope("blocks.", "blocks.{}.", LAYERS)
    block.heads_in("split", ["q", "k"], WIDTH, HEADS, SIZE)
    block.heads_in("fused", "qk", WIDTH, HEADS, SIZE, count=2)
    block.heads_in("interleaved", "qk_by_head", WIDTH, HEADS, SIZE, count=2, interleaved=True)
    block.heads_out("out", "o", HEADS, SIZE, WIDTH)
    block.gate_value("gate_first", ["w1", "w3"], WIDTH, 5, gate_first=True)
    block.gate_value("value_first", ["fc"], WIDTH, 5, gate_first=False)
    block.gate_value("two_value_first", ["a", "b"], WIDTH, 5, gate_first=False)
    return tensors


class Holder(nnx.Module):
    """Parameters by name, in bfloat16."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape, jnp.bfloat16)))


def load(file: Path, layout: TensorMap, place: Any = None) -> dict[str, np.ndarray]:
    shapes = {}
    for entry in layout.entries:
        shape = entry.load(*(np.zeros(s) for s in entry.shapes)).shape
        shapes[entry.parameter] = shape if entry.layers is None else (entry.layers, *shape)
    # A module has no dots in its names.
    flat = {name.replace(".", "_"): shape for name, shape in shapes.items()}
    for entry in layout.entries:
        object.__setattr__(entry, "parameter", entry.parameter.replace(".", "_"))
    abstract = nnx.eval_shape(lambda: Holder(flat))
    loaded = checkpoint.load(abstract, layout, checkpoint.Reader(file), place)
    return {name: np.asarray(getattr(loaded, name)[...]) for name in flat}


def write(file: Path, numbers: str) -> None:
    """Random tensors; matrices in the given form."""
    generator, tensors, dtypes = np.random.default_rng(0), {}, {}
    dtype = numbers.rpartition(" ")[2]
    for entry in every_kind().entries:
        for name, shape in entry.tensors():
            values = generator.uniform(-3, 3, shape).astype(np.float32)
            if len(shape) == 1:
                tensors[name] = values
                continue
            tensors[name], dtypes[name] = values.astype(DTYPES[dtype]), dtype
            if numbers.startswith("scaled"):
                rows = generator.uniform(0.5, 2, (shape[0], 1)).astype(np.float32)
                one = name.endswith(("q.weight", "w1.weight"))
                tensors[f"{name}_scale"] = rows[0, 0] if one else rows
    write_raw(file, tensors, dtypes)


@pytest.mark.parametrize("numbers", NUMBERS)
def test_large_parameters_are_arranged_like_small_ones(numbers, tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    write(file, numbers)
    small = load(file, every_kind())
    monkeypatch.setattr(placing, "_SMALL", 0)
    large = load(file, every_kind())
    mesh = Mesh(np.array(jax.devices()[:1]), ("all",))
    parts = load(file, every_kind(), lambda name, shape: NamedSharding(mesh, PartitionSpec("all")))
    split = PartitionSpec(None, None, "all")  # the axis of q and k, and of w1 and w3
    whole = load(
        file,
        every_kind(),
        lambda name, shape: NamedSharding(mesh, split if len(shape) > 2 else PartitionSpec()),
    )
    for name, array in small.items():
        for other in (large, parts, whole):
            # Bit for bit: the device rounds a product of two numbers as NumPy does.
            np.testing.assert_array_equal(other[name], array, err_msg=name)
        assert np.any(array != 0), name


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "BF16", "F16"])
def test_every_code_of_a_small_type_arrives(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(placing, "_SMALL", 0)
    wide = dtype in ("BF16", "F16")
    codes = np.arange(2**16 if wide else 2**8, dtype=np.uint16 if wide else np.uint8)
    write_raw(tmp_path / "x.safetensors", {"x": codes}, {"x": dtype})
    values = TensorFile(tmp_path / "x.safetensors").tensor("x")
    parameter = placing.Parameter(codes.shape, jnp.dtype("float32"), None, stacked=False)
    parameter.write([0], values)
    expected = values.astype(np.float32)
    tiny = np.abs(expected) < np.finfo(np.float32).tiny  # which devices may flush to zero
    np.testing.assert_array_equal(
        np.where(tiny, 0, np.asarray(parameter.array())), np.where(tiny, 0, expected)
    )


@pytest.mark.parametrize("small", [0, 2**18])
def test_parameters_do_not_change_with_the_file(small, tmp_path, monkeypatch):
    monkeypatch.setattr(placing, "_SMALL", small)
    file = tmp_path / "x.safetensors"
    values = np.arange(4096, dtype=np.float32)
    write_raw(file, {"x": values}, {})
    parameter = placing.Parameter(values.shape, values.dtype, None, stacked=False)
    parameter.write([0], TensorFile(file).tensor("x"))
    array = parameter.array()
    with file.open("r+b") as stream:
        stream.write(b"\0" * file.stat().st_size)
    np.testing.assert_array_equal(array, values)


def test_a_file_says_what_it_holds(tmp_path):
    file = tmp_path / "x.safetensors"
    header = {
        "__metadata__": {"format": "pt"},
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "none": {"dtype": "F32", "shape": [0, 3], "data_offsets": [4, 4]},
    }
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + np.float32(2.5).tobytes())
    opened = TensorFile(file)
    assert opened.metadata == {"format": "pt"}
    assert opened.shapes == {"scalar": (), "none": (0, 3)}
    assert opened.tensor("scalar") == 2.5
    assert opened.tensor("none").shape == (0, 3)
