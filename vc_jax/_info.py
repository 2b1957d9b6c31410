"""What `vc-jax info` prints."""

import importlib.metadata
import os
import platform

import jax
import jax.numpy as jnp

import vc_jax

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "opencv-python-headless")
_EXAMPLE = (1, 14_080, 2, 128)


def describe() -> str:
    """Device, versions, and what each preset runs on here, as a text of lines."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = [
        f"device     {device.device_kind} ({jax.default_backend()}), {jax.device_count()} visible; "
        f"{cores} CPU cores",
        f"vc-jax     {vc_jax.__version__}, Python {platform.python_version()}",
        "packages   " + ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "",
        f"attention of bfloat16 {list(_EXAMPLE)}, the sizes of `vc-jax sample` on a GPU:",
    ]
    shape = jax.ShapeDtypeStruct(_EXAMPLE, jnp.bfloat16)
    for name in vc_jax.PRESETS:
        found = vc_jax.explain(shape, shape, shape, config=name)
        lines.append(f"  {name:<7} runs on {found.implementation or 'nothing'}")
        lines += [f"    not {other}: {reason}" for other, reason in found.reasons.items()]
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
