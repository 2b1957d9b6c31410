"""What takes the place of what needs a GPU in the tests of benchmarks."""

import jax
import jax.numpy as jnp


def kernel(prepared, *, softmax, config):
    """In the fused kernel's place: the first of its inputs, in the right layout."""
    assert softmax in ("expcast", "expcast_running", "exp")
    return jnp.swapaxes(prepared.query_codes, 1, 2).astype(jnp.bfloat16), None


def plain(query, key, value):
    """In the place of a BF16 peer: XLA's attention."""
    return jax.nn.dot_product_attention(query, key, value, implementation="xla")
