"""The reference attention against rows computed one at a time from the same codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax._quantize import Nvfp4
from vc_jax._reference import multiply_in_bfloat16, multiply_in_float32, nvfp4_codes

from . import oracles
from .cases import CONFIGS, LENGTHS, attend_ragged, lse_error, ragged, real_heads, relative_l2
from .test_prepare import prepare, prepared

reference = jax.jit(vc_jax.reference_attention, static_argnames="config")
EIGHT_BIT_ROWS = ["int8", "fp8", "int8 running", "fp8 running", "fp8 exp"]


def rows_match(got, want, lse, want_lse):
    """Nearly all rows to float32 rounding; a byte that flips at a rounding boundary moves a row."""
    got = np.asarray(got, np.float64)
    norm = np.linalg.norm(want, axis=-1)
    error = np.linalg.norm(got - want, axis=-1) / np.where(norm == 0, 1, norm)
    assert (error < 1e-5).mean() >= 0.9
    assert error.max() < 5e-3
    assert lse_error(lse, want_lse) < 5e-3


def rows_of(layout, softmax, shape):
    oracle = oracles.Prepared8Rows(layout, softmax)
    out, lse = np.zeros(shape), np.zeros(shape[:-1])
    for b, t, n in np.ndindex(*shape[:-1]):
        out[b, t, n], lse[b, t, n] = oracle.row(b, n, t)
    return out, lse


@pytest.mark.parametrize("name", EIGHT_BIT_ROWS)
def test_it_computes_what_a_kernel_computes_row_by_row(name):
    layout = prepared(name.split()[0])  # the softmax is no part of it
    got, lse = reference(layout, config=CONFIGS[name])
    assert got.dtype == lse.dtype == jnp.float32
    want, want_lse = rows_of(layout, CONFIGS[name].softmax, (6, 9, 4, 64))
    rows_match(got, want, lse, want_lse)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("factor", [10.0, 1e3, 1e5])
def test_rows_with_scores_in_the_thousands_and_millions_match_as_well(name, factor):
    query, key, value = ragged()
    layout = prepared(name, (factor * query, key, value))
    got, lse = reference(layout, config=CONFIGS[name])
    want, want_lse = rows_of(layout, "expcast", (6, 9, 4, 64))
    error = np.linalg.norm(np.asarray(got) - want, axis=-1)
    assert (error < 1e-4 * np.linalg.norm(want, axis=-1).max()).mean() > 0.9
    finite = np.isfinite(want_lse)
    np.testing.assert_allclose(np.asarray(lse)[finite], want_lse[finite], rtol=1e-5, atol=5e-3)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rows_of_real_heads_match(name):
    query, key, value = real_heads(64)
    layout = prepare(query, key, value, CONFIGS[name], key_mean=vc_jax.mean_key(key))
    got, lse = reference(layout, config=CONFIGS[name])
    want, want_lse = rows_of(layout, "expcast", query.shape)
    rows_match(got, want, lse, want_lse)


@pytest.mark.parametrize(
    ("name", "bound", "lse_bound"),
    [("int8", 0.008, 0.03), ("fp8", 0.008, 0.03), ("fp8 exp", 0.008, 0.02), ("nvfp4", 0.02, 0.08)],
)
def test_it_is_softmax_attention_over_what_the_codes_stand_for(name, bound, lse_bound):
    """Only the rounding of probabilities (and of float16 scores) is left between the two."""
    layout = prepared(name.split()[0])
    restored = vc_jax.restore(layout)
    key, value = (np.swapaxes(np.asarray(x), 1, 2) for x in (restored.key, restored.value))
    query = np.swapaxes(np.asarray(restored.query), 1, 2)
    valid = oracles.prefix(LENGTHS, key.shape[1])
    want, want_lse = oracles.attention(query, key, value, scale=np.log(2) / 8, key_valid=valid)
    got, lse = reference(layout, config=CONFIGS[name])
    assert relative_l2(got, want) < bound
    assert lse_error(lse, want_lse) < lse_bound


def test_the_public_call_is_the_reference_over_the_layout_it_prepares():
    query, key, value = ragged()
    live = np.array([9, 9, 9, 9, 9, 9])
    out, lse = attend_ragged("fp8 unsmoothed", (query, key, value), query_lengths=live)
    identity = jnp.broadcast_to(jnp.arange(300, dtype=jnp.int32), (6, 2, 300))
    layout = prepared("fp8 unsmoothed", order=identity)
    want, want_lse = reference(layout, config=CONFIGS["fp8 unsmoothed"])
    assert relative_l2(out, want) < 1e-3
    shift = np.isfinite(np.asarray(want_lse))
    valid = jnp.asarray(oracles.prefix(LENGTHS, 300))
    mean = np.repeat(np.asarray(vc_jax.mean_key(key, valid)), 2, 1)
    added = 0.125 * np.einsum("btnh,bnh->btn", np.asarray(query), mean)
    np.testing.assert_allclose(
        np.asarray(lse)[shift], (np.asarray(want_lse) + added)[shift], atol=2e-3
    )


@pytest.mark.parametrize(
    ("layout_of", "config"), [("int8", "nvfp4"), ("nvfp4", "int8"), ("int8", "bf16")]
)
def test_a_layout_of_another_configuration_is_refused(layout_of, config):
    with pytest.raises(ValueError, match="prepared must be the layout"):
        vc_jax.reference_attention(prepared(layout_of), CONFIGS[config])


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_an_eight_bit_layout_of_the_other_format_is_refused(name):
    other = {"int8": "fp8", "fp8": "int8"}[name]
    with pytest.raises(ValueError, match="prepared must be the layout"):
        vc_jax.reference_attention(prepared(other), CONFIGS[name])


def all_nvfp4_codes():
    """Every E2M1 code with every finite E4M3 scale: [256 scales, 16 codes]."""
    codes = np.arange(16, dtype=np.uint8)
    packed = np.broadcast_to(codes[0::2] | codes[1::2] << 4, (256, 8))
    scales = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.float8_e4m3fn)
    finite = np.isfinite(np.asarray(scales, np.float32))
    every = Nvfp4(jnp.asarray(packed[finite]), scales[finite][:, None], jnp.float32(1.0))
    assert every.codes.shape == (254, 8)
    return every


def every_code(name):
    """All values that operands of the matrix products take, float32."""
    if name == "nvfp4":
        return nvfp4_codes(all_nvfp4_codes())
    if name == "int8":
        return jnp.arange(-127, 128, dtype=jnp.float32)
    codes = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.float8_e4m3fn)
    values = codes.astype(jnp.float32)
    return values[jnp.isfinite(values)]


@pytest.mark.parametrize(("name", "number"), [("nvfp4", 254 * 16), ("e4m3", 254), ("int8", 255)])
def test_every_code_is_exact_in_bfloat16_and_every_product_of_two_in_float32(name, number):
    codes = np.asarray(every_code(name))
    assert codes.size == number
    # In NumPy: XLA may drop a cast to bfloat16 and back.
    np.testing.assert_array_equal(codes.astype(jnp.bfloat16).astype(np.float32), codes)
    values = np.unique(codes)
    products = np.multiply.outer(values.astype(np.float64), values)
    np.testing.assert_array_equal(products.astype(np.float32), products)


def test_nvfp4_codes_times_the_global_scale_are_what_the_format_stands_for():
    every = all_nvfp4_codes()._replace(global_scale=jnp.float32(0.75))
    np.testing.assert_array_equal(0.75 * nvfp4_codes(every), vc_jax.dequantize_nvfp4(every))


@pytest.mark.parametrize("name", ["nvfp4", "e4m3", "int8"])
def test_products_in_bfloat16_are_those_in_float32_but_for_the_order_of_the_sum(name):
    draw = np.random.default_rng(0).choice
    left, right = (jnp.asarray(draw(np.ravel(every_code(name)), (60, 128))) for _ in range(2))
    got = multiply_in_bfloat16("td,sd->ts", left, right)
    want = multiply_in_float32("td,sd->ts", left, right)
    assert got.dtype == want.dtype == jnp.float32
    if name == "int8":  # its sums are integers below 2^24
        np.testing.assert_array_equal(got, want)
    size = np.abs(np.asarray(left, np.float64)) @ np.abs(np.asarray(right, np.float64)).T
    exact = np.asarray(left, np.float64) @ np.asarray(right, np.float64).T
    assert (np.abs(np.asarray(got) - exact) <= 128 * 2.0**-24 * size).all()
    assert (np.abs(np.asarray(want) - exact) <= 128 * 2.0**-24 * size).all()


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8 exp", "nvfp4"])
def test_an_nvidia_gpu_multiplies_in_bfloat16_and_everything_else_in_float32(name):
    layout = prepared(name.split()[0])
    traced = jax.jit(vc_jax.reference_attention, static_argnames="config").trace(
        layout, config=CONFIGS[name]
    )
    for platform, operand in (("cuda", "bf16"), ("cpu", "f32")):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert len(products) == 2
        for line in products:
            operands, result = line.split(" : ")[-1].split("->")
            assert operands.count(f"x{operand}>") == 2
            assert result.endswith("xf32>")
