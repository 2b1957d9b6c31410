"""Inputs for the kernels' tests: prepared arrays and what the reference makes of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import vc_jax

from .tensor_core import half_products


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of a kernel. `counts` are valid keys of each batch row."""

    preset: str = "fp8"
    softmax: str = "expcast"
    smooth: bool = True
    batch: int = 1
    rows: int = 70
    length: int = 300
    heads: int = 2
    key_heads: int = 1
    head_dim: int = 64
    counts: tuple[int, ...] | None = None
    logit_sigma: float = 1.0
    seed: int = 0

    @property
    def config(self) -> vc_jax.AttentionConfig:
        return dataclasses.replace(vc_jax.PRESETS[self.preset], softmax=self.softmax)


def inputs(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random queries, keys and values, float32; values have a mean of 0.5."""
    random = np.random.default_rng(case.seed)
    query = random.normal(size=(case.batch, case.rows, case.heads, case.head_dim))
    shape = (case.batch, case.length, case.key_heads, case.head_dim)
    key, value = random.normal(size=shape), random.normal(size=shape) + 0.5
    query, key, value = (jnp.asarray(x, jnp.float32) for x in (query, key, value))
    return query * case.logit_sigma, key, value


@functools.partial(jax.jit, static_argnames=("config", "smooth"))
def _prepare(query, key, value, counts, config, smooth):
    return vc_jax.prepare(query, key, value, config, kv_count=counts, smooth=smooth)


@functools.partial(jax.jit, static_argnames=("config", "products"))
def _reference(prepared, config, products):
    return vc_jax.reference_attention(prepared, config, products=products)


def prepared_and_reference(case: Case, tensor_core: bool = False):
    """Prepared arrays, and output and normaliser of the reference, as NumPy arrays.

    Both are made on the CPU: it compiles them faster, and a GPU kernel is held to it. With
    `tensor_core`, E4M3 products are summed as the hardware does.
    """
    products = half_products if tensor_core and case.preset == "fp8" else None
    with jax.default_device(jax.devices("cpu")[0]):
        counts = case.counts or (case.length,) * case.batch
        counts = jnp.asarray(counts, jnp.int32)
        prepared = _prepare(*inputs(case), counts, case.config, case.smooth)
        out, lse = _reference(prepared, case.config, products)
    return jax.tree.map(np.asarray, prepared), np.asarray(out), np.asarray(lse)


def relative_error(out, expected) -> float:
    out, expected = (np.asarray(x, np.float64) for x in (out, expected))
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def gain(out, expected) -> float:
    out, expected = (np.asarray(x, np.float64) for x in (out, expected))
    return float((out * expected).sum() / (expected * expected).sum())
