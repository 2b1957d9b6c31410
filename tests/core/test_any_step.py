"""Any arguments of `attention_step`: refused with one clear line, or the right result.

`VC_JAX_EXAMPLES=1000 pytest tests/core/test_any_step.py -s` tries more and prints the counts.
"""

import collections
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vc_jax

from . import oracles

EXAMPLES = int(os.environ.get("VC_JAX_EXAMPLES", "40"))
CONFIGS = ["bf16", "int8", "fp8", "nvfp4"] if EXAMPLES > 100 else ["bf16", "int8"]
ERROR = {"bf16": 2e-5, "int8": 0.1, "fp8": 0.2, "nvfp4": 0.6}
SCHEDULE = vc_jax.DenoisingSchedule(
    5, smoothing_fraction=0.4, refresh_every=2, high_precision_steps=(0, 1)
)
COUNTS: collections.Counter[str] = collections.Counter()
REFUSED = (TypeError, ValueError, NotImplementedError)
ARGUMENTS = ("state", "step", "schedule", "layer", "config", "key_value_seq_lengths", "key", "mask")
BATCH, ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 2, 5, 20, 4, 2, 16
FITTING = {"batch": BATCH, "kv_length": LENGTH, "kv_heads": KV_HEADS, "head_dim": SIZE}

mostly = st.sampled_from


@functools.cache
def tensors(seed: int, length: int = LENGTH):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(BATCH, ROWS, HEADS, SIZE)] + [(BATCH, length, KV_HEADS, SIZE)] * 2
    return [jax.random.normal(k, shape) for k, shape in zip(keys, shapes)]


@functools.cache
def states(config: str, layers: int | None, other: str | None):
    """A state that fits, or one that differs from it in one thing."""
    shape = dict(FITTING)
    if other in shape:
        shape[other] += 1 if other != "head_dim" else 16
    state = vc_jax.init_state(config, layers=layers, **shape)
    if other == "dtype":
        state = state._replace(permutation=state.permutation.astype(jnp.float32))
    return state


@st.composite
def runs(draw):
    """Some steps of one state, with the arguments of each."""

    def odd(usual, *unusual):
        """Mostly what is usual."""
        return draw(mostly([usual] * 30 + list(unusual)))

    config = draw(mostly(CONFIGS))
    layers = draw(mostly([None, None, 2]))
    made_for = odd(config, *CONFIGS)
    state = odd(
        states(made_for, layers, None),
        *(states(made_for, layers, other) for other in (*FITTING, "dtype")),
        None,
        jnp.zeros(3),
    )
    steps = []
    for _ in range(draw(st.integers(1, 2))):
        seed, length = draw(st.integers(0, 2)), odd(LENGTH, LENGTH + 1)
        kind = draw(mostly([int, jnp.int32, np.int64]))
        step = kind(draw(st.integers(0, SCHEDULE.num_steps - 1)))
        layer = None if layers is None else draw(st.integers(0, layers - 1))
        arguments = {
            "step": odd(step, -1, SCHEDULE.num_steps, 1.5, jnp.float32(1), None, "1", [0], True),
            "layer": odd(layer, 0, 7, None, 0.5),
            "schedule": odd(SCHEDULE, SCHEDULE, 5),
            "config": config,
            "key_value_seq_lengths": draw(mostly([None, [LENGTH, LENGTH], [7, 0], [1]])),
        }
        steps.append((tensors(seed, length), arguments))
    return state, steps, draw(st.booleans())


@functools.partial(jax.jit, static_argnames="config")
def traced_step(given, state, step, layer, config, lengths):
    """One compilation serves all steps and layers."""
    return vc_jax.attention_step(
        *given,
        state,
        step=step,
        layer=layer,
        schedule=SCHEDULE,
        config=config,
        key_value_seq_lengths=lengths,
    )


def one_step(given, state, arguments, traced: bool):
    indices = (arguments["step"], arguments["layer"])
    integers = (int, np.integer, jax.Array, type(None))
    schedule = arguments["schedule"]
    if not (traced and all(isinstance(x, integers) for x in indices) and schedule is SCHEDULE):
        return vc_jax.attention_step(*given, state, **arguments)
    lengths = arguments["key_value_seq_lengths"]
    lengths = jnp.full(BATCH, LENGTH) if lengths is None else jnp.asarray(lengths)
    return traced_step(given, state, *indices, arguments["config"], lengths)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(runs())
def check(drawn):
    state, steps, traced = drawn
    for given_tensors, arguments in steps:
        arguments = dict(arguments)
        config, step = arguments["config"], arguments["step"]
        COUNTS["tried"] += 1
        said, result = "", None
        try:
            result = one_step(given_tensors, state, arguments, traced)
        except REFUSED as error:
            said = str(error)
        if result is None:
            assert len(said.splitlines()) == 1, said
            assert any(name in said for name in ARGUMENTS), said
            COUNTS["refused"] += 1
            return
        out, new = result
        assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)
        assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, state)
        layer, layers = arguments["layer"], len(new.made)
        if not (0 <= int(step) < SCHEDULE.num_steps and (layer is None or 0 <= layer < layers)):
            assert traced
            assert np.isnan(np.asarray(out)).all()
            COUNTS["poisoned"] += 1
            return
        lengths = arguments["key_value_seq_lengths"]
        valid = None if lengths is None else oracles.prefix(lengths, given_tensors[1].shape[1])
        want, _ = oracles.attention(*given_tensors, key_valid=valid)
        exact = int(step) == SCHEDULE.num_steps - 1
        allowed = ERROR["bf16" if exact else config]
        error = np.linalg.norm(np.asarray(out, np.float64) - want)
        assert error <= allowed * np.linalg.norm(want), (config, step, error)
        state = new
        COUNTS["right"] += 1


def test_any_step_is_refused_by_name_or_computed():
    check()
    print(dict(COUNTS))
    assert min(COUNTS["refused"], COUNTS["right"]) >= COUNTS["tried"] // 10
