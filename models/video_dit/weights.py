"""Weights of a `VideoDiT` as a safetensors file: 16-bit tensors, one a parameter.

A parameter's name in the file is its path in the module, as in ``blocks.attention.qkv.kernel``; the
blocks are stacked on the leading axis. The configuration travels in the file's metadata.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .model import VideoDiT, VideoDiTConfig

SHIPPED_WEIGHTS = pathlib.Path(__file__).parents[1] / "data" / "video_dit.safetensors"


def named_parameters(parameters: Any) -> dict[str, jax.Array]:
    """The parameters of a `VideoDiT` (an `nnx.State`) by their names in a file."""
    flat = nnx.to_flat_state(parameters)
    return {".".join(map(str, path)): variable[...] for path, variable in flat}


def save_weights(path: str | os.PathLike[str], parameters: Any, config: VideoDiTConfig) -> None:
    """Writes parameters as bfloat16. The file appears under its name only when it is complete.

    Args:
      path: file to write; its folder must exist.
      parameters: the `nnx.Param` state of a `VideoDiT`.
      config: the model's configuration.
    """
    tensors = {
        name: np.asarray(array.astype(jnp.bfloat16))
        for name, array in named_parameters(parameters).items()
    }
    metadata = {"config": json.dumps(dataclasses.asdict(config), sort_keys=True)}
    path = pathlib.Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial, metadata=metadata)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_video_dit(
    path: str | os.PathLike[str] = SHIPPED_WEIGHTS, *, compute_dtype: str | None = None
) -> VideoDiT:
    """Builds the model that a weights file describes; the shipped one by default.

    Args:
      path: a file written by `save_weights`.
      compute_dtype: dtype of the matrix products instead of the one that the file names.

    Returns:
      The model with float32 parameters.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no such weights file, or tensors are missing, unexpected or of another
        shape: all of them are listed.
    """
    metadata, tensors = _read(path)
    try:
        config = VideoDiTConfig(**json.loads(metadata["config"]))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} names no VideoDiT configuration: {error}") from error
    if compute_dtype is not None:
        config = dataclasses.replace(config, compute_dtype=compute_dtype)
    model = nnx.eval_shape(lambda: VideoDiT(config, rngs=nnx.Rngs(0)))
    definition, abstract = nnx.split(model, nnx.Param)
    return nnx.merge(definition, fill_parameters(abstract, tensors))


def fill_parameters(abstract: Any, tensors: dict[str, np.ndarray]) -> Any:
    """Puts named tensors in the places of a (possibly abstract) parameter state, as float32.

    Raises:
      ValueError: names or shapes differ; the message lists every difference.
    """
    wanted = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(abstract)}
    problems = [f"missing {name}" for name in sorted(wanted.keys() - tensors.keys())]
    problems += [f"unexpected {name}" for name in sorted(tensors.keys() - wanted.keys())]
    problems += [
        f"{name} has shape {tensors[name].shape}, expected {wanted[name].shape}"
        for name in sorted(wanted.keys() & tensors.keys())
        if tensors[name].shape != wanted[name].shape
    ]
    if problems:
        raise ValueError("weights do not fit the model: " + "; ".join(problems))
    filled = [
        # Cast on the host: on the device each shape would compile a cast of its own.
        (path, variable.replace(jnp.asarray(tensors[".".join(map(str, path))].astype(np.float32))))
        for path, variable in nnx.to_flat_state(abstract)
    ]
    return nnx.from_flat_state(filled)


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"no weights file at {path}")
    try:
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
