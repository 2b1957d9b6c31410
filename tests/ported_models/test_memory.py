"""Models whose parameters wait in host memory: where they are, when, and what comes out."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vc_jax.models.common import memory, placing
from vc_jax.models.sampling import sample
from vc_jax.models.wan import Wan, WanConfig

from . import golden

WAN = WanConfig(num_layers=2, num_heads=1, head_dim=16, ffn_dim=1024, text_dim=8, freq_dim=8)
HOST, DEVICE = "pinned_host", "device"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Two experts that differ."""
    folders = [tmp_path_factory.mktemp(name) for name in ("high", "low")]
    for scale, folder in enumerate(folders, 1):
        port = golden.random_model(Wan, WAN, dtype=jnp.float32)
        port.head.kernel.set_value(scale * port.head.kernel[...])
        port.to_pretrained(folder)
    return folders


def load(folders: list[Path], **options: Any) -> list[Any]:
    given = {"dtype": jnp.float32, "attention": "bf16", "cross_attention": "bf16"} | options
    return [Wan.from_pretrained(folder, **given) for folder in folders]


def kinds(model: nnx.Module) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(nnx.state(model))}


def run(experts: list[Any], **changes: Any) -> np.ndarray:
    """Five steps, two of them with high noise."""
    settings = dataclasses.replace(
        experts[0].sampling, num_steps=5, shift=1.0, boundary=0.7, **changes
    )
    assert settings.high_noise().tolist() == [True, True, False, False, False]
    latents = jax.random.normal(jax.random.key(0), (1, 16, 2, 8, 8))
    text = {"text": jnp.ones((1, 3, 8))}
    negative = {"text": jnp.zeros((1, 3, 8))}
    given = {"negative": negative, "sampling": settings, "progress": False}
    return np.asarray(sample(experts[0], latents, text, low_noise_model=experts[1], **given))


@pytest.mark.parametrize("small", [0, 2**18])
def test_parameters_are_read_into_host_memory(small, folders, monkeypatch):
    """Those that the device arranges and those that NumPy puts together."""
    monkeypatch.setattr(placing, "_SMALL", small)
    resident, waiting = load(folders[:1])[0], load(folders[:1], memory_kind=HOST)[0]
    assert (kinds(resident), kinds(waiting)) == ({DEVICE}, {HOST})
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (resident, waiting)))


def test_experts_in_host_memory_sample_the_same_bits(folders):
    resident, waiting = load(folders), load(folders, memory_kind=HOST)
    expected = run(resident)
    np.testing.assert_array_equal(run(waiting), expected)
    np.testing.assert_array_equal(run([resident[0], waiting[1]]), expected)
    assert [kinds(expert) for expert in waiting] == [{HOST}, {HOST}]
    assert np.isfinite(expected).all()


def test_one_expert_at_a_time_is_on_the_device(folders, monkeypatch):
    experts = load(folders, memory_kind=HOST)
    run(experts)  # what is compiled stays
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(experts[0])))
    seen, copy = [], memory.on_device

    def watched(tree: Any) -> Any:
        before = device_bytes()
        copied = copy(tree)
        seen.append((before, device_bytes()))
        return copied

    monkeypatch.setattr(memory, "on_device", watched)
    start = device_bytes()
    run(experts)
    assert len(seen) == 2
    for before, after in seen:
        assert before - start < size / 4  # latents and solver only, of no expert
        assert 0.99 * size <= after - before <= 1.25 * size
    assert device_bytes() - start < size / 4


def device_bytes() -> int:
    arrays = (a for a in jax.live_arrays() if a.sharding.memory_kind == DEVICE)
    return sum(array.nbytes for array in arrays)


def test_a_model_is_moved_and_moved_back(folders, tmp_path):
    port = load(folders[:1])[0]
    there = port.in_memory(HOST)
    assert (kinds(port), kinds(there), kinds(there.in_memory(DEVICE))) == (
        {DEVICE},
        {HOST},
        {DEVICE},
    )
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (port, there)))
    there.to_pretrained(tmp_path / "written")
    again = load([tmp_path / "written"])[0]
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (port, again)))


def test_on_a_mesh_parts_wait_too(folders):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("seq", "tensor"))
    resident, waiting = load(folders, mesh=mesh), load(folders, mesh=mesh, memory_kind=HOST)
    assert kinds(waiting[0]) == {HOST}
    kernel = waiting[0].blocks.qkv.kernel[...]
    assert kernel.sharding.spec == resident[0].blocks.qkv.kernel[...].sharding.spec
    np.testing.assert_array_equal(run(waiting), run(resident))


def test_a_sharding_may_name_the_memory(folders):
    mesh = Mesh(np.array(jax.devices()[:1]), ("all",))
    place = NamedSharding(mesh, PartitionSpec(), memory_kind=HOST)
    assert kinds(load(folders[:1], sharding=place)[0]) == {HOST}


def test_a_memory_that_is_not_there_is_named(folders):
    with pytest.raises(ValueError, match=r"memory_kind: expected one of \[.*'pinned_host'.*got 'd"):
        load(folders[:1], memory_kind="disk")
    with pytest.raises(ValueError, match=r"memory_kind: expected one of"):
        load(folders[:1])[0].in_memory("disk")
