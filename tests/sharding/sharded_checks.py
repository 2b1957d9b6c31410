"""`vc_jax.sharding` on 8 devices against the calls of one device.

Exchanged heads are computed as on one device, up to the rounding of another program. A ring's codes
are others, so its error against exact attention is compared.
"""

import functools
import pathlib
import re
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import vc_jax
from vc_jax import sharding

from ..core.cases import relative_l2, video_like
from . import devices

CLOSE = 2e-3
ERROR = {"bf16": 1e-5, "int8": 0.01, "fp8": 0.013, "nvfp4": 0.05}
LENGTHS = np.array([300, 0], np.int32)
"""Of 8 pieces of 64 keys the last three have none, and the second row has none at all."""
QUERY_LENGTHS = np.array([61, 30], np.int32)
SCHEDULE = vc_jax.DenoisingSchedule(
    4, smoothing_fraction=0.5, refresh_every=1, high_precision_steps=(0, 1)
)
ULYSSES = {"sequence_axis": "inner"}
RING = {"sequence_axis": "inner", "method": "ring", "batch_axis": "outer"}
BOTH = {"sequence_axis": ("outer", "inner")}


@functools.cache
def mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("outer", "inner"), axis_types=(kind, kind))


@functools.cache
def tensors(heads: int = 8, kv_heads: int = 4):
    """61 queries and 509 keys, which nothing divides."""
    return video_like(0, 2, 61, 509, heads, kv_heads, 32)


@functools.partial(jax.jit, static_argnames=("call", "config"))
def attend(call, query, key, value, lengths, rows, config="int8"):
    return call(
        query,
        key,
        value,
        key_value_seq_lengths=lengths,
        query_seq_lengths=rows,
        config=config,
        return_residual=True,
    )


@functools.cache
def one_device(config: str):
    return attend(vc_jax.dot_product_attention, *tensors(), LENGTHS, QUERY_LENGTHS, config)


@functools.cache
def on_mesh(axes: tuple, config: str):
    call = functools.partial(sharding.sharded_attention, mesh=mesh(), **dict(axes))
    return attend(call, *tensors(), LENGTHS, QUERY_LENGTHS, config)


def close(axes: dict, config: str, bound: float, exact: str) -> None:
    (out, lse), want = on_mesh(tuple(axes.items()), config), one_device(exact)
    assert relative_l2(out, want[0]) < bound
    assert not np.any(np.asarray(out)[1])
    assert np.all(np.isneginf(np.asarray(lse)[1]))
    assert np.abs(np.asarray(lse)[0] - np.asarray(want[1])[0]).max() < max(0.06, bound)
    assert out.shape == want[0].shape


def check_ulysses_int8():
    close(ULYSSES, "int8", CLOSE, "int8")


def check_ulysses_fp8():
    close(ULYSSES | {"batch_axis": "outer"}, "fp8", CLOSE, "fp8")


def check_ulysses_nvfp4():
    close(ULYSSES, "nvfp4", CLOSE, "nvfp4")


def check_heads_and_ulysses_bf16():
    close({"head_axis": "outer", "sequence_axis": "inner", "method": "ring"}, "bf16", 1e-5, "bf16")


def check_ring_bf16():
    close(RING, "bf16", 1e-5, "bf16")


def check_ring_int8():
    close(RING, "int8", ERROR["int8"], "bf16")


def check_both_fp8():
    close(BOTH, "fp8", ERROR["fp8"], "bf16")


def check_empty_pieces_and_masks():
    """Eight pieces of one key each at most; a mask with holes; three more queries than keys."""
    query, key, value = tensors()
    query, key, value = query[:, :6], key[:, :3], value[:, :3]
    mask = np.array([[1, 0, 1], [0, 0, 0]], bool)[:, None, None]
    axes = {"sequence_axis": ("outer", "inner"), "method": "ring", "mesh": mesh()}
    out = sharding.sharded_attention(query, key, value, mask=mask, **axes)
    want = vc_jax.dot_product_attention(query, key, value, mask=mask, config="bf16")
    assert relative_l2(out, want) < ERROR["int8"]


def check_axes_of_one_device():
    one = jax.make_mesh((1,), ("only",), axis_types=(AxisType.Auto,))
    for method in ("ulysses", "ring"):
        call = functools.partial(
            sharding.sharded_attention, mesh=one, sequence_axis="only", method=method
        )
        out, _ = attend(call, *tensors(), LENGTHS, QUERY_LENGTHS)
        assert relative_l2(out, one_device("int8")[0]) < CLOSE


def check_gradients():
    weights = video_like(1, 2, 61, 1, 8, 8, 32)[0]

    def gradient(call):
        def loss(*tensors):
            return (call(*tensors, key_value_seq_lengths=LENGTHS) * weights).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*tensors())

    want = gradient(vc_jax.dot_product_attention)
    for axes in (ULYSSES, BOTH):
        call = functools.partial(sharding.sharded_attention, mesh=mesh(), **axes)
        for got, one in zip(gradient(call), want):
            assert relative_l2(got, one) < 1e-5


