"""The public call against float64 attention, on every configuration."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax

from . import oracles
from .cases import (
    CONFIGS,
    ERROR,
    LENGTHS,
    QUERY_LENGTHS,
    attend,
    attend_ragged,
    attend_real,
    exact_real,
    jaxpr_equations,
    lse_error,
    ragged,
    relative_l2,
    same_bytes,
    video_like,
)

KEY_VALID = oracles.prefix(LENGTHS, 300)
QUERY_VALID = oracles.prefix(QUERY_LENGTHS, 9)
ALL_ROWS = np.full(6, 9, np.int32)
LSE_ERROR = {"bf16": 2e-6, "int8": 0.05, "fp8": 0.06, "nvfp4": 0.15}


def exact(inputs, **arguments):
    arguments = {"scale": 0.125, "key_valid": KEY_VALID, "query_valid": QUERY_VALID} | arguments
    return oracles.attention(*inputs, **arguments)


def spoil(inputs, keys, garbage):
    """Keys and values replaced by `garbage` where `keys` [B, S] is set."""
    query, key, value = inputs
    where = jnp.asarray(keys)[:, :, None, None]
    return query, jnp.where(where, garbage, key), jnp.where(where, garbage, value)


@pytest.mark.parametrize("name", CONFIGS)
def test_output_and_normaliser_are_those_of_attention_over_valid_keys(name):
    out, lse = attend_ragged(name, ragged())
    want, want_lse = exact(ragged())
    assert out.dtype == lse.dtype == jnp.float32
    assert out.shape == (6, 9, 4, 64)
    assert lse.shape == (6, 9, 4)
    assert relative_l2(out, want) < ERROR[name]
    if name != "nvfp4 bare":  # neither centred nor rotated: its scores are off by a nat
        assert lse_error(lse, want_lse) < LSE_ERROR[name.split()[0]]


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_of_padded_keys_change_nothing(name):
    clean = attend_ragged(name, ragged())
    for garbage in (0.0, np.nan, np.inf, -np.inf, 1e30, -3e38, 1e-42):
        same_bytes(clean, attend_ragged(name, spoil(ragged(), ~KEY_VALID, garbage)))


@pytest.mark.parametrize("name", CONFIGS)
def test_padded_queries_give_zeros_whatever_they_hold(name):
    query, key, value = ragged()
    clean = attend_ragged(name, ragged())
    for garbage in (np.nan, np.inf, 3e38):
        dirty = jnp.where(QUERY_VALID[:, :, None, None], query, garbage)
        got = attend_ragged(name, (dirty, key, value))
        same_bytes(clean, got)
        assert (np.asarray(got[0])[~QUERY_VALID] == 0).all()
        assert np.isneginf(np.asarray(got[1])[~QUERY_VALID]).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_without_a_valid_key_gives_zeros_whatever_its_query_holds(name):
    query, key, value = ragged()
    for garbage in (1.0, np.nan, np.inf):
        out, lse = attend_ragged(name, (query.at[0].set(garbage), key, value))
        assert (np.asarray(out)[0] == 0).all()
        assert np.isneginf(np.asarray(lse)[0]).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_batch_rows_do_not_reach_each_other(name):
    """Not even a NaN in a valid token of another row."""
    clean = attend_ragged(name, ragged())
    query, key, value = ragged()
    other = (query.at[5].set(jnp.nan), key.at[5].set(1e4), value.at[5, 3].set(jnp.inf))
    got = attend_ragged(name, other)
    same_bytes(*(jax.tree.map(lambda x: x[:5], r) for r in (clean, got)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_nan_in_a_valid_token_is_not_hidden(name, bad):
    query, key, value = ragged()
    b = list(LENGTHS).index(129)
    out, lse = attend_ragged(name, (query.at[b, 2, 1, 7].set(bad), key, value))
    assert np.isnan(np.asarray(out)[b, 2, 1]).all()
    assert np.isnan(np.asarray(lse)[b, 2, 1])
    if not name.startswith("nvfp4"):  # its queries share a scale
        assert np.isfinite(np.asarray(out)[b, 3]).all()
    out, _ = attend_ragged(name, (query, key, value.at[b, 128, 1, 7].set(bad)))
    assert not np.isfinite(np.asarray(out)[b, :, 2:, 7]).any()
    assert np.isfinite(np.asarray(out)[b, :, :2]).all()
    if np.isnan(bad):  # an infinite key may rightly have a score of -inf
        out, lse = attend_ragged(name, (query, key.at[b, 128, 1, 7].set(bad), value))
        assert np.isnan(np.asarray(out)[b, :, 2:]).all()
        assert np.isnan(np.asarray(lse)[b, :, 2:]).all()
        assert np.isfinite(np.asarray(out)[b, :, :2]).all()


@functools.cache
def one_key_inputs():
    """Queries that are one valid key each, keys of norm 1, values, and the key of each query."""
    rng = np.random.default_rng(5)
    key = rng.normal(size=(6, 300, 2, 64))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    target = rng.integers(np.maximum(LENGTHS, 1)[:, None, None], size=(6, 9, 4))
    query = key[np.arange(6)[:, None, None], target, np.arange(4) // 2]
    query, key = (jnp.asarray(x, jnp.float32) for x in (query, key))
    return query, key, ragged()[2], target


@functools.cache
def one_key_each(logit, name):
    """Output and normaliser of `one_key_inputs`, every other score far below, and the value."""
    query, key, value, target = one_key_inputs()
    out, lse = attend_ragged(name, (query, key, value), scale=logit)
    counts = (KEY_VALID[:, :1] & QUERY_VALID)[..., None, None]
    value = value[np.arange(6)[:, None, None], target, np.arange(4) // 2]
    return out, lse, np.where(counts, value, 0)


LOGITS = [1e3, 1e4, 1e5, 1e6]


@pytest.mark.parametrize("logit", LOGITS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_in_the_thousands_and_millions_pick_the_right_key(name, logit):
    out, lse, want = one_key_each(logit, name)
    assert relative_l2(out, want) < (0.1 if name.startswith("nvfp4") else 0.04)
    assert not np.isnan(np.asarray(lse)).any()


@pytest.mark.parametrize("logit", LOGITS)
@pytest.mark.parametrize("name", CONFIGS)
def test_pieces_merge_at_logits_in_the_thousands_and_millions(name, logit):
    """By their normalisers: a row whose key lies in one piece takes nothing from the other."""
    _, lse, want = one_key_each(logit, name)
    query, key, value, target = one_key_inputs()
    cut = LENGTHS // 2
    front = attend_ragged(name, (query, key, value), cut, scale=logit)
    # The rest of the keys, brought to the front.
    turned = (np.arange(300) + cut[:, None]) % 300
    rest = [jnp.take_along_axis(x, jnp.asarray(turned)[..., None, None], 1) for x in (key, value)]
    back = attend_ragged(name, (query, *rest), LENGTHS - cut, scale=logit)
    front_lse, back_lse = (np.asarray(x[1], np.float64) for x in (front, back))
    with np.errstate(invalid="ignore"):
        share = np.where(
            np.isneginf(front_lse), 0, 1 / (1 + np.exp(np.minimum(back_lse - front_lse, 700)))
        )
    merged = share[..., None] * np.asarray(front[0]) + (1 - share[..., None]) * np.asarray(back[0])
    assert relative_l2(merged, want) < (0.1 if name.startswith("nvfp4") else 0.04)
    live = np.isfinite(np.asarray(lse))
    np.testing.assert_array_equal((share > 0.5)[live], (target < cut[:, None, None])[live])


@pytest.mark.parametrize("factor", [1.0, 30.0, 1e3, 1e5])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_scale_of_the_scores_gives_a_nan_or_leaves_the_range_of_the_values(name, factor):
    query, key, value = ragged()
    out, lse = attend_ragged(name, (query, 10 * key + 2, value), scale=factor)
    assert np.isfinite(np.asarray(out)).all()
    assert np.abs(np.asarray(out)).max() < 1.15 * np.abs(np.asarray(value)).max()
    assert not np.isnan(np.asarray(lse)).any()
    assert not np.isposinf(np.asarray(lse)).any()


@pytest.mark.parametrize("factor", [1e-28, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("name", CONFIGS)
def test_huge_and_tiny_values_are_as_accurate_as_others(name, factor):
    query, key, value = ragged()
    out, _ = attend_ragged(name, (query, key, value * factor))
    want, _ = exact((query, key, value))
    assert relative_l2(np.asarray(out, np.float64) / factor, want) < 1.5 * ERROR[name]


@pytest.mark.parametrize("factor", [1e-30, 1e-15, 1e15, 1e30])
@pytest.mark.parametrize("name", CONFIGS)
def test_huge_queries_on_tiny_keys_are_as_accurate_as_others(name, factor):
    query, key, value = ragged()
    out, lse = attend_ragged(name, (query * factor, key / factor, value))
    want, want_lse = exact((query, key, value))
    assert relative_l2(out, want) < 1.5 * ERROR[name]
    if name != "nvfp4 bare":
        assert lse_error(lse, want_lse) < 1.5 * LSE_ERROR[name.split()[0]] + 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_zeros_are_answered_with_the_plain_mean(name):
    query, key, value = ragged()
    mean = np.where(KEY_VALID[:, :, None, None], value, 0).sum(1)
    mean = np.repeat(mean / np.maximum(LENGTHS, 1)[:, None, None], 2, 1)[:, None]
    want = np.where(QUERY_VALID[:, :, None, None], mean, 0)
    with np.errstate(divide="ignore"):
        want_lse = np.log(np.where(QUERY_VALID, LENGTHS[:, None], 0))[..., None]
    for zeros in ((0 * query, key, value), (query, 0 * key, value), (0 * query, 0 * key, value)):
        out, lse = attend_ragged(name, zeros)
        assert relative_l2(out, want) < ERROR[name]
        assert lse_error(lse, np.broadcast_to(want_lse, lse.shape)) < 0.01
    out, _ = attend_ragged(name, (query, key, 0 * value))
    assert (np.asarray(out) == 0).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_scale_of_zero_or_below_is_taken_as_it_is(name):
    for scale in (0.0, -0.125):
        out, _ = attend_ragged(name, ragged(), scale=scale)
        want, _ = exact(ragged(), scale=scale)
        assert relative_l2(out, want) < 2 * ERROR[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_second_run_gives_the_same_bytes(name):
    same_bytes(attend_ragged(name, ragged()), attend_ragged(name, ragged()))


def test_padding_an_array_is_the_same_as_not_having_the_keys():
    b = list(LENGTHS).index(129)
    query, key, value = (x[b : b + 1] for x in ragged())
    call = functools.partial(
        attend,
        query,
        config=vc_jax.AttentionConfig(clusters=2, lloyd_stride=1),
        return_residual=True,
    )
    out, lse = call(key, value, key_value_seq_lengths=jnp.array([129]))
    short, short_lse = call(key[:, :129], value[:, :129])
    # Sums run over zeros as well, so a code may flip.
    assert relative_l2(out, short) < 2e-3
    assert lse_error(lse, short_lse) < 2e-3


SHAPES = {
    "one token": (1, 1, 1, 1, 1, 64),
    "one query": (2, 1, 257, 4, 1, 96),
    "one key": (1, 130, 1, 2, 2, 40),
    "short of a block": (2, 7, 127, 6, 2, 128),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [("int8", s) for s in SHAPES]
    + [("bf16", "one query"), ("fp8", "one key"), ("nvfp4", "one token")],
)
def test_any_length_group_and_head_size_is_taken(name, shape):
    batch, rows, length, heads, kv_heads, size = SHAPES[shape]
    inputs = video_like(1, batch, rows, length, heads, kv_heads, size)
    out, lse = attend(*inputs, config=name, return_residual=True)
    want, want_lse = oracles.attention(*inputs)
    bound = {"bf16": 1e-6, "int8": 0.02, "fp8": 0.02, "nvfp4": 0.08}[name]
    assert out.shape == (batch, rows, heads, size)
    assert relative_l2(out, want) < bound
    assert lse_error(lse, want_lse) < 3 * LSE_ERROR[name]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", jnp.bfloat16),
        ("bf16", jnp.float16),
        ("int8", jnp.float16),
        ("fp8", jnp.bfloat16),
    ],
)
def test_narrow_inputs_give_an_output_of_their_dtype_and_a_float32_normaliser(name, dtype):
    inputs = video_like(2, 1, 9, 130, 2, 1, 64, dtype)
    dirty = spoil(inputs, ~oracles.prefix([129], 130), jnp.asarray(jnp.nan, dtype))
    out, lse = attend(
        *dirty, config=name, key_value_seq_lengths=jnp.array([129]), return_residual=True
    )
    want, want_lse = oracles.attention(*inputs, key_valid=oracles.prefix([129], 130))
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    step = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-11
    bound = {"bf16": 0, "int8": 0.012, "fp8": 0.015, "nvfp4": 0.05}[name] + step
    assert relative_l2(out, want) < bound
    assert lse_error(lse, want_lse) < LSE_ERROR[name] + step


def test_queries_and_keys_may_differ_in_dtype_and_the_query_decides_the_output():
    query, key, value = video_like(3, 1, 9, 130, 2, 1, 64)
    narrow = query.astype(jnp.bfloat16)
    out = attend(narrow, key, value.astype(jnp.float16), config="int8")
    want, _ = oracles.attention(narrow, key, value)
    assert out.dtype == jnp.bfloat16
    assert relative_l2(out, want) < 0.015


def test_arrays_without_a_batch_axis_are_taken():
    inputs = video_like(4, 1, 9, 130, 2, 1, 64)
    lengths = {"key_value_seq_lengths": jnp.array([77]), "query_seq_lengths": jnp.array([8])}
    call = functools.partial(vc_jax.dot_product_attention, return_residual=True, **lengths)
    out, lse = call(*(x[0] for x in inputs))
    assert out.shape == (9, 2, 64)
    assert lse.shape == (9, 2)
    batched = call(*inputs)
    same_bytes((out, lse), jax.tree.map(lambda x: x[0], batched))
    # The defaults are int8 and the scale of the head size.
    same_bytes(batched, call(*inputs, config="int8", scale=64**-0.5))


def test_the_bf16_preset_rounds_probabilities_to_the_dtype_of_the_inputs():
    """It computes in the dtype of the inputs: about as well as jax.nn."""
    inputs = video_like(2, 1, 9, 130, 2, 1, 64, jnp.bfloat16)
    want, _ = oracles.attention(*inputs)
    plain = relative_l2(jax.nn.dot_product_attention(*inputs), want)
    assert relative_l2(attend(*inputs, config="bf16"), want) < 1.5 * plain


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_normaliser_is_that_of_the_uncentred_scores_of_a_real_head(name):
    """Its mean key is 37 long in one channel: the scores are shifted by up to 280 nats."""
    out, lse = attend_real(CONFIGS[name])
    want, want_lse = exact_real()
    assert np.abs(want_lse).max() > 100
    assert np.median(np.abs(np.asarray(lse) - want_lse)) < 0.05
    assert lse_error(lse, want_lse) < (0.3 if name == "int8" else 0.8)
    assert relative_l2(out, want) < (0.1 if name == "int8" else 0.2)


@pytest.mark.parametrize("name", ["bf16", "int8", "fp8", "nvfp4"])
def test_every_matrix_product_runs_at_highest_precision(name):
    """No TF32 in the oracle: floats say so themselves, products of bfloat16 are exact."""
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ragged()]

    def loss(*arrays):
        return jnp.sum(vc_jax.dot_product_attention(*arrays, config=name))

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(*inputs)
    products = [e for e in jaxpr_equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) >= 5
    highest = (jax.lax.Precision.HIGHEST,) * 2

    def is_exact(product):
        halves = all(v.aval.dtype == jnp.bfloat16 for v in product.invars)
        return halves and product.params["preferred_element_type"] == jnp.float32

    assert all(e.params["precision"] == highest or is_exact(e) for e in products)
    assert any(e.params["precision"] == highest for e in products)


@pytest.mark.parametrize("name", ["bf16", "int8", "nvfp4"])
def test_memory_grows_with_the_number_of_tokens_not_with_its_square(name):
    rows, length, size = 4096, 8192, 64
    shape = jax.ShapeDtypeStruct((1, rows, 1, size), jnp.float32)
    keys = jax.ShapeDtypeStruct((1, length, 1, size), jnp.float32)

    def loss(*arrays):
        return jnp.sum(vc_jax.dot_product_attention(*arrays, config=name, implementation="xla"))

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(shape, keys, keys)
    largest = max(
        int(np.prod(v.aval.shape)) for e in jaxpr_equations(jaxpr.jaxpr) for v in e.outvars
    )
    assert largest <= (rows + length) * 256


def test_every_configuration_has_numerics_of_its_own():
    numbers = {name: np.asarray(attend_ragged(name, ragged())[0]) for name in CONFIGS}
    assert len({x.tobytes() for x in numbers.values()}) == len(CONFIGS)
