"""One of two processes that `jax.distributed` joins; its arguments: the port, its place."""

import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import vc_jax
from vc_jax import sharding

from ..core.cases import relative_l2, video_like

LENGTHS = np.array([200, 90], np.int32)


def place(array: np.ndarray, where: NamedSharding) -> jax.Array:
    """A global array, of which this process makes its own part only."""
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def check_own_part(got: jax.Array, want: jax.Array) -> None:
    for shard in got.addressable_shards:
        assert relative_l2(shard.data, np.asarray(want)[shard.index]) < 2e-3


def main(port: str, process: int) -> None:
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
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
