"""Which files hold one copy of a model's weights, and which of their tensors are the model's."""

import re
from pathlib import Path

from .release import read_json

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""What single-file checkpoints put before the names of the transformer's tensors."""

_OTHER_PARTS = (
    "first_stage_model.",
    "vae.",
    "cond_stage_model.",
    "conditioner.",
    "text_encoders.",
)
"""Parts that such a file may hold besides the transformer."""


def choose(path: Path, variant: str | None) -> list[Path]:
    """The safetensors that a path stands for.

    Args:
      path: one file, or a folder.
      variant: chooses among the copies in a folder: the name before `.safetensors` (and before
        the number of a shard), or how it ends: `"ema"` for `model_ema.safetensors`, `"fp16"` for
        `diffusion_pytorch_model.fp16.safetensors`.

    Returns:
      What the variant's or the only index names; without an index, all files of the variant or
      of the folder.

    Raises:
      FileNotFoundError: nothing there; says where the transformers are below a repository's root.
      ValueError: a file that is none of safetensors, several indices, or a variant that no file or
        several have.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(f"path: expected a .safetensors file or a folder, got {path}")
        if variant is not None:
            raise ValueError(f"variant: {path.name} is a file of its own; pass its folder")
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(_nowhere(path))
    files = sorted(path.glob("*.safetensors"))
    indices = {_index_copy(file): file for file in sorted(path.glob("*.safetensors.index*.json"))}
    if not files and not indices:
        raise FileNotFoundError(_empty(path))
    if variant is not None:
        copies = sorted({copy_name(file) for file in files} | set(indices))
        fitting = [name for name in copies if re.search(rf"(^|[._-]){re.escape(variant)}$", name)]
        exact = [name for name in fitting if name == variant]
        if len(exact or fitting) != 1:
            raise ValueError(f"variant: {variant!r} is none or several of {copies} in {path}")
        (chosen,) = exact or fitting
        indices = {chosen: indices[chosen]} if chosen in indices else {}
        files = [file for file in files if copy_name(file) == chosen]
    if len(indices) > 1:
        names = [file.name for file in indices.values()]
        raise ValueError(f"path: several indices in {path}: {names}; pass variant=")
    for index in indices.values():
        return _indexed(index)
    return files


def copy_name(file: Path) -> str:
    """The name of the copy that a file belongs to: without a shard's number."""
    return re.sub(r"-\d+-of-\d+$", "", file.stem)


def _index_copy(index: Path) -> str:
    """`x.safetensors.index.fp16.json` is of the copy `x.fp16`."""
    name, _, rest = index.name.partition(".safetensors.index")
    return name + rest.removesuffix(".json")


def _indexed(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"path: {index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise FileNotFoundError(f"path: {index.name} names absent files {absent}")
    return [index.parent / name for name in names]


def _nowhere(path: Path) -> str:
    hint = ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        hint = "; if it is a hub's name, download it and pass the folder of its transformer"
    return f"path: no file or folder {path}{hint}"


def _empty(path: Path) -> str:
    """Names the transformers below a repository's root."""
    below = {file.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/*.safetensors")}
    names = sorted(str(folder.relative_to(path)) for folder in below)
    transformers = [name for name in names if not re.search("encoder|vae|lora", name)]
    if not transformers:
        return f"path: no .safetensors file at {path}"
    return f"path: {path} is a repository; pass one of its transformers' folders: {transformers}"


def transformer_names(names: list[str]) -> dict[str, str]:
    """The transformer's tensors by their names without a prefix, and what they are called.

    In a file with a prefix, tensors of the other parts that it may hold are left out; whatever
    else has none keeps its name.

    Raises:
      ValueError: a tensor with and without the prefix.
    """
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in names)), None)
    if prefix is None:
        return {name: name for name in names}
    kept = [name for name in names if not name.startswith(_OTHER_PARTS)]
    twice = sorted(name for name in kept if prefix + name in kept)
    if twice:
        raise ValueError(f"path: {twice[0]!r} with and without the prefix {prefix!r}")
    return {name.removeprefix(prefix): name for name in kept}
