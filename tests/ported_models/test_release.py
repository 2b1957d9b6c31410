"""How a checkpoint is sampled: what its files say, and where each number came from."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vc_jax.models.attention import AttentionControl
from vc_jax.models.hunyuan_video15 import HUNYUAN_VIDEO_15, HunyuanVideo15, HunyuanVideo15Config
from vc_jax.models.longcat_video import LongCatVideo, LongCatVideoConfig
from vc_jax.models.minimax_h3 import MiniMaxH3, MiniMaxH3Config
from vc_jax.models.sampling import sample
from vc_jax.models.wan import I2V_A14B, Wan, WanConfig

from . import golden

WAN = WanConfig(num_layers=1, num_heads=1, head_dim=6, ffn_dim=8, text_dim=8)
HUNYUAN = HunyuanVideo15Config(
    num_layers=1,
    num_heads=1,
    head_dim=6,
    rope_axes=(2, 2, 2),
    text_dim=4,
    image_dim=4,
    byt5_dim=4,
    byt5_hidden=4,
)
LONGCAT = LongCatVideoConfig(num_layers=1, num_heads=1, hidden=6, text_dim=4, time_dim=4)
MINIMAX = MiniMaxH3Config(
    num_layers=1, num_heads=1, head_dim=6, rope_freqs=1, hidden=4, ffn_dim=4, text_dim=4
)
MINIMAX = dataclasses.replace(MINIMAX, time_hidden=4, time_dim=4)
FLOW_MATCH = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "invert_sigmas": False,
    "shift_terminal": None,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": False,
    "use_karras_sigmas": False,
}
UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "final_sigmas_type": "zero",
    "lower_order_final": True,
    "num_train_timesteps": 1000,
    "predict_x0": True,
    "prediction_type": "flow_prediction",
    "solver_order": 2,
    "solver_type": "bh2",
    "use_flow_sigmas": True,
}


def write(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def saved(
    cls: Any, config: Any, repository: Path, folder: str = "transformer", layout: str = "diffusers"
) -> Path:
    golden.random_model(cls, config).to_pretrained(repository / folder, layout=layout)
    return repository / folder


def test_longcat_has_the_shift_of_its_scheduler_file(tmp_path):
    folder = saved(LongCatVideo, LONGCAT, tmp_path, "dit", "original")
    constants = LongCatVideo.from_pretrained(folder).sampling
    assert constants.shift == 12.0
    assert constants.origins()["shift"] == "constant of LongCat-Video"
    write(tmp_path / "scheduler/scheduler_config.json", FLOW_MATCH | {"shift": 7.5})
    said = LongCatVideo.from_pretrained(folder).sampling
    assert said == dataclasses.replace(constants, shift=7.5)
    assert said.origins()["shift"] == "scheduler/scheduler_config.json: shift"
    assert said.origins()["num_steps"] == "constant of LongCat-Video"
    assert "shift: 7.5 (scheduler/scheduler_config.json: shift)" in str(said)
    changed = dataclasses.replace(said, shift=3.0)
    assert changed.origins()["shift"] == "the caller"
    own = dataclasses.replace(constants, num_steps=2)
    assert LongCatVideo.from_pretrained(folder, sampling=own).sampling == own


def test_a_scheduler_in_the_transformers_own_folder_comes_first(tmp_path):
    folder = saved(LongCatVideo, LONGCAT, tmp_path)
    write(tmp_path / "scheduler/scheduler_config.json", FLOW_MATCH | {"shift": 7.5})
    write(folder / "scheduler_config.json", FLOW_MATCH | {"shift": 2.0})
    assert LongCatVideo.from_pretrained(folder).sampling.shift == 2.0


def test_wan_has_the_shift_and_the_boundary_of_its_files(tmp_path):
    folder = saved(Wan, WAN, tmp_path)
    write(tmp_path / "scheduler/scheduler_config.json", UNIPC | {"flow_shift": 3.0})
    write(tmp_path / "model_index.json", {"_class_name": "WanPipeline", "boundary_ratio": 0.8})
    sampling = Wan.from_pretrained(folder).sampling
    assert (sampling.shift, sampling.boundary, sampling.guidance_high_noise) == (3.0, 0.8, 4.0)
    assert sampling.origins()["boundary"] == "model_index.json: boundary_ratio"
    assert sampling.origins()["guidance"] == "constant of Wan2.2-T2V-A14B"
    # One transformer alone, as Wan2.1 and TI2V-5B are: there is no low-noise expert to ask for.
    write(tmp_path / "model_index.json", {"_class_name": "WanPipeline", "boundary_ratio": None})
    single = Wan.from_pretrained(folder).sampling
    assert (single.boundary, single.guidance_high_noise, single.shift) == (None, None, 3.0)
    assert set(single.guidance_scales()) == {5.0}


def test_minimax_has_the_shifts_of_both_schedulers(tmp_path):
    folder = saved(MiniMaxH3, MINIMAX, tmp_path)
    kind = {"_class_name": "MiniMaxH3Scheduler"}
    write(tmp_path / "scheduler/scheduler_config.json", kind | {"shift": 10.0})
    write(tmp_path / "audio_scheduler/scheduler_config.json", kind | {"shift": 2.0})
    sampling = MiniMaxH3.from_pretrained(folder).sampling
    assert (sampling.shift, sampling.audio_shift) == (10.0, 2.0)
    assert sampling.origins()["audio_shift"] == "audio_scheduler/scheduler_config.json: shift"


def test_minimax_has_the_shifts_of_its_authors_index(tmp_path):
    folder = saved(MiniMaxH3, MINIMAX, tmp_path / "FL2VA", layout="original")
    own: dict[str, Any] = {"sigma_shift_scales": {"video": 11.0, "audio": 4.0}}
    write(tmp_path / "FL2VA/model_index.json", {"_minimax_h3": own})
    sampling = MiniMaxH3.from_pretrained(folder).sampling
    assert (sampling.shift, sampling.audio_shift) == (11.0, 4.0)
    where = "model_index.json: _minimax_h3.sigma_shift_scales.audio"
    assert sampling.origins()["audio_shift"] == where
    own["base_schedule"] = [1.0, 0.7, 0.4, 0.15, 0.0]
    write(tmp_path / "FL2VA/model_index.json", {"_minimax_h3": own})
    with pytest.raises(NotImplementedError, match=r"_minimax_h3: base_schedule is not ported"):
        MiniMaxH3.from_pretrained(folder)


@pytest.mark.parametrize(
    ("size", "task", "shift"),
    [(640, "t2v", 5.0), (640, "i2v", 5.0), (960, "t2v", 9.0), (960, "i2v", 7.0)],
)
@pytest.mark.parametrize("layout", ["diffusers", "original"])
def test_hunyuan_has_the_shift_of_its_resolution_and_task(size, task, shift, layout):
    config = dataclasses.replace(HUNYUAN_VIDEO_15, target_size=size, task=task)
    written = config.to_dict(layout)
    named = {"ideal_resolution": {640: "480p", 960: "720p"}[size], "ideal_task": task}
    expected = named if layout == "original" else {"target_size": size, "task_type": task}
    assert {name: written[name] for name in expected} == expected
    assert HunyuanVideo15Config.from_dict(written) == config
    model: Any = nnx.eval_shape(
        lambda: HunyuanVideo15(
            dataclasses.replace(HUNYUAN, target_size=size, task=task), rngs=nnx.Rngs(0)
        )
    )
    assert (model.sampling.shift, model.sampling.guidance) == (shift, 6.0)


def test_hunyuan_distilled_is_sampled_without_guidance(tmp_path):
    named = saved(HunyuanVideo15, HUNYUAN, tmp_path / "transformer", "720p_t2v_distilled")
    assert HunyuanVideo15.from_pretrained(named).sampling.guidance == 1.0
    # In diffusers' layout the guider says so, whatever the folder is called.
    folder = saved(HunyuanVideo15, HUNYUAN, tmp_path / "release")
    assert HunyuanVideo15.from_pretrained(folder).sampling.guidance == 6.0
    guider = {"_class_name": "ClassifierFreeGuidance", "start": 0.0, "stop": 1.0, "enabled": True}
    file = tmp_path / "release/guider/guider_config.json"
    write(file, guider | {"guidance_scale": 1.0})
    sampling = HunyuanVideo15.from_pretrained(folder).sampling
    assert sampling.guidance == 1.0
    assert sampling.origins()["guidance"] == "guider/guider_config.json: guidance_scale"
    write(file, guider | {"guidance_scale": 4.0, "enabled": False})
    assert HunyuanVideo15.from_pretrained(folder).sampling.guidance == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dynamic_shifting": True}, "use_dynamic_shifting is not ported"),
        ({"use_karras_sigmas": True}, "use_karras_sigmas is not ported"),
        ({"shift_terminal": 0.1}, "shift_terminal is not ported"),
        ({"num_train_timesteps": 100}, "num_train_timesteps 100, expected 1000"),
        ({"_class_name": "FlowMatchLCMScheduler"}, "_class_name 'FlowMatchLCMScheduler'"),
    ],
)
def test_a_schedule_that_is_not_ported_is_refused(change, message, tmp_path):
    folder = saved(LongCatVideo, LONGCAT, tmp_path)
    write(tmp_path / "scheduler/scheduler_config.json", FLOW_MATCH | {"shift": 12.0} | change)
    with pytest.raises(NotImplementedError, match=rf"scheduler_config\.json: {message}"):
        LongCatVideo.from_pretrained(folder)
    own = golden.random_model(LongCatVideo, LONGCAT).sampling
    assert LongCatVideo.from_pretrained(folder, sampling=own).sampling == own


def test_numbers_out_of_range_in_a_file_are_named(tmp_path):
    folder = saved(LongCatVideo, LONGCAT, tmp_path)
    file = tmp_path / "scheduler/scheduler_config.json"
    write(file, FLOW_MATCH | {"shift": -1})
    with pytest.raises(ValueError, match="shift: expected a positive number"):
        LongCatVideo.from_pretrained(folder)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"scheduler_config\.json is not JSON"):
        LongCatVideo.from_pretrained(folder)


def test_a_meanflow_model_is_told_the_time_after_each_step():
    config = dataclasses.replace(HUNYUAN, use_meanflow=True)
    port = golden.random_model(HunyuanVideo15, config, dtype=jnp.float32)
    assert (port.sampling.num_steps, port.sampling.shift, port.sampling.guidance) == (12, 7.0, 1.0)
    rng = np.random.default_rng(0)
    latents = jnp.asarray(rng.normal(size=(1, 32, 1, 2, 2)), jnp.float32)
    rows = {"text": (1, 3, 4), "byt5": (1, 2, 4), "image": (1, 2, 4), "condition": (1, 33, 1, 2, 2)}
    given: dict[str, Any] = {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in rows.items()
    }
    given |= {"text_mask": jnp.ones((1, 3)), "byt5_mask": jnp.ones((1, 2))}
    settings = dataclasses.replace(port.sampling, num_steps=3)
    result = sample(port, latents, given, sampling=settings, progress=False)
    sigmas = settings.sigmas()
    velocity = golden.quick_jit(
        lambda x, now, after: port.denoise(x, now, given, AttentionControl(), next_time=after)[0]
    )
    x = latents
    for now, after in itertools.pairwise(sigmas):
        x = x + (after - now) * velocity(x, jnp.float32(1000 * now), jnp.float32(1000 * after))
    assert golden.relative_l2(result, x) < 1e-5
    with pytest.raises(ValueError, match="timestep_r: needed by a MeanFlow model"):
        port.denoise(latents, jnp.float32(0), given, AttentionControl())


def test_constants_are_attributed_without_a_checkpoint():
    model: Any = nnx.eval_shape(
        lambda: Wan(dataclasses.replace(I2V_A14B, num_layers=1), rngs=nnx.Rngs(0))
    )
    assert set(model.sampling.origins().values()) == {"constant of Wan2.2-I2V-A14B"}