def denoise(step, state):
    query, key, value = tensors()

    def body(state, index):
        out, state = step(
            query * (1 + 0.1 * index), key, value, state, step=index, schedule=SCHEDULE, layer=1
        )
        return state, out

    run = jax.jit(lambda s: jax.lax.scan(body, s, jnp.arange(SCHEDULE.num_steps)), donate_argnums=0)
    return run(state)


def check_steps():
    """States through a scan, donated; ring steps against steps that are not quantised."""
    sizes = (2, 509, 4, 32)
    _, want = denoise(vc_jax.attention_step, vc_jax.init_state("int8", *sizes, layers=2))
    plain = functools.partial(vc_jax.attention_step, config="bf16")
    _, exact = denoise(plain, vc_jax.init_state("bf16", *sizes, layers=2))
    for axes, expected, bound in ((ULYSSES, want, CLOSE), (BOTH, exact, 0.03)):
        state = sharding.init_state("int8", *sizes, layers=2, mesh=mesh(), **axes)
        places = [x.sharding for x in state]
        step = functools.partial(sharding.sharded_attention_step, mesh=mesh(), **axes)
        new, outs = denoise(step, state)
        assert relative_l2(outs, expected) < bound
        assert bool(new.made[1].all())
        assert not new.made[0].any()
        for array, place in zip(new, places):
            assert array.sharding.is_equivalent_to(place, array.ndim)


def check_a_saved_state_goes_on_on_another_mesh():
    """Saved from heads over four devices, restored to heads over two."""
    made = {"config": "int8", "batch": 2, "kv_length": 509, "kv_heads": 4, "head_dim": 32}
    options = {"schedule": SCHEDULE, "mesh": mesh()}
    state = sharding.init_state(**made, mesh=mesh(), **ULYSSES)
    step = functools.partial(sharding.sharded_attention_step, *tensors())
    _, state = step(state, step=0, **options, **ULYSSES)
    narrow = {"sequence_axis": "outer"}
    place = sharding.init_state(**made, mesh=mesh(), **narrow)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), place
    )
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as saved:
        saved.save(pathlib.Path(folder) / "state", state)
        saved.wait_until_finished()
        restored = saved.restore(pathlib.Path(folder) / "state", abstract)
    for got, was, where in zip(restored, state, place):
        assert np.array_equal(got, was)
        assert got.sharding.is_equivalent_to(where.sharding, got.ndim)
    out, new = step(vc_jax.AttentionState(*restored), step=2, **options, **narrow)
    # After the window the order is that of the state.
    assert np.array_equal(new.permutation, state.permutation)
    exact = vc_jax.dot_product_attention(*tensors(), config="bf16")
    assert relative_l2(out, exact) < 0.02


def check_explicit_axes():
    """Tensors as they lie in a model on explicit axes, the mesh from the context."""
    place = NamedSharding(mesh(AxisType.Explicit), PartitionSpec("outer", "inner"))
    tokens = [jax.device_put(x[:, :60], place) for x in tensors(8, 4)]
    with jax.set_mesh(mesh(AxisType.Explicit)):
        call = functools.partial(
            sharding.sharded_attention, batch_axis="outer", sequence_axis="inner"
        )
        out = jax.jit(call)(*tokens)
    assert out.sharding.is_equivalent_to(place, 4)
    want = vc_jax.dot_product_attention(*(x[:, :60] for x in tensors()))
    assert relative_l2(out, want) < CLOSE


SIZES = {"f32": 4, "bf16": 2, "s32": 4, "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1}


def collectives(program: str) -> dict[str, list[int]]:
    """Bytes of the operands of each collective in a compiled program, by its name."""
    found: dict[str, list[int]] = {}
    names = "all-to-all|collective-permute|all-gather|all-reduce|reduce-scatter"
    for results, name in re.findall(rf"= (.*?) ({names})(?:-start)?\(", program):
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", results)
        size = sum(
            SIZES[kind] * np.prod([int(n) for n in dims.split(",") if n]) for kind, dims in shapes
        )
        found.setdefault(name, []).append(int(size))
    return {name: sorted(sizes) for name, sizes in found.items()}


def check_collectives_are_those_that_are_said():
    """Of whole programs, from inputs that lie on the mesh: no gather of keys or values."""
    for axes, config in ((ULYSSES, "int8"), (BOTH, "int8"), (RING, "bf16")):
        place = NamedSharding(mesh(), PartitionSpec(axes.get("batch_axis"), axes["sequence_axis"]))
        query, key = (
            jax.ShapeDtypeStruct((2, *sizes, 32), jnp.float32, sharding=place)
            for sizes in ((64, 8), (512, 4))
        )
        options = {"mesh": mesh(), "config": config, **axes}
        call = functools.partial(sharding.sharded_attention, **options)
        program = jax.jit(call).lower(query, key, key).compile().as_text()
        said: dict[str, list[int]] = {}
        for transfer in sharding.communication(query, key, key, **options).transfers:
            said.setdefault(transfer.collective, []).append(transfer.payload)
        assert said
        assert collectives(program) == {name: sorted(sizes) for name, sizes in said.items()}


if __name__ == "__main__":
    devices.run(sys.modules["__main__"])
