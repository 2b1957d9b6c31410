"""A small denoising loop that the tests of the state share."""

import itertools

import jax.numpy as jnp
import numpy as np

import vc_jax
from vc_jax import AttentionConfig, DenoisingSchedule

CONFIG = AttentionConfig(clusters=3, lloyd_steps=3, warm_lloyd_steps=1)
BATCH, ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 2, 5, 384, 2, 1, 16
SHAPE = (BATCH, LENGTH, KV_HEADS, SIZE)
FORTY = DenoisingSchedule(40)
FULL = np.full(BATCH, LENGTH, np.int32)
RAGGED = np.array([384, 200], np.int32)


def inputs(seed=0, drift=0):
    """Queries, keys, and values that drift from one denoising step to the next."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(BATCH, ROWS, HEADS, SIZE))
    key = rng.normal(size=SHAPE) + 1
    centres = 2 * rng.normal(size=(3, SIZE))
    value = centres[rng.integers(3, size=SHAPE[:3])] + rng.normal(size=SHAPE)
    value = value + 0.3 * np.random.default_rng(100 + drift).normal(size=SHAPE)
    return tuple(jnp.asarray(x, jnp.float32) for x in (query, key, value))


def fresh(config=CONFIG, layers=None):
    return vc_jax.init_state(config, BATCH, LENGTH, KV_HEADS, SIZE, layers=layers)


def step_at(tensors, state, step, lengths=FULL, schedule=FORTY, config=CONFIG):
    """`((out, lse), state)`, from the one compilation for all steps and lengths."""
    return vc_jax.attention_step(
        *tensors,
        state,
        step=step,
        schedule=schedule,
        config=config,
        key_value_seq_lengths=lengths,
        return_residual=True,
    )


def stateless(tensors, lengths=FULL, config=CONFIG, state=None):
    """Output and normaliser of a call that returns no state."""
    return vc_jax.dot_product_attention(
        *tensors, config=config, state=state, key_value_seq_lengths=lengths, return_residual=True
    )


UNSMOOTHED = AttentionConfig(smooth_values=False)


def trajectory(steps, lengths=None, schedule=FORTY):
    """Outputs and states of a run whose values drift at every step."""
    state, outs, states = fresh(), [], []
    for i, step in enumerate(steps):
        given = FULL if lengths is None else lengths[i]
        result, state = step_at(inputs(drift=step), state, step, given, schedule)
        outs.append(result)
        states.append(state)
    return outs, states


def clusterings(states):
    """Indices at which the centroids are others than before."""
    centroids = [np.asarray(fresh().centroids)] + [np.asarray(s.centroids) for s in states]
    pairs = itertools.pairwise(centroids)
    return [i for i, (a, b) in enumerate(pairs) if not np.array_equal(a, b)]
