"""Checks that need several devices: all of a module's, in one process that has them."""

import functools
import json
import os
import pathlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from types import ModuleType

REPOSITORY = pathlib.Path(__file__).parents[2]
_PREFIX = "results: "


def checks(module: ModuleType) -> dict[str, Callable[[], None]]:
    """The functions `check_...` of a module, without that part of their names."""
    found = {name.removeprefix("check_"): f for name, f in vars(module).items()}
    return {name: f for name, f in found.items() if f"check_{name}" in vars(module)}


def environment(devices: int) -> dict[str, str]:
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(REPOSITORY),
        # What is optimised here costs more than it saves.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} "
        "--xla_backend_optimization_level=0",
    }


@functools.cache
def results(module: str, devices: int = 8) -> dict[str, str | None]:
    """For each check of a module: `None`, or how it failed; run in a process of their own."""
    command = [sys.executable, "-W", "error", "-m", module]
    done = subprocess.run(
        command, env=environment(devices), capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_PREFIX)]
    assert done.returncode == 0, done.stderr[-4000:]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[-1].removeprefix(_PREFIX))


def run(module: ModuleType) -> None:
    """The main function of a module with checks; names among the arguments pick some."""
    failed = {}
    chosen = sys.argv[1:]
    for name, check in checks(module).items():
        if chosen and name not in chosen:
            continue
        began = time.process_time()
        try:
            check()
            failed[name] = None
        except Exception:
            failed[name] = traceback.format_exc(limit=-8)
            print(name, failed[name], sep="\n", file=sys.stderr)
        print(f"{name}: {time.process_time() - began:.1f} s", file=sys.stderr)
    print(_PREFIX + json.dumps(failed))
