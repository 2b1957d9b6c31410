"""Writes docs/api.md, the API reference, from the signatures and docstrings of `vc_jax`.

python docs/build_api.py            writes the file
python docs/build_api.py --check    exits with 1 if the file is not up to date
"""

import argparse
import ast
import importlib
import inspect
import itertools
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"

SECTIONS = {
    "Attention": ["dot_product_attention", "explain", "Explanation", "compare", "Comparison"],
    "Configuration": ["AttentionConfig", "PRESETS", "default_clusters", "default_lloyd_stride"],
    "State over denoising steps": [
        "DenoisingSchedule",
        "init_state",
        "attention_step",
        "reset",
        "AttentionState",
    ],
    "Flax": ["flax.attention_fn", "flax.FlaxAttention"],
}
"""Headings and their names; all other public names follow under the last heading."""
LAST_SECTION = "Building blocks"

_FIELDS = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")
_WIDTH = 100


def public_names() -> list[str]:
    """Every name that the page must have, in its order."""
    import vc_jax

    named = [name for names in SECTIONS.values() for name in names]
    return named + sorted((n for n in vc_jax.__all__ if n not in named), key=str.lower)


def resolve(name: str) -> tuple[Any, Any]:
    """The object behind a name below `vc_jax`, and the module that defines it."""
    parent, _, last = f"vc_jax.{name}".rpartition(".")
    # A cached or jitted function stands for the one inside.
    found = inspect.unwrap(getattr(importlib.import_module(parent), last))
    if inspect.isclass(found) or inspect.isfunction(found):
        return found, inspect.getmodule(found)
    modules = [m for n, m in sys.modules.items() if n.startswith("vc_jax._") and hasattr(m, last)]
    defining = [m for m in modules if _assignment(m, last)]
    return found, defining[0]


def _assignment(module: Any, name: str) -> tuple[str, str] | None:
    """Source and docstring of a constant."""
    source = inspect.getsource(module)
    for statement, following in itertools.pairwise(ast.parse(source).body):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and any(
            isinstance(target, ast.Name) and target.id == name for target in targets
        ):
            text = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = str(following.value.value)
            return ast.get_source_segment(source, statement) or "", text
    return None


def _definition(thing: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def _signature(node: ast.FunctionDef, name: str) -> str:
    """A function's signature as source, one argument a line where it is long."""
    returns = f" -> {_source(node.returns)}" if node.returns else ""
    short = f"{name}({_source(node.args)}){returns}"
    if len(short) <= _WIDTH:
        return short
    lines = "".join(f"    {part},\n" for part in _arguments(node.args))
    return f"{name}(\n{lines}){returns}"


def _arguments(args: ast.arguments) -> Iterator[str]:
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    for arg, default in zip(plain, defaults):
        yield _argument(arg, default)
    if args.vararg:
        yield f"*{_argument(args.vararg, None)}"
    elif args.kwonlyargs:
        yield "*"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults):
        yield _argument(arg, default)
    if args.kwarg:
        yield f"**{_argument(args.kwarg, None)}"


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    text = _source(arg)
    if default is None:
        return text
    return f"{text} = {_source(default)}" if arg.annotation else f"{text}={_source(default)}"


def _source(node: ast.AST) -> str:
    """Source of a node, with double quotes as everywhere in this project."""
    return ast.unparse(node).replace("'", '"')


def markdown(docstring: str | None) -> str:
    """A docstring with its fields as lists and its examples as code."""
    made, in_fields, in_code = [], False, False
    for line in inspect.cleandoc(docstring or "").splitlines():
        example = line.startswith(">>>") or (in_code and line.strip() != "")
        if example != in_code:
            made.append("```python" if example else "```")
            in_code = example
        if example:
            made.append(line)
        elif field := _FIELDS.match(line):
            made += [f"**{field[1]}**", ""]
            in_fields = True
        elif in_fields and line.startswith("  "):
            made.append(_field(line))
        else:
            in_fields = in_fields and not line
            made.append(line)
    return "\n".join([*made, "```"] if in_code else made)


def _field(line: str) -> str:
    """A line of an indented section: an item where it names something, else its continuation."""
    text = line[2:]
    if text.startswith("  "):
        return text
    name, colon, rest = text.partition(": ")
    if colon and re.fullmatch(r"[\w., ()*]+", name):
        return f"* `{name}`: {rest}"
    if text.endswith(":") and re.fullmatch(r"[\w., ()*]+", text[:-1]):
        return f"* `{text[:-1]}`:"
    return text


def _entry(name: str) -> Iterator[str]:
    thing, module = resolve(name)
    short = name.rpartition(".")[2]
    yield f"### `vc_jax.{name}`\n"
    if inspect.isfunction(thing):
        yield _code(_signature(_definition(thing), short))
        yield markdown(thing.__doc__)
    elif inspect.isclass(thing):
        yield from _class_entry(thing)
    else:
        found = _assignment(module, short)
        assert found is not None
        yield _code(found[0])
        yield markdown(found[1])


def _class_entry(thing: type) -> Iterator[str]:
    node = _definition(thing)
    fields = [_source(part) for part in node.body if isinstance(part, ast.AnnAssign)]
    base = "(NamedTuple)" if issubclass(thing, tuple) else ""
    yield _code("\n".join([f"class {thing.__name__}{base}:", *(f"    {f}" for f in fields)]))
    yield markdown(thing.__doc__) + "\n"
    for part in node.body:
        if not isinstance(part, ast.FunctionDef):
            continue
        if part.name == "__call__" or not part.name.startswith("_"):
            kinds = [ast.unparse(decorator) for decorator in part.decorator_list]
            text = _signature(part, part.name)
            if "property" in kinds:
                text = f"{part.name}: {_source(part.returns)}" if part.returns else part.name
            yield f"#### `{thing.__name__}.{part.name}`\n"
            yield _code(text)
            yield markdown(ast.get_docstring(part)) + "\n"


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def make_page() -> str:
    """The whole page."""
    import vc_jax

    names = public_names()
    headings = {n: heading for heading, group in SECTIONS.items() for n in group}
    lines = ["# API reference\n", f"{inspect.cleandoc(vc_jax.__doc__ or '')}\n"]
    lines.append("Made by `docs/build_api.py` from the docstrings; do not edit.\n")
    current = None
    for name in names:
        heading = headings.get(name, LAST_SECTION)
        if heading != current:
            lines.append(f"## {heading}\n")
            current = heading
        lines += [*_entry(name), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    page = make_page()
    if not parser.parse_args().check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is not up to date: run docs/build_api.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
