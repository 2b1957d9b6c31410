"""Who may import whom (`docs/architecture.md`): models and benchmarks, vc_jax, pallas_kernels."""

import ast
import graphlib
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FLOORS = ("vc_jax", "models", "benchmarks", "pallas_kernels")
FORBIDDEN = {
    "pallas_kernels": ("vc_jax", "vc_jax.models", "vc_jax.benchmarks", "flax"),
    "vc_jax": ("vc_jax.models", "vc_jax.benchmarks", "flax", "cv2", "matplotlib", "optax"),
    "models": ("vc_jax.benchmarks",),
}
"""Floor -> what it never imports, at its modules' tops or inside functions."""


def modules(floor: str) -> list[pathlib.Path]:
    """The floor's files; the links in `vc_jax` lead to other floors."""
    if floor != "vc_jax":
        return sorted((ROOT / floor).rglob("*.py"))
    return sorted([*(ROOT / floor).glob("*.py"), *(ROOT / floor / "sharding").glob("*.py")])


def location(path: pathlib.Path) -> tuple[str, ...]:
    """A file's name as an installed module, a package's ending in `__init__`."""
    place = path.relative_to(ROOT).with_suffix("").parts
    return place if place[0] == "vc_jax" else ("vc_jax", *place)


def run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a module is imported: none of a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from run_at_import(node)


def imports(path: pathlib.Path, nodes=ast.walk) -> Iterator[str]:
    """Absolute names of the modules and names that a file imports, by their installed names."""
    package = location(path)[:-1]
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            lead = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*lead, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("floor", FORBIDDEN)
def test_a_floor_imports_nothing_of_those_above(floor):
    for path in modules(floor):
        for name in imports(path):
            # What lies in the wheel's folder `vc_jax/pallas_kernels` is not the library.
            own = floor == "pallas_kernels" and within(name, "vc_jax.pallas_kernels")
            wrong = [other for other in FORBIDDEN[floor] if within(name, other) and not own]
            assert not wrong, f"{path.relative_to(ROOT)} imports {name}"


def test_models_use_public_names_of_the_library_only():
    for path in modules("models"):
        for name in imports(path):
            parts = name.split(".")
            private = parts[0] == "vc_jax" and len(parts) > 1 and parts[1].startswith("_")
            assert not private, f"{path.relative_to(ROOT)} imports {name}"
            assert not within(name, "vc_jax.pallas_kernels"), f"{path.relative_to(ROOT)}: {name}"


@pytest.mark.parametrize("floor", FLOORS)
def test_every_import_names_the_installed_package(floor):
    """A bare `models` or `benchmarks` would be whatever lies on the user's path."""
    for path in modules(floor):
        for name in imports(path):
            assert name.split(".")[0] not in FLOORS[1:], f"{path.relative_to(ROOT)} imports {name}"


def importing(files: dict[str, pathlib.Path]) -> dict[str, set[str]]:
    """Module -> those that it imports when it is imported itself, by the file of each name."""
    graph = {}
    for module, path in files.items():
        graph[module] = set()
        for name in imports(path, run_at_import):
            parts = name.split(".")
            # The longest known start: what follows is a name inside of that module.
            starts = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            graph[module].update([start for start in starts if start in files][:1])
    return graph


def test_no_module_imports_itself_through_others():
    files = {
        ".".join(location(path)).removesuffix(".__init__"): path
        for floor in FLOORS
        for path in modules(floor)
    }
    graph = importing(files)
    assert "vc_jax.pallas_kernels.layout" in graph["vc_jax._dispatch"]
    graphlib.TopologicalSorter(graph).prepare()  # raises with the circle
