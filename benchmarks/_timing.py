"""Sustained, interleaved timing on a GPU whose speed depends on how hot it runs.

A card at its power limit lowers its clock, so a short burst flatters a kernel. Every candidate runs
for seconds, candidates take turns, and clock and power are sampled while they run.
"""

import contextlib
import dataclasses
import importlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax

_LONG_ENOUGH = 0.02
"""Seconds beside which starting an execution and waiting for it do not count."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Something to time.

    Attributes:
      run: starts one execution and returns its (asynchronous) result.
      flops: useful floating-point operations of one execution; 0 if none are claimed.
      wait: until a result is there, and those of all executions before it.
    """

    run: Callable[[], Any]
    flops: float = 0.0
    wait: Callable[[Any], Any] = jax.block_until_ready


@dataclasses.dataclass(frozen=True)
class Pace:
    """How long to measure.

    Attributes:
      seconds: of each candidate a round, or one execution where that is longer.
      rounds: at most.
      deadline: of `time.perf_counter()`; no round but the first begins that would end after it.
    """

    seconds: float
    rounds: int
    deadline: float = math.inf


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Rounds of one candidate.

    Attributes:
      milliseconds: mean time of an execution in each round.
      teraflops: TFLOP/s in each round (0 without a claim).
      clock_mhz, power_w: means over the samples, `None` where NVML is not there.
    """

    milliseconds: tuple[float, ...]
    teraflops: tuple[float, ...]
    clock_mhz: float | None
    power_w: float | None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def median_teraflops(self) -> float:
        return statistics.median(self.teraflops)

    @property
    def spread(self) -> float:
        """Largest over smallest round, minus 1."""
        return max(self.milliseconds) / min(self.milliseconds) - 1.0


class _Sampler:
    """Samples SM clock and power in a thread while it is switched on."""

    def __init__(self, period_s: float = 0.04):
        self.samples: list[tuple[float, float]] = []
        self._on = threading.Event()
        self._period = period_s
        try:
            pynvml = importlib.import_module("pynvml")

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._nvml: Any = pynvml
        except Exception:  # no NVML: the table then has no clocks
            self._nvml = None
            return
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self) -> None:
        nvml = self._nvml
        while self._on.wait():
            clock = nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)
            power = nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000.0
            self.samples.append((float(clock), power))
            time.sleep(self._period)

    @contextlib.contextmanager
    def sampling(self) -> Iterator[list[tuple[float, float]]]:
        """Samples of this block; the first two, which look back, are dropped."""
        self.samples = []
        self._on.set()
        kept: list[tuple[float, float]] = []
        try:
            yield kept
        finally:
            self._on.clear()
            kept.extend(self.samples[2:])


def _repeat(candidate: Candidate, times: int) -> float:
    """Seconds that `times` executions take, started back to back."""
    start = time.perf_counter()
    result = None
    for _ in range(times):
        result = candidate.run()
    candidate.wait(result)
    return time.perf_counter() - start


def _estimate(candidate: Candidate) -> float:
    """Seconds of one execution, the first one not counted; of many in a row if they are short."""
    _repeat(candidate, 1)
    times, seconds = 1, _repeat(candidate, 1)
    while seconds < _LONG_ENOUGH:
        times *= 4
        seconds = _repeat(candidate, times)
    return seconds / times


def sustained[Name: Hashable](
    candidates: Mapping[Name, Candidate],
    *,
    seconds: float = 2.0,
    rounds: int = 3,
    estimates: Mapping[Name, float] | None = None,
    deadline: float = math.inf,
) -> dict[Name, Measurement]:
    """Time candidates in turns, each for `seconds` a round after a warm-up of a third of that.

    Args:
      candidates: what to time, by name.
      seconds: of each candidate in a round.
      rounds: how often the candidates take their turn.
      estimates: seconds of one execution, where they are known well enough. Such a candidate is
        not tried out first, and one that takes `seconds` by itself runs once a round and without a
        warm-up: its neighbours keep the card as warm.
      deadline: of `time.perf_counter()`; no round but the first begins that would end after it.
    """
    sampler = _Sampler()
    times: dict[Name, list[float]] = {name: [] for name in candidates}
    samples: dict[Name, list[tuple[float, float]]] = {name: [] for name in candidates}
    repeats = {}
    for name, candidate in candidates.items():
        if estimates is not None and name in estimates:
            repeats[name] = max(1, math.ceil(seconds / estimates[name]))
            continue
        repeats[name] = max(2, math.ceil(seconds / _estimate(candidate)))
    longest = 0.0
    for done in range(rounds):
        start = time.perf_counter()
        if done and start + longest > deadline:
            break
        for name, candidate in candidates.items():
            known = estimates is not None and name in estimates
            warm_up = repeats[name] // 3 if known else max(1, repeats[name] // 3)
            if warm_up:
                _repeat(candidate, warm_up)
            with sampler.sampling() as taken:
                elapsed = _repeat(candidate, repeats[name])
            times[name].append(elapsed / repeats[name])
            samples[name].extend(taken)
        longest = max(longest, time.perf_counter() - start)
    return {name: _measurement(candidates[name], times[name], samples[name]) for name in times}


def _measurement(candidate: Candidate, times: list[float], samples) -> Measurement:
    clock, power = (
        (statistics.fmean(column) for column in zip(*samples, strict=True))
        if samples
        else (None, None)
    )
    return Measurement(
        tuple(1e3 * t for t in times),
        tuple(candidate.flops / t / 1e12 for t in times),
        clock,
        power,
    )
