"""Under jit, vmap, scan, cond, remat and ahead of time: the same attention."""

import jax
import jax.numpy as jnp
import numpy as np

from ..core import oracles
from ..core.cases import relative_l2, same_bytes, video_like
from .implementations import every

INPUTS = video_like(0, 2, 4, 130, 2, 2, 64)
LENGTHS = np.array([130, 67])
KEY_VALID = oracles.prefix(LENGTHS, 130)


@every("bf16", "int8", any_pattern=True)
def test_vmap_over_some_arguments_is_attention_of_each(case):
    """In and out along different axes; keys and masks that are shared or not."""
    rng = np.random.default_rng(2)
    queries = jnp.stack([INPUTS[0], 2 * INPUTS[0], -INPUTS[0]], 1)
    values = jnp.stack([INPUTS[2], INPUTS[2] + 1, 3 * INPUTS[2]])
    masks = rng.random((3, 2, 1, 1, 130)) < 0.5
    lengths, scales = np.array([[130, 1], [0, 129], [128, 130]]), np.array([0.125, 0.1, -0.1])

    def call(query, value, mask, lengths, scale):
        return case.attend(
            query, INPUTS[1], value, mask=mask, key_value_seq_lengths=lengths, scale=scale
        )

    mapped = jax.jit(jax.vmap(call, in_axes=(1, 0, 0, 0, 0), out_axes=2))
    out = mapped(queries, values, masks, jnp.asarray(lengths), jnp.asarray(scales, jnp.float32))
    for i in range(3):
        want, _ = oracles.attention(
            queries[:, i],
            INPUTS[1],
            values[i],
            scale=scales[i],
            key_valid=masks[i, :, 0, 0] & oracles.prefix(lengths[i], 130),
        )
        assert relative_l2(out[:, :, i], want) < 2 * case.error


@every("int8", any_pattern=True, quick=True)
def test_scan_cond_and_remat_run_the_same_attention(case):
    """And differentiate it."""
    weights = np.random.default_rng(1).normal(size=INPUTS[0].shape).astype(np.float32)

    def loss(query, key, value, lengths):
        attend = jax.checkpoint(
            lambda: case.attend(query, key, value, key_value_seq_lengths=lengths, scale=0.125)
        )

        def body(carry, index):
            return jax.lax.cond(index == 1, attend, lambda: carry), None

        out = jax.lax.scan(body, jnp.zeros_like(query), jnp.arange(2))[0]
        return jnp.sum(out * weights), out

    program = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (_, out), gradients = program(*INPUTS, jnp.asarray(LENGTHS))
    valid = {"scale": 0.125, "key_valid": KEY_VALID}
    assert relative_l2(out, oracles.attention(*INPUTS, **valid)[0]) < 2 * case.error
    valid["query_valid"] = np.ones((2, 4), bool)
    for got, want in zip(gradients, oracles.attention_gradient(*INPUTS, weights, **valid)):
        assert relative_l2(got, want) < 1e-5


@every("int8", any_pattern=True, quick=True)
def test_lengths_scales_and_masks_are_traced_and_never_recompile(case):
    traces = []

    @jax.jit
    def call(query_lengths, key_lengths, scale, mask):
        traces.append(None)
        return case.attend(
            *INPUTS,
            query_seq_lengths=query_lengths,
            key_value_seq_lengths=key_lengths,
            scale=scale,
            mask=mask,
        )

    for seed in range(3):
        rng = np.random.default_rng(seed)
        rows, keys = rng.integers(1, 5, 2), rng.integers(60, 131, 2)
        keep, scale = rng.random((2, 1, 1, 130)) < 0.7, 0.1 * (seed - 1)
        out = call(jnp.asarray(rows), jnp.asarray(keys), jnp.float32(scale), jnp.asarray(keep))
        want, _ = oracles.attention(
            *INPUTS,
            scale=scale,
            key_valid=keep[:, 0, 0] & oracles.prefix(keys, 130),
            query_valid=oracles.prefix(rows, 4),
        )
        assert relative_l2(out, want) < 2 * case.error
    assert len(traces) == 1


@every("int8", any_pattern=True, quick=True)
def test_a_call_compiled_ahead_of_time_twice_uses_up_donated_buffers_and_is_the_same(case):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*INPUTS, jnp.asarray(LENGTHS))]

    def run():
        # A function of its own, or the first one's program would be found again.
        call = jax.jit(
            lambda q, k, v, n: case.attend(q, k, v, key_value_seq_lengths=n, scale=0.125),
            donate_argnums=0,
        )
        query = INPUTS[0] + 0
        out = call.lower(*shapes).compile()(query, *INPUTS[1:], jnp.asarray(LENGTHS))
        assert query.is_deleted()
        return out

    first = run()
    same_bytes(first, run())
    want, _ = oracles.attention(*INPUTS, scale=0.125, key_valid=KEY_VALID)
    assert relative_l2(first, want) < 2 * case.error
