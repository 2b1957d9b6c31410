"""One line on the terminal that says how far a sampling run is."""

import threading
import time
from typing import Self, TextIO

_BAR = 24
_REDRAW_SECONDS = 0.1


class ProgressBar:
    """Draws a bar on a terminal; elsewhere it prints a line for each method and stage.

    Args:
      stream: where to draw.
      names: the methods, in the order in which they run.
      steps: steps of one pass of a method.
    """

    def __init__(self, stream: TextIO, names: tuple[str, ...], steps: int):
        self._stream = stream
        self._steps = steps
        # Every method samples; all but the first one also follow the first one's path.
        self._passes = 2 * len(names) - 1
        self._finished = 0
        self._started = self._drawn = time.monotonic()
        self._stage = ("", "")
        self._terminal = stream.isatty()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def update(self, name: str, doing: str, done: int) -> None:
        """Says that `done` steps of what a method does now are finished."""
        with self._lock:
            new = (name, doing) != self._stage
            self._stage = (name, doing)
            if done == self._steps:
                self._finished += 1
            total = self._finished + (done % self._steps) / self._steps
            if not self._terminal:
                if new:
                    self._say(f"{self._clock()} {name}: {doing}\n")
                return
            now = time.monotonic()
            if new or done == self._steps or now - self._drawn > _REDRAW_SECONDS:
                self._drawn = now
                self._say("\r\x1b[K" + self._line(name, doing, done, total / self._passes))

    def _line(self, name: str, doing: str, done: int, share: float) -> str:
        filled = round(min(share, 1.0) * _BAR)
        bar = "█" * filled + "░" * (_BAR - filled)
        count = f" {done}/{self._steps}" if done else ""
        return f"{bar} {min(share, 1.0):4.0%} {self._clock()}  {name}: {doing}{count}"

    def _clock(self) -> str:
        seconds = int(time.monotonic() - self._started)
        return f"{seconds // 60}:{seconds % 60:02d}"

    def _say(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.replace("█", "#").replace("░", "."))
        self._stream.flush()
