"""Noise schedules and solvers of flow matching: x_σ = (1 − σ) · data + σ · noise.

A solver is a table of coefficients, computed in float64 on the host from the σ grid alone, and a
pure step that a `lax.scan` can run. UniPC is Zhao et al., "UniPC: A Unified Predictor-Corrector
Framework for Fast Sampling of Diffusion Models" (2023), B₂(h), on predictions of the data.
"""

import dataclasses
import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .checks import check_fields

Grid = Literal["wan", "flow", "longcat", "minimax"]
TRAIN_STEPS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a model is sampled. Hashable; `dataclasses.replace` changes a field.

    Attributes:
      num_steps: evaluations of the model (of pairs, with guidance).
      shift: s of σ' = s·σ / (1 + (s − 1)·σ).
      grid: σ before the shift, and what the model is told. `"wan"`: 0.999 to 0, whole timesteps;
        `"flow"`: 1 to 0, timesteps σ·1000; `"longcat"`: 1 to 0.001, then 0; `"minimax"`: 1 to 0,
        times 1 − σ.
      solver: `"euler"` or `"unipc"`.
      order: of UniPC.
      guidance: scale of classifier-free guidance; 1 is none.
      guidance_high_noise: another scale while the high-noise expert runs.
      guidance_form: `"cfg"`, or `"cfg_zero"`: the unconditional prediction is first scaled by its
        projection on the conditional one (Fan et al., "CFG-Zero*", 2025).
      boundary: share of the timesteps from which on the high-noise expert runs (Wan2.2-A14B).
      audio_shift: shift of the audio rows' own schedule (MiniMax-H3).
      sources: (field, value, where it came from); see `origins`.

    Raises:
      ValueError: a field out of range, by name.
    """

    num_steps: int
    shift: float
    grid: Grid
    solver: Literal["euler", "unipc"] = "euler"
    order: int = 2
    guidance: float = 1.0
    guidance_high_noise: float | None = None
    guidance_form: Literal["cfg", "cfg_zero"] = "cfg"
    boundary: float | None = None
    audio_shift: float | None = None
    sources: tuple[tuple[str, Any, str], ...] = dataclasses.field(
        default=(), compare=False, repr=False
    )

    def __post_init__(self):
        check_fields(self, any_sign=("guidance", "guidance_high_noise"))
        if self.order > 3:
            raise ValueError(f"order: expected 1, 2 or 3, got {self.order}")
        if self.boundary is not None and self.boundary >= 1:
            raise ValueError(f"boundary: expected a number between 0 and 1, got {self.boundary}")

    def origins(self) -> dict[str, str]:
        """Where each number comes from: a file of the checkpoint and its field, a constant of the
        named release, or `"the caller"` (also what `dataclasses.replace` has changed)."""
        recorded = {name: (value, where) for name, value, where in self.sources}
        origins = {}
        for field in dataclasses.fields(self):
            if field.name != "sources":
                value, where = recorded.get(field.name, (None, "the caller"))
                same = value == getattr(self, field.name)
                origins[field.name] = where if same else "the caller"
        return origins

    def __str__(self) -> str:
        """One line a number: its name, its value and where it comes from."""
        lines = [f"{name}: {getattr(self, name)} ({o})" for name, o in self.origins().items()]
        return "\n".join(lines)

    def sigmas(self, shift: float | None = None) -> Float[np.ndarray, "steps_plus_1"]:
        """σ before each step and after the last, float64."""
        count, shift = self.num_steps, self.shift if shift is None else shift
        if self.grid == "longcat":
            base = np.append(np.linspace(1.0, 0.001, count), 0.0)
        else:
            top = 1.0 - 1.0 / TRAIN_STEPS if self.grid == "wan" else 1.0
            base = np.linspace(top, 0.0, count + 1)
        return shift * base / (1.0 + (shift - 1.0) * base)

    def timesteps(self, shift: float | None = None) -> Float[np.ndarray, "steps"]:
        """What the model is told at each step."""
        sigmas = self.sigmas(shift)[:-1]
        if self.grid == "minimax":
            return 1.0 - sigmas
        if self.grid == "wan":
            return np.floor(sigmas * TRAIN_STEPS)
        return sigmas * TRAIN_STEPS

    def next_timesteps(self, shift: float | None = None) -> Float[np.ndarray, "steps"]:
        """What the model would be told after each step; after the last one, of the data."""
        return np.append(self.timesteps(shift)[1:], 1.0 if self.grid == "minimax" else 0.0)

    def high_noise(self) -> np.ndarray:
        """bool [steps]: where the high-noise expert runs (everywhere without a boundary)."""
        if self.boundary is None:
            return np.ones(self.num_steps, bool)
        return self.timesteps() >= self.boundary * TRAIN_STEPS

    def guidance_scales(self) -> np.ndarray:
        """float [steps]."""
        high = self.guidance if self.guidance_high_noise is None else self.guidance_high_noise
        return np.where(self.high_noise(), high, self.guidance)

    def make_solver(self, shift: float | None = None) -> "Euler | UniPC":
        sigmas = self.sigmas(shift)
        return Euler(sigmas) if self.solver == "euler" else UniPC(sigmas, self.order)


class Euler:
    """x_{i+1} = x_i + (σ_{i+1} − σ_i) · v_i, with v = noise − data."""

    def __init__(self, sigmas: Float[np.ndarray, "steps_plus_1"]):
        self.differences = np.diff(sigmas).astype(np.float32)

    def init(self, latents: Array) -> Any:
        return ()

    def step(self, index: Array, latents: Array, velocity: Array, memory: Any) -> tuple[Array, Any]:
        """One step; `index` may be traced."""
        return latents + jnp.asarray(self.differences)[index] * velocity, memory


class UniPC:
    """Multistep predictor and corrector of one order, on the data prediction x − σ·v.

    Every step first corrects the latents with the new prediction (from the second step on), then
    predicts the next ones. Both are linear in the latents and the last predictions; the first and
    last steps have a lower order.
    """

    def __init__(self, sigmas: Float[np.ndarray, "steps_plus_1"], order: int = 2):
        sigmas = np.asarray(sigmas, np.float64).copy()
        # At σ = 1 the half log signal-to-noise ratio is −∞.
        sigmas[0] = min(sigmas[0], 1.0 - 1e-6)
        steps = len(sigmas) - 1
        orders = [min(order, index + 1, steps - index) for index in range(steps)]
        # Columns: the latents before this step's correction, those after the last one, then the
        # predictions from the newest to the oldest.
        self.corrector = np.zeros((steps, order + 3))
        self.predictor = np.zeros((steps, order + 1))
        self.corrector[0, 0] = 1.0
        for index in range(steps):
            if index:
                self.corrector[index, 1:] = _correction(sigmas, index, orders[index - 1], order)
            self.predictor[index] = _prediction(sigmas, index, orders[index], order)
        self.sigmas = sigmas.astype(np.float32)
        self.order = order

    def init(self, latents: Array) -> Any:
        """The latents after the last correction, and the last predictions, newest first."""
        return latents, tuple(jnp.zeros_like(latents) for _ in range(self.order))

    def step(self, index: Array, latents: Array, velocity: Array, memory: Any) -> tuple[Array, Any]:
        """One step; `index` may be traced."""
        previous, predictions = memory
        data = latents - jnp.asarray(self.sigmas)[index] * velocity
        row = jnp.asarray(self.corrector, jnp.float32)[index]
        corrected = _combine(row, (latents, previous, data, *predictions))
        predictions = (data, *predictions[:-1])
        row = jnp.asarray(self.predictor, jnp.float32)[index]
        following = _combine(row, (corrected, *predictions))
        return following, (corrected, predictions)


def _combine(coefficients: Array, terms: tuple[Array, ...]) -> Array:
    return sum(coefficients[k] * term for k, term in enumerate(terms))  # type: ignore[return-value]


def _half_log_snr(sigma: float) -> float:
    return math.inf if sigma == 0.0 else math.log1p(-sigma) - math.log(sigma)


def _step_terms(
    sigmas: np.ndarray, start: int, order: int
) -> tuple[float, float, list[float], np.ndarray, np.ndarray]:
    """Of a step from σ[start] to σ[start + 1]: the weight of the latents, α·B(h), the relative
    positions r of the older predictions, and R, b of the order conditions R·ρ = b."""
    begin, end = sigmas[start], sigmas[start + 1]
    origin = _half_log_snr(begin)
    negative_step = origin - _half_log_snr(end)
    base = math.expm1(negative_step)
    ratios = [(_half_log_snr(sigmas[start - k]) - origin) / -negative_step for k in range(1, order)]
    powers = np.vander([*ratios, 1.0], order, increasing=True).T
    # φ-functions by their recurrence; only a step to σ = 0 is infinite, and it has order 1.
    right, phi, factorial = [], base / negative_step - 1.0, 1.0
    for k in range(1, order + 1):
        right.append(phi * factorial / base)
        factorial *= k + 1
        phi = phi / negative_step - 1.0 / factorial
    return end / begin, (1.0 - end) * base, ratios, powers, np.array(right)


def _prediction(sigmas: np.ndarray, index: int, used: int, order: int) -> np.ndarray:
    """Coefficients of UniP from step `index`: latents, then predictions, newest first."""
    weight, base, ratios, powers, right = _step_terms(sigmas, index, used)
    # The published code takes 1/2 for order 2 instead of solving the one condition.
    rho = [0.5] if used == 2 else np.linalg.solve(powers[:-1, :-1], right[:-1])
    row = np.zeros(order + 1)
    row[:2] = weight, -base
    for k, (share, ratio) in enumerate(zip(rho, ratios, strict=True)):
        row[2 + k] -= base * share / ratio
        row[1] += base * share / ratio
    return row


def _correction(sigmas: np.ndarray, index: int, used: int, order: int) -> np.ndarray:
    """Coefficients of UniC at step `index`: the latents of the last step, then predictions."""
    weight, base, ratios, powers, right = _step_terms(sigmas, index - 1, used)
    rho = np.array([0.5]) if used == 1 else np.linalg.solve(powers, right)
    row = np.zeros(order + 2)
    row[0], row[1], row[2] = weight, -base * rho[-1], -base * (1.0 - rho[-1])
    for k, (share, ratio) in enumerate(zip(rho[:-1], ratios, strict=True)):
        row[3 + k] -= base * share / ratio
        row[2] += base * share / ratio
    return row
