"""Trains the small video DiT on a film within a time budget.

    python -m vc_jax.models.training.train --video FILM --output DIR --seconds 420

Two stages share the budget: crops first, whole frames after. The learning rate follows the share of
the budget that has passed, so the run uses all of it on any machine. The output folder holds, at
any time during the run, the last good weights and the losses so far; a run that is killed leaves
them. In the end the weights (the moving average, 16 bits) are evaluated on held-out scenes.
"""

import argparse
import concurrent.futures
import csv
import datetime
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..common.video import read_video
from ..video_dit import flow, weights
from ..video_dit.model import VideoDiTConfig, create_video_dit
from . import evaluate, optimiser
from . import film as film_module
from .plots import write_loss_curve
from .training_step import (
    Film,
    StageShape,
    TrainState,
    data_mesh,
    initial_state,
    make_train_steps,
)

_CHECKPOINT_SECONDS = 30.0
# After this many steps the loss must have fallen to the share of the first one that is required.
_CHECK_AFTER_STEPS = 300

# Condition frames and time shift of the samples to evaluate, the default first.
_SETTINGS = ((4, 3.0), (1, 3.0), (4, 1.0), (4, 2.0), (4, 5.0))


class TrainingFailed(RuntimeError):
    """The loss is not finite or does not fall."""


class Record(NamedTuple):
    """One call of the compiled training function, as in ``loss.csv``."""

    step: int
    stage: str
    seconds: float
    rate: float
    loss: float
    gradient_norm: float


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m vc_jax.models.training.train", description=__doc__
    )
    add = parser.add_argument
    add("--video", required=True, help="film to train on")
    add("--output", required=True, type=pathlib.Path, help="folder to write")
    add("--seconds", type=float, required=True, help="time for the training steps")
    add("--deadline", type=float, help="seconds after the start when training ends in any case")
    add("--ranges", help="frames to use, as in 285-500,780-11727 (default: Big Buck Bunny)")
    add("--initial-weights", type=pathlib.Path, help="continue from these weights")
    add("--devices", type=int, help="use so many devices (default: all)")
    add("--seed", type=int, default=0)
    add("--learning-rate", type=float, default=2.5e-3, help="peak")
    add("--full-frame-share", type=float, default=0.6, help="of the time, for whole frames")
    add("--crop", type=int, default=64, help="edge of the first stage's crops")
    add("--crop-batch", type=int, default=16, help="crops per device and step")
    add("--frame-batch", type=int, default=4, help="whole-frame clips per device and step")
    add("--steps-per-call", type=int, default=25)
    add("--required-fall", type=float, default=0.7, help="give up unless the loss falls to this")
    add("--height", type=int, default=88)
    add("--width", type=int, default=160)
    add("--model-width", type=int, default=VideoDiTConfig.width)
    add("--model-layers", type=int, default=VideoDiTConfig.num_layers)
    add("--evaluation-clips", type=int, default=48, help="at most so many held-out clips")
    add("--evaluation-steps", type=int, default=40)
    add("--save-samples", type=int, default=0, help="write so many sampled clips to samples.npz")
    return parser.parse_args(argv)


def parse_ranges(text: str | None) -> tuple[tuple[int, int], ...]:
    """``"0-100,200-300"`` to pairs; the ranges of Big Buck Bunny for None."""
    if text is None:
        return film_module.BIG_BUCK_BUNNY_RANGES
    try:
        pairs = [tuple(int(edge) for edge in part.split("-")) for part in text.split(",")]
        return tuple((start, stop) for start, stop in pairs)
    except ValueError as error:
        raise ValueError(f"--ranges must look like 0-100,200-300, got {text!r}") from error


