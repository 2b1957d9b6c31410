"""From measured times to a 40-step schedule, shares, and what Amdahl's law allows."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vc_jax import DenoisingSchedule


@dataclasses.dataclass(frozen=True)
class OfKinds:
    """A time or another quantity of each kind of step.

    Attributes:
      cold: a clustering from rows of the values.
      refresh: a clustering from the last centroids.
      window: smoothed values in a stored order.
      after: after the smoothing window.
    """

    cold: float
    refresh: float
    window: float
    after: float

    def total(self, schedule: DenoisingSchedule) -> float:
        """The sum over a schedule: its first clustering is cold, the others are not."""
        counts = kind_counts(schedule)
        return sum(count * getattr(self, kind) for kind, count in counts.items())


def kind_counts(schedule: DenoisingSchedule) -> dict[str, int]:
    """How many steps of each kind a schedule has."""
    clusterings = len(schedule.refresh_steps)
    cold = min(clusterings, 1)
    return {
        "cold": cold,
        "refresh": clusterings - cold,
        "window": schedule.smoothing_steps - clusterings,
        "after": schedule.num_steps - schedule.smoothing_steps,
    }


def allowed_speedup(share: float, ratio: float) -> float:
    """Amdahl's law: the whole's speed-up when `share` of it runs `ratio` times as fast."""
    return 1.0 / (1.0 - share + share / ratio)


def summary(
    schedule: DenoisingSchedule,
    layers: int,
    bf16_step: float,
    bf16_call: float,
    steps: OfKinds,
    calls: OfKinds,
    kernels: OfKinds,
    matrix_products: float | None = None,
) -> dict[str, Any]:
    """Speed-ups and shares of a low-bit method.

    Args:
      schedule: of the extrapolation.
      layers: attention calls of a step.
      bf16_step: milliseconds of the BF16 step.
      bf16_call: of its attention call, which is the bare kernel.
      steps: of the low-bit steps.
      calls: of a low-bit attention call with its preparation.
      kernels: of the bare low-bit kernel.
      matrix_products: of a step's matrix products outside of attention (estimated).

    Returns:
      By name; `steps` holds the same for each kind of step. `allowed` comes from the share of
      attention in the BF16 step and the ratio of the bare kernels; `of_allowed` is the speed-up
      over it. `allowed_by_call` counts the preparation as attention.
    """
    share = layers * bf16_call / bf16_step

    def compare(step: float, call: float, kernel: float) -> dict[str, float]:
        allowed = allowed_speedup(share, bf16_call / kernel)
        by_call = allowed_speedup(share, bf16_call / call)
        return {
            "step_ms": step,
            "speedup": bf16_step / step,
            "kernel_ratio": bf16_call / kernel,
            "call_ratio": bf16_call / call,
            "allowed": allowed,
            "of_allowed": bf16_step / step / allowed,
            "allowed_by_call": by_call,
            "attention_share": layers * call / step,
            "kernel_ms": layers * kernel,
            "preparation_ms": layers * (call - kernel),
            "rest_ms": step - layers * call,
        }

    count = schedule.num_steps
    means = [times.total(schedule) / count for times in (steps, calls, kernels)]
    rest = bf16_step - layers * bf16_call
    return {
        "bf16_attention_share": share,
        "bf16_rest_ms": rest,
        "matrix_products_ms": matrix_products,
        "other_ms": None if matrix_products is None else rest - matrix_products,
        "schedule_s": steps.total(schedule) / 1e3,
        "bf16_schedule_s": count * bf16_step / 1e3,
        "schedule": compare(*means),
        "steps": {
            kind: compare(*(getattr(times, kind) for times in (steps, calls, kernels)))
            for kind in kind_counts(schedule)
        },
    }


def of_kinds(times: Mapping[str, float]) -> OfKinds:
    """From a mapping that has all kinds."""
    return OfKinds(**{field.name: times[field.name] for field in dataclasses.fields(OfKinds)})
