"""The shipped weights, clip, measurements and model card."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vc_jax.models.common.video import read_video
from vc_jax.models.training import clip_statistics, evaluate
from vc_jax.models.training.film import WINDOW
from vc_jax.models.training.training_step import from_pixels
from vc_jax.models.video_dit import flow, sampler
from vc_jax.models.video_dit.weights import SHIPPED_WEIGHTS, load_video_dit

FOLDER = SHIPPED_WEIGHTS.parent
CLIP = FOLDER / "big_buck_bunny.mp4"
CLIP_FRAMES = (10260, 10303)


def read_json(name: str):
    return json.loads((FOLDER / name).read_text())


@pytest.fixture(scope="module")
def model():
    return load_video_dit()


@pytest.fixture(scope="module")
def clip() -> np.ndarray:
    pytest.importorskip("cv2")
    return read_video(CLIP, height=88, width=160)


def test_weights_are_small_enough_and_of_the_documented_size(model):
    assert SHIPPED_WEIGHTS.stat().st_size <= 16_000_000
    parameters = nnx.state(model, nnx.Param)
    assert sum(array.size for array in jax.tree.leaves(parameters)) == 7_007_280


def test_shipped_weights_predict_the_velocity_of_a_held_out_scene(model, clip):
    """From four clean frames the error is far below that of any guess from single pixels."""
    real = from_pixels(jnp.asarray(clip[None, :16, 24:56, 48:112]))
    noise = sampler.draw_noise(0, real.shape)
    t, count = jnp.full(1, 0.5), jnp.full(1, 4)
    error = jax.jit(lambda: flow.velocity_errors(model, real, noise, t, count))()
    assert np.all(np.isfinite(error))
    linear_guess = 0.25 / (0.25 * 0.25 + 0.25)
    assert float(error[0]) < 0.05 * linear_guess


def test_shipped_clip_is_whole_and_holds_enough_frames_for_a_sample(clip):
    assert clip.shape == (CLIP_FRAMES[1] - CLIP_FRAMES[0], 88, 160, 3)
    assert clip.std() > 20


def test_shipped_clip_carries_its_attribution():
    assert b"2008 Blender Foundation, www.bigbuckbunny.org, CC BY 3.0" in CLIP.read_bytes()
    assert CLIP.stat().st_size < 1_000_000


def test_shipped_clip_and_evaluation_clips_lie_in_held_out_scenes():
    scenes = read_json("run.json")["held_out_scenes"]
    clips = [CLIP_FRAMES] + [(s, s + 16) for s in read_json("evaluation.json")["clip_starts"]]
    for start, stop in clips:
        assert any(a <= start and stop <= b for a, b in scenes), start


def test_the_setting_of_the_evaluation_is_the_samplers_default():
    evaluation = read_json("evaluation.json")
    default = evaluation["samples"][0]
    assert evaluation["steps"] == sampler.DEFAULT_STEPS
    assert evaluation["frames"] == f"{clip_statistics.FIRST_FRAME}-{WINDOW - 1}"
    assert default["condition_frames"] == evaluate.CONDITION_FRAMES
    assert default["shift"] == sampler.DEFAULT_SHIFT
    assert set(evaluation["velocity_mse"]["4"]) == {str(t) for t in evaluate.LOSS_TIMES}


@pytest.mark.parametrize("name", ["frame_difference_energy", "laplacian_variance"])
def test_evaluated_statistics_of_the_film_are_those_of_the_shipped_clip(clip, name):
    """Two of the evaluated clips lie in the shipped one."""
    evaluation = read_json("evaluation.json")
    starts = [
        s for s in evaluation["clip_starts"] if CLIP_FRAMES[0] <= s <= CLIP_FRAMES[1] - WINDOW
    ]
    assert len(starts) == 2
    clips = np.stack([clip[s - CLIP_FRAMES[0] :][:WINDOW] for s in starts])
    measured = getattr(clip_statistics, name)(clips)
    for entry in evaluation["samples"]:
        listed = entry["per_clip"][f"real_{name}"]
        listed = [listed[evaluation["clip_starts"].index(s)] for s in starts]
        np.testing.assert_allclose(listed, measured, rtol=0.01)


@pytest.mark.parametrize("name", ["frame_difference_energy", "laplacian_variance"])
def test_summaries_are_what_the_code_makes_of_the_numbers_of_the_clips(name):
    evaluation = read_json("evaluation.json")
    for entry in evaluation["samples"]:
        sampled, real = (np.array(entry["per_clip"][f"{of}{name}"]) for of in ("", "real_"))
        assert len(sampled) == len(real) == entry["clips"] == len(evaluation["clip_starts"])
        # The numbers of the clips are rounded, some to three digits.
        want = pytest.approx(entry[f"{name}_ratio"], rel=1e-3)
        assert clip_statistics.ratios(sampled, real) == want


def test_model_card_states_the_measured_numbers():
    card = (pathlib.Path(FOLDER).parent / "MODEL_CARD.md").read_text()
    evaluation, run = read_json("evaluation.json"), read_json("run.json")
    for losses in evaluation["velocity_mse"].values():
        for loss in losses.values():
            assert f"{loss:.4f}" in card
    for entry in evaluation["samples"]:
        for name in ("frame_difference_energy_ratio", "laplacian_variance_ratio"):
            for value in entry[name].values():
                assert f"{value:.2f}" in card, (name, value)
    for steps in run["steps"].values():
        assert f"{steps:,}".replace(",", " ") in card
    assert run["date"] in card
    assert "© 2008 Blender Foundation" in card
    assert "Creative Commons Attribution 3.0" in card


def test_pictures_of_the_model_card_exist_and_are_small():
    card = pathlib.Path(FOLDER).parent / "MODEL_CARD.md"
    for name in ("loss.png", "contact_sheet.png"):
        assert f"data/{name}" in card.read_text()
        assert (FOLDER / name).stat().st_size <= 600_000