class Training:
    """Data, model and compiled functions of one run."""

    def __init__(self, arguments: argparse.Namespace, started: float):
        self.arguments = arguments
        self.started = started
        self.output: pathlib.Path = arguments.output
        self.records: list[Record] = []
        self.held_out_losses: list[dict[str, Any]] = []
        self.stage_change: int | None = None
        self.mesh = data_mesh(jax.devices()[: arguments.devices])
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self._load_film()
        self._make_model()
        self._compile()

    def say(self, message: str) -> None:
        """Prints a line with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:6.1f} s] {message}", flush=True)

    def _load_film(self) -> None:
        arguments = self.arguments
        film = read_video(arguments.video, height=arguments.height, width=arguments.width)
        self.split = film_module.split_film(film, parse_ranges(arguments.ranges))
        self.film = self._put(
            Film(
                jnp.asarray(film),
                jnp.asarray(self.split.train_starts),
                jnp.asarray(np.cumsum(self.split.train_weights), jnp.float32),
            )
        )
        self._clips = evaluate.moving_clips(
            film,
            self.split.held_out_clips,
            limit=arguments.evaluation_clips,
            multiple=self.mesh.size,
        )
        self._pixels = film
        self.say(
            f"film {film.shape}, {len(self.split.train_starts)} training windows, held-out "
            f"scenes {self.split.held_out}, {len(self._clips)} moving held-out clips"
        )

    def _make_model(self) -> None:
        arguments = self.arguments
        if arguments.initial_weights:
            model = weights.load_video_dit(arguments.initial_weights)
        else:
            config = VideoDiTConfig(
                width=arguments.model_width,
                num_layers=arguments.model_layers,
                mlp_width=4 * arguments.model_width,
            )
            model = create_video_dit(config, arguments.seed)
        self.config = model.config
        self.definition, parameters = nnx.split(model, nnx.Param)
        self.optimiser = optimiser.build_optimiser()
        self.state: TrainState = self._put(initial_state(parameters, self.optimiser))
        self.good_average = jax.device_get(self.state.average)
        count = sum(array.size for array in jax.tree.leaves(parameters))
        self.say(f"{count} parameters on {self.mesh.size} x {jax.devices()[0].device_kind}")

    def _compile(self) -> None:
        """Compiles everything that the run will need, side by side, before the clock starts."""
        arguments = self.arguments
        shapes = {
            "crops": StageShape(
                arguments.crop_batch, film_module.WINDOW, arguments.crop, arguments.crop
            ),
            "frames": StageShape(
                arguments.frame_batch, film_module.WINDOW, arguments.height, arguments.width
            ),
        }
        self.stages: dict[str, Any] = {}
        self.held_out = evaluate.HeldOut(
            self._pixels,
            self._clips,
            self.mesh,
            self.definition,
            steps=arguments.evaluation_steps,
        )
        jobs = self.held_out.compile_jobs(self.state.parameters)
        for name, shape in shapes.items():
            lowered = make_train_steps(
                self.definition, self.optimiser, self.mesh, shape, steps=arguments.steps_per_call
            ).lower(self.state, self.film, *self._inputs(0, 0.0))
            jobs.append(lambda name=name, lowered=lowered: self._compile_stage(name, lowered))
        self.say("compiling")
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            for done in [pool.submit(job) for job in jobs]:
                done.result()
        # One call of the second stage on a copy: what fails should fail before the budget is spent.
        copy = jax.tree.map(jnp.copy, self.state)
        _, losses, _ = self.stages["frames"](copy, self.film, *self._inputs(0, 0.0))
        if not np.all(np.isfinite(losses)):
            raise TrainingFailed(f"the first whole-frame losses are {losses}")
        self.say(f"compiled; untrained whole-frame loss {float(np.mean(losses)):.3f}")

    def _compile_stage(self, name: str, lowered: Any) -> None:
        self.stages[name] = lowered.compile()

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self._replicated)

    def _inputs(self, call: int, rate: float) -> tuple[Any, Any]:
        key = jax.random.fold_in(jax.random.key(self.arguments.seed + 1), call)
        return self._put(key), self._put(jnp.float32(rate))

    def run(self) -> None:
        """Trains until the budget is spent.

        Raises:
          TrainingFailed: a loss is not finite or the loss does not fall; `good_average` is the last
            good state.
        """
        arguments = self.arguments
        begin = time.monotonic()
        budget = arguments.seconds
        if arguments.deadline is not None:
            budget = min(budget, self.started + arguments.deadline - begin)
        if budget <= 0:
            raise TrainingFailed("no time is left to train")
        pending: tuple[int, str, float, Any, Any] | None = None
        saved = begin
        call = 0
        while (elapsed := time.monotonic() - begin) < budget:
            fraction = elapsed / budget
            stage = "crops" if fraction < 1.0 - arguments.full_frame_share else "frames"
            step = call * arguments.steps_per_call
            if stage == "frames" and self.stage_change is None:
                self.stage_change = step
            rate = optimiser.learning_rate(arguments.learning_rate, fraction, step)
            self.state, losses, norms = self.stages[stage](
                self.state, self.film, *self._inputs(call, rate)
            )
            call += 1
            # The device works on this call while the host waits for the one before.
            if pending is not None:
                self._record(pending, time.monotonic() - begin)
            pending = (call * arguments.steps_per_call, stage, rate, losses, norms)
            if time.monotonic() - saved > _CHECKPOINT_SECONDS:
                saved = time.monotonic()
                self._record(pending, saved - begin)
                pending = None
                self._checkpoint()
        if pending is not None:
            self._record(pending, time.monotonic() - begin)
        self._checkpoint()

    def _record(self, call: tuple[int, str, float, Any, Any], seconds: float) -> None:
        step, stage, rate, losses, norms = call
        loss, norm = float(np.mean(losses)), float(np.mean(norms))
        self.records.append(Record(step, stage, round(seconds, 2), rate, loss, norm))
        if not np.isfinite(loss):
            raise TrainingFailed(f"the loss is {loss} at step {step}")
        first = self.records[0].loss
        if step >= _CHECK_AFTER_STEPS and loss > self.arguments.required_fall * first:
            raise TrainingFailed(f"the loss went from {first:.3f} to {loss:.3f} at step {step}")

    def _checkpoint(self) -> None:
        """Keeps and writes the averaged weights, their held-out loss, and the losses so far."""
        average = self.state.average
        self.good_average = jax.device_get(average)
        weights.save_weights(self.output / "video_dit.safetensors", self.good_average, self.config)
        losses = self.held_out.losses(average, evaluate.CONDITION_FRAMES)
        last = self.records[-1]
        self.held_out_losses.append({"step": last.step, "velocity_mse": losses})
        self._write_losses()
        values = " ".join(f"{t}: {loss:.4f}" for t, loss in losses.items())
        self.say(
            f"step {last.step} ({last.stage}), rate {last.rate:.2e}, loss {last.loss:.4f}, "
            f"gradient norm {last.gradient_norm:.3f}; held-out {values}"
        )

    def _write_losses(self) -> None:
        with open(self.output / "loss.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Record._fields)
            writer.writerows(
                (*r[:3], f"{r.rate:.3e}", f"{r.loss:.6f}", f"{r.gradient_norm:.4f}")
                for r in self.records
            )

    def finish(self) -> dict[str, Any]:
        """Writes weights, curve and run description; then evaluates the weights as stored."""
        self._write_losses()
        weights.save_weights(self.output / "video_dit.safetensors", self.good_average, self.config)
        write_run(self)
        write_loss_curve(
            self.output / "loss.png",
            [r.step for r in self.records],
            [r.loss for r in self.records],
            [
                (entry["step"], float(np.mean(list(entry["velocity_mse"].values()))))
                for entry in self.held_out_losses
            ],
            self.stage_change,
        )
        self.say("evaluating")
        stored = weights.load_video_dit(self.output / "video_dit.safetensors")
        parameters = self._put(nnx.state(stored, nnx.Param))
        return evaluate.evaluate(
            self.held_out,
            parameters,
            self.output,
            settings=_SETTINGS,
            save_samples=self.arguments.save_samples,
        )

    def replica_difference(self) -> float:
        """Largest difference between the devices' copies of a parameter; 0 when in step."""
        largest = 0.0
        for array in jax.tree.leaves(self.state.parameters):
            copies = [np.asarray(shard.data) for shard in array.addressable_shards]
            largest = max(largest, *(float(np.abs(copies[0] - c).max()) for c in copies))
        return largest


