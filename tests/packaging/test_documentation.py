"""The documentation is true: its examples run, its reference is complete, its links lead on."""

import doctest
import functools
import importlib
import importlib.util
import pathlib
import re
import subprocess

import pytest

import vc_jax

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
PACKAGES = ("vc_jax", "models", "benchmarks", "pallas_kernels")


def load_build_api():
    spec = importlib.util.spec_from_file_location("build_api", ROOT / "docs" / "build_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_the_sampling_loop_of_the_readme_uses_its_state():
    state = run_examples("README.md")["state"]
    assert isinstance(state, vc_jax.AttentionState)
    assert bool(state.made)


def modules_with_examples() -> list[str]:
    files = (f for package in PACKAGES for f in sorted((ROOT / package).glob("*.py")))
    names = []
    for file in files:
        if ">>>" in file.read_text():
            parent = file.parent.name
            below = "vc_jax" if parent == "vc_jax" else f"vc_jax.{parent}"
            names.append(f"{below}.{file.stem}")
    return names


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_api_reference_is_up_to_date():
    build_api = load_build_api()
    assert build_api.PAGE.read_text() == build_api.make_page(), "run docs/build_api.py"


def test_the_api_reference_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in vc_jax.__all__ if f"### `vc_jax.{name}`" not in text]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_changelog_has_this_version():
    assert f"## {vc_jax.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_setup_script_names_the_two_commands_of_the_readme():
    shown = subprocess.run([ROOT / "vc", "--help"], capture_output=True, text=True, check=True)
    for command in ("./vc sample", "./vc test"):
        assert command in shown.stdout
        assert command in (ROOT / "README.md").read_text()
