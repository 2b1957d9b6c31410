"""When values are clustered, and which steps run unquantised, over a denoising loop."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class DenoisingSchedule:
    """What each of `num_steps` denoising steps does (paper, section on the schedule).

    V-Smooth is on for the first `ceil(smoothing_fraction * num_steps)` steps; in that window the
    values are clustered anew every `refresh_every` steps and the order is reused in between. After
    the window there is no clustering and no mean: the plain low-bit attention runs on the last
    order.

    Attributes:
      num_steps: number of denoising steps, >= 1.
      smoothing_fraction: share of the steps in which V-Smooth is on, in [0, 1].
      refresh_every: steps between clusterings within the window, >= 1.
      high_precision_steps: `(first, last)`: how many steps at either end run as `"bf16"`.

    Raises:
      ValueError: a field out of range, by name.
    """

    num_steps: int
    smoothing_fraction: float = 0.25
    refresh_every: int = 4
    high_precision_steps: tuple[int, int] = (0, 0)

    def __post_init__(self):
        for name in ("num_steps", "refresh_every"):
            number = getattr(self, name)
            if not _is_integer(number) or number < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {number!r}")
            object.__setattr__(self, name, int(number))
        fraction = self.smoothing_fraction
        if (
            isinstance(fraction, bool)
            or not isinstance(fraction, (int, float, np.floating, np.integer))
            or not 0.0 <= fraction <= 1.0
        ):
            raise ValueError(f"smoothing_fraction must be a number in [0, 1], got {fraction!r}")
        object.__setattr__(self, "smoothing_fraction", float(fraction))
        ends = self.high_precision_steps
        if (
            not isinstance(ends, (tuple, list))
            or len(ends) != 2
            or not all(_is_integer(n) and n >= 0 for n in ends)
        ):
            raise ValueError(
                f"high_precision_steps must be two integers >= 0 (first, last), got {ends!r}"
            )
        object.__setattr__(self, "high_precision_steps", tuple(map(int, ends)))

    @property
    def smoothing_steps(self) -> int:
        """Length of the window in which V-Smooth is on, in steps."""
        return math.ceil(round(self.smoothing_fraction * self.num_steps, 9))

    @property
    def refresh_steps(self) -> tuple[int, ...]:
        """The steps at which values are clustered, unless `high_precision_steps` has them.

        The first step after those that is in the window clusters too if nothing was clustered yet.
        """
        return tuple(range(0, self.smoothing_steps, self.refresh_every))

    def in_window(self, step: jax.typing.ArrayLike) -> jax.Array:
        """Whether V-Smooth is on at `step` (may be traced)."""
        return jnp.asarray(step) < self.smoothing_steps

    def refreshes(self, step: jax.typing.ArrayLike) -> jax.Array:
        """Whether `step` (may be traced) clusters the values."""
        return self.in_window(step) & (jnp.asarray(step) % self.refresh_every == 0)

    def high_precision(self, step: jax.typing.ArrayLike) -> jax.Array:
        """Whether `step` (may be traced) runs unquantised."""
        first, last = self.high_precision_steps
        step = jnp.asarray(step)
        return (step < first) | (step >= self.num_steps - last)


def _is_integer(number) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)
