"""Quantised weights in files: which tensors belong together, and the numbers they stand for.

The forms that released and converted checkpoints have, each a matrix times one scale or one a row:

* E4M3 or E5M2 as it is, without a scale;
* E4M3 with `scale_weight` or `weight_scale` (ComfyUI's and the common runtimes' scaled FP8);
* INT8 with `weight_scale`, under the matrix's own name or as `weight_int8` (LongCat-Video).

Scales of activations and marks of the format are left out: the models compute in their own dtype.
"""

import dataclasses
import json

import numpy as np

from .tensor_map import Shape

_PLAIN = ("F64", "F32", "F16", "BF16")
_FP8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("weight_scale", "scale_weight")
_LEFT_OUT = ("input_scale", "scale_input")
_NOTE = "comfy_quant"
_MARK = "scaled_fp8"
_NOTED_FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor's numbers stand in the files: `tensor`, times `scale` where there is one.

    `note` is a tensor of bytes, JSON, that says more of the format.
    """

    tensor: str
    scale: str | None = None
    note: str | None = None


def stored(shapes: dict[str, Shape], dtypes: dict[str, str]) -> dict[str, Stored]:
    """The tensors that a checkpoint means, by name; scales and marks are no tensors of their own.

    Args:
      shapes: of all tensors in the files.
      dtypes: likewise, as safetensors names them.
    """
    meant: dict[str, Stored] = {}
    taken = {name for name in shapes if name.rpartition(".")[2] == _MARK}
    for name, dtype in dtypes.items():
        if name in taken or dtype in _PLAIN:
            continue
        module, _, kind = name.rpartition(".")
        if kind not in ("weight", "weight_int8"):
            continue
        scales = [f"{module}.{end}" for end in _SCALES if f"{module}.{end}" in shapes]
        notes = [f"{module}.{_NOTE}"] if f"{module}.{_NOTE}" in shapes else []
        meant[f"{module}.weight"] = Stored(name, *(scales[:1] or [None]), *(notes or [None]))
        taken |= {name, *scales[:1], *notes, *(f"{module}.{end}" for end in _LEFT_OUT)}
    return meant | {name: Stored(name) for name in shapes if name not in taken}


def check(name: str, entry: Stored, shapes: dict[str, Shape], dtypes: dict[str, str]) -> str | None:
    """What keeps a tensor from being read as numbers, in one line, or None."""
    dtype, shape = dtypes[entry.tensor], shapes[entry.tensor]
    if dtype not in (*_PLAIN, *_FP8, "I8"):
        return f"{name}: {dtype} is not supported"
    if entry.scale is None:
        if dtype == "I8":
            return f"{name}: {dtype} without its scale ({' or '.join(_SCALES)})"
        return None
    rows = shape[0] if shape else 1
    if dtypes[entry.scale] not in _PLAIN or shapes[entry.scale] not in (
        *((), (1,), (1, 1)),
        *((rows,), (rows, 1)),
    ):
        return (
            f"{entry.scale}: expected one number or one for each of the {rows} rows, "
            f"got {dtypes[entry.scale]} {list(shapes[entry.scale])}"
        )
    return None


def check_note(name: str, note: bytes) -> str | None:
    """What a note says that the numbers cannot be read without, in one line, or None."""
    try:
        said = dict(json.loads(note))
    except (ValueError, TypeError):
        return f"{name}: no valid JSON"
    known = {"format", "full_precision_matrix_mult"}
    if said.get("format") in _NOTED_FORMATS and said.keys() <= known:
        return None
    return f"{name}: {said} is not supported"


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A tensor's numbers: `values`, times `scale`, one for all or one a row, where there is one."""

    values: np.ndarray
    scale: np.ndarray | None = None

    @property
    def factors(self) -> np.ndarray | None:
        """The scale, repeated to the values' shape without being stored so; float32."""
        if self.scale is None:
            return None
        factors = self.scale.astype(np.float32).reshape(-1, *[1] * (self.values.ndim - 1))
        return np.broadcast_to(factors, self.values.shape)

    def multiplied(self) -> np.ndarray:
        """float32."""
        values, factors = self.values.astype(np.float32), self.factors
        return values if factors is None else values * factors
