"""The optimiser, the compiled training steps, and the training script end to end."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from vc_jax.models.training import training_step as ts
from vc_jax.models.video_dit import VideoDiT, VideoDiTConfig, create_video_dit

pytest.importorskip("optax")

from vc_jax.models.training import optimiser as opt

TINY = VideoDiTConfig(
    width=32, num_layers=2, num_heads=1, head_dim=12, mlp_width=64, compute_dtype="float32"
)


def made_up_film(frames: int = 60) -> np.ndarray:
    """Bright discs on dark ground, moving to the right."""
    y, x = np.mgrid[:16, :24]
    film = []
    for i in range(frames):
        disc = (y - 8) ** 2 + (x - i % 24) ** 2 < 20
        film.append(np.where(disc[..., None], 220, 40) * np.ones(3))
    return np.stack(film).astype(np.uint8)


@pytest.fixture(scope="module")
def trained():
    """State before and after 120 steps of a tiny model, with the losses."""
    mesh = ts.data_mesh(jax.devices()[:1])
    everywhere = NamedSharding(mesh, PartitionSpec())
    definition, parameters = nnx.split(create_video_dit(TINY), nnx.Param)
    optimiser = opt.build_optimiser()
    start = jax.device_put(ts.initial_state(parameters, optimiser), everywhere)
    frames = jnp.asarray(made_up_film())
    film = ts.Film(frames, jnp.arange(50, dtype=jnp.int32), jnp.linspace(0.02, 1.0, 50))
    film = jax.device_put(film, everywhere)
    steps = ts.make_train_steps(
        definition, optimiser, mesh, ts.StageShape(4, 4, 8, 8), steps=60, average_decay=0.9
    )
    state, losses = jax.tree.map(jnp.copy, start), []
    for call in range(2):
        state, loss, norms = steps(state, film, jax.random.key(call), jnp.float32(3e-3))
        losses.append(loss)
        assert np.all(np.isfinite(norms))
    return start, state, np.concatenate(losses)


def test_training_reduces_the_loss(trained):
    _, _, losses = trained
    assert losses[-20:].mean() < 0.5 * losses[:5].mean()


def test_training_moves_every_parameter_and_counts_its_steps(trained):
    start, state, _ = trained
    assert state.step == 120
    before = dict(jax.tree_util.tree_leaves_with_path(start.parameters))
    for path, array in jax.tree_util.tree_leaves_with_path(state.parameters):
        assert not np.array_equal(before[path], array), jax.tree_util.keystr(path)


def test_average_lies_between_and_follows(trained):
    start, state, _ = trained

    def distance(a, b):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return sum(float(np.square(np.asarray(x) - np.asarray(y)).sum()) for x, y in pairs)

    assert distance(state.average, state.parameters) > 0
    assert distance(state.average, state.parameters) < distance(start.parameters, state.parameters)


def test_matrices_of_the_blocks_and_nothing_else_are_orthogonalised():
    parameters = nnx.state(nnx.eval_shape(lambda: VideoDiT(TINY, rngs=nnx.Rngs(0))), nnx.Param)
    axes = opt.matrix_axes(parameters)
    flat = jax.tree_util.tree_leaves_with_path(
        axes, is_leaf=lambda leaf: isinstance(leaf, opt.MuonDimensionNumbers)
    )
    names = {".".join(opt._path_names(path)) for path, _ in flat}
    assert names == {
        "blocks.attention.qkv.kernel",
        "blocks.attention.out.kernel",
        "blocks.up.kernel",
        "blocks.down.kernel",
    }


def test_muon_steps_are_orthogonal_per_layer_and_projection():
    """The step of q in a layer has near-equal singular values, whatever k's gradient is."""
    shape = (2, 32, 3, 1, 12)
    parameters = {"blocks": {"attention": {"qkv": {"kernel": jnp.zeros(shape)}}}}
    gradient = jax.random.normal(jax.random.key(0), shape).at[:, :, 1].multiply(1e3)
    gradients = {"blocks": {"attention": {"qkv": {"kernel": gradient}}}}
    optimiser = opt.build_optimiser()
    updates, _ = jax.jit(optimiser.update)(gradients, optimiser.init(parameters), parameters)
    kernel = updates["blocks"]["attention"]["qkv"]["kernel"]
    for layer in range(2):
        for projection in range(3):
            step = kernel[layer, :, projection, 0]
            values = np.linalg.svd(step, compute_uv=False)
            assert values.max() / values.min() < 3.0
            assert 0.1 < np.sqrt(np.mean(np.square(step))) < 0.3


