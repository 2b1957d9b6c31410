"""Calls on explicit mesh axes against the same calls on one device.

Every check compares what a program on 8 devices computes with what another computes on one: they
may round differently and sort a token differently, so they are close, not equal.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import vc_jax

from ..core.cases import relative_l2, video_like
from . import devices

CLOSE = 2e-3
SHAPE = {"batch": 2, "rows": 64, "length": 256, "heads": 4, "kv_heads": 2, "size": 32}
LENGTHS = np.array([200, 0], np.int32)
QUERY_LENGTHS = np.array([64, 30], np.int32)
SCHEDULE = vc_jax.DenoisingSchedule(
    6, smoothing_fraction=0.5, refresh_every=2, high_precision_steps=(0, 1)
)
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@functools.cache
def mesh():
    return jax.make_mesh((2, 2, 2), ("b", "s", "h"))


def put(array, *axes):
    return jax.device_put(array, NamedSharding(mesh(), PartitionSpec(*axes)))


@functools.cache
def tensors():
    return video_like(0, **SHAPE)


@functools.cache
def placed(*axes: tuple):
    return tuple(put(x, *spec) for x, spec in zip(tensors(), axes))


ROWS = (("b", "s", "h"), ("b", None, "h"), ("b", "s"))
"""Query rows are parted, and keys and values in two other ways."""
COPIED = (("b", None, ("s", "h")), ("b",), ("b", None, "h"))
"""Four parts of the query heads, two key heads."""


@functools.partial(jax.jit, static_argnames=("config", "return_residual"))
def attend(query, key, value, lengths, rows, **options):
    return vc_jax.dot_product_attention(
        query,
        key,
        value,
        key_value_seq_lengths=lengths,
        query_seq_lengths=rows,
        **options,
    )


@functools.cache
def want(config: str):
    return attend(*tensors(), LENGTHS, QUERY_LENGTHS, config=config, return_residual=True)


def preset(config: str, axes: tuple) -> None:
    arrays = placed(*axes)
    lengths = put(LENGTHS, "b")
    out, lse = attend(*arrays, lengths, QUERY_LENGTHS, config=config, return_residual=True)
    assert relative_l2(out, want(config)[0]) < CLOSE
    finite = np.isfinite(want(config)[1])
    assert np.array_equal(np.isfinite(lse), finite)
    assert np.abs(np.asarray(lse)[finite] - np.asarray(want(config)[1])[finite]).max() < CLOSE
    assert out.sharding.is_equivalent_to(arrays[0].sharding, 4)
    of_rows = NamedSharding(mesh(), PartitionSpec(*axes[0][:3]))
    assert lse.sharding.is_equivalent_to(of_rows, 3)


def check_bf16():
    preset("bf16", ROWS)


def check_int8():
    preset("int8", ROWS)


def check_fp8():
    preset("fp8", COPIED)


def check_nvfp4():
    """Rows share the balance of channels, so parts of them would have others."""
    preset("nvfp4", ROWS)


def check_head_dim_sharded():
    preset("bf16", ((None, None, None, "h"), (None, None, "s", "h"), ("b",)))


def check_eager_with_masks():
    """Any mix of placements, eager; a mask that is sharded itself."""
    mask = (np.arange(256) < LENGTHS[:, None])[:, None, None]
    plain, *others = placed(*ROWS)
    for given in (mask, put(mask, "b", None, None, "s")):
        out = vc_jax.dot_product_attention(plain, *others, mask=given, query_seq_lengths=[64, 30])
        assert relative_l2(out, want("int8")[0]) < CLOSE
        assert out.sharding.is_equivalent_to(plain.sharding, 4)


def check_context_mesh():
    """Arrays that lie nowhere in particular, under `jax.set_mesh`."""
    with jax.set_mesh(mesh()):
        out = attend(*tensors(), LENGTHS, QUERY_LENGTHS, config="bf16")
        assert relative_l2(out, want("bf16")[0]) < CLOSE


def check_batch_and_heads_need_no_communication():
    arrays = placed(("b", None, "h"), ("b", None, "h"), ("b", None, "h"))
    run = attend.lower(*arrays, put(LENGTHS, "b"), put(QUERY_LENGTHS, "b"), config="int8")
    program = run.compile().as_text() or ""
    assert not [name for name in COLLECTIVES if name in program]


def check_gradients():
    def loss(query, key, value):
        return (vc_jax.dot_product_attention(query, key, value) ** 2).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    expected = gradient(*tensors())
    arrays = placed(*COPIED)
    for got, one, array in zip(gradient(*arrays), expected, arrays):
        assert relative_l2(got, one) < CLOSE
        assert got.sharding.is_equivalent_to(array.sharding, 4)


@jax.jit
def denoise(query, key, value, state):
    def step(state, index):
        out, state = vc_jax.attention_step(
            query * (1 + 0.1 * index), key, value, state, step=index, schedule=SCHEDULE, layer=1
        )
        return state, out

    return jax.lax.scan(step, state, jnp.arange(SCHEDULE.num_steps))


def check_steps():
    """A state in a scan: with its heads and batch on the mesh; whole, for heads that are copied."""
    state = vc_jax.init_state("int8", 2, 256, 2, 32, layers=2)
    _, expected = denoise(*tensors(), state)
    for axes, heads in ((ROWS, (None, "b", "h")), (COPIED, ())):
        of_state = [put(x, *heads[: 3 if i < 2 else 2]) for i, x in enumerate(state)]
        given = vc_jax.AttentionState(*of_state)
        new, outs = denoise(*placed(*axes), given)
        assert relative_l2(outs, expected) < CLOSE
        assert bool(new.made[1].all())
        assert not new.made[0].any()
        order = np.sort(np.asarray(new.permutation[1]), -1)
        assert np.array_equal(order, np.broadcast_to(np.arange(256), order.shape))
        for array, was in zip(new, of_state):
            assert array.sharding.is_equivalent_to(was.sharding, array.ndim)


def check_state_is_read():
    _, state = vc_jax.attention_step(
        *placed(*ROWS),
        vc_jax.init_state("int8", 2, 256, 2, 32),
        step=0,
        schedule=SCHEDULE,
        key_value_seq_lengths=LENGTHS,
        query_seq_lengths=QUERY_LENGTHS,
    )
    out = vc_jax.dot_product_attention(
        *placed(*COPIED),
        state=state,
        key_value_seq_lengths=LENGTHS,
        query_seq_lengths=QUERY_LENGTHS,
    )
    assert relative_l2(out, want("int8")[0]) < CLOSE


def check_explain_and_compare():
    arrays = placed(*ROWS)
    assert vc_jax.explain(*arrays, key_value_seq_lengths=put(LENGTHS, "b")).implementation == "xla"
    got = vc_jax.compare(*arrays, "int8", rows=16)["int8"]
    one = vc_jax.compare(*tensors(), "int8", rows=16)["int8"]
    assert relative_l2(got.relative_l2, one.relative_l2) < 0.1


def check_without_batch():
    query, key, value = (x[0] for x in tensors())
    one = vc_jax.dot_product_attention(query, key, value)
    out = vc_jax.dot_product_attention(put(query, "s", "h"), put(key, "s"), put(value, None, "h"))
    assert relative_l2(out, one) < CLOSE
    assert out.sharding.spec == PartitionSpec("s", "h", None)


def check_inside_shard_map_over_another_axis():
    heads = PartitionSpec("b", None, "h")
    sharded = jax.shard_map(
        vc_jax.dot_product_attention,
        in_specs=(PartitionSpec("b"),) * 3,
        out_specs=PartitionSpec("b"),
        axis_names={"b"},
        mesh=mesh(),
    )
    out = jax.jit(sharded)(*placed(heads, heads, heads))
    assert relative_l2(out, vc_jax.dot_product_attention(*tensors())) < CLOSE


if __name__ == "__main__":
    devices.run(sys.modules["__main__"])
