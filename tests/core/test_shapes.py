"""Wrong shapes are caught where functions and containers are called: the suite's checks are on."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

import vc_jax
from vc_jax import _arguments, _quantize

from .cases import CONFIGS


def test_a_container_of_arrays_of_another_rank_or_size_is_caught():
    tokens = jnp.zeros((1, 5, 1, 16))
    prepared = jax.jit(lambda x: vc_jax.prepare(x, x, x, CONFIGS["fp8"]))(tokens)
    for name, wrong in (
        ("key_scale", prepared.key_scale[0]),
        ("value_scale", prepared.value_scale[..., :3]),
        ("kv_count", prepared.kv_count.astype(jnp.float32)),
    ):
        with pytest.raises(TypeCheckError, match="Prepared8"):
            dataclasses.replace(prepared, **{name: wrong})
    with pytest.raises(TypeCheckError, match="Validity"):
        _arguments.Validity(jnp.ones((2, 3)), None, None, True)


def test_an_argument_of_another_shape_is_caught():
    with pytest.raises(TypeCheckError, match="count_of"):
        _quantize.count_of(jnp.zeros(5), None)
