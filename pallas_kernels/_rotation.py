"""The Hadamard rotation on the tensor core: products with +1 and -1, which are exact."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def hadamard_signs(size: int, dtype) -> Array:
    """The symmetric matrix of +1 and -1 [H, H] whose product with sqrt(1/H) is a rotation."""
    index = jnp.arange(size)
    return jnp.where(lax.population_count(index[:, None] & index) % 2 == 0, 1, -1).astype(dtype)


def rotated(tokens, signs) -> Any:
    """Rows times the signs, float32; float32 rows in three exact pieces of 8 bits."""
    if signs is None:
        return tokens.astype(jnp.float32)
    if tokens.dtype != jnp.float32:
        return jnp.dot(tokens, signs, preferred_element_type=jnp.float32)
    total, rest = None, tokens
    for _ in range(3):
        piece = rest.astype(jnp.bfloat16)
        rest = rest - piece.astype(jnp.float32)
        part = jnp.dot(piece, signs, preferred_element_type=jnp.float32)
        total = part if total is None else total + part
    return total


def signs_dtype(dtype):
    return jnp.bfloat16 if dtype == jnp.float32 else dtype
