"""Results: JSON for programs, Markdown and figures for people."""

import datetime
import importlib
import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax

import vc_jax


def environment() -> dict[str, Any]:
    """What a result was measured with."""
    device = jax.devices()[0]
    about: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind,
        "vc_jax": vc_jax.__version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
    }
    try:
        pynvml = importlib.import_module("pynvml")

        pynvml.nvmlInit()
        about["driver"] = pynvml.nvmlSystemGetDriverVersion()
        limit = pynvml.nvmlDeviceGetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(0))
        about["power_limit_w"] = limit / 1000
    except Exception:  # no NVIDIA GPU, or no NVML
        about["driver"] = None
    return about


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; numbers are right-aligned."""
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "|".join("---:" if n else "---" for n in numeric) + "|",
    ]
    lines += ["| " + " | ".join(_cell(x) for x in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)


def write_results(folder: pathlib.Path, name: str, report: dict[str, Any], text: str) -> None:
    """Write `name`.json and `name`.md into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / f"{name}.md").write_text(text.rstrip() + "\n")


NO_FIGURE = "no figure: matplotlib is not installed"


def pyplot() -> Any:
    """Matplotlib's `pyplot`, drawing into files; `None` where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def announce_figure() -> None:
    """Says on stderr, before anything is measured, that there will be no figure."""
    if pyplot() is None:
        print(NO_FIGURE, file=sys.stderr, flush=True)
