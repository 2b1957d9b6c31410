"""Subcommands other than `sample`, and what importing the package needs."""

import subprocess
import sys
import types

import pytest

import vc_jax
from vc_jax import _cli


def test_the_parser_knows_the_presets():
    assert set(_cli._PRESETS) == set(vc_jax.PRESETS)


@pytest.mark.parametrize("command", [[], ["sample"], ["bench"], ["info"]])
def test_help_names_the_command(command, capsys):
    with pytest.raises(SystemExit) as stop:
        _cli.main([*command, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(" ".join(["usage: vc-jax", *command]))


def test_no_command_shows_the_help(capsys):
    assert _cli.main([]) == 0
    assert "sample" in capsys.readouterr().out


def test_version_is_the_packages(capsys):
    assert _cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"vc-jax {vc_jax.__version__}\n"


def test_info_names_every_implementation_of_every_preset(capsys):
    assert _cli.main(["info"]) == 0
    text = capsys.readouterr().out
    for preset in vc_jax.PRESETS:
        assert f"{preset:<7} runs on" in text
    for name in ("hopper", "mma", "cudnn"):
        assert text.count(f"not {name}: ") + text.count(f"runs on {name}") == len(vc_jax.PRESETS)


def test_a_benchmark_gets_its_own_arguments(monkeypatch):
    given = []
    module = types.ModuleType("vc_jax.benchmarks.end_to_end")
    module.main = lambda argv: given.append(argv) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert _cli.main(["bench", "end-to-end", "--model", "small", "--help"]) == 7
    assert given == [["--model", "small", "--help"]]


def test_the_package_imports_without_flax_or_opencv():
    code = "import sys; sys.modules.update(flax=None, cv2=None); import vc_jax, vc_jax._cli"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_dependency_is_one_line(monkeypatch, capsys):
    for name in [n for n in sys.modules if n.startswith("vc_jax.models")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax", None)
    assert _cli.main(["sample"]) == 2
    assert capsys.readouterr().err == "vc-jax sample: cannot import flax: install vc-jax[video]\n"
