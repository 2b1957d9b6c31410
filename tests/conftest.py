"""Settings that have to be made before JAX starts."""

import os

# Two CPU devices, so that sharded calls can be tested on any machine.
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=2".strip()

# Pallas's interpreter blocks a thread of XLA's pool for each warpgroup of a cluster.
os.environ.setdefault("NPROC", "16")
