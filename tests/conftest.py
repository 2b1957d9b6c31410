"""Settings that have to be made before JAX starts and before vc_jax is imported."""

import atexit
import os
import shutil
import tempfile

import jax
from jaxtyping import install_import_hook

from . import shapes

# Two CPU devices, so that sharded calls can be tested on any machine.
_FLAGS = {"--xla_force_host_platform_device_count": "2"}
# Most of the suite's time is compilation of programs that run for milliseconds on a CPU: LLVM need
# not optimise them. On a GPU it must: there, what ships is tested.
_ON_CPU = shutil.which("nvidia-smi") is None
if _ON_CPU:
    _FLAGS["--xla_backend_optimization_level"] = "0"
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [_given, *(f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _given)]
).strip()


def _share_compilations() -> None:
    """Compile equal programs once a run: this process's, its workers' and those that tests start.

    The first process makes the folder, passes it on and takes it away.
    """
    settings = {
        "jax_compilation_cache_dir": os.environ.get("JAX_COMPILATION_CACHE_DIR"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    if settings["jax_compilation_cache_dir"] is None:
        folder = tempfile.mkdtemp(prefix="vc-jax-tests-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        settings["jax_compilation_cache_dir"] = folder
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


if _ON_CPU:
    _share_compilations()

# Pallas's interpreter blocks a thread of XLA's pool for each warpgroup of a cluster.
os.environ.setdefault("NPROC", "16")

# Shapes and dtypes of signatures and containers are checked at every call in this process.
install_import_hook(shapes.CHECKED, f"{shapes.__name__}.{shapes.checked.__name__}")
