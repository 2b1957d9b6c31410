"""NVFP4 on a GPU without an FP4 unit, held to the reference on identical codes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax._decode import decode
from vc_jax.pallas_kernels import hopper_fp4

from ..kernels.cases import Case, gain, inputs, prepared_and_reference, relative_error
from ..kernels.nvfp4_probabilities import probabilities

pytestmark = pytest.mark.gpu
FULL = Case("nvfp4", "exp", rows=300, length=1000, head_dim=128, heads=4, key_heads=2)
ULP = {jnp.float32: 0.0, jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11}


@pytest.fixture(scope="module", autouse=True)
def _on_hopper():
    if str(getattr(jax.devices()[0], "compute_capability", "")) != "9.0":
        pytest.skip("needs a GPU of compute capability 9.0")


def check(case: Case, dtype=jnp.float32, most=4e-3):
    prepared, expected, expected_lse = prepared_and_reference(case)
    out, lse = jax.jit(
        lambda x: hopper_fp4.attention(decode(x), out_dtype=dtype, return_residual=True)
    )(prepared)
    out, lse = np.asarray(out.astype(jnp.float32)), np.asarray(lse)
    error = relative_error(out, expected)
    print(f"{case}: {error:.1e}")
    assert error <= most + ULP[dtype]
    assert 0.998 <= gain(out, expected) <= 1.002
    finite = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isfinite(lse), finite)
    assert np.abs(lse[finite] - expected_lse[finite]).max() <= 0.02


@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_codes_of_probabilities_are_within_one_of_the_reference(head_dim, sigma):
    @jax.jit
    def attention(operands):
        return hopper_fp4.attention(operands, out_dtype=jnp.float32, return_residual=True)

    case = Case(rows=256, heads=4, key_heads=2, logit_sigma=sigma)
    found = probabilities(attention, case, head_dim)
    print(
        f"D={head_dim}, sigma={sigma}: {found.share(0):.5%} equal, {found.share(1):.5%} within "
        f"one, {np.mean(found.same_scale):.5%} of the same scale, of {found.codes.size}"
    )
    assert found.share(1) == 1.0
    assert found.share(0) > 0.995


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_agrees_with_the_reference(head_dim, smooth, dtype):
    check(dataclasses.replace(FULL, head_dim=head_dim, smooth=smooth), dtype)


@pytest.mark.parametrize(
    ("rows", "length"), [(1, 1), (9, 9), (1001, 503), (503, 1001), (64, 4096), (129, 2048)]
)
def test_lengths_of_queries_and_keys(rows, length):
    check(Case("nvfp4", "exp", rows=rows, length=length, head_dim=128), most=2e-2)


def test_batch_rows_of_their_own_lengths():
    check(Case("nvfp4", "exp", batch=4, counts=(0, 1, 300, 129), rows=64, head_dim=128), most=2e-2)


@pytest.mark.parametrize("sigma", [0.1, 3.0, 30.0, 1e3, 1e6])
def test_flat_peaked_and_huge_scores_stay_finite_and_right(sigma):
    case = Case("nvfp4", "exp", rows=200, length=1500, logit_sigma=sigma)
    prepared, expected, _ = prepared_and_reference(case)
    operands = decode(jax.tree.map(jnp.asarray, prepared))
    out = np.asarray(hopper_fp4.attention(operands, out_dtype=jnp.float32)[0])
    assert np.all(np.isfinite(out))
    assert relative_error(out, expected) <= (8e-3 if sigma <= 30 else 0.1)


@pytest.mark.parametrize("length", [75600, 218000])
def test_long_sequences(length):
    check(Case("nvfp4", "exp", rows=100, length=length, heads=1, head_dim=128))


def test_every_length_from_1_to_300_without_recompiling():
    case = Case("nvfp4", "exp", rows=64, length=300, head_dim=128)
    compiled = []

    @jax.jit
    def compute(prepared):
        compiled.append(1)
        return hopper_fp4.attention(decode(prepared), out_dtype=jnp.float32)[0]

    errors = []
    for count in range(1, 301):
        prepared, expected, _ = prepared_and_reference(dataclasses.replace(case, counts=(count,)))
        errors.append(relative_error(np.asarray(compute(prepared)), expected))
    # One code of a few keys is a few per cent of a row.
    assert max(errors) <= 2e-2, int(np.argmax(errors)) + 1
    assert np.median(errors) <= 2e-3
    assert len(compiled) == 1


def test_repeated_runs_are_bit_identical():
    case = Case("nvfp4", "exp", rows=1000, length=5000, head_dim=128)
    operands = decode(jax.tree.map(jnp.asarray, prepared_and_reference(case)[0]))
    compute = jax.jit(lambda x: hopper_fp4.attention(x, return_residual=True))
    first = jax.tree.map(np.asarray, compute(operands))
    for _ in range(20):
        for got, want in zip(compute(operands), first, strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("smooth", [True, False])
def test_a_whole_call_is_as_close_to_exact_as_the_reference(smooth):
    case = Case(rows=256, length=4000, heads=1, head_dim=128)
    tensors = [x.astype(jnp.bfloat16) for x in inputs(case)]
    config = dataclasses.replace(vc_jax.PRESETS["nvfp4"], smooth_values=smooth)
    exact = vc_jax.dot_product_attention(
        *(x.astype(jnp.float32) for x in tensors), config="bf16", implementation="xla"
    )
    hopper, xla = (
        relative_error(
            vc_jax.dot_product_attention(*tensors, config=config, implementation=name).astype(
                jnp.float32
            ),
            exact,
        )
        for name in ("hopper", "xla")
    )
    assert hopper <= 1.1 * xla
