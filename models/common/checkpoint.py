"""Checkpoints: lazy reading of sharded safetensors into stacked parameters, and writing back."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from safetensors.numpy import save_file

from . import memory, quantised, weight_files
from .lora import Loras
from .placing import Parameter
from .release import read_json
from .tensor_files import TensorFile
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
    """Names and shapes of a transformer's tensors under a path; reads one tensor at a time.

    Args:
      path, variant: see `weight_files.choose`.

    Attributes:
      folder: of the files.
      shapes: by name, without a single-file checkpoint's prefix; quantised matrices by the names
        of the matrices that they stand for.

    Raises:
      FileNotFoundError, ValueError: see `weight_files.choose`; files that hold the same tensor.
    """

    def __init__(self, path: str | Path, variant: str | None = None):
        self.path = Path(path)
        self.folder = self.path.parent if self.path.is_file() else self.path
        files = weight_files.choose(self.path, variant)
        self._file_of: dict[str, TensorFile] = {}
        for file in map(TensorFile, files):
            for name in file.shapes:
                if name in self._file_of:
                    raise ValueError(_copies(name, self._file_of[name].path, file.path))
                self._file_of[name] = file
        self._named = weight_files.transformer_names(list(self._file_of))
        shapes = {name: self._file_of[raw].shapes[raw] for name, raw in self._named.items()}
        dtypes = {name: self._file_of[raw].dtypes[raw] for name, raw in self._named.items()}
        self._stored = quantised.stored(shapes, dtypes)
        self._unread = {
            name: problem
            for name, entry in self._stored.items()
            if (problem := quantised.check(name, entry, shapes, dtypes))
        }
        self.shapes: dict[str, Shape] = {
            name: shapes[entry.tensor] for name, entry in self._stored.items()
        }

    def config(self, kind: Any) -> Any:
        """The configuration beside the tensors, as an instance of a class with `from_dict`.

        Raises:
          FileNotFoundError, ValueError, NotImplementedError: no such file, no JSON, a field that
            is missing, of another kind or out of range; names the file.
        """
        file = self.folder / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"config: no {file}; pass config=")
        values = read_json(file)
        try:
            return kind.from_dict(values)
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"config: {file}: {error}") from error

    def check(self, names: Iterable[str]) -> None:
        """Refuses tensors whose numbers cannot be read.

        Raises:
          ValueError: names them.
        """
        problems = []
        for name in names:
            note, problem = self._stored[name].note, self._unread.get(name)
            if note is not None and problem is None:
                problem = quantised.check_note(note, self._tensor(note).tobytes())
            problems += [problem] if problem else []
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise ValueError(f"{self.path}: {problems[0]}{more}")

    def read(self, name: str) -> quantised.Numbers:
        """A tensor's numbers as views of the files, which are read where they are looked at."""
        entry = self._stored[name]
        scale = None if entry.scale is None else self._tensor(entry.scale)
        return quantised.Numbers(self._tensor(entry.tensor), scale)

    def _tensor(self, name: str) -> np.ndarray:
        raw = self._named[name]
        return self._file_of[raw].tensor(raw)


def _copies(name: str, first: Path, second: Path) -> str:
    copies = sorted({weight_files.copy_name(file) for file in (first, second)})
    chosen = " or ".join(map(repr, copies))
    hint = f": two copies of a model and no index; pass variant={chosen}"
    both = f"path: {first.name} and {second.name} in {first.parent} both hold {name!r}"
    return both + (hint if len(copies) > 1 else "")


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
    abstract: Model,
    layout: TensorMap,
    reader: Reader,
    sharding: ShardingLike = None,
    loras: Loras | None = None,
) -> Model:
    """An abstract model (`nnx.eval_shape`) with the parameters of a checkpoint, LoRAs merged.

    Two tensors are in host memory at a time, of a parameter on a mesh only the parts of this
    process. They are sent as the files have them, and cast and arranged on the device.

    Raises:
      CheckpointError: see `check`.
      ValueError: tensors whose numbers cannot be read (INT8 without its scale).
    """
    check(layout, reader.shapes)
    reader.check(name for entry in layout.entries for name, _ in entry.tensors())
    graphdef, state = nnx.split(abstract)
    parameters = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    for entry in layout.entries:
        variable = parameters.pop(entry.parameter)
        target = variable.get_value()
        place = sharding(entry.parameter, target.shape) if callable(sharding) else sharding
        variable.set_value(_parameter(entry, reader, target, place, loras))
    if parameters:
        raise AssertionError(f"the layout has no entry for {sorted(parameters)}")
    return nnx.merge(graphdef, state)


