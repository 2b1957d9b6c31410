"""The main job, end to end on a tiny model."""

import html.parser
import json
import re

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax import _cli
from vc_jax.models import load_video_dit, sample_job
from vc_jax.models.sample_job import FILES, Options
from vc_jax.models.sample_job.clip import load_clip, to_model
from vc_jax.models.sample_job.methods import Method, Task, measure_block_means
from vc_jax.models.sample_job.record import _finite
from vc_jax.models.video_dit import sampler

STEPS, FRAMES, GIVEN = 3, 5, 4


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """The output of a run of all methods."""
    output = tmp_path_factory.mktemp("sample") / "out"
    assert _cli.main([*tiny, "--output", str(output)]) == 0
    return output


@pytest.fixture(scope="module")
def report(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def task(film, weights):
    """600 tokens, so that blocks of 128 and clusters exist."""
    pixels = jnp.asarray(to_model(load_clip(film, 6, 40, 40).pixels))
    noise = sampler.draw_noise(0, pixels.shape)
    return Task(load_video_dit(weights), pixels, 2, noise, 6)


@pytest.fixture(scope="module")
def methods(task):
    return {name: Method(name, task, lambda *_: None) for name in ("bf16", "int8")}


def test_the_folder_holds_the_documented_files_and_nothing_stays_beside_it(folder):
    assert sorted(p.name for p in folder.iterdir()) == sorted(FILES)
    assert list(folder.parent.iterdir()) == [folder]


def test_every_preset_is_reported_with_bf16_as_reference(report):
    assert list(report["methods"]) == ["bf16", "int8", "fp8", "nvfp4"]
    assert report["reference"] == "bf16"
    assert report["methods"]["bf16"]["to_reference"] is None


def test_every_method_is_compiled_once(report):
    assert [m["traces"] for m in report["methods"].values()] == [1] * 4


def test_every_low_bit_method_differs_from_bf16_at_every_step_and_is_close(report):
    for name in ("int8", "fp8", "nvfp4"):
        method = report["methods"][name]
        assert len(method["velocity_error"]) == STEPS
        assert all(0 < error < 0.2 for error in method["velocity_error"])
        assert method["path_error"][0] == 0
        assert all(0 < error < 0.2 for error in method["path_error"][1:])
        near = method["to_reference"]
        assert 20 < near["psnr_db"] < 100
        assert 0.5 < near["ssim"] < 1
        assert 0 < near["relative_l2"] < 0.2


def test_four_bits_are_further_from_bf16_than_eight(report):
    errors = {n: np.mean(report["methods"][n]["velocity_error"]) for n in ("int8", "nvfp4")}
    assert errors["nvfp4"] > errors["int8"]


def test_the_report_says_what_ran_where(report):
    assert report["versions"]["vc_jax"] == vc_jax.__version__
    assert report["device"]["platform"] == jax.default_backend()
    assert report["model"]["tokens"] == FRAMES * 4 * 8
    assert report["sampling"]["steps"] == STEPS
    assert report["sampling"]["times"][0] == 1.0
    assert report["clip"]["condition_frames"] == GIVEN
    assert report["methods"]["int8"]["refresh_steps"] == [0]
    for method in report["methods"].values():
        assert method["implementation"] in ("xla", "cudnn", "hopper")
        assert method["seconds"]["compile"] > 0


def test_energy_is_a_share_for_every_layer_and_head(report):
    for point in report["block_mean_energy"]["points"]:
        for order in ("sequence", "sorted"):
            shares = np.array(point[order])
            assert shares.shape == (2, 1)
            assert np.all((shares > 0) & (shares <= 1))


class Links(html.parser.HTMLParser):
    """Everything that a page would load, and its open tags."""

    def __init__(self):
        super().__init__()
        self.links, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("src", "href", "data", "srcset") and v]
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing(folder):
    page = (folder / "report.html").read_text()
    parser = Links()
    parser.feed(page)
    assert parser.links == []
    assert parser.open == []
    urls = re.findall(r"url\(([^)]{0,40})", page)
    assert urls
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    assert "@import" not in page


def test_the_page_shows_the_numbers_of_the_json(folder, report):
    page = (folder / "report.html").read_text()
    for method in report["methods"].values():
        assert f"<td>{method['to_real_clip']['psnr_db']:.2f}</td>" in page
        if method["to_reference"]:
            assert f"<td>{method['to_reference']['psnr_db']:.2f}</td>" in page
            assert f"<td>{100 * np.mean(method['velocity_error']):.2f}</td>" in page
    assert report["device"]["kind"] in page


def test_the_animation_has_every_frame(folder):
    done, animation = cv2.imreadanimation(str(folder / "comparison.gif"))
    assert done
    assert len(animation.frames) == FRAMES


