"""Constants of the prepared layout (`vc_jax.Prepared8`), for all kernels that make or read it."""

import jax.numpy as jnp

BLOCK = 128
"""Keys that share a scale and a mean."""
STEP = 256
"""Keys of a step of the softmax; stored keys are a multiple of it."""
COUNT_ROWS = 8
"""Rows under the transposed values that count valid keys."""
E4M3 = jnp.float8_e4m3fn
