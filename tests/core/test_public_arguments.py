"""What every public function says of an argument that it cannot take."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax

FUNCTIONS = {
    name: function
    for name, function in vars(vc_jax).items()
    if callable(function) and not inspect.isclass(function) and not name.startswith("_")
}
BAD = {
    "None": None,
    "a string": "x",
    "a list": [1.0],
    "a number": 0.5,
    "a scalar array": jnp.zeros((), jnp.int32),
    "complex": jnp.zeros((2, 2, 2), jnp.complex64),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_kinds_are_refused_by_name(name):
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    for kind, bad in BAD.items():
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
            function(**dict.fromkeys(required, bad))
        said = str(caught.value)
        assert len(said.splitlines()) == 1, (kind, said)
        assert any(p.name in said for p in parameters), (kind, said)


def test_arrays_that_do_not_fit_each_other_are_refused():
    query, key = jnp.zeros((1, 4, 2, 16)), jnp.zeros((1, 8, 2, 16))
    with pytest.raises(
        ValueError,
        match=r"key must be float \[b s k h\] with b = 1, h = 16, got float32 \[1, 8, 2, 8\]",
    ):
        vc_jax.channel_balance(query, key[..., :8])
    with pytest.raises(ValueError, match="value must be"):
        vc_jax.plain_attention(query, key, key[:, :5])
    with pytest.raises(
        TypeError, match=r"key_valid must be bool \[b s\] with b = 1, s = 8 or None, got int32"
    ):
        vc_jax.mean_key(key, jnp.ones((1, 8), jnp.int32))
    with pytest.raises(TypeError, match="quantized must be Quantized, got float32"):
        vc_jax.dequantize(query)


def test_numpy_arrays_and_traced_ones_are_taken():
    values = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    codes = vc_jax.quantize_int8(values).codes
    np.testing.assert_array_equal(jax.jit(vc_jax.quantize_int8)(values).codes, codes)
    rows = jax.vmap(vc_jax.hadamard_rotate)(values)
    np.testing.assert_allclose(rows, vc_jax.hadamard_rotate(values), atol=1e-6)


def test_the_matrix_that_all_callers_share_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        vc_jax.hadamard_matrix(4)[0, 0] = 2.0
