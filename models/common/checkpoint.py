"""Checkpoints: lazy reading of sharded safetensors into stacked parameters, and writing back."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .tensor_map import Entry, Shape, TensorMap

ShardingLike = Sharding | Callable[[str, Shape], Sharding] | None


class CheckpointError(ValueError):
    """A checkpoint that does not fit the model: every difference in one list."""

    def __init__(self, missing: list[str], unexpected: list[str], misshapen: list[str]):
        self.missing, self.unexpected, self.misshapen = missing, unexpected, misshapen
        parts = [
            f"{title} ({len(lines)}):\n  " + "\n  ".join(lines)
            for title, lines in (
                ("missing tensors", missing),
                ("unexpected tensors", unexpected),
                ("tensors of another shape", misshapen),
            )
            if lines
        ]
        super().__init__("the checkpoint does not fit the model; " + "\n".join(parts))


class Reader:
    """Names and shapes of the tensors under a path; reads one tensor at a time."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        files = [self.path] if self.path.is_file() else self._files()
        if not files:
            raise FileNotFoundError(f"path: no .safetensors file at {self.path}")
        self._open = {file: _opened(file) for file in files}
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, Shape] = {}
        for file, handle in self._open.items():
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                self._file_of[name] = file
                self.shapes[name] = tuple(handle.get_slice(name).get_shape())

    def _files(self) -> list[Path]:
        """The files that the index names, or all of the folder where there is no index."""
        indices = sorted(self.path.glob("*.safetensors.index.json"))
        if len(indices) > 1:
            raise ValueError(f"path: several indices in {self.path}: {[i.name for i in indices]}")
        if indices:
            weight_map = _json(indices[0]).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"path: {indices[0]} has no weight_map")
            names = {str(name) for name in weight_map.values()}
            absent = sorted(name for name in names if not (self.path / name).is_file())
            if absent:
                raise FileNotFoundError(f"path: {indices[0].name} names absent files {absent}")
            return [self.path / name for name in sorted(names)]
        return sorted(self.path.glob("*.safetensors"))

    def config(self, kind: Any) -> Any:
        """The configuration beside the tensors, as an instance of a class with `from_dict`.

        Raises:
          FileNotFoundError, ValueError, NotImplementedError: no such file, no JSON, a field that
            is missing, of another kind or out of range; names the file.
        """
        file = (self.path if self.path.is_dir() else self.path.parent) / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"config: no {file}; pass config=")
        values = _json(file)
        try:
            return kind.from_dict(values)
        except KeyError as error:
            raise ValueError(f"config: {file} lacks {error.args[0]}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"config: {file}: {error}") from error

    def read(self, name: str) -> np.ndarray:
        return self._open[self._file_of[name]].get_tensor(name)


def _json(file: Path) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
      ValueError: it holds none; names the file.
    """
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"path: {file} is not JSON{_hint(file)}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"path: {file} holds no JSON object but a {type(values).__name__}")
    return values


def _opened(file: Path) -> Any:
    """An open safetensors file.

    Raises:
      ValueError: it is none, or not all of it is there; names the file.
    """
    try:
        return safe_open(file, "np")
    except SafetensorError as error:
        raise ValueError(
            f"path: {file} is not a whole safetensors file{_hint(file)}: {error}"
        ) from error


def _hint(file: Path) -> str:
    with file.open("rb") as opened:
        pointer = opened.read(40).startswith(b"version https://git-lfs")
    return " but a Git LFS pointer (git lfs pull fetches the file)" if pointer else ""


def detect_layout(layouts: dict[str, TensorMap], reader: Reader) -> str:
    """The layout that most of the file's names belong to."""

    def matches(layout: TensorMap) -> int:
        names = {name for entry in layout.entries for name, _ in entry.tensors()}
        return len(names & reader.shapes.keys())

    return max(layouts, key=lambda name: matches(layouts[name]))


def check(layout: TensorMap, shapes: dict[str, Shape]) -> None:
    """Compares names and shapes with a layout.

    Raises:
      CheckpointError: with all differences.
    """
    wanted = dict(tensor for entry in layout.entries for tensor in entry.tensors())
    missing = [name for name in wanted if name not in shapes]
    unexpected = [
        name for name in shapes if name not in wanted and not name.endswith(layout.ignore or "\0")
    ]
    misshapen = [
        f"{name}: {shapes[name]}, expected {shape}"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != shape
    ]
    if missing or unexpected or misshapen:
        raise CheckpointError(sorted(missing), sorted(unexpected), misshapen)


def load[Model: nnx.Module](
    abstract: Model, layout: TensorMap, reader: Reader, sharding: ShardingLike = None
) -> Model:
    """An abstract model (`nnx.eval_shape`) with the parameters of a checkpoint.

    One tensor is in host memory at a time: it is cast to the parameter's dtype and written into
    the (sharded) device array of its stack, whose buffer is donated.

    Raises:
      CheckpointError: see `check`.
    """
    check(layout, reader.shapes)
    graphdef, state = nnx.split(abstract)
    parameters = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    for entry in layout.entries:
        variable = parameters.pop(entry.parameter)
        target = variable.get_value()
        place = sharding(entry.parameter, target.shape) if callable(sharding) else sharding

        def tensor(layer: int, entry: Entry = entry, dtype: Any = target.dtype) -> np.ndarray:
            arrays = [reader.read(name.format(layer)) for name in entry.names]
            return np.ascontiguousarray(entry.load(*arrays), dtype)

        if entry.layers is None:
            variable.set_value(jax.device_put(tensor(0), place))
        else:
            stack = jnp.zeros(target.shape, target.dtype, device=place)
            update = _layer_update(stack.sharding)
            for layer in range(entry.layers):
                piece = jax.device_put(tensor(layer), _layer_sharding(place))
                # Without the wait, pieces in flight would pile up in host memory.
                stack = jax.block_until_ready(update(stack, piece, layer))
            variable.set_value(stack)
    if parameters:
        raise AssertionError(f"the layout has no entry for {sorted(parameters)}")
    return nnx.merge(graphdef, state)


@functools.cache
def _layer_update(sharding: Sharding) -> Callable[[jax.Array, jax.Array, int], jax.Array]:
    def update(stack: jax.Array, piece: jax.Array, layer: int) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, piece, layer, 0)

    return jax.jit(update, donate_argnums=0, out_shardings=sharding)


