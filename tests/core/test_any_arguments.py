"""Any arguments of `dot_product_attention`: refused with one clear line, or the right result.

`VC_JAX_EXAMPLES=1000 pytest tests/core/test_any_arguments.py -s` tries more and prints the counts.
"""

import collections
import os

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vc_jax

from . import oracles

EXAMPLES = int(os.environ.get("VC_JAX_EXAMPLES", "60"))
CONFIGS = ["bf16", "int8", "fp8", "nvfp4"] if EXAMPLES > 100 else ["bf16"]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}
QUANTISED = {"bf16": 0.0, "int8": 0.1, "fp8": 0.2, "nvfp4": 0.6}
COUNTS: collections.Counter[str] = collections.Counter()
REFUSED = (TypeError, ValueError, NotImplementedError)
ARGUMENTS = (
    *("query", "key", "value", "bias", "mask", "config", "scale", "is_causal"),
    *("query_seq_lengths", "key_value_seq_lengths", "local_window_size", "implementation"),
    *("return_residual", "state", "no implementation supports"),
)

mostly = st.sampled_from


@st.composite
def calls(draw):
    """Tensors and keyword arguments; most of them, not all, go together."""

    def odd(usual, *unusual):
        """Mostly what is usual."""
        return draw(mostly([usual] * 40 + list(unusual)))

    batch, rows, length = draw(mostly([(2, 5, 20), (1, 1, 3)]))
    kv_heads, size = 2, 16
    heads = odd(4, 2, 3)
    dtype = odd(jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.complex64, bool)
    key = jax.random.key(draw(st.integers(0, 3)))
    shapes = [
        (batch, rows, heads, size),
        (odd(batch, batch + 1), odd(length, 0), kv_heads, odd(size, 8)),
    ]
    shapes.append(odd(shapes[1], shapes[0]))
    if odd(False, True):
        shapes = [shape[1:] for shape in shapes]
    tensors = [
        jax.random.normal(k, shape).astype(dtype)
        for k, shape in zip(jax.random.split(key, 3), shapes)
    ]
    tensors[1] = odd(tensors[1], np.asarray(tensors[1]), None, [1.0])
    lead = (batch, heads, rows, length)
    axes = draw(st.tuples(*(st.booleans() for _ in range(3))))
    mask_shape = (*(n if keep else 1 for n, keep in zip(lead, axes)), odd(length, length + 1))
    kind = draw(mostly(["none", "none", "none", "keys", "keys", "bits", "additive", "words"]))
    bits = jax.random.bernoulli(key, 0.7, mask_shape)
    mask = {
        "none": None,
        "keys": bits[:, :1, :1].astype(draw(mostly([bool, jnp.float32, jnp.int8]))),
        "bits": bits,
        "additive": jnp.where(bits, 0.0, -1e9),
        "words": "all",
    }[kind]

    def lengths(limit):
        fitting = st.lists(st.integers(0, limit), min_size=batch, max_size=batch)
        return odd(draw(st.none() | fitting), [limit + 1] * batch, [-1] * batch, [0.5], "all")

    arguments = {
        "mask": mask,
        "config": odd(draw(mostly(CONFIGS)), "fp7", None),
        "scale": odd(None, 0.5, 1, jnp.float32(0.3), float("nan"), "big", [1.0, 2.0], 1j),
        "query_seq_lengths": lengths(rows),
        "key_value_seq_lengths": lengths(length),
        "is_causal": odd(False, True, None),
        "bias": odd(None, jnp.zeros(lead)),
        "local_window_size": odd(None, 3),
        "implementation": odd(None, "xla", "hopper", "fast"),
        "return_residual": odd(True, False),
    }
    return tensors, arguments


def expected(tensors, arguments):
    """The oracle's output and normaliser of a call that is taken."""
    tensors = [np.asarray(x, np.float64) for x in tensors]
    unbatched = tensors[0].ndim == 3
    query, key, value = (x[None] if unbatched else x for x in tensors)
    batch, rows, heads, _ = query.shape
    length = key.shape[1]
    valid = {"query": np.ones((batch, rows), bool), "key": np.ones((batch, length), bool)}
    for side, name in (("query", "query_seq_lengths"), ("key", "key_value_seq_lengths")):
        if arguments[name] is not None:
            valid[side] &= oracles.prefix(arguments[name], valid[side].shape[1])
    if arguments["mask"] is not None:
        mask = np.asarray(arguments["mask"], bool)
        keep = np.broadcast_to(mask, (batch, heads, rows, length))
        valid["key"] &= keep.any((1, 2))
        valid["query"] &= keep.any((1, 3)) | (mask.shape[2] == 1)
    scale = arguments["scale"]
    out, lse = oracles.attention(
        query, key, value, scale=scale, key_valid=valid["key"], query_valid=valid["query"]
    )
    return (out[0], lse[0]) if unbatched else (out, lse)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(calls())
def check(drawn):
    tensors, arguments = drawn
    COUNTS["tried"] += 1
    said, result = "", None
    try:
        result = vc_jax.dot_product_attention(*tensors, **arguments)
    except REFUSED as error:
        said = str(error)
    if result is None:
        assert len(said.splitlines()) == 1, said
        assert any(name in said for name in ARGUMENTS), said
        COUNTS["refused"] += 1
        return
    out = result[0] if arguments["return_residual"] else result
    want, want_lse = expected(tensors, arguments)
    config, dtype = arguments["config"], str(tensors[0].dtype)
    assert out.dtype == tensors[0].dtype
    error = np.linalg.norm(np.asarray(out, np.float64) - want)
    assert error <= (TOLERANCE[dtype] + QUANTISED[config]) * np.linalg.norm(want)
    if arguments["return_residual"] and config == "bf16":
        np.testing.assert_allclose(np.asarray(result[1]), want_lse, rtol=1e-2, atol=1e-2)
    COUNTS["right"] += 1


def test_any_arguments_are_refused_by_name_or_computed():
    check()
    print(dict(COUNTS))
    assert min(COUNTS["refused"], COUNTS["right"]) >= COUNTS["tried"] // 10