def write_run(training: Training) -> None:
    """Writes ``run.json``: arguments, versions, hardware, split, speeds, held-out losses."""
    records = training.records
    seconds: dict[str, float] = {}
    steps: dict[str, int] = {}
    before = Record(0, "", 0.0, 0.0, 0.0, 0.0)
    for record in records:
        seconds[record.stage] = seconds.get(record.stage, 0.0) + record.seconds - before.seconds
        steps[record.stage] = steps.get(record.stage, 0) + record.step - before.step
        before = record
    run = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "devices": [device.device_kind for device in training.mesh.devices.flat],
        "versions": {
            "python": sys.version.split()[0],
            "jax": jax.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
        },
        "arguments": {
            name: value.name if isinstance(value, pathlib.Path) else value
            for name, value in vars(training.arguments).items()
            if name not in ("output", "video")
        },
        "film": pathlib.Path(training.arguments.video).name,
        "training_windows": len(training.split.train_starts),
        "held_out_scenes": training.split.held_out,
        "condition_shares": flow.CONDITION_SHARES,
        "steps": steps,
        "seconds": {stage: round(value, 1) for stage, value in seconds.items()},
        "replica_difference": training.replica_difference(),
        "held_out": training.held_out_losses,
    }
    (training.output / "run.json").write_text(json.dumps(run, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when trained and evaluated, 2 for bad input, 3 when training failed."""
    started = time.monotonic()
    arguments = parse_arguments(argv)
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        training = Training(arguments, started)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TrainingFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    code = 0
    try:
        training.run()
    except TrainingFailed as error:
        print(f"error: {error}; keeping the last good weights", file=sys.stderr, flush=True)
        code = 3
        if len(training.records) * arguments.steps_per_call < 500:
            return code
    evaluate.print_report(training.finish())
    training.say("done")
    return code


if __name__ == "__main__":
    sys.exit(main())
