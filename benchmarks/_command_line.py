"""What the benchmarks' command lines share: kinds of arguments, each refused in one line."""

import argparse
import math
import os
import pathlib
from collections.abc import Callable, Sequence

from vc_jax._cli import Parser, path


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with `--output`, the folder of the results."""
    parse = Parser(prog=f"vc-jax bench {name}", description=description)
    parse.add_argument(
        "--output",
        type=output_folder,
        default=pathlib.Path("benchmark-results"),
        metavar="DIR",
        help="folder to write (default: benchmark-results)",
    )
    return parse


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
