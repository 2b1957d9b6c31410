"""Configurations and inputs that many tests share, so that each is compiled once."""

import functools
import pathlib

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

import vc_jax
from vc_jax import AttentionConfig

from . import oracles

CONFIGS = {
    **vc_jax.PRESETS,
    "int8 running": AttentionConfig(qk="int8", softmax="expcast_running"),
    "fp8 running": AttentionConfig(qk="e4m3", softmax="expcast_running"),
    "fp8 exp": AttentionConfig(qk="e4m3", softmax="exp"),
    "int8 bare": AttentionConfig(
        softmax="exp", center_keys=False, rotate=False, smooth_values=False
    ),
    "fp8 unsmoothed": AttentionConfig(qk="e4m3", smooth_values=False),
    "nvfp4 bare": AttentionConfig(
        qk="nvfp4", pv="nvfp4", softmax="exp", center_keys=False, rotate=False, smooth_values=False
    ),
}
"""Every preset, and others that take the paths the presets do not."""
QUANTIZED = [name for name in CONFIGS if name != "bf16"]
EIGHT_BIT = [name for name in QUANTIZED if not name.startswith("nvfp4")]
PRESETS = list(vc_jax.PRESETS)
SMOOTHED = [name for name in CONFIGS if CONFIGS[name].smooth_values]

LENGTHS = np.array([0, 1, 127, 128, 129, 300], np.int32)
"""Valid keys of the ragged batch: nothing, one, around a block, everything."""
QUERY_LENGTHS = np.array([9, 9, 5, 0, 9, 8], np.int32)

ERROR = {
    "bf16": 1e-6,
    "int8": 0.01,
    "fp8": 0.013,
    "nvfp4": 0.045,
    "int8 running": 0.01,
    "fp8 running": 0.013,
    "fp8 exp": 0.013,
    "int8 bare": 0.045,
    "fp8 unsmoothed": 0.045,
    "nvfp4 bare": 0.08,
}
"""Relative L2 error that a float32 call must keep on `ragged()`: twice what it is."""


attend = jax.jit(
    vc_jax.dot_product_attention,
    static_argnames=("config", "is_causal", "implementation", "return_residual"),
)
"""The public call, jitted; lengths, masks and scales are traced."""


def attend_ragged(name, inputs, lengths=LENGTHS, query_lengths=QUERY_LENGTHS, scale=0.125):
    """The one compiled call per configuration that most tests go through: output and lse."""
    return attend(
        *inputs,
        config=CONFIGS[name],
        scale=jnp.float32(scale),
        key_value_seq_lengths=jnp.asarray(lengths, jnp.int32),
        query_seq_lengths=jnp.asarray(query_lengths, jnp.int32),
        return_residual=True,
    )


def video_like(seed, batch, rows, length, heads, kv_heads, size, dtype=np.float32):
    """Queries, keys with a mean, and values in groups with a channel offset."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(batch, rows, heads, size))
    key = rng.normal(size=(batch, length, kv_heads, size)) + 2 * rng.normal(size=size)
    centres = 1.5 * rng.normal(size=(5, size))
    value = centres[rng.integers(5, size=(batch, length, kv_heads))]
    value = value + rng.normal(size=value.shape) + rng.normal(size=size)
    return tuple(jnp.asarray(x.astype(np.float32)).astype(dtype) for x in (query, key, value))


@functools.cache
def ragged():
    """[6, 9, 4, 64] queries over [6, 300, 2, 64] keys, float32; for `LENGTHS`."""
    return video_like(0, 6, 9, 300, 4, 2, 64)


DATA = pathlib.Path(__file__).parent.parent / "data" / "dinov2s_bbb_qkv_1k.npz"


@functools.cache
def real_heads(rows: int = 1024):
    """Two heads of a DINOv2 on a film, float32 [1, rows, 2, 64] queries, [1, 1024, 2, 64] keys."""
    with np.load(DATA) as arrays:
        found = [
            np.stack([arrays[f"{x}_{head}"] for head in ("l3h4", "l6h2")], 1)[None] for x in "qkv"
        ]
    query, key, value = (jnp.asarray(x.astype(np.float32)) for x in found)
    return query[:, :: 1024 // rows], key, value


@functools.cache
def attend_real(config):
    """Output and normaliser of 128 rows of the real heads."""
    return attend(*real_heads(128), config=config, return_residual=True)


@functools.cache
def exact_real():
    """The same in float64."""
    return oracles.attention(*real_heads(128))


def relative_l2(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def lse_error(got, want) -> float:
    """Largest difference where `want` is finite; elsewhere both have to be -inf."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isneginf(got), ~finite)
    return float(np.abs(got[finite] - want[finite]).max())


def same_bytes(first, second) -> None:
    """Assert that two pytrees are equal bit for bit (a NaN equals itself)."""
    leaves = [jax.tree.leaves(tree) for tree in (first, second)]
    assert len(leaves[0]) == len(leaves[1])
    for a, b in zip(*leaves):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def jaxpr_equations(jaxpr):
    """Every equation of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from jaxpr_equations(inner)