def _layer_sharding(sharding: Sharding | None) -> Sharding | None:
    """The sharding of one layer of a stack, where the stack's can say it."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


def save(model: nnx.Module, layout: TensorMap, folder: Path, max_shard_bytes: int) -> None:
    """Writes a model's parameters, holding one shard in host memory at a time."""
    flat = nnx.to_flat_state(nnx.state(model))
    parameters = {".".join(map(str, path)): leaf[...] for path, leaf in flat}
    shards: list[list[tuple[str, Entry, int, int]]] = [[]]
    size = total = 0
    for entry in layout.entries:
        itemsize = parameters[entry.parameter].dtype.itemsize
        for layer in range(entry.layers or 1):
            for index, (name, shape) in enumerate(zip(entry.names, entry.shapes, strict=True)):
                nbytes = int(np.prod(shape)) * itemsize
                if shards[-1] and size + nbytes > max_shard_bytes:
                    shards.append([])
                    size = 0
                shards[-1].append((name.format(layer), entry, layer, index))
                size += nbytes
                total += nbytes
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = "diffusion_pytorch_model.safetensors"
        if len(shards) > 1:
            file = f"diffusion_pytorch_model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = dict(_file_tensors(shard, parameters))
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        name = "diffusion_pytorch_model.safetensors.index.json"
        (folder / name).write_text(json.dumps(index, indent=2) + "\n")


def _file_tensors(
    shard: Iterable[tuple[str, Entry, int, int]], parameters: dict[str, jax.Array]
) -> Iterator[tuple[str, np.ndarray]]:
    for name, entry, layer, index in shard:
        parameter = parameters[entry.parameter]
        array = np.asarray(parameter if entry.layers is None else parameter[layer])
        yield name, np.ascontiguousarray(entry.save(array)[index])
