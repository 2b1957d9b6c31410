"""A tiny model and a short film, so that the whole job takes seconds."""

import pathlib

import cv2
import jax
import numpy as np
import pytest
from flax import nnx

from vc_jax.models import VideoDiT, VideoDiTConfig, save_weights

FILM_FRAMES = 12


def make_film(path: pathlib.Path, frames: int = FILM_FRAMES) -> None:
    """A bright square that moves over a gradient, 160x90."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 24.0, (160, 90))
    rows, columns = np.mgrid[:90, :160]
    ground = np.stack([rows * 2, columns, 200 - rows], -1).astype(np.uint8)
    for index in range(frames):
        frame = ground.copy()
        frame[30:60, 60 + 3 * index : 85 + 3 * index] = (40, 220, 240)
        writer.write(frame)
    writer.release()


def make_weights(path: pathlib.Path) -> None:
    """An untrained model whose output is not zero."""
    config = VideoDiTConfig(width=32, num_layers=2, num_heads=1, head_dim=32, mlp_width=64)
    model = VideoDiT(config, rngs=nnx.Rngs(0))
    shape = model.output.kernel.shape
    model.output.kernel[...] = 0.1 * jax.random.normal(jax.random.key(1), shape)
    save_weights(path, nnx.state(model, nnx.Param), config)


@pytest.fixture(scope="session")
def film(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    make_film(path)
    return path


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    make_weights(path)
    return path


@pytest.fixture(scope="session")
def tiny(film, weights) -> list[str]:
    """Arguments of a run that takes seconds."""
    return [
        *("sample", "--video", str(film), "--weights", str(weights)),
        *("--frames", "5", "--size", "16x32", "--steps", "3"),
    ]
