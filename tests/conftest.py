"""Settings that have to be made before JAX starts and before vc_jax is imported."""

import gc
import itertools
import os
import shutil
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

from . import shapes

# Two CPU devices, so that sharded calls can be tested on any machine.
_FLAGS = {"--xla_force_host_platform_device_count": "2"}
# Most of the suite's time is compilation of programs that run for milliseconds on a CPU: LLVM need
# not optimise them. On a GPU it must: there, what ships is tested.
if shutil.which("nvidia-smi") is None:
    _FLAGS["--xla_backend_optimization_level"] = "0"
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [_given, *(f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _given)]
).strip()

# Pallas's interpreter blocks a thread of XLA's pool for each warpgroup of a cluster.
os.environ.setdefault("NPROC", "16")

# Shapes and dtypes of signatures and containers are checked at every call in this process.
install_import_hook(shapes.CHECKED, f"{shapes.__name__}.{shapes.checked.__name__}")

_MAPS = Path("/proc/self/maps")
_MOST_MAPS = 20_000
"""A process may have 65 530 on Linux; the compiled program of a quantised call has about 240."""
_tests = itertools.count(1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Forgets compiled programs before there are too many: without maps left, XLA crashes."""
    if next(_tests) % 8 or not _MAPS.exists():
        return
    with _MAPS.open("rb") as lines:
        crowded = sum(1 for _ in lines) > _MOST_MAPS
    if crowded:
        import jax

        jax.clear_caches()
        gc.collect()
