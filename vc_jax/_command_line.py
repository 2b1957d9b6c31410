"""What the package's command lines share: a parser, kinds of arguments, complaints in one line."""

import argparse
import errno
import math
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

USAGE_ERROR = 2
"""Exit code of something asked for that cannot be done."""


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {_one_line(message)} (see {self.prog} --help)\n")


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def complain(command: str, message: object) -> int:
    """Says in one line on stderr why a command cannot be done, and returns its exit code."""
    print(f"{f'vc-jax {command}'.strip()}: {_one_line(message)}", file=sys.stderr)
    return USAGE_ERROR


def path(text: str) -> pathlib.Path:
    """A path that every library can be given.

    An empty one, which would be the working folder, is a mistake; a name that is not UTF-8 crashes
    native decoders.
    """
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("must be a name in UTF-8") from None
    try:
        os.lstat(text)
    except ValueError:
        raise argparse.ArgumentTypeError("must not hold a null character") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise argparse.ArgumentTypeError(os.strerror(error.errno)) from None
    return pathlib.Path(text)


def output_folder(text: str) -> pathlib.Path:
    """A folder that results can be written to, which need not be there yet."""
    folder = path(text)
    there = folder.absolute()
    while not there.exists() and not there.is_symlink():
        there = there.parent
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{there} exists and is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"cannot write to {there}")
    return folder


def positive[Number: (int, float)](kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """A finite number above 0."""

    def convert(text: str) -> Number:
        number = kind(text)
        if not 0 < number < math.inf:
            raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
        return number

    # argparse says "invalid int value".
    convert.__name__ = getattr(kind, "__name__", "number")
    return convert


def sizes(text: str) -> dict[str, int]:
    """Sizes of a mesh's axes: `"batch=1,seq=2"` to `{"batch": 1, "seq": 2}`."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not (name.isidentifier() and size.isdecimal() and len(size) < 10) or name in found:
            raise argparse.ArgumentTypeError(
                f"must be AXIS=N,... with each axis once, for example batch=1,seq=2, got {text!r}"
            )
        found[name] = int(size)
    return found


def pair(text: str, what: str, example: str) -> tuple[int, int]:
    """Two integers with an x between them: `"88x160"` to (88, 160)."""
    try:
        first, second = (int(part) for part in text.lower().replace("×", "x").split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be {what}, for example {example}, got {text!r}"
        ) from None
    return first, second


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return number


def once[Item](items: Sequence[Item]) -> list[Item]:
    """Items in order, repetitions left out: measured twice, one would replace the other."""
    return list(dict.fromkeys(items))