def _parameter(
    entry: Entry, reader: Reader, target: Any, place: Sharding | None, loras: Loras | None
) -> jax.Array:
    stacked = entry.layers is not None
    parameter = Parameter(target.shape, target.dtype, place, stacked=stacked)
    for layer in range(entry.layers or 1):
        numbers = [reader.read(name.format(layer)) for name in entry.names]
        added = None if loras is None else loras.addend(entry.parameter, layer)
        for start, values, factors in _pieces(entry, numbers, place):
            of_piece = tuple(slice(i, i + n) for i, n in zip(start, values.shape, strict=True))
            addend = None if added is None else added[of_piece]
            parameter.write([layer, *start] if stacked else start, values, factors, addend)
    return parameter.array()


def _pieces(
    entry: Entry, numbers: list[quantised.Numbers], place: Sharding | None
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray | None]]:
    """Where each piece of a parameter (of one layer) begins, its values and their factors.

    Each tensor is a piece where the layout lets it, and no device splits the axis of the tensors.
    """
    axis = entry.stacked
    if axis is not None and isinstance(place, NamedSharding):
        split = (*place.spec, *[None] * (axis + 2))[axis + (entry.layers is not None)]
        axis = axis if split is None else None
    if axis is None and len(numbers) > 1:
        numbers = [quantised.Numbers(entry.load(*(each.multiplied() for each in numbers)))]
        yield [0] * numbers[0].values.ndim, numbers[0].values, None
        return
    for index, each in enumerate(numbers):
        values, factors = entry.load(each.values), each.factors
        start = [0] * values.ndim
        if axis is not None:
            start[axis] = index
        yield start, values, None if factors is None else entry.load(factors)


def is_spread(model: nnx.Module) -> bool:
    """Whether other processes hold parts of the model's parameters."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return not all(leaf.is_fully_addressable for leaf in leaves)


def save(model: nnx.Module, layout: TensorMap, folder: Path, max_shard_bytes: int) -> None:
    """Writes a model's parameters, holding one shard in host memory at a time.

    Where they are spread over processes, all of them bring a tensor together at a time, and the
    first one writes.
    """
    writes = not is_spread(model) or jax.process_index() == 0
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
        made = _file_tensors(shard, parameters)
        # The others take part in bringing a tensor together, and let it go.
        tensors = {name: tensor for name, tensor in made if writes}
        if writes:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if writes and len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        name = "diffusion_pytorch_model.safetensors.index.json"
        (folder / name).write_text(json.dumps(index, indent=2) + "\n")


def _file_tensors(
    shard: Iterable[tuple[str, Entry, int, int]], parameters: dict[str, jax.Array]
) -> Iterator[tuple[str, np.ndarray]]:
    for name, entry, layer, index in shard:
        parameter = parameters[entry.parameter]
        array = _on_host(parameter, None if entry.layers is None else layer)
        yield name, np.ascontiguousarray(entry.save(array)[index])


def _on_host(parameter: jax.Array, layer: int | None) -> np.ndarray:
    """A parameter, or one layer of it, wherever its parts are."""
    if memory.waits(parameter) and parameter.is_fully_addressable:
        whole = np.asarray(parameter)
        return whole if layer is None else whole[layer]
    if parameter.is_fully_addressable:
        return np.asarray(parameter if layer is None else parameter[layer])
    assert isinstance(parameter.sharding, NamedSharding)
    whole = NamedSharding(parameter.sharding.mesh, PartitionSpec())
    return np.asarray(_brought_together(whole, layer is not None)(parameter, layer or 0))


@functools.cache
def _brought_together(whole: NamedSharding, stacked: bool) -> Callable[[jax.Array, int], jax.Array]:
    def one(parameter: jax.Array, layer: jax.Array) -> jax.Array:
        if not stacked:
            return parameter
        return jax.lax.dynamic_index_in_dim(parameter, layer, 0, keepdims=False)

    return jax.jit(one, out_shardings=whole)
