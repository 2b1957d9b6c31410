"""Noise schedules and solvers, against the published algorithms in float64 NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vc_jax.models.common.schedulers import Sampling, UniPC
from vc_jax.models.hunyuan_video15.config import SAMPLING_480P
from vc_jax.models.longcat_video.config import LONGCAT_VIDEO_SAMPLING
from vc_jax.models.minimax_h3.config import MINIMAX_H3_SAMPLING
from vc_jax.models.wan.config import T2V_A14B_SAMPLING, TI2V_5B_SAMPLING


def unipc_reference(sigmas, order, noise, velocity):
    """UniPC-B₂(h) with data prediction (Zhao et al. 2023, algorithms 5 to 8), one call a step.

    `velocity(x, sigma)` is noise − data. As in the released samplers: warm-up from order 1, lower
    orders at the end, the corrector without a further evaluation, ρ = 1/2 for a predictor of
    order 2 and a corrector of order 1.
    """
    lam = [math.log((1.0 - s) / s) if 0.0 < s < 1.0 else math.inf for s in sigmas]
    steps = len(sigmas) - 1
    x, last, models, last_order = noise, None, [], 0

    def psi(h, count):
        # φ_1(h) = (e^h - 1)/h, φ_{k+1} = (φ_k - 1/k!)/h, at -h.
        out, value = [], math.expm1(-h) / -h
        for k in range(1, count + 1):
            value = (value - 1.0 / math.factorial(k)) / -h
            out.append(math.factorial(k) * value)
        return out

    def universal(start, end, p, previous, model_end):
        """x(end) from x(start): the linear term, then B(h) · Σ ρ_m D_m / r_m."""
        h = lam[end] - lam[start]
        bh = math.expm1(-h)
        x = sigmas[end] / sigmas[start] * previous - (1.0 - sigmas[end]) * bh * models[-1]
        r = [(lam[start - m] - lam[start]) / h for m in range(1, p)]
        d = [(models[-1 - m] - models[-1]) / r[m - 1] for m in range(1, p)]
        if model_end is not None:
            r, d = [*r, 1.0], [*d, model_end - models[-1]]
        if d:
            n = len(d)
            right = [-h * b / bh for b in psi(h, n)]
            matrix = [[r_m**k for r_m in r] for k in range(n)]
            half = (model_end is None and p == 2) or (model_end is not None and p == 1)
            rho = [0.5] if half else np.linalg.solve(matrix, right)
            x = x - (1.0 - sigmas[end]) * bh * sum(a * b for a, b in zip(rho, d, strict=True))
        return x

    for i in range(steps):
        model = x - sigmas[i] * velocity(x, sigmas[i])
        if i > 0:
            x = universal(i - 1, i, last_order, last, model)
        models = [*models, model][-order:]
        last_order = min(order, i + 1, steps - i)
        last = x
        if sigmas[i + 1] == 0.0:
            x = models[-1] if last_order == 1 else x
        else:
            x = universal(i, i + 1, last_order, x, None)
    return x


def field(x, sigma):
    """A smooth, nonlinear velocity."""
    return 0.7 * x - 0.3 * sigma * x**2 / (1.0 + x**2) + 0.2


def run_solver(solver, sampling, noise):
    sigmas = jnp.asarray(sampling.sigmas(), jnp.float32)

    def step(carry, index):
        x, memory = carry
        return solver.step(index, x, field(x, sigmas[index]), memory), None

    steps = jnp.arange(sampling.num_steps)
    return jax.jit(lambda x: jax.lax.scan(step, (x, solver.init(x)), steps)[0][0])(noise)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize(("steps", "shift"), [(1, 5.0), (2, 5.0), (5, 12.0), (40, 12.0), (50, 5.0)])
def test_unipc_is_the_published_algorithm(order, steps, shift):
    noise = np.random.default_rng(0).normal(size=(2, 3, 4))
    sampling = Sampling(num_steps=steps, shift=shift, grid="wan", solver="unipc", order=order)
    expected = unipc_reference(sampling.sigmas(), order, noise, field)
    actual = run_solver(sampling.make_solver(), sampling, jnp.asarray(noise, jnp.float32))
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)


def test_unipc_is_more_accurate_than_euler():
    noise = jnp.asarray(np.random.default_rng(0).normal(size=(64,)), jnp.float32)
    base = Sampling(num_steps=20, shift=3.0, grid="wan")
    fine = dataclasses.replace(base, num_steps=4000)
    exact = run_solver(fine.make_solver(), fine, noise)
    errors = {}
    for solver in ("euler", "unipc"):
        sampling = dataclasses.replace(base, solver=solver)
        result = run_solver(sampling.make_solver(), sampling, noise)
        errors[solver] = float(jnp.abs(result - exact).max())
    assert errors["unipc"] < 0.2 * errors["euler"]


@pytest.mark.parametrize("solver", ["euler", "unipc"])
def test_solvers_find_the_data_exactly_where_the_prediction_is_exact(solver):
    """A velocity noise − data leads to the data in any number of steps."""
    generator = np.random.default_rng(0)
    data, noise = (jnp.asarray(generator.normal(size=(8,)), jnp.float32) for _ in range(2))
    for steps in (1, 2, 7):
        sampling = Sampling(num_steps=steps, shift=5.0, grid="flow", solver=solver)
        made = sampling.make_solver()
        x, memory = noise, made.init(noise)
        for index in range(steps):
            x, memory = made.step(jnp.int32(index), x, noise - data, memory)
        np.testing.assert_allclose(x, data, atol=1e-4)


def test_a_starting_sigma_of_one_is_no_infinity():
    solver = UniPC(np.array([1.0, 0.5, 0.0]), 2)
    assert np.isfinite(solver.predictor).all()
    assert np.isfinite(solver.corrector).all()


def test_grids_are_the_releases_own():
    wan = T2V_A14B_SAMPLING
    assert wan.sigmas()[0] == pytest.approx(12 * 0.999 / (1 + 11 * 0.999))
    assert wan.sigmas()[-1] == 0.0
    assert wan.timesteps()[0] == 999.0
    assert (wan.timesteps() == np.floor(wan.timesteps())).all()
    hunyuan = SAMPLING_480P
    np.testing.assert_allclose(hunyuan.sigmas()[:2], [1.0, 5 * 0.98 / (1 + 4 * 0.98)])
    assert hunyuan.timesteps()[0] == 1000.0
    longcat = LONGCAT_VIDEO_SAMPLING
    base = np.linspace(1.0, 0.001, 50)
    np.testing.assert_allclose(longcat.sigmas()[:-1], 12 * base / (1 + 11 * base))
    assert sum(longcat.sigmas() > 0.9) == 29
    four = dataclasses.replace(longcat, num_steps=4).timesteps()
    np.testing.assert_allclose(four, [1000, 960, 858, 11.9], atol=0.5)
    assert longcat.sigmas()[-1] == 0.0
    minimax = MINIMAX_H3_SAMPLING
    base = np.linspace(1.0, 0.0, 50)
    np.testing.assert_allclose(minimax.sigmas(), 12 * base / (1 + 11 * base))
    audio = minimax.timesteps(minimax.audio_shift)
    np.testing.assert_allclose(audio, 1.0 - (3 * base / (1 + 2 * base))[:-1])
    assert audio[0] == 0.0


def test_experts_change_at_the_boundary():
    t2v = T2V_A14B_SAMPLING
    high = t2v.high_noise()
    assert high[0]
    assert not high[-1]
    np.testing.assert_array_equal(high, t2v.timesteps() >= 875)
    assert set(t2v.guidance_scales()[high]) == {4.0}
    assert set(t2v.guidance_scales()[~high]) == {3.0}
    assert TI2V_5B_SAMPLING.high_noise().all()


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("num_steps", 0),
        ("num_steps", 2.5),
        ("num_steps", True),
        ("shift", None),
        ("guidance", None),
        ("guidance", float("nan")),
        ("guidance_high_noise", "high"),
        ("boundary", 875),
        ("boundary", 0.0),
        ("shift", 0.0),
        ("grid", "linear"),
        ("solver", "heun"),
        ("order", 4),
        ("guidance_form", "apg"),
        ("audio_shift", -1.0),
    ],
)
def test_settings_out_of_range_are_named(field_name, value):
    with pytest.raises(ValueError, match=f"{field_name}: expected"):
        dataclasses.replace(LONGCAT_VIDEO_SAMPLING, **{field_name: value})