def test_learning_rate_warms_up_and_falls_with_the_budget():
    assert opt.learning_rate(1.0, 0.0, 0) == pytest.approx(0.01)
    assert opt.learning_rate(1.0, 0.0, 1000) == pytest.approx(1.0)
    assert opt.learning_rate(1.0, 0.5, 1000) == pytest.approx(0.51)
    assert opt.learning_rate(1.0, 1.5, 1000) == pytest.approx(0.02)


def test_drawn_clips_are_windows_of_the_film():
    frames = jnp.asarray(made_up_film())
    film = ts.Film(frames, jnp.array([7], jnp.int32), jnp.ones(1))
    clips = ts.draw_clips(film, jax.random.key(0), ts.StageShape(8, 4, 16, 24))
    plain = ts.from_pixels(frames[7:11])
    mirrored = plain[:, :, ::-1]
    same = [np.array_equal(clip, plain) for clip in clips]
    flipped = [np.array_equal(clip, mirrored) for clip in clips]
    assert sum(same) + sum(flipped) == 8
    assert any(same)
    assert any(flipped)


def test_windows_of_no_probability_are_not_drawn():
    frames = jnp.arange(30, dtype=jnp.uint8)[:, None, None, None] * jnp.ones(
        (1, 4, 4, 3), jnp.uint8
    )
    film = ts.Film(frames, jnp.array([0, 10, 20], jnp.int32), jnp.array([0.5, 0.5, 1.0]))
    clips = ts.draw_clips(film, jax.random.key(0), ts.StageShape(64, 1, 4, 4))
    assert set(np.unique(ts.to_pixels(clips))) == {0, 20}


def test_bytes_survive_the_way_to_floats_and_back():
    values = jnp.arange(256, dtype=jnp.uint8)
    np.testing.assert_array_equal(ts.to_pixels(ts.from_pixels(values)), values)
    np.testing.assert_array_equal(ts.to_pixels(jnp.array([-3.0, 3.0])), [0, 255])


def write_film(path) -> None:
    cv2 = pytest.importorskip("cv2")
    rng = np.random.default_rng(0)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 24, (64, 32))
    for shot in range(20):
        coarse = rng.integers(0, 120, (4, 30, 3)).astype(np.uint8) + np.uint8(shot % 2 * 120)
        texture = cv2.resize(coarse, (240, 32), interpolation=cv2.INTER_CUBIC)
        for i in range(50):
            writer.write(np.ascontiguousarray(texture[:, 2 * i : 2 * i + 64]))
    writer.release()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_trains_and_evaluates_and_leaves_everything_in_the_folder(tmp_path):
    pytest.importorskip("PIL")
    pytest.importorskip("matplotlib")
    from vc_jax.models.training import train
    from vc_jax.models.video_dit.weights import load_video_dit

    write_film(tmp_path / "film.avi")
    options = {
        "video": tmp_path / "film.avi",
        "output": tmp_path / "out",
        "seconds": 2,
        "ranges": "0-1000",
        "height": 8,
        "width": 16,
        "crop": 8,
        "crop-batch": 1,
        "frame-batch": 1,
        "model-width": 16,
        "model-layers": 1,
        "steps-per-call": 1,
        "evaluation-clips": 2,
        "evaluation-steps": 2,
        "devices": 1,
        "required-fall": 10,
    }
    argv = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    assert train.main(argv) == 0
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {
        "video_dit.safetensors",
        "loss.csv",
        "loss.png",
        "run.json",
        "evaluation.json",
        "contact_sheet.png",
    }
    rows = list(csv.DictReader((tmp_path / "out" / "loss.csv").read_text().splitlines()))
    assert {row["stage"] for row in rows} == {"crops", "frames"}
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert sum(run["steps"].values()) == len(rows)
    assert load_video_dit(tmp_path / "out" / "video_dit.safetensors").config.width == 16


def test_script_reports_a_missing_film_in_one_line(tmp_path, capsys):
    from vc_jax.models.training import train

    code = train.main(
        ["--video", str(tmp_path / "no.mp4"), "--output", str(tmp_path / "o"), "--seconds", "1"]
    )
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_ranges_are_parsed_or_explained():
    from vc_jax.models.training import train

    assert train.parse_ranges("0-10,20-30") == ((0, 10), (20, 30))
    with pytest.raises(ValueError, match="--ranges"):
        train.parse_ranges("all")
