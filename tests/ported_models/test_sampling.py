"""`sample`: one compiled loop per model, equal to its steps taken one by one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax.models.attention import AttentionControl
from vc_jax.models.longcat_video import KVCache
from vc_jax.models.minimax_h3 import packed_layout
from vc_jax.models.sampling import sample
from vc_jax.models.wan import Wan

from . import golden

CLUSTERED = dataclasses.replace(vc_jax.PRESETS["int8"], clusters=4)


def steps_by_hand(
    port: Any,
    latents: Any,
    positive: dict[str, Any],
    negative: dict[str, Any] | None,
    settings: Any,
) -> Any:
    """The loop written out, without state, guidance in two separate evaluations."""
    sigmas, times = settings.sigmas(), settings.timesteps()
    solver, memory = settings.make_solver(), None
    evaluate = golden.quick_jit(
        lambda x, time, given: port.denoise(x, time, given, AttentionControl())[0]
    )
    for index in range(settings.num_steps):
        x = port.impose(latents, positive)
        velocity = evaluate(x, jnp.float32(times[index]), positive)
        if negative is not None:
            without = evaluate(x, jnp.float32(times[index]), positive | negative)
            if settings.guidance_form == "cfg_zero":
                flat = [v.reshape(len(v), -1) for v in (without, velocity)]
                ratio = (flat[0] * flat[1]).sum(1) / ((flat[0] ** 2).sum(1) + 1e-8)
                without = without * ratio.reshape(-1, 1, 1, 1, 1)
            scale = settings.guidance_scales()[index]
            velocity = without + scale * (velocity - without)
        if settings.solver == "euler":
            latents = latents + (sigmas[index + 1] - sigmas[index]) * velocity
        else:
            memory = solver.init(latents) if memory is None else memory
            latents, memory = solver.step(jnp.int32(index), latents, velocity, memory)
    return port.impose(latents, positive)


def noise(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).normal(size=shape), jnp.float32)


def wan_case(name: str = "wan_t2v") -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    port = golden.fixture(name).model()
    arguments = golden.fixture(name).arguments("main")
    text = jnp.asarray(arguments["encoder_hidden_states"])
    return port, noise(*arguments["hidden_states"].shape), {"text": text}, {"text": text[:, ::-1]}


def test_wan_with_guidance_and_unipc_is_its_steps():
    port, latents, positive, negative = wan_case()
    settings = dataclasses.replace(port.sampling, num_steps=3, boundary=None)
    result = sample(port, latents, positive, negative=negative, sampling=settings, progress=False)
    expected = steps_by_hand(port, latents, positive, negative, settings)
    assert golden.relative_l2(result, expected) < 1e-5


def test_wan_image_to_video_keeps_the_first_frame():
    port, latents, positive, negative = wan_case("wan_ti2v")
    positive = positive | {"first_frame": noise(1, 48, 1, 8, 18)}
    settings = dataclasses.replace(port.sampling, num_steps=2)
    result = sample(port, latents, positive, negative=negative, sampling=settings, progress=False)
    np.testing.assert_array_equal(result[:, :, :1], positive["first_frame"])
    expected = steps_by_hand(port, latents, positive, negative, settings)
    assert golden.relative_l2(result, expected) < 1e-5


def test_wan_experts_change_at_the_boundary_and_the_state_is_fresh():
    name = "wan_t2v"
    high = golden.fixture(name).model(attention=CLUSTERED, cross_attention="bf16")
    low = golden.fixture(name).model(attention=CLUSTERED, cross_attention="bf16")
    low.head.kernel.set_value(low.head.kernel[...] * 0.5)
    _, latents, positive, _ = wan_case()
    settings = dataclasses.replace(
        high.sampling, num_steps=4, guidance=1.0, guidance_high_noise=1.0, solver="euler"
    )
    assert settings.high_noise().tolist() == [True, True, True, False]
    schedule = vc_jax.DenoisingSchedule(4, smoothing_fraction=1.0, refresh_every=4)
    result = sample(
        high,
        latents,
        positive,
        sampling=settings,
        low_noise_model=low,
        schedule=schedule,
        progress=False,
    )

    @golden.quick_jit
    def by_hand(latents: Any) -> Any:
        state = high.sampling_state(latents, positive)
        for index in range(4):
            expert = high if index < 3 else low
            state = vc_jax.reset(state) if index == 3 else state
            control = AttentionControl(state, jnp.int32(index), schedule=schedule)
            time = jnp.float32(settings.timesteps()[index])
            velocity, state = expert.denoise(latents, time, positive, control)
            difference = settings.sigmas()[index + 1] - settings.sigmas()[index]
            latents = latents + difference * velocity
        return latents

    # Codes at a rounding edge fall either way in two compilations of low-bit attention.
    assert golden.relative_l2(result, by_hand(latents)) < 5e-3


def test_hunyuan_is_its_steps():
    data = golden.fixture("hunyuan_video15")
    arguments = data.arguments("main")
    port = data.model()
    latents = noise(2, 32, 3, 5, 7)
    positive = {
        "condition": jnp.asarray(arguments["hidden_states"][:, 32:]),
        "text": jnp.asarray(arguments["encoder_hidden_states"]),
        "text_mask": jnp.asarray(arguments["encoder_attention_mask"]),
        "byt5": jnp.asarray(arguments["encoder_hidden_states_2"]),
        "byt5_mask": jnp.asarray(arguments["encoder_attention_mask_2"]),
        "image": jnp.asarray(arguments["image_embeds"]),
    }
    negative = {"text": positive["text"][::-1], "text_mask": positive["text_mask"][::-1]}
    settings = dataclasses.replace(port.sampling, num_steps=2)
    result = sample(port, latents, positive, negative=negative, sampling=settings, progress=False)
    expected = steps_by_hand(port, latents, positive, negative, settings)
    assert golden.relative_l2(result, expected) < 1e-5


def longcat_case() -> tuple[Any, jax.Array, dict[str, Any], dict[str, Any], jax.Array]:
    data = golden.fixture("longcat_video")
    arguments = data.arguments("main")
    text = jnp.asarray(arguments["encoder_hidden_states"][:, 0])
    frames = jnp.broadcast_to(noise(1, 16, 1, 10, 14), (2, 16, 1, 10, 14))
    positive = {"text": text, "text_mask": jnp.asarray(arguments["encoder_attention_mask"])}
    negative = {"text": text[::-1]}
    return data.model(), noise(2, 16, 3, 10, 14), positive, negative, frames


def cache_of(port: Any, frames: jax.Array, text: jax.Array) -> KVCache:
    @golden.quick_jit
    def fill(frames: jax.Array) -> KVCache:
        options = {"return_kv": True, "skip_cross_attention": True}
        return port(frames, jnp.zeros(len(frames)), text, **options)[1]

    return fill(frames)


def test_longcat_continuation_is_its_steps_and_keeps_the_given_frames():
    port, latents, positive, negative, frames = longcat_case()
    positive = positive | {"cond_latents": frames}
    settings = dataclasses.replace(port.sampling, num_steps=2)
    assert settings.guidance_form == "cfg_zero"
    result = sample(port, latents, positive, negative=negative, sampling=settings, progress=False)
    np.testing.assert_array_equal(result[:, :, :1], frames)
    expected = steps_by_hand(port, latents, positive, negative, settings)
    assert golden.relative_l2(result, expected) < 1e-5


def test_longcat_with_a_cache_gives_the_same_frames():
    port, latents, positive, _, frames = longcat_case()
    settings = dataclasses.replace(port.sampling, num_steps=2, guidance=1.0)
    whole = sample(
        port, latents, positive | {"cond_latents": frames}, sampling=settings, progress=False
    )
    cache = cache_of(port, frames[:1], positive["text"][:1])
    cached = sample(
        port,
        latents[:, :, 1:],
        positive | {"kv_cache": cache},
        sampling=settings,
        progress=False,
    )
    both = positive | {"kv_cache": cache, "cond_latents": frames}
    with pytest.raises(ValueError, match="conditioning: cond_latents or their kv_cache"):
        sample(port, latents, both, sampling=settings, progress=False)
    assert golden.relative_l2(cached, whole[:, :, 1:]) < 1e-5


def test_longcat_guidance_shares_a_cache_between_its_halves():
    port, latents, positive, negative, frames = longcat_case()
    cache = cache_of(port, frames[:1], positive["text"][:1])
    settings = dataclasses.replace(port.sampling, num_steps=1)
    result = sample(
        port,
        latents[:, :, 1:],
        positive | {"kv_cache": cache},
        negative=negative,
        sampling=settings,
        progress=False,
    )
    given = positive | {"kv_cache": cache}
    expected = steps_by_hand(port, latents[:, :, 1:], given, negative, settings)
    assert golden.relative_l2(result, expected) < 1e-5


def test_minimax_follows_two_schedules_towards_the_data():
    data = golden.fixture("minimax_h3")
    port = data.model()
    layout = packed_layout(np.ones(5, np.int32), (2, 4, 6), 3, keyframes=("first",))
    latents = {"video": noise(1, 12, 96), "audio": noise(1, 6, 32)}
    given = {
        "text": noise(1, 5, 48),
        "layout": layout,
        "keyframe_rows": noise(1, 6, 96),
    }
    settings = dataclasses.replace(port.sampling, num_steps=2)
    result = sample(port, latents, given, sampling=settings, progress=False)
    video, audio = latents["video"], latents["audio"]
    shifts = {"video": 12.0, "audio": 3.0}
    sigmas = {part: settings.sigmas(shift) for part, shift in shifts.items()}
    forward = golden.quick_jit(
        lambda *given: port(*given, jnp.asarray(layout.time_indices), layout)
    )
    for index in range(2):
        times = jnp.array([1 - sigmas["video"][index], 1 - sigmas["audio"][index], 0.999])
        rows = jnp.concatenate([given["keyframe_rows"], video], axis=1)
        v, a = forward(rows, audio, given["text"], times)
        # x₀ = x + σ·v, and the next x a blend of x and x₀.
        parts = []
        for part, x, towards in (("video", video, v[:, 6:]), ("audio", audio, a)):
            ratio = sigmas[part][index + 1] / sigmas[part][index]
            parts.append(ratio * x + (1 - ratio) * (x + sigmas[part][index] * towards))
        video, audio = parts
    assert golden.relative_l2(result["video"], video) < 1e-5
    assert golden.relative_l2(result["audio"], audio) < 1e-5


def test_a_run_compiles_once_and_shows_its_progress(capfd, monkeypatch):
    port, latents, positive, negative = wan_case("wan_ti2v")
    settings = dataclasses.replace(port.sampling, num_steps=3)
    traces, denoise = [], Wan.denoise

    def counted(*arguments: Any) -> Any:
        traces.append(len(traces))
        return denoise(*arguments)

    monkeypatch.setattr(Wan, "denoise", counted)
    sample(port, latents, positive, negative=negative, sampling=settings)
    first = len(traces)
    sample(port, 2 * latents, positive, negative=negative, sampling=settings)
    assert len(traces) == first
    shown = capfd.readouterr().err
    assert "1/3" in shown
    assert len([line for line in shown.split("\n") if "3/3" in line]) == 2


def test_low_bit_sampling_carries_a_state_and_stays_near_bf16():
    port, latents, positive, negative = wan_case("wan_ti2v")
    settings = dataclasses.replace(port.sampling, num_steps=4)

    def run(attention: Any, **options: Any) -> Any:
        low = golden.fixture("wan_ti2v").model(attention=attention, cross_attention="bf16")
        return sample(
            low, latents, positive, negative=negative, sampling=settings, progress=False, **options
        )

    exact = run("bf16")
    error = golden.relative_l2(run(CLUSTERED), exact)
    print(f"wan_ti2v, 4 steps with guidance 5, int8: {100 * error:.2f} %")
    assert 1e-4 < error < 0.05
    # Policies as arrays: every step, or every layer, in bf16.
    everywhere = {"bf16_steps_mask": np.ones(4, bool)}
    assert golden.relative_l2(run(CLUSTERED, **everywhere), exact) < 1e-5


def test_arguments_that_do_not_fit_are_named():
    port, latents, positive, _ = wan_case()
    settings = dataclasses.replace(port.sampling, num_steps=2, boundary=None)
    with pytest.raises(ValueError, match="negative: guidance needs it"):
        sample(port, latents, positive, sampling=settings)
    with pytest.raises(ValueError, match=r"low_noise_model: needed with sampling\.boundary"):
        sample(port, latents, positive, negative=positive)
    plain = dataclasses.replace(settings, guidance=1.0, guidance_high_noise=1.0)
    schedule = vc_jax.DenoisingSchedule(3)
    with pytest.raises(ValueError, match="schedule: has 3 steps, sampling 2"):
        sample(port, latents, positive, sampling=plain, schedule=schedule)
    with pytest.raises(ValueError, match=r"negative: .*txt.* is not in conditioning"):
        sample(port, latents, positive, negative={"txt": 0}, sampling=settings, progress=False)
    with pytest.raises(ValueError, match=r"bf16_steps_mask: expected \[2\]"):
        sample(port, latents, positive, sampling=plain, bf16_steps_mask=[True])
    with pytest.raises(ValueError, match="latents: a dict"):
        sample(port, {"video": latents}, positive, sampling=plain)
