"""One of two processes that `jax.distributed` joins; arguments: the port, its place, a folder."""

import dataclasses
import pathlib
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import vc_jax
from vc_jax import sharding
from vc_jax.models.mesh import ModelMesh
from vc_jax.models.sampling import sample
from vc_jax.models.wan import Wan

from ..core.cases import relative_l2, video_like
from ..ported_models import golden
from ..ported_models.test_sampling import wan_case

LENGTHS = np.array([200, 90], np.int32)


def place(array: np.ndarray, where: NamedSharding) -> jax.Array:
    """A global array, of which this process makes its own part only."""
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def check_own_part(got: jax.Array, want: jax.Array) -> None:
    for shard in got.addressable_shards:
        assert relative_l2(shard.data, np.asarray(want)[shard.index]) < 2e-3


def check_model(folder: pathlib.Path) -> None:
    """A model whose weights and rows lie in two processes: read, sampled, written, read again."""
    data = golden.fixture("wan_t2v")
    where = ModelMesh(jax.make_mesh((2,), ("x",)), sequence_axis="x", fsdp_axis="x")
    tracemalloc.start()
    port = data.model(mesh=where, attention="bf16", cross_attention="bf16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    flat = nnx.to_flat_state(nnx.state(port, nnx.Param))
    parameters = [variable.get_value() for _, variable in flat]
    assert not port.blocks.qkv.kernel[...].is_fully_addressable
    # The interpreter's own things in it take more than this small model's parts.
    assert peak < 2 * sum(x.addressable_shards[0].data.nbytes for x in parameters) + 8e6
    alone = data.model(attention="bf16", cross_attention="bf16")
    _, latents, positive, negative = wan_case()
    settings = dataclasses.replace(port.sampling, num_steps=2, boundary=None)
    given = {"negative": negative, "sampling": settings}
    want = sample(alone, latents, positive, progress=False, **given)
    got = sample(port, latents, positive, progress=True, **given)
    assert relative_l2(np.asarray(got), np.asarray(want)) < 2e-5
    port.to_pretrained(folder / "model", max_shard_bytes=2_000_000)
    again = Wan.from_pretrained(folder / "model", mesh=where, dtype=jnp.float32)
    for (path, variable), array in zip(
        nnx.to_flat_state(nnx.state(again, nnx.Param)), parameters, strict=True
    ):
        for mine, read in zip(
            array.addressable_shards, variable.get_value().addressable_shards, strict=True
        ):
            np.testing.assert_array_equal(mine.data, read.data, err_msg=str(path))
    # Both are told, not one that then waits for the other.
    with pytest.raises(ValueError, match="path:"):
        port.to_pretrained(folder / "model")


def main(port: str, process: int, folder: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    assert jax.process_count() == 2
    tensors = video_like(0, 2, 64, 256, 4, 4, 32)
    mask = (np.arange(256) < LENGTHS[:, None])[:, None, None]
    want = vc_jax.dot_product_attention(*tensors, key_value_seq_lengths=LENGTHS)
    for kind in (AxisType.Explicit, AxisType.Auto):
        mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
        rows = NamedSharding(mesh, PartitionSpec("x"))
        tokens = NamedSharding(mesh, PartitionSpec(None, "x"))
        lengths = place(LENGTHS, rows)
        arrays = [place(np.asarray(x), rows) for x in tensors]
        if kind == AxisType.Explicit:
            # Eager, with lengths and a mask whose values are not all here.
            for given in ({"key_value_seq_lengths": lengths}, {"mask": place(mask, rows)}):
                check_own_part(vc_jax.dot_product_attention(*arrays, **given), want)
        arrays = [place(np.asarray(x), tokens) for x in tensors]
        out = sharding.sharded_attention(
            *arrays, mesh=mesh, sequence_axis="x", key_value_seq_lengths=lengths
        )
        check_own_part(out, want)
    check_model(pathlib.Path(folder))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
