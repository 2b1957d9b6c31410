"""One safetensors file: names, shapes and types of its tensors; the numbers stay in the file."""

import json
import math
import mmap
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from .release import pointer_hint
from .tensor_map import Shape

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
}
"""Types that are read, by their names in safetensors."""


class TensorFile:
    """A file of tensors.

    Attributes:
      path: of the file.
      shapes, dtypes: by the tensors' names; types as safetensors names them.
      metadata: strings that the file says of itself.

    Raises:
      ValueError: no safetensors, or not all of it is there; names the file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with safe_open(path, "np"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"path: {path} is not a whole safetensors file{pointer_hint(path)}: {error}"
            ) from error
        with path.open("rb") as stream:
            # The header's length in 8 bytes, the header, and tensors at offsets from its end.
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.shapes: dict[str, Shape] = {name: tuple(e["shape"]) for name, e in header.items()}
        self.dtypes: dict[str, str] = {name: entry["dtype"] for name, entry in header.items()}
        self._begin = {name: 8 + length + e["data_offsets"][0] for name, e in header.items()}

    def tensor(self, name: str) -> np.ndarray:
        """A read-only view of the file: it is read where the array is looked at."""
        dtype, shape, begin = DTYPES[self.dtypes[name]], self.shapes[name], self._begin[name]
        count = math.prod(shape)
        if not count:
            return np.empty(shape, dtype)
        before = begin % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as stream:
            length = before + count * dtype.itemsize
            mapped = mmap.mmap(
                stream.fileno(), length, access=mmap.ACCESS_READ, offset=begin - before
            )
        if hasattr(mmap, "MADV_WILLNEED"):
            mapped.madvise(mmap.MADV_WILLNEED)
        return np.frombuffer(mapped, dtype, count, before).reshape(shape)
