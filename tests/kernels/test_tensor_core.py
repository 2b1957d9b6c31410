"""The model of the tensor core's E4M3 sums against what a GPU computed."""

import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from .tensor_core import half_products

MEASURED = pathlib.Path(__file__).parent / "data" / "e4m3_scores_h200.npz"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_model_reproduces_every_score_of_an_h200(head_dim):
    with np.load(MEASURED) as file:
        codes = [file[f"{name}{head_dim}"] for name in ("query", "key")]
        measured = file[f"scores{head_dim}"].astype(np.float32)
    query, key = (jnp.asarray(c.view(ml_dtypes.float8_e4m3fn).astype(np.float32)) for c in codes)
    scores = jax.jit(half_products)(query[None, None, None], key[None, None])[0, 0, 0]
    np.testing.assert_array_equal(np.asarray(scores), measured)
    exact = (query @ key.T).astype(jnp.float16)
    assert np.mean(np.asarray(exact).astype(np.float32) != measured) > 0.1
