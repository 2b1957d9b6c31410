"""What a release says beside its weights, and how that becomes a model's `Sampling`.

One way for all models: the constants of a release (each model's `release_sampling`), then the files
of the checkpoint, which win over them, then the caller's own `dataclasses.replace`. Every number
keeps where it came from (`Sampling.origins`).

The files, by the names that diffusers gives them:

* `scheduler_config.json` in the transformer's folder or in `scheduler/` in it or beside it: the
  shift and the solver's order; `audio_scheduler/` likewise, of MiniMax-H3's sound;
* `guider/guider_config.json` beside it: the scale of the guidance;
* `model_index.json` beside it: at which share of the timesteps Wan's experts change, and both
  shifts of MiniMax-H3 (its authors' own field).
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from .schedulers import TRAIN_STEPS, Sampling

_SCHEDULERS = {
    "wan": {"UniPCMultistepScheduler": "flow_shift"},
    "flow": {"FlowMatchEulerDiscreteScheduler": "shift", "FlowMatchDiscreteScheduler": "shift"},
    "longcat": {"FlowMatchEulerDiscreteScheduler": "shift"},
    "minimax": {"MiniMaxH3Scheduler": "shift"},
}
"""By grid: the scheduler classes that make it, and what each calls the shift."""

_SCHEDULER_HAS = {
    "num_train_timesteps": TRAIN_STEPS,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "solver_type": "bh2",
    "predict_x0": True,
    "lower_order_final": True,
    "final_sigmas_type": "zero",
    "disable_corrector": [],
    "reverse": True,
    "solver": "euler",
}
_SCHEDULER_LACKS = (
    "invert_sigmas",
    "rescale_betas_zero_snr",
    "shift_terminal",
    "solver_p",
    "stochastic_sampling",
    "thresholding",
    "use_beta_sigmas",
    "use_dynamic_shifting",
    "use_exponential_sigmas",
    "use_flux_shift",
    "use_karras_sigmas",
)
_GUIDER_HAS = {"start": 0.0, "stop": 1.0, "guidance_rescale": 0.0}
_GUIDER_LACKS = ("use_original_formulation",)

Said = dict[str, tuple[Any, str]]
"""Settings by their names in `Sampling`: the value, and the file and field that says so."""


class Files:
    """The JSON files of a release around the folder of one transformer, each read when asked for.

    Raises:
      ValueError: a file that is no JSON object, by name.
    """

    def __init__(self, folder: Path):
        self.folder = folder.absolute()

    def component(self, name: str, file: str) -> tuple[dict[str, Any], str] | None:
        """`file` of a component: in the folder `name` inside of the transformer's, or beside it."""
        return self._first(f"{name}/{file}")

    def scheduler(self) -> tuple[dict[str, Any], str] | None:
        return self._first("scheduler_config.json", beside=False) or self.component(
            "scheduler", "scheduler_config.json"
        )

    def index(self) -> tuple[dict[str, Any], str] | None:
        return self._first("model_index.json")

    def _first(self, file: str, *, beside: bool = True) -> tuple[dict[str, Any], str] | None:
        for folder in (self.folder, self.folder.parent) if beside else (self.folder,):
            if (folder / file).is_file():
                return read_json(folder / file), file
        return None


def read_json(file: Path) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
      ValueError: it holds none; names the file.
    """
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"path: {file} is not JSON{pointer_hint(file)}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"path: {file} holds no JSON object but a {type(content).__name__}")
    return content


def pointer_hint(file: Path) -> str:
    """What to add to a message about a file, if it is only Git LFS's pointer to one."""
    with file.open("rb") as opened:
        pointer = opened.read(40).startswith(b"version https://git-lfs")
    return " but a Git LFS pointer (git lfs pull fetches the file)" if pointer else ""


