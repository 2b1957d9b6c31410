"""LoRAs, which are merged into a checkpoint's tensors as these are read.

A LoRA changes a matrix W of the file to W + strength · (alpha / rank) · up · down. Its names may be
those of another layout than the checkpoint's: both lead to the same parameters (`tensor_map`), so
that what one adds to a parameter is the same re-ordering of its own tensors. Key styles that are
read, of a module `M` in any of the model's layouts:

* `M.lora_A.weight`, `M.lora_B.weight` (and `.bias`): diffusers and PEFT, where alpha is the rank or
  stands in the file's `lora_adapter_metadata`;
* `M.lora_down.weight`, `M.lora_up.weight`, `M.alpha`: the authors' and ComfyUI's; also with
  `M.diff`, `M.diff_b` and `M.diff_m`, differences of weight, bias and modulation;
* `lora_unet_M` with underscores for dots: kohya's;
* `lora___lorahyphen___M`, with `M.alpha_scale` (alpha / rank) and `M.lora_up.blocks.I.weight`, the
  parts of a fused matrix, each with its own rows of `lora_down`: LongCat-Video's.

Before `M` may stand `transformer.`, `diffusion_model.`, `model.diffusion_model.` or
`base_model.model.`.
"""

import dataclasses
import functools
import json
import math
import numbers
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .tensor_files import DTYPES, TensorFile
from .tensor_map import Entry, Shape, TensorMap

LoraLike = str | Path | tuple[str | Path, float]
"""A LoRA's file, or the file and its strength (a list of the two, as of JSON, is taken too)."""

_ROLES = (
    (re.compile(r"\.lora[._](?:A|down)(?:\.\w+)?\.weight$"), "down"),
    (re.compile(r"\.lora[._](?:B|up)(?:\.\w+)?\.weight$"), "up 0"),
    (re.compile(r"\.lora_up\.blocks\.(\d+)\.weight$"), r"up \1"),
    (re.compile(r"\.lora_B(?:\.\w+)?\.bias$"), "up bias"),
    (re.compile(r"\.(alpha|alpha_scale|diff|diff_b|diff_m)$"), r"\1"),
)
_PREFIXES = re.compile(
    r"^(?:base_model\.model\.|model\.diffusion_model\.|diffusion_model\.|transformer\.)+"
)
_HYPHEN = "___lorahyphen___"
_UNDERSCORED = re.compile(r"^lora_(?:unet|transformer)_")
_METADATA = "lora_adapter_metadata"
_NOT_MERGED = ("use_dora", "use_rslora", "alpha_pattern")


class LoraError(ValueError):
    """A LoRA that does not fit the model: every problem in one list.

    Attributes:
      problems: one line each; names the file's key.
    """

    def __init__(self, path: Path, problems: Sequence[str]):
        self.problems = list(problems)
        lines = "\n  ".join(self.problems)
        super().__init__(f"loras: {path} does not fit the model ({len(problems)}):\n  {lines}")


@dataclasses.dataclass(frozen=True)
class _Change:
    """What a LoRA adds to one tensor, of the given shape; made times a factor when asked for."""

    shape: Shape
    make: Callable[[float], np.ndarray]


class Loras:
    """What LoRAs add to a model's parameters.

    Args:
      loras: files, or files with strengths.
      layouts: those of the model, by name.

    Raises:
      TypeError: not a sequence of paths and pairs.
      FileNotFoundError: no such file.
      ValueError: a strength that is not finite, a file that is no safetensors.
      LoraError: keys that belong to no tensor of the model, halves of pairs, and other shapes.
    """

    def __init__(self, loras: Sequence[LoraLike], layouts: dict[str, TensorMap]):
        self._changes: list[tuple[float, dict[str, list[_Change]], dict[str, Entry]]] = []
        for path, strength in _pairs(loras):
            if not path.is_file():
                raise FileNotFoundError(f"loras: no file {path}")
            file = TensorFile(path)
            layout, modules = _modules(file, layouts)
            changes = _changes(file, layout, modules)
            entries = {entry.parameter: entry for entry in layout.entries}
            self._changes.append((strength, changes, entries))

    def addend(self, parameter: str, layer: int) -> np.ndarray | None:
        """float32, in the axes of the parameter (of one layer); None where nothing is added."""
        total = None
        for strength, changes, entries in self._changes:
            entry = entries[parameter]
            found = [changes.get(name.format(layer)) for name in entry.names]
            if not any(found):
                continue
            tensors = [
                np.zeros(shape, np.float32)
                if each is None
                else functools.reduce(operator.add, (change.make(strength) for change in each))
                for each, shape in zip(found, entry.shapes, strict=True)
            ]
            added = entry.load(*tensors)
            total = added if total is None else total + added
        return total


