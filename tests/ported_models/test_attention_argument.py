"""`attention=` of every model: presets, callables, policies as arrays, and the V-Smooth state."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax.models.attention import AttentionControl, attend, attention_function, uses_state

from . import golden

SCHEDULE = vc_jax.DenoisingSchedule(8)
ROWS = {
    "wan_t2v": 105,
    "wan_ti2v": 144,
    "hunyuan_video15": 150,
    "minimax_h3": 161,
    "longcat_video": 105,
}
"""Keys of a self-attention call of the case `main`."""

# So few tokens make one cluster by default, and one cluster is no order.
CLUSTERED = dataclasses.replace(vc_jax.PRESETS["int8"], clusters=4)


@functools.cache
def model(name: str, attention: Any) -> Any:
    return golden.fixture(name).model(attention=attention, cross_attention="bf16")


def run(port: Any, name: str, control: AttentionControl | None = None, case: str = "main") -> Any:
    """All results of a case, compiled."""
    return golden.run(port, golden.fixture(name).arguments(case), control)


@functools.cache
def video(name: str, attention: Any) -> np.ndarray:
    """The video output of the case `main`."""
    return first(run(model(name, attention), name))


def run_eagerly(port: Any, name: str, control: AttentionControl) -> Any:
    """The case `main` with a control whose values are known, traced only for its shapes."""
    arguments = golden.fixture(name).arguments("main")
    return jax.eval_shape(
        lambda arguments: golden.call(port, arguments, control=control), arguments
    )


def first(results: Any) -> np.ndarray:
    return np.asarray(results[0] if isinstance(results, tuple) else results)


def low_bit_error(result: Any, name: str) -> float:
    """How far a result of the case `main` is from the one without low-bit attention.

    Programs that are compiled apart round differently, so that some of their codes differ: two
    low-bit results are held to this, which says how much of the model was quantised.
    """
    return golden.relative_l2(first(result), video(name, "bf16"))


def state_for(name: str, attention: Any = "int8") -> Any:
    """A fresh state for the case `main`."""
    batch = len(golden.fixture(name).arguments("main")["hidden_states"])
    return model(name, attention).init_attention_state(batch, ROWS[name])


@pytest.mark.parametrize(
    ("name", "preset", "bound"),
    # What a model hands on is the same for every preset: one model takes another one.
    [*((name, "int8", 0.02) for name in golden.NAMES), ("wan_t2v", "fp8", 0.04)],
)
def test_low_bit_presets_stay_close_to_the_peer(name, preset, bound):
    expected = golden.fixture(name).expected("main/sample")
    error = golden.relative_l2(video(name, preset), expected)
    print(f"{name:16} {preset:4} {100 * error:.2f} %  bound {100 * bound:.0f} %")
    assert 1e-4 < error <= bound


def test_a_preset_and_a_callable_are_the_same_attention():
    same = functools.partial(vc_jax.dot_product_attention, config=vc_jax.PRESETS["int8"])
    np.testing.assert_array_equal(video("wan_t2v", same), video("wan_t2v", "int8"))


def test_the_attention_of_a_model_can_be_changed():
    port = golden.fixture("wan_t2v").model(attention="bf16", cross_attention="bf16")
    port.attention = "int8"
    np.testing.assert_array_equal(first(run(port, "wan_t2v")), video("wan_t2v", "int8"))


def test_only_self_attention_takes_the_low_bit_attention():
    seen = {"attention": [], "cross_attention": []}

    def spy(kind: str) -> Any:
        def attend(query: Any, key: Any, value: Any, **options: Any) -> Any:
            seen[kind].append((query.shape[1], key.shape[1]))
            return golden.plain_attention(query, key, value, **options)

        return attend

    for name in golden.NAMES:
        port = golden.fixture(name).model(**{kind: spy(kind) for kind in seen})
        jax.eval_shape(functools.partial(golden.call, port), golden.fixture(name).arguments("main"))
    assert set(seen["attention"]) == {(rows, rows) for rows in ROWS.values()}
    # Text of Wan; Hunyuan's and MiniMax's refiners; text of LongCat.
    assert {keys for _, keys in seen["cross_attention"]} == {26, 21, 24, 19, 22}


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match=r"cross_attention: expected .* got int"):
        attention_function(3, "cross_attention")
    with pytest.raises(ValueError, match=r"attention: expected one of .*'int8'.* got 'int4'"):
        attention_function("int4")
    port = model("wan_t2v", "int8")
    with pytest.raises(ValueError, match=r"high_precision_layers: expected \[2\], got \(3,\)"):
        run(port, "wan_t2v", AttentionControl(high_precision_layers=jnp.zeros(3, bool)))
    with pytest.raises(ValueError, match=r"needs control\.step"):
        run(port, "wan_t2v", AttentionControl(bf16_steps_mask=jnp.zeros(3, bool)))
    control = AttentionControl(
        step=0, bf16_steps_mask=jnp.zeros(3, bool), schedule=vc_jax.DenoisingSchedule(8)
    )
    with pytest.raises(ValueError, match=r"bf16_steps_mask: expected \[8\]"):
        run(port, "wan_t2v", control)
    state = state_for("wan_t2v")
    for steps in (SCHEDULE, None):
        for step in (8, -1):
            by_step = AttentionControl(
                step=step, bf16_steps_mask=jnp.zeros(8, bool), schedule=steps
            )
            with pytest.raises(ValueError, match=rf"control\.step must be in \[0, 7\], got {step}"):
                run_eagerly(port, "wan_t2v", by_step)
    with pytest.raises(ValueError, match=r"control\.step must be in \[0, 7\], got 8"):
        run_eagerly(port, "wan_t2v", AttentionControl(state, step=8, schedule=SCHEDULE))
    for step in (1.0, jnp.zeros(2, jnp.int32)):
        with pytest.raises(TypeError, match=r"control\.step must be an integer scalar"):
            AttentionControl(step=step, bf16_steps_mask=jnp.zeros(8, bool)).per_layer(2)
    with pytest.raises(ValueError, match=r"needs control\.step and control\.schedule"):
        run(port, "wan_t2v", AttentionControl(state))
    plain = golden.fixture("wan_t2v").model()
    with pytest.raises(ValueError, match="callable attention keeps no state"):
        run(plain, "wan_t2v", AttentionControl(state, step=0, schedule=SCHEDULE))
    with pytest.raises(ValueError, match="callable keeps no state"):
        plain.init_attention_state(1, 105)


@pytest.mark.parametrize("name", [name for name in golden.NAMES if name != "wan_t2v"])
def test_layer_policy_switches_layers_between_precisions(name):
    error = low_bit_error(video(name, "int8"), name)

    def with_layers(*flags: bool) -> np.ndarray:
        control = AttentionControl(high_precision_layers=jnp.array(flags))
        return first(run(model(name, "int8"), name, control))

    assert low_bit_error(with_layers(True, True), name) < 1e-5
    low = with_layers(False, False)
    assert low_bit_error(low, name) == pytest.approx(error, rel=0.25)
    for mixed in (with_layers(True, False), with_layers(False, True)):
        assert low_bit_error(mixed, name) > 2e-3
        assert golden.relative_l2(mixed, low) > 2e-3


def test_policies_and_steps_are_traced_and_compile_once():
    name, traces = "wan_ti2v", []
    port = model(name, "int8")
    arguments = golden.fixture(name).arguments("main")

    @golden.quick_jit
    def forward(step: Any, by_layer: Any, by_step: Any) -> Any:
        traces.append(step)
        control = AttentionControl(
            step=step, high_precision_layers=by_layer, bf16_steps_mask=by_step
        )
        return golden.call(port, arguments, control=control)

    none, last = jnp.zeros(2, bool), jnp.array([False, False, True])
    low = forward(jnp.int32(1), none, last)
    high = forward(jnp.int32(2), none, last)
    mixed = forward(jnp.int32(1), jnp.array([True, False]), last)
    assert len(traces) == 1
    assert low_bit_error(high, name) < 1e-5
    error = low_bit_error(video(name, "int8"), name)
    assert low_bit_error(low, name) == pytest.approx(error, rel=0.25)
    assert low_bit_error(mixed, name) > 2e-3
    assert golden.relative_l2(mixed, low) > 2e-3


@pytest.mark.parametrize("name", golden.NAMES)
def test_a_state_comes_back_with_the_structure_it_went_in_with(name):
    port, state = model(name, CLUSTERED), state_for(name, CLUSTERED)
    arguments = golden.fixture(name).arguments("main")
    control = AttentionControl(state, step=0, schedule=SCHEDULE)
    *_, after = jax.eval_shape(functools.partial(golden.call, port), arguments, control=control)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)


@pytest.mark.parametrize("name", ["wan_ti2v", "hunyuan_video15"])
def test_a_first_step_with_state_is_the_stateless_pass_and_keeps_an_order(name):
    port = model(name, CLUSTERED)
    control = AttentionControl(state_for(name, CLUSTERED), step=0, schedule=SCHEDULE)
    out, state = run(port, name, control)
    error = low_bit_error(video(name, CLUSTERED), name)
    assert low_bit_error(out, name) == pytest.approx(error, rel=0.25)
    assert state.made.shape[0] == 2
    assert bool(state.made.all())
    # Each layer found an order of its own.
    assert not np.array_equal(state.permutation[0], state.permutation[1])


def test_later_steps_reuse_the_order_until_a_refresh():
    name = "wan_t2v"
    port = model(name, CLUSTERED)
    schedule = vc_jax.DenoisingSchedule(32, refresh_every=4)
    arguments = golden.fixture(name).arguments("main")

    @golden.quick_jit
    def forward(scale: Any, state: Any, step: Any) -> Any:
        control = AttentionControl(state, step, schedule=schedule)
        given = arguments | {"hidden_states": scale * arguments["hidden_states"]}
        return golden.call(port, given, control=control)

    states = [state_for(name, CLUSTERED)]
    for step in range(5):
        _, state = forward(jnp.float32(1.0 - 0.2 * step), states[-1], jnp.int32(step))
        states.append(state)
    orders = [np.asarray(state.permutation) for state in states[1:]]
    for order in orders[1:4]:
        np.testing.assert_array_equal(order, orders[0])
    assert not np.array_equal(orders[4], orders[0])


@pytest.mark.parametrize("name", ["wan_t2v", "hunyuan_video15"])
def test_rows_of_the_batch_are_independent(name):
    """The two halves of a guided batch: neither changes with what the other one is."""
    port = model(name, CLUSTERED)
    arguments = golden.fixture(name).arguments("main")
    both = golden.run(port, arguments)
    for row in range(2):
        # One program, so bit for bit: a scale or a centroid shared by rows would be seen.
        twice = golden.run(port, {key: array[[row, row]] for key, array in arguments.items()})
        np.testing.assert_array_equal(twice[row], both[row])


def test_one_decision_about_the_order_holds_for_the_whole_batch():
    """A row whose valid keys change makes the others cluster anew; no result mixes rows."""
    keys = jax.random.split(jax.random.key(0), 2)
    first, later = (jax.random.normal(key, (2, 200, 2, 64)) for key in keys)
    schedule = vc_jax.DenoisingSchedule(8, smoothing_fraction=0.5)

    def step(number: int, state: Any, rows: Any, *lengths: int) -> tuple[Any, Any]:
        control = AttentionControl(step=number, schedule=schedule)
        valid = jnp.array(lengths)
        return attend(CLUSTERED, rows, rows, rows, control, state, None, valid)

    _, made = step(0, vc_jax.init_state(CLUSTERED, 2, 200, 2, 64), first, 200, 150)
    _, kept = step(1, made, later, 200, 150)
    np.testing.assert_array_equal(kept.permutation, made.permutation)
    out, anew = step(1, made, later, 200, 140)
    assert not np.array_equal(anew.permutation[0], made.permutation[0])
    _, after = step(6, made, later, 200, 140)
    np.testing.assert_array_equal(after.permutation[0], np.tile(np.arange(200), (2, 1)))
    # What the other row holds does not come into this row's result.
    other, _ = step(1, made, later.at[1].multiply(3.0), 200, 140)
    np.testing.assert_array_equal(other[0], out[0])


def test_longcat_keeps_two_states_when_conditioning_frames_are_in_front():
    name = "longcat_video"
    port = model(name, "int8")
    state = port.init_attention_state(2, 105, cond_length=35)
    assert state["cond"].permutation.shape[-1] == 35
    out, state = run(port, name, AttentionControl(state, step=0, schedule=SCHEDULE), "continuation")
    assert all(bool(part.made.all()) for part in state.values())
    expected = golden.fixture(name).expected("continuation/sample")
    assert golden.relative_l2(out, expected) <= 0.02
    missing = port.init_attention_state(2, 105)
    with pytest.raises(ValueError, match="needs `cond`"):
        run(port, name, AttentionControl(missing, step=0, schedule=SCHEDULE), "continuation")


def test_rematerialised_layers_have_the_same_gradients():
    name = "wan_ti2v"
    arguments = golden.fixture(name).arguments("main")

    def gradient(port: Any) -> Any:
        def loss(latents: Any) -> Any:
            return jnp.sum(golden.call(port, arguments | {"hidden_states": latents}) ** 2)

        return golden.quick_jit(jax.grad(loss))(jnp.asarray(arguments["hidden_states"]))

    plain = gradient(golden.fixture(name).model())
    assert golden.relative_l2(gradient(golden.fixture(name).model(remat=True)), plain) < 1e-5


def test_uses_state_says_whether_a_configuration_clusters():
    assert uses_state("int8")
    assert not uses_state("bf16")
    assert not uses_state(golden.plain_attention)
    without = dataclasses.replace(vc_jax.PRESETS["fp8"], smooth_values=False)
    assert not uses_state(without)
    with pytest.raises(ValueError, match="expected one of"):
        uses_state("int4")


@pytest.mark.parametrize("name", [name for name in golden.NAMES if name != "wan_t2v"])
def test_bfloat16_models_stay_as_close_as_bfloat16_weights(name):
    """Weights rounded to bfloat16 alone move the peers by 0.5 to 0.85 %."""
    # Small timesteps, as LongCat-Video rounds its own to bfloat16, like the peer.
    case = "main" if name == "minimax_h3" else "small_timestep"
    port = golden.fixture(name).model(dtype=jnp.bfloat16)
    expected = golden.fixture(name).expected(f"{case}/sample")
    error = golden.relative_l2(first(run(port, name, case=case)), expected)
    print(f"{name:16} bfloat16 {100 * error:.2f} %")
    assert error < 0.02