def attributed(sampling: Sampling, constants: str, said: Said | None = None) -> Sampling:
    """Constants with what the files say in their place, each with its origin.

    Args:
      sampling: the constants.
      constants: what they are constants of.
      said: see `settings`.
    """
    said = said or {}
    sampling = dataclasses.replace(sampling, **{name: value for name, (value, _) in said.items()})
    origins = {
        field.name: said[field.name][1] if field.name in said else f"constant of {constants}"
        for field in dataclasses.fields(sampling)
        if field.name != "sources"
    }
    sources = tuple((name, getattr(sampling, name), where) for name, where in origins.items())
    return dataclasses.replace(sampling, sources=sources)


def settings(constants: Sampling, files: Files) -> Said:
    """What the files of a release say about its sampling.

    Raises:
      NotImplementedError: a scheduler or guider that is not ported, or an option of it; names the
        file and the field.
      ValueError: a file that is no JSON object.
    """
    said: Said = {}
    index = files.index()
    if index:
        said |= _indexed(constants, *index)
    found = files.scheduler()
    if found:
        config, file = found
        said |= _schedule(constants, config, file, "shift")
        if constants.solver == "unipc" and "solver_order" in config:
            said["order"] = config["solver_order"], f"{file}: solver_order"
    audio = files.component("audio_scheduler", "scheduler_config.json")
    if constants.audio_shift is not None and audio:
        said |= _schedule(constants, *audio, "audio_shift")
    guider = files.component("guider", "guider_config.json")
    if constants.guidance_form == "cfg" and guider:
        said |= _guidance(*guider)
    return said


def _indexed(constants: Sampling, index: dict[str, Any], file: str) -> Said:
    said: Said = {}
    if constants.boundary is not None and index.get("boundary_ratio") is not None:
        said["boundary"] = index["boundary_ratio"], f"{file}: boundary_ratio"
    own = index.get("_minimax_h3")
    if constants.grid == "minimax" and isinstance(own, dict):
        _check_options(own, f"{file}: _minimax_h3", {}, ("base_schedule",))
        shifts = own.get("sigma_shift_scales") or {}
        for setting, part in (("shift", "video"), ("audio_shift", "audio")):
            if part in shifts:
                where = f"{file}: _minimax_h3.sigma_shift_scales.{part}"
                said[setting] = shifts[part], where
    return said


def _schedule(constants: Sampling, config: dict[str, Any], file: str, setting: str) -> Said:
    known = _SCHEDULERS[constants.grid]
    kind = config.get("_class_name", next(iter(known)))
    if kind not in known:
        raise NotImplementedError(
            f"{file}: _class_name {kind!r}, expected one of {sorted(known)}; pass sampling="
        )
    _check_options(config, file, _SCHEDULER_HAS, _SCHEDULER_LACKS)
    field = known[kind]
    return {setting: (config[field], f"{file}: {field}")} if field in config else {}


def _guidance(config: dict[str, Any], file: str) -> Said:
    kind = config.get("_class_name", "ClassifierFreeGuidance")
    if kind != "ClassifierFreeGuidance":
        raise NotImplementedError(
            f"{file}: _class_name {kind!r}, expected 'ClassifierFreeGuidance'; pass sampling="
        )
    if config.get("enabled") is False:
        return {"guidance": (1.0, f"{file}: enabled")}
    _check_options(config, file, _GUIDER_HAS, _GUIDER_LACKS)
    if "guidance_scale" not in config:
        return {}
    return {"guidance": (config["guidance_scale"], f"{file}: guidance_scale")}


def _check_options(
    config: dict[str, Any], file: str, has: dict[str, Any], lacks: tuple[str, ...]
) -> None:
    """Refuses options that would make another schedule or guidance than the ported one."""
    for name, value in has.items():
        if name in config and config[name] != value:
            raise NotImplementedError(
                f"{file}: {name} {config[name]!r}, expected {value!r}; pass sampling="
            )
    for name in lacks:
        if config.get(name):
            raise NotImplementedError(f"{file}: {name} is not ported; pass sampling=")
