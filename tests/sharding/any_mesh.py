"""Any mesh under a call: refused with one clear line, or what the formula says.

`VC_JAX_EXAMPLES=500 python -m tests.sharding.any_mesh` on 8 simulated devices tries more and prints
the counts (`XLA_FLAGS=--xla_force_host_platform_device_count=8`).
"""

import collections
import os
import sys

import jax
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import vc_jax
from vc_jax import sharding

from ..core import oracles
from . import devices

EXAMPLES = int(os.environ.get("VC_JAX_EXAMPLES", "12"))
ERROR = {"bf16": 2e-5, "int8": 0.1, "fp8": 0.2, "nvfp4": 0.6}
COUNTS: collections.Counter[str] = collections.Counter()
REFUSED = (TypeError, ValueError, NotImplementedError)
ARGUMENTS = ("mesh", "_axis", "method", "implementation")
SHAPES = {(1,): ("x",), (2,): ("x",), (4,): ("x",), (8,): ("x",), (2, 2): ("x", "y")}
SHAPES |= {(2, 4): ("x", "y"), (2, 2, 2): ("x", "y", "z")}
BATCH, SIZE = 2, 16

mostly = st.sampled_from


@st.composite
def calls(draw):
    shape = draw(mostly(list(SHAPES)))
    names = SHAPES[shape]
    kind = draw(mostly([AxisType.Explicit, AxisType.Auto]))
    config = draw(mostly(list(ERROR) if EXAMPLES > 100 else ["bf16", "int8"]))
    heads, kv_heads = draw(mostly([(4, 4), (4, 2), (8, 4), (3, 3)]))
    rows, length = draw(mostly([(16, 32), (16, 32), (13, 29), (3, 5)]))
    places = draw(st.permutations(range(3)))
    chosen = dict.fromkeys(("batch_axis", "head_axis", "sequence_axis"))
    for name, place in zip(names, places):
        chosen[list(chosen)[place]] = name
    if len(names) > 1 and draw(st.booleans()):
        chosen |= {"batch_axis": None, "head_axis": None, "sequence_axis": names}
    chosen["method"] = draw(mostly([None, None, "ulysses", "ring", "ulysses+ring", "tree"]))
    wrong = draw(mostly([None] * 12 + ["batch_axis", "head_axis", "sequence_axis"]))
    if wrong is not None:
        chosen[wrong] = draw(mostly(["w", names[0]]))
    lengths = draw(mostly([None, None, [length, 1], [0, length]]))
    plain = draw(mostly([False, False, True]))
    return shape, kind, config, (rows, length, heads, kv_heads), chosen, lengths, plain


def tensors(rows: int, length: int, heads: int, kv_heads: int):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(BATCH, rows, heads, SIZE)] + [(BATCH, length, kv_heads, SIZE)] * 2
    return [np.asarray(jax.random.normal(k, shape)) for k, shape in zip(keys, shapes)]


def names_of(axis) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis or ()


def placed(arrays, mesh, axes):
    """Arrays on the mesh's axes as far as those exist and divide their sizes."""
    spec = [axes["batch_axis"], axes["sequence_axis"], axes["head_axis"]]
    if any(name not in mesh.shape for axis in spec for name in names_of(axis)):
        spec = []
    if len(names := [name for axis in spec for name in names_of(axis)]) > len(set(names)):
        spec = []

    def place(array):
        parts = [int(np.prod([mesh.shape[name] for name in names_of(axis)])) for axis in spec]
        fits = [a if n % part == 0 else None for a, n, part in zip(spec, array.shape, parts)]
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*fits)))

    return [place(x) for x in arrays]


def computed(drawn, arrays):
    shape, kind, config, _, axes, lengths, plain = drawn
    names = SHAPES[shape]
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(names))
    query, key, value = placed(arrays, mesh, axes)
    common = {"config": config, "key_value_seq_lengths": lengths}
    if plain:
        return jax.jit(lambda q, k, v: vc_jax.dot_product_attention(q, k, v, **common))(
            query, key, value
        )
    return jax.jit(
        lambda q, k, v: sharding.sharded_attention(q, k, v, mesh=mesh, **axes, **common)
    )(query, key, value)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(calls())
def any_mesh(drawn):
    _, _, config, sizes, _, lengths, _ = drawn
    arrays = tensors(*sizes)
    COUNTS["tried"] += 1
    said, out = "", None
    try:
        out = computed(drawn, arrays)
    except REFUSED as error:
        said = str(error)
    if out is None:
        assert len(said.splitlines()) == 1, said
        assert any(name in said for name in ARGUMENTS), said
        COUNTS["refused"] += 1
        return
    valid = None if lengths is None else oracles.prefix(lengths, arrays[1].shape[1])
    want, _ = oracles.attention(*arrays, key_valid=valid)
    error = np.linalg.norm(np.asarray(out, np.float64) - want)
    assert error <= ERROR[config] * np.linalg.norm(want), error
    COUNTS["right"] += 1


def check_any_mesh():
    any_mesh()
    print(dict(COUNTS), file=sys.stderr)
    assert COUNTS["right"] >= COUNTS["tried"] // 5
    assert COUNTS["refused"]


if __name__ == "__main__":
    devices.run(sys.modules["__main__"])
