"""What the GPU did during one call, from JAX's profiler: kernels, copies, and pauses."""

import collections
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax


class Event(NamedTuple):
    """Something that ran on the GPU; times in nanoseconds."""

    name: str
    start: float
    duration: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """One call on one GPU.

    Attributes:
      kernels: how many ran.
      from_host, to_host: copies between host and device.
      span_ms: from the first event's start to the last one's end.
      idle_ms: of that, without any event.
      milliseconds: of kernels and copies by name, the longest first.
    """

    kernels: int
    from_host: int
    to_host: int
    span_ms: float
    idle_ms: float
    milliseconds: dict[str, float]


def profile(call: Callable[[], Any]) -> Profile:
    """Profile one execution, after another one.

    Raises:
      RuntimeError: the profiler saw no GPU.
    """
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        files = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        events = [e for file in files for e in _gpu_events(file)]
    if not events:
        raise RuntimeError("the profiler saw no GPU")
    return summary(events)


def _gpu_events(file: pathlib.Path) -> Iterable[Event]:
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            # Other lines of the plane repeat the events by XLA module and operation.
            if line.name.startswith("Stream"):
                yield from (Event(e.name, e.start_ns, e.duration_ns) for e in line.events)


def summary(events: Iterable[Event]) -> Profile:
    """Of the events of one call."""
    events = sorted(events, key=lambda event: event.start)
    end, idle = events[0].start, 0.0
    for event in events:
        idle += max(0.0, event.start - end)
        end = max(end, event.start + event.duration)
    total: dict[str, float] = collections.defaultdict(float)
    for event in events:
        total[event.name] += event.duration / 1e6
    names = [event.name for event in events]
    return Profile(
        kernels=sum(not name.startswith(("Memcpy", "Memset")) for name in names),
        from_host=sum(name.startswith("MemcpyH2D") for name in names),
        to_host=sum(name.startswith("MemcpyD2H") for name in names),
        span_ms=(end - events[0].start) / 1e6,
        idle_ms=idle / 1e6,
        milliseconds=dict(sorted(total.items(), key=lambda item: -item[1])),
    )
