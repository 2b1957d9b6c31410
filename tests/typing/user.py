"""A user's module, as type checkers see it: `pyright` and `mypy --strict` pass over this file.

Nothing here runs. `assert_type` holds what a call returns to what its docstring says, so that a
return annotation that is lost, or an `Any`, fails.
"""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

import vc_jax
import vc_jax.flax
from vc_jax import AttentionConfig, AttentionState, Clusters, Comparison, DenoisingSchedule


def attention(q: jax.Array) -> jax.Array:
    return vc_jax.dot_product_attention(q, q, q)


def attention_of_lengths(q: jax.Array, lengths: jax.Array) -> jax.Array:
    lists = vc_jax.dot_product_attention(q, q, q, key_value_seq_lengths=[1, 2], scale=0.5)
    assert_type(lists, jax.Array)
    return vc_jax.dot_product_attention(
        q, q, q, None, q > 0, config="fp8", query_seq_lengths=lengths, implementation="xla"
    )


def normaliser(q: jax.Array) -> tuple[jax.Array, jax.Array]:
    return vc_jax.dot_product_attention(q, q, q, return_residual=True)


def either(q: jax.Array, residual: bool) -> jax.Array:
    result = vc_jax.dot_product_attention(q, q, q, return_residual=residual)
    assert_type(result, jax.Array | tuple[jax.Array, jax.Array])
    return result[0] if isinstance(result, tuple) else result


def numpy_arrays(q: np.ndarray) -> jax.Array:
    # What `jax.nn.dot_product_attention` takes, at run time; the annotation is JAX's.
    return vc_jax.dot_product_attention(jnp.asarray(q), jnp.asarray(q), jnp.asarray(q))


def step(q: jax.Array, state: AttentionState, index: jax.Array) -> tuple[jax.Array, AttentionState]:
    schedule = DenoisingSchedule(40)
    return vc_jax.attention_step(q, q, q, state, step=index, schedule=schedule)


def step_with_normaliser(
    q: jax.Array, state: AttentionState
) -> tuple[tuple[jax.Array, jax.Array], AttentionState]:
    schedule = DenoisingSchedule(40, high_precision_steps=(1, 0))
    return vc_jax.attention_step(
        q, q, q, state, step=0, schedule=schedule, layer=1, return_residual=True
    )


def step_of_either(q: jax.Array, state: AttentionState, residual: bool) -> AttentionState:
    out, state = vc_jax.attention_step(
        q, q, q, state, step=0, schedule=DenoisingSchedule(4), return_residual=residual
    )
    assert_type(out, jax.Array | tuple[jax.Array, jax.Array])
    return vc_jax.reset(state)


def scan_over_steps(q: jax.Array) -> jax.Array:
    state = vc_jax.init_state("int8", 1, 256, 2, 64, layers=2)
    assert_type(state, AttentionState)

    def body(
        carry: tuple[jax.Array, AttentionState], index: jax.Array
    ) -> tuple[tuple[jax.Array, AttentionState], None]:
        return step(carry[0], carry[1], index), None

    (out, _), _ = jax.lax.scan(body, (q, state), jnp.arange(4))
    return out


def configurations() -> dict[str, AttentionConfig]:
    config = AttentionConfig(qk="e4m3", clusters=12)
    assert_type(config.quantized, bool)
    assert_type(vc_jax.default_clusters(1024), int)
    return {**vc_jax.PRESETS, "mine": config}


def why(q: jax.Array) -> str | None:
    abstract = jax.eval_shape(lambda: q)
    found = vc_jax.explain(abstract, q, q)
    assert_type(found.reasons, dict[str, str])
    return found.implementation


def errors(q: jax.Array) -> float:
    found = vc_jax.compare(q, q, q, ["int8", AttentionConfig()], rows=16)
    assert_type(found, dict[str | AttentionConfig, Comparison])
    return float(found["int8"].relative_l2.max())


def parts(q: jax.Array) -> jax.Array:
    clusters = vc_jax.kmeans(q, 4, steps=2)
    assert_type(clusters, Clusters)
    order = vc_jax.cluster_order(
        clusters.labels, vc_jax.similar_clusters_together(clusters.centroids)
    )
    prepared = vc_jax.prepare(q, q, q, "int8", order=order, key_mean=vc_jax.mean_key(q))
    out, lse = vc_jax.reference_attention(prepared, AttentionConfig())
    assert_type(lse, jax.Array)
    assert_type(vc_jax.restore(prepared).query, jax.Array)
    assert_type(vc_jax.plain_attention(q, q, q), tuple[jax.Array, jax.Array])
    return out


def quantisers(x: jax.Array) -> jax.Array:
    assert_type(vc_jax.quantize_int8(x).codes, jax.Array)
    assert_type(vc_jax.quantize_nvfp4(x).global_scale, jax.Array)
    assert_type(vc_jax.hadamard_matrix(64).dtype, np.dtype[np.float32])
    return vc_jax.dequantize(vc_jax.quantize_e4m3(x))


def schedule() -> jax.Array:
    return DenoisingSchedule(40).refreshes(3)


def flax_layer(q: jax.Array) -> jax.Array:
    return vc_jax.flax.attention_fn("int8")(q, q, q, key_value_seq_lengths=[1])
