import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    return ROOT


def build(target: str, source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Builds one distribution without a network."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="session")
def sdist(tmp_path_factory) -> pathlib.Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> pathlib.Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))