def _pairs(loras: Sequence[LoraLike]) -> Iterator[tuple[Path, float]]:
    if isinstance(loras, str | Path) or not isinstance(loras, Sequence):
        raise TypeError(f"loras: expected a list of paths or (path, strength) pairs, got {loras!r}")
    for each in loras:
        path, strength = each if isinstance(each, tuple | list) and len(each) == 2 else (each, 1.0)
        number = isinstance(strength, numbers.Real) and not isinstance(strength, bool)
        if not isinstance(path, str | Path) or not number:
            raise TypeError(f"loras: expected a path or a (path, strength) pair, got {each!r}")
        if not math.isfinite(strength):
            raise ValueError(f"loras: expected a finite strength, got {strength} of {path}")
        yield Path(path), float(strength)


def _modules(
    file: TensorFile, layouts: dict[str, TensorMap]
) -> tuple[TensorMap, dict[str, dict[str, str]]]:
    """The layout that most of the keys belong to; by its modules, the keys by their roles."""
    tables = {name: _module_names(layout) for name, layout in layouts.items()}
    parsed = {key: _parsed(key) for key in file.shapes}
    if not parsed:
        raise LoraError(file.path, ["it has no tensors"])

    def matches(name: str) -> int:
        return sum(module in tables[name] for module, _ in filter(None, parsed.values()))

    best = max(layouts, key=matches)
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    problems = []
    for key, found in parsed.items():
        module = found and tables[best].get(found[0])
        if not found or module is None:
            problems.append(f"{key}: belongs to no tensor of the model")
        elif found[1] in modules[module]:
            problems.append(f"{key}: means the same as {modules[module][found[1]]}")
        elif file.dtypes[key] not in DTYPES:
            problems.append(f"{key}: {file.dtypes[key]} is not supported")
        else:
            modules[module][found[1]] = key
    if problems:
        raise LoraError(file.path, problems)
    return layouts[best], modules


def _module_names(layout: TensorMap) -> dict[str, str]:
    """Modules by the names that a LoRA may call them: their own, and those with underscores."""
    tensors = [name for entry in layout.entries for name, _ in entry.tensors()]
    modules = {name.rpartition(".")[0] for name in tensors} | set(tensors)
    return {f"_{name.replace('.', '_')}": name for name in modules} | {n: n for n in modules}


def _parsed(key: str) -> tuple[str, str] | None:
    """The module's name in the tables of `_module_names`, and the key's role."""
    for pattern, role in _ROLES:
        if found := pattern.search(key):
            module = key[: found.start()].replace(f"lora{_HYPHEN}", "").replace(_HYPHEN, ".")
            module = _UNDERSCORED.sub("_", _PREFIXES.sub("", module))
            return module, found.expand(role)
    return None


def _changes(
    file: TensorFile, layout: TensorMap, modules: dict[str, dict[str, str]]
) -> dict[str, list[_Change]]:
    """By the layout's tensors."""
    shapes = dict(tensor for entry in layout.entries for tensor in entry.tensors())
    alpha, problems = _said(file), []
    changes: dict[str, list[_Change]] = defaultdict(list)
    for module, keys in modules.items():
        try:
            for tensor, change in _of_module(file, module, keys, alpha):
                tensor = module if tensor == f"{module}.weight" and module in shapes else tensor
                if tensor not in shapes:
                    raise ValueError(f"{tensor} is no tensor of the model")
                if change.shape != _flat(shapes[tensor], change.shape):
                    raise ValueError(f"expected {shapes[tensor]}, got {change.shape}")
                changes[tensor].append(_reshaped(change, shapes[tensor]))
        except ValueError as error:
            problems.append(f"{', '.join(keys.values())}: {error}")
    if problems:
        raise LoraError(file.path, problems)
    return changes


