"""What the benchmarks' command lines share: `--output`, and the GPU that most of them need."""

import argparse
import pathlib

import jax

from vc_jax._command_line import Parser, output_folder


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


def missing_gpu() -> str | None:
    """Why the fused kernels cannot be measured on this machine; `None` if they can."""
    device = jax.devices()[0]
    if str(getattr(device, "compute_capability", "")) != "9.0":
        return f"needs a GPU of compute capability 9.0, this is {device.device_kind}"
    return None