def test_the_contact_sheet_has_a_row_a_clip(folder):
    sheet = cv2.imread(str(folder / "contact_sheet.png"))
    assert sheet is not None
    row = round(240 / 32) * 16
    assert sheet.shape[0] >= (5 + 3) * row


def test_only_the_named_methods_run_beside_bf16(tiny, tmp_path, capsys):
    output = tmp_path / "out"
    arguments = ["--attention", "fp8", "--steps", "1", "--output", str(output)]
    assert _cli.main([*tiny, *arguments]) == 0
    report = json.loads((output / "report.json").read_text())
    assert list(report["methods"]) == ["bf16", "fp8"]
    out, err = capsys.readouterr()
    assert str(output / "report.html") in out
    assert err.splitlines()[-1].endswith("values: block means")


def test_bf16_alone_is_a_report_too(tiny, tmp_path):
    output = tmp_path / "out"
    arguments = ["--attention", "bf16", "--steps", "1", "--output", str(output)]
    assert _cli.main([*tiny, *arguments]) == 0
    assert "nothing to compare" in (output / "report.html").read_text()


def test_another_seed_is_another_sample(tiny, tmp_path, report):
    output = tmp_path / "out"
    arguments = ["--attention", "bf16", "--seed", "5", "--output", str(output)]
    assert _cli.main([*tiny, *arguments]) == 0
    other = json.loads((output / "report.json").read_text())
    assert other["methods"]["bf16"]["to_real_clip"] != report["methods"]["bf16"]["to_real_clip"]


def test_the_scan_is_the_loop_over_attention_steps(task, methods):
    config, model, schedule = vc_jax.PRESETS["int8"], task.model, task.schedule
    state = vc_jax.init_state(config, 1, task.tokens, 1, 32, layers=2)
    given = sampler.Given(task.pixels, task.given)

    @jax.jit
    def predict(video, state, step):
        return model.with_state(
            video,
            sampler.velocity_times(given, task.times[step]),
            state,
            attention=lambda q, k, v, s, layer: vc_jax.attention_step(
                q, k, v, s, step=step, schedule=schedule, layer=layer, config=config
            ),
        )

    video = task.noise
    for step in range(task.steps):
        video = sampler.clamp(video, given)
        velocity, state = predict(video, state, step)
        video = video + (task.times[step + 1] - task.times[step]) * velocity
    sampled = methods["int8"].sample().path
    np.testing.assert_allclose(
        sampled.final, sampler.clamp(video, given), atol=0.02 * float(jnp.std(video))
    )


def test_a_method_that_follows_its_own_path_predicts_the_same(methods):
    for method in methods.values():
        own = method.sample().path
        followed = method.follow(own.videos).path
        np.testing.assert_array_equal(followed.velocities, own.velocities)
        assert method.traces == 1


def test_following_another_path_starts_every_step_there(methods):
    path = methods["bf16"].sample().path
    followed = methods["int8"].follow(path.videos).path
    np.testing.assert_array_equal(followed.videos, path.videos)
    assert not np.array_equal(followed.velocities, path.velocities)


def test_condition_frames_stay_as_they_are(task, methods):
    final = methods["int8"].sample().path.final
    np.testing.assert_array_equal(final[:, :2], task.pixels[:, :2])
    assert not np.array_equal(final[:, 2:], task.pixels[:, 2:])


def test_progress_counts_every_step(task):
    seen = []
    method = Method("bf16", task, lambda *update: seen.append(update))
    method.sample()
    assert seen[:2] == [("bf16", "compiling", 0), ("bf16", "sampling", 0)]
    assert [done for _, _, done in seen[2:]] == list(range(1, task.steps + 1))


def test_sorting_raises_the_energy_of_block_means(task, methods):
    points = measure_block_means(task)(methods["bf16"].sample().path.videos)
    assert points[0].step == 0
    before = np.mean([p.sequence for p in points])
    after = np.mean([p.sorted for p in points])
    assert after > before


def test_the_defaults_fit_the_device(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    height, width = sample_job.default_size()
    assert abs(Options.frames * (height // 4) * (width // 4) / 4096 - 1) < 0.1
    assert 8 <= sample_job.default_steps() <= 12
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    height, width = sample_job.default_size()
    assert Options.frames * (height // 4) * (width // 4) == 14_080
    assert sample_job.default_steps() == 40


def test_numbers_that_json_does_not_know_are_null():
    assert _finite({"a": [1.0, float("nan"), {"b": float("inf")}], "c": "nan"}) == {
        "a": [1.0, None, {"b": None}],
        "c": "nan",
    }