def _reshaped(change: _Change, shape: Shape) -> _Change:
    return _Change(shape, lambda factor: change.make(factor).reshape(shape))


def _flat(shape: Shape, like: Shape) -> Shape:
    """A convolution's shape as a matrix, where it is compared with one."""
    return (shape[0], math.prod(shape[1:])) if len(like) == 2 < len(shape) else shape


def _said(file: TensorFile) -> float | None:
    """The alpha in PEFT's metadata; None where it says none.

    Raises:
      LoraError: settings that are not a plain product of two matrices, or no JSON.
    """
    try:
        said: dict[str, Any] = dict(json.loads(file.metadata.get(_METADATA, "{}")))
    except (ValueError, TypeError) as error:
        raise LoraError(file.path, [f"{_METADATA}: no valid JSON"]) from error
    said = {key.removeprefix("transformer."): value for key, value in said.items()}
    if wrong := [name for name in _NOT_MERGED if said.get(name)]:
        raise LoraError(file.path, [f"{_METADATA}: {name} is not supported" for name in wrong])
    alpha = said.get("lora_alpha")
    if alpha is not None and not isinstance(alpha, int | float):
        raise LoraError(file.path, [f"{_METADATA}: lora_alpha is no number: {alpha!r}"])
    return alpha


def _of_module(
    file: TensorFile, module: str, keys: dict[str, str], alpha: float | None
) -> Iterator[tuple[str, _Change]]:
    """Tensors that a module's keys change.

    Raises:
      ValueError: a half of a pair, or ranks that differ.
    """

    def read(role: str) -> np.ndarray:
        return file.tensor(keys[role]).astype(np.float32)

    for role, name in (("diff", "weight"), ("diff_b", "bias"), ("diff_m", "modulation")):
        if role in keys:
            shape = file.shapes[keys[role]]
            yield f"{module}.{name}", _Change(shape, lambda f, role=role: f * read(role))
    ups = sorted((r for r in keys if re.match(r"up \d", r)), key=lambda r: int(r[3:]))
    if not ups and "down" not in keys:
        if rest := [key for role, key in keys.items() if not role.startswith("diff")]:
            raise ValueError(f"{rest[0]} without its matrices")
        return
    if not ups or "down" not in keys or ups[-1] != f"up {len(ups) - 1}":
        raise ValueError("a half of a pair is missing")
    down, of_ups = file.shapes[keys["down"]], [file.shapes[keys[up]] for up in ups]
    if (
        len(down) < 2
        or not down[0]
        or any(len(up) < 2 or up[1] * len(ups) != down[0] for up in of_ups)
    ):
        raise ValueError(f"ranks differ: {of_ups} and {down}")
    for role in {"alpha", "alpha_scale"} & keys.keys():
        if math.prod(file.shapes[keys[role]]) != 1:
            raise ValueError(f"{role}: expected a number, got shape {file.shapes[keys[role]]}")
    rank, scale = of_ups[0][1], 1.0
    if "alpha_scale" in keys:
        scale = float(read("alpha_scale").item())
    elif "alpha" in keys or alpha is not None:
        scale = (float(read("alpha").item()) if "alpha" in keys else alpha or 0.0) / rank

    rows = sum(up[0] for up in of_ups)

    def product(factor: float) -> np.ndarray:
        parts = np.split(factor * scale * read("down").reshape(down[0], -1), len(ups))
        result = np.empty((rows, parts[0].shape[1]), np.float32)
        begin = 0
        for up, shape, part in zip(ups, of_ups, parts, strict=True):
            np.matmul(read(up).reshape(-1, rank), part, out=result[begin : begin + shape[0]])
            begin += shape[0]
        return result

    yield f"{module}.weight", _Change((rows, math.prod(down[1:])), product)
    if "up bias" in keys:
        shape = file.shapes[keys["up bias"]]
        yield f"{module}.bias", _Change(shape, lambda factor: factor * scale * read("up bias"))
