"""The documentation is true: its examples run, its reference is complete, its links lead on."""

import doctest
import functools
import importlib
import pathlib
import re
import subprocess

import pytest

import vc_jax

ROOT = pathlib.Path(__file__).parents[2]
ROOT_PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES = sorted([*ROOT_PAGES, *(ROOT / "docs").rglob("*.md")])
API = sorted((ROOT / "docs" / "api").glob("*.md"))
DOCUMENTED = (
    "vc_jax",
    "vc_jax.models",
    "vc_jax.models.wan",
    "vc_jax.models.hunyuan_video15",
    "vc_jax.models.longcat_video",
    "vc_jax.models.minimax_h3",
    "vc_jax.pallas_kernels.hopper",
)
"""Modules whose public names all are in the API reference."""
PACKAGES = ("vc_jax", "models", "benchmarks", "pallas_kernels")


def examples(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@functools.cache
def run_examples(name: str) -> dict[str, object]:
    """Runs a page's examples from top to bottom and returns what they have defined."""
    blocks = examples(ROOT / name)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("name", ["README.md", "docs/migrating.md"])
def test_the_examples_of_a_page_run_from_top_to_bottom(name):
    assert "out" in run_examples(name) or "after" in run_examples(name)


def test_every_page_with_examples_is_run():
    # Those of integration, models and scaling run in tests/ported_models/test_integration.py.
    found = {page.relative_to(ROOT).as_posix() for page in PAGES if examples(page)}
    of_docs = ("migrating", "integration", "models", "scaling")
    assert found == {"README.md", *(f"docs/{page}.md" for page in of_docs)}


def test_the_sampling_loop_of_the_readme_uses_its_state():
    state = run_examples("README.md")["state"]
    assert isinstance(state, vc_jax.AttentionState)
    assert bool(state.made)


def modules_with_examples() -> list[str]:
    names = []
    for package in PACKAGES:
        # The folders in `vc_jax` are links to the other packages.
        folder = ROOT / package
        for file in sorted(folder.glob("*.py") if package == "vc_jax" else folder.rglob("*.py")):
            if ">>>" in file.read_text():
                parts = file.relative_to(ROOT).with_suffix("").parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                names.append(".".join(parts if package == "vc_jax" else ("vc_jax", *parts)))
    return names


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def documented() -> list[str]:
    """Every name that a page of the API reference asks for."""
    return [name for page in API for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]


def test_the_api_reference_has_every_public_name_once():
    wanted = [
        f"{module}.{name}"
        for module in DOCUMENTED
        for name in importlib.import_module(module).__all__
    ]
    names = documented()
    assert sorted(set(wanted) - set(names)) == []
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", documented())
def test_every_name_of_the_api_reference_can_be_imported(name):
    module, _, last = name.rpartition(".")
    assert hasattr(importlib.import_module(module), last)


def test_every_page_of_the_docs_is_in_the_navigation():
    shown = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in shown] == []


def test_shapes_are_shown_as_they_are_written():
    griffe = pytest.importorskip("griffe", reason="the docs extra is not installed")
    extensions = griffe.load_extensions(str(ROOT / "docs" / "_jaxtyping_shapes.py"))
    source = """
from jaxtyping import Array, Float, Int
def attend(query: Float[Array, "*b t n h"], count: Int[Array, " b"] | None) -> tuple[Array, None]:
    ...
"""
    modules = {"__init__.py": source}
    with griffe.temporary_visited_package("shown", modules, extensions=extensions) as package:
        function = package["attend"]
        shown = [str(parameter.annotation) for parameter in function.parameters]
        assert shown == ['Float[Array, "*b t n h"]', 'Int[Array, "b"] | None']
        assert str(function.returns) == "tuple[Array, None]"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    "name", ["docs/architecture.md", "docs/jax_internals.md", "CONTRIBUTING.md"]
)
def test_files_that_a_page_names_exist(name):
    named = re.findall(r"`([\w./-]+\.(?:py|yml))(?::[^`]*)?`", (ROOT / name).read_text())
    there = {file.name for folder in (*PACKAGES, "tests") for file in (ROOT / folder).rglob("*.py")}
    assert named
    assert [file for file in named if not (ROOT / file).exists() and file not in there] == []


def test_the_changelog_has_this_version():
    assert f"## {vc_jax.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_setup_script_names_the_two_commands_of_the_readme():
    shown = subprocess.run([ROOT / "vc", "--help"], capture_output=True, text=True, check=True)
    for command in ("./vc sample", "./vc test"):
        assert command in shown.stdout
        assert command in (ROOT / "README.md").read_text()
