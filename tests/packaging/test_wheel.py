"""The wheel works wherever it is installed, next to whatever lies around."""

import json
import pathlib
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

from .conftest import build

QUICK = ["sample", "--frames", "5", "--size", "16x32", "--steps", "1", "--attention", "int8"]
FOREIGN = ("models", "benchmarks", "pallas_kernels")


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> pathlib.Path:
    """A fresh environment with the wheel; dependencies come from the running one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.fixture(params=["empty", "hostile"])
def folder(request, tmp_path) -> pathlib.Path:
    """A working folder, empty or with packages whose names are also ours."""
    if request.param == "hostile":
        for name in FOREIGN:
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('foreign {name}')\n")
    return tmp_path


def run(command: list[str], folder: pathlib.Path) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_samples_with_what_the_wheel_ships(environment, folder):
    run([str(environment / "bin" / "vc-jax"), *QUICK], folder)
    report = json.loads((folder / "vc-jax-sample" / "report.json").read_text())
    assert report["model"]["weights"] == "shipped"
    assert "Blender Foundation" in report["clip"]["credit"]
    assert report["methods"]["int8"]["to_reference"]["relative_l2"] > 0


def test_the_module_is_the_command(environment, folder):
    python = str(environment / "bin" / "python")
    assert "runs on" in run([python, "-m", "vc_jax", "info"], folder)


def test_the_installed_package_is_the_one_that_runs(environment, folder):
    python = str(environment / "bin" / "python")
    code = "import vc_jax.models as m, vc_jax.benchmarks as b; print(m.__file__, b.__file__)"
    for path in run([python, "-c", code], folder).split():
        assert path.startswith(str(environment))


def contents(wheel: pathlib.Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_the_wheel_holds_every_source_file_inside_the_package(wheel, root):
    names = {n for n in contents(wheel) if ".dist-info/" not in n}
    assert all(name.startswith("vc_jax/") for name in names)
    assert not [name for name in names if "__pycache__" in name]
    wanted = {f"vc_jax/{p.name}" for p in (root / "vc_jax").glob("*.py")}
    for package in FOREIGN:
        files = (p for p in (root / package).rglob("*") if p.is_file())
        wanted |= {f"vc_jax/{p.relative_to(root)}" for p in files if "__pycache__" not in p.parts}
    assert wanted <= names
    assert "vc_jax/py.typed" in names
    assert "vc_jax/models/sample_job/template.html" in names


def test_the_wheel_holds_the_shipped_model_and_clip(wheel):
    data = {n for n in contents(wheel) if n.startswith("vc_jax/models/data/")}
    assert "vc_jax/models/data/video_dit.safetensors" in data
    assert [n for n in data if n.endswith(".mp4")]


def test_a_wheel_made_from_the_sdist_is_the_same(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    (tmp_path / "dist").mkdir()
    again = build("wheel", source, tmp_path / "dist")
    assert contents(again) == contents(wheel)


def test_the_sdist_can_be_tested(sdist):
    with tarfile.open(sdist) as file:
        names = {name.split("/", 1)[1] for name in file.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "vc"} <= names
    assert "tests/packaging/test_wheel.py" in names
    assert not [n for n in names if n.startswith("vc_jax/models/")]
