"""The fused preparation in Pallas's interpreter, held to `vc_jax.prepare` on the same order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import vc_jax
from vc_jax import _fused
from vc_jax.pallas_kernels import preparation

from .preparation_cases import FAST_COMPILE, Call, assert_same, both, mean_key, scores

RAGGED = Call(batch=4, heads=4, key_heads=2, counts=(0, 129, 300, 256))
FP8_RAGGED = dataclasses.replace(RAGGED, format="fp8")
compiled = functools.partial(jax.jit, compiler_options=FAST_COMPILE)


statistics = compiled(
    functools.partial(_fused.statistics_fused, interpret=True), static_argnames="config"
)


def key_mean(key, valid):
    return statistics(key, key, key, RAGGED.config, key_valid=valid).key_mean


@pytest.mark.parametrize(
    "call",
    [
        RAGGED,
        FP8_RAGGED,
        Call(dtype=jnp.float32, head_dim=128, length=600, key_heads=2, rows=600),
        Call("fp8", jnp.float16, batch=2, counts=(300, 40), smooth=False),
        Call(dtype=jnp.float16, head_dim=128, length=100, ordered=False, rows=1),
        Call("fp8", jnp.float32, length=9, rows=9, ordered=False, smooth=False),
        Call("fp8", head_dim=128, length=257, batch=2, counts=(257, 256), prefix=True),
        Call("int8 bare", length=513, rows=65),
        Call("int8 balanced", jnp.float16, length=300),
        Call("fp8 balanced", head_dim=128, length=300),
        Call("fp8 bare", head_dim=128, ordered=False, batch=2, counts=(300, 2), prefix=True),
    ],
    ids=str,
)
def test_codes_and_scales_are_those_of_the_definition(call):
    # Ratios of values of 8 bits lie on an edge more often than those of rotated ones.
    assert_same(*both(call), share=1e-3 if call.config.rotate else 5e-3)


@pytest.mark.parametrize("call", [RAGGED, FP8_RAGGED], ids=str)
def test_most_codes_are_equal_bit_for_bit(call):
    # Of 10^5 codes a few lie on an edge between two; a systematic difference would be thousands.
    want, got = both(call)
    for name in ("query_codes", "key_codes", "value_codes"):
        one, other = getattr(want, name), getattr(got, name)
        assert np.mean(one.view(np.uint8) != other.view(np.uint8)) < 1e-4, name


@pytest.mark.parametrize("poison", [0.0, np.inf, -3e38])
@pytest.mark.parametrize("call", [RAGGED, FP8_RAGGED], ids=str)
def test_bytes_of_invalid_keys_reach_nothing(call, poison):
    query, key, value = call.tensors()
    assert np.isnan(np.asarray(key, np.float32)).any()
    other = [jnp.where(jnp.isnan(x), poison, x).astype(x.dtype) for x in (key, value)]
    assert_equal(both(call)[1], both(call, (query, *other))[1])


def test_bytes_of_invalid_keys_do_not_reach_the_mean():
    key, valid = RAGGED.tensors()[1], jnp.asarray(RAGGED.valid)
    np.testing.assert_array_equal(key_mean(key, valid)[0], 0.0)
    assert np.isfinite(key_mean(key, valid)).all()


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a_single_key_less_its_mean_is_nothing(format):
    # Rotation and mean commute up to rounding: codes of that rounding mean nothing.
    call = dataclasses.replace(RAGGED, format=format, counts=(1, 0, 300, 2))
    query, key, _ = call.tensors()
    want, got = both(call)
    size = np.nanmax(np.abs(np.asarray(key, np.float32)[0]))
    bound = size * np.abs(np.asarray(query, np.float32)).max() * call.head_dim * 1e-5
    assert np.abs(scores(want)[0]).max() == 0
    assert np.abs(scores(got)[0]).max() < bound
    for name in ("value_codes", "value_scale", "block_means"):
        assert getattr(want, name)[0].tobytes() == getattr(got, name)[0].tobytes()
    assert_same(*(jax.tree.map(lambda x: x[1:], prepared) for prepared in (want, got)))


@pytest.mark.parametrize("scale", [1e25, 1e-25, 1e-38])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_huge_and_tiny_tensors(format, scale):
    call = Call(format, jnp.float32, length=257, rows=40)
    query, key, value = call.tensors()
    for tensors in ((query * scale, key, value), (query, key * scale, value * scale)):
        want, got = both(call, tensors)
        assert_same(want, got)
        assert np.isfinite(got.query_scale).all()
        assert np.isfinite(got.value_scale).all()


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_zeros_are_prepared_as_zeros(format):
    call = Call(format, jnp.float32, length=257, rows=40)
    want, got = both(call, [jnp.zeros_like(x) for x in call.tensors()])
    assert_equal(want, got)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_what_is_not_finite_in_a_valid_token_shows(format, poison):
    call = Call(format, jnp.float32, length=257, rows=40)
    query, key, value = call.tensors()
    _, got = both(call, (query.at[0, 3, 1, 5].set(poison), key, value))
    spoilt = np.isnan(got.query_scale)
    assert spoilt[0, 1, 3]
    assert spoilt.sum() == 1
    _, got = both(call, (query, key.at[0, 200, 0, 5].set(poison), value))
    assert np.isnan(got.query_scale).all() or not np.isfinite(got.key_scale).all()
    _, got = both(call, (query, key, value.at[0, 200, 0, 5].set(poison)))
    assert not np.isfinite(got.value_scale[0, 0, 5])


def test_the_softmax_scale_is_in_the_scales_of_the_queries():
    call = Call(dtype=jnp.float32, length=257, rows=40)
    one, two = both(call, scale=0.1)[1], both(call, scale=0.2)[1]
    np.testing.assert_allclose(2 * one.query_scale, two.query_scale, rtol=1e-6)
    np.testing.assert_array_equal(one.query_codes, two.query_codes)


@pytest.mark.parametrize(
    ("dtype", "length"), [(jnp.float32, 1), (jnp.float16, 100), (jnp.bfloat16, 2049)]
)
def test_the_mean_key_is_that_of_all_tokens(dtype, length):
    key = Call(dtype=dtype, length=length, key_heads=2).tensors()[1]
    np.testing.assert_allclose(key_mean(key, None), mean_key(key), rtol=2e-6, atol=1e-6)


def test_the_mean_key_is_that_of_the_valid_tokens():
    length = 2100
    call = Call(length=length, batch=3, counts=(0, 1, length // 2), head_dim=128)
    key, valid = call.tensors()[1], jnp.asarray(call.valid)
    got = key_mean(key, valid)
    np.testing.assert_allclose(got, mean_key(key, valid), rtol=2e-6, atol=1e-6)


def whole(interpret, query, key, value, order, valid):
    """Mean and preparation of a call of `RAGGED`."""
    count = jnp.sum(valid, 1, dtype=jnp.int32)
    tensors = (query, key, value, RAGGED.config)
    given = {"order": order, "key_valid": valid, "kv_count": count, "interpret": interpret}
    found = _fused.statistics_fused(*tensors, **given)
    return _fused.prepare_fused(*tensors, **given, **found._asdict())


@functools.cache
def whole_at_once() -> tuple[tuple, vc_jax.Prepared8]:
    arrays = (*RAGGED.tensors(), jnp.asarray(RAGGED.order), jnp.asarray(RAGGED.valid))
    return arrays, compiled(functools.partial(whole, True))(*arrays)


def assert_equal(want: vc_jax.Prepared8, got: vc_jax.Prepared8) -> None:
    for name, one in vars(want).items():
        other = getattr(got, name)
        if one is None:
            assert other is None, name
            continue
        np.testing.assert_array_equal(
            np.asarray(one, np.float32), np.asarray(other, np.float32), name
        )


def test_vmap_over_calls_of_one_row_equals_a_call_of_all_rows():
    arrays, want = whole_at_once()
    mapped = compiled(jax.vmap(functools.partial(whole, True)))(*(x[:, None] for x in arrays))
    assert_equal(want, jax.tree.map(lambda x: x[:, 0], mapped))


def test_shard_map_over_heads_equals_the_whole():
    arrays, want = whole_at_once()
    tokens, by_head = PartitionSpec(None, None, "x"), PartitionSpec(None, "x")
    shared, rows = PartitionSpec(), PartitionSpec("x")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    of_heads = {
        "in_specs": (tokens, tokens, tokens, by_head, shared),
        "out_specs": vc_jax.Prepared8(*(by_head,) * 8, shared, by_head),
    }
    # The interpreter does not know of varying axes; the kernels' own types are checked here.
    for specs in (of_heads, {"in_specs": (rows,) * 5, "out_specs": rows}):
        checked = functools.partial(whole, False)
        jax.jit(jax.shard_map(checked, mesh=mesh, check_vma=True, **specs)).trace(*arrays)
    interpreted = functools.partial(whole, True)
    sharded = jax.shard_map(interpreted, mesh=mesh, check_vma=False, **of_heads)
    got = compiled(sharded)(*arrays)
    assert_same(*jax.tree.map(np.asarray, (want, got)))


def test_what_the_kernels_do_not_take_is_said():
    def tokens(dtype=jnp.bfloat16, length=300, heads=2, size=64):
        return jax.ShapeDtypeStruct((1, length, heads, size), dtype)

    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        for size in (64, 128):
            assert preparation.unsupported(size, tokens(dtype, size=size)) is None
    assert "head dim of 64 or 128, got 96" in str(preparation.unsupported(96, tokens(size=96)))
    reason = preparation.unsupported(64, tokens(), tokens(jnp.float8_e4m3fn))
    assert "float32, bfloat16 or float16 tokens, got float8_e4m3fn" in str(reason)


@pytest.mark.parametrize("batch", [1, 3, 64, 1000])
@pytest.mark.parametrize("heads", [1, 40, 128])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_numbers_of_tokens_stay_below_32_bits_with_all_padding(batch, heads, which):
    def unsupported(length):
        arrays = [jax.ShapeDtypeStruct((batch, 300, heads, 128), jnp.bfloat16)] * 3
        arrays[which] = jax.ShapeDtypeStruct((batch, length, heads, 128), jnp.bfloat16)
        return preparation.unsupported(128, *arrays)

    # By the definition, one step of 256 tokens at a time: the longest that is taken ...
    steps = (2**31 - 1) // (batch * heads * 256) - 1
    assert unsupported(steps * 256) is None
    assert batch * heads * steps * 256 < 2**31
    # ... and no token more, however far below 2^31 the tokens themselves are.
    assert "fewer than 2^31 tokens" in str(unsupported(steps * 256 + 1))
    assert "fewer than 2^31 tokens" in str(unsupported(2**31 // batch // heads))


@pytest.mark.parametrize("scale", [-0.125, -20.0, 1e4])
@pytest.mark.parametrize("call", [RAGGED, FP8_RAGGED], ids=str)
def test_scales_of_any_sign_and_size(call, scale):
    want, got = both(call, scale=scale)
    assert_same(want, got)
    assert (got.query_scale >= 0).all()
    # The sign is in the codes: those of the other sign's, negated.
    other = both(call, scale=-scale)[1]
    np.testing.assert_array_equal(
        got.query_codes.astype(np.float32), -other.query_codes.astype(np.float32)
    )
