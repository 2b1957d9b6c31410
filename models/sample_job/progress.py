"""How far a sampling run is: a bar on a terminal, a line for each method and stage elsewhere."""

import threading
import time
from typing import Self, TextIO

import tqdm

_FORMAT = "{percentage:3.0f}%|{bar:24}| {elapsed}  {desc}"


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
        self._finished = 0
        self._started = time.monotonic()
        self._stage = ("", "")
        self._lock = threading.Lock()
        # Every method samples; all but the first one also follow the first one's path.
        total = (2 * len(names) - 1) * steps
        self._bar = None
        if stream.isatty():
            self._bar = tqdm.tqdm(total=total, file=stream, leave=False, bar_format=_FORMAT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, name: str, doing: str, done: int) -> None:
        """Says that `done` steps of what a method does now are finished."""
        with self._lock:
            new = (name, doing) != self._stage
            self._stage = (name, doing)
            if self._bar is None:
                if new:
                    seconds = int(time.monotonic() - self._started)
                    print(f"{seconds // 60}:{seconds % 60:02d} {name}: {doing}", file=self._stream)
                    self._stream.flush()
                return
            self._bar.set_description_str(
                f"{name}: {doing}" + (f" {done}/{self._steps}" if done else ""), refresh=new
            )
            self._bar.update(self._finished + done - self._bar.n)
            if done == self._steps:
                self._finished += done
