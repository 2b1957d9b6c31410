"""Standard streams that take what they can: no command fails for what it could not print."""

import errno
import io
import os
import sys
from typing import TextIO


class Stream(io.TextIOBase):
    """A text stream that outlives its reader.

    Characters that the encoding lacks become question marks; what cannot be written at all is
    dropped.

    Attributes:
      failure: why the first loss happened, unless the reader only went away.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._descriptor: int | None = None
        self.failure: OSError | None = None
        try:
            self._descriptor = stream.fileno()
            stream.reconfigure(errors="replace")  # type: ignore[attr-defined]
        except (AttributeError, OSError, ValueError):
            pass  # Not one of Python's own: a test's, say.

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if error.errno not in (errno.EPIPE, errno.EIO) and self.failure is None:
            self.failure = error
        # What is still in the buffer would fail again when the interpreter ends.
        if self._descriptor is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._descriptor)
            os.close(nowhere)


def open_streams() -> tuple[Stream, Stream]:
    """Puts such streams in the place of stdout and stderr, also where those are closed."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number: this one. Left free, a file of ours would become it.
            os.open(os.devnull, os.O_RDWR)
    streams = [
        Stream(stream if stream is not None else open(os.devnull, "w"))  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr)
    ]
    sys.stdout, sys.stderr = streams
    return streams[0], streams[1]
