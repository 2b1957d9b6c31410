"""The main job: one clip sampled with several attention methods, and a report on how they compare.

The output folder appears complete or not at all: everything is written into a folder beside it,
which is renamed in the end and removed if anything goes wrong.
"""

import concurrent.futures
import contextlib
import functools
import json
import pathlib
import queue
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

import vc_jax.sharding

from ..mesh import ModelMesh
from ..video_dit import sampler, weights
from .clip import Clip, InputError, load_clip, to_model
from .images import DIFFERENCE_GAIN, difference, to_bytes, write_animation, write_contact_sheet
from .methods import REFERENCE, BlockMeanEnergy, Method, Outcome, Task, measure_block_means
from .options import Options, check_options, default_size, default_steps
from .page import make_page, number
from .progress import ProgressBar
from .record import make_record

FILES = ("comparison.gif", "contact_sheet.png", "report.html", "report.json")
"""What the output folder holds."""


def run(options: Options) -> dict[str, Any]:
    """Samples, measures and writes the report.

    Returns:
      What `report.json` holds.

    Raises:
      InputError: something that the user asked for cannot be done; nothing is left behind.
      KeyboardInterrupt: likewise nothing is left behind.
    """
    check_options(options)
    with _folder(options.output) as folder:
        clip, task = _prepare(options)
        names = (REFERENCE, *(n for n in options.attention if n != REFERENCE))
        with ProgressBar(sys.stderr, names, task.steps) as bar:
            outcomes, energy = _in_thread(lambda: _measure(task, names, bar.update))
        measured = functools.partial(make_record, options, task, clip, outcomes, energy)
        try:
            record = _write(folder, measured, clip, outcomes)
        except OSError as error:
            raise InputError(f"cannot write to {options.output}: {error}") from error
    return record


def not_finite(record: dict[str, Any]) -> list[str]:
    """The methods whose sample holds something that is not finite."""
    return [name for name, method in record["methods"].items() if not method["finite"]]


def summary(record: dict[str, Any], output: pathlib.Path) -> str:
    """The main numbers and where the report lies, for a terminal."""
    lines = [
        f"{'attention':<10} {'PSNR dB':>8} {'SSIM':>8} {'rel. L2':>8} {'velocity':>9} "
        f"{'compile':>8} {'run':>8}   against BF16"
    ]
    for name, method in record["methods"].items():
        near, errors = method["to_reference"], method["velocity_error"]
        cells = ["–"] * 4
        if near:
            mean = np.mean([e for e in errors if e is not None] or [np.nan])
            cells = [
                number(near["psnr_db"], 2),
                number(near["ssim"], 4),
                number(near["relative_l2"], 4),
                f"{mean:.4f}",
            ]
        seconds = method["seconds"]
        lines.append(
            f"{name:<10} {cells[0]:>8} {cells[1]:>8} {cells[2]:>8} {cells[3]:>9} "
            f"{seconds['compile']:>6.1f} s {seconds['sample']:>6.1f} s"
        )
    return "\n".join([*lines, f"report: {output / 'report.html'}"])


def _prepare(options: Options) -> tuple[Clip, Task]:
    height, width = options.size or default_size()
    try:
        model = weights.load_video_dit(options.weights or weights.SHIPPED_WEIGHTS)
        model.config.grid(options.frames, height, width)
        if model.config.channels != 3:
            raise ValueError(f"the model must have 3 channels, got {model.config.channels}")
    except (OSError, ValueError) as error:
        raise InputError(" ".join(str(error).split())) from error
    clip = load_clip(options.video, options.frames, height, width, start=options.start)
    pixels = jnp.asarray(to_model(clip.pixels))
    task = Task(
        model,
        pixels,
        options.condition or min(4, options.frames - 1),
        sampler.draw_noise(options.seed, pixels.shape),
        options.steps or default_steps(),
        mesh=None if options.mesh is None else ModelMesh.make(**options.mesh),
    )
    _check_mesh(task, options)
    return clip, task


def _check_mesh(task: Task, options: Options) -> None:
    """Refuses, before anything is compiled, a method that cannot run on the mesh."""
    if task.mesh is None:
        return
    shape = task.attention_shape()
    for name in options.attention:
        try:
            axes = task.mesh.attention_axes
            vc_jax.sharding.communication(shape, shape, shape, config=name, **axes)
        except (ValueError, NotImplementedError) as error:
            raise InputError(f"attention {name} cannot run on this mesh: {error}") from error


def _measure(
    task: Task, names: tuple[str, ...], progress: Callable[[str, str, int], None]
) -> tuple[dict[str, Outcome], list[BlockMeanEnergy]]:
    """Runs every method, the reference first, then looks at the values on its path.

    Everything is compiled first, side by side: compilation is most of the time on a GPU.
    """
    outcomes: dict[str, Outcome] = {}
    compiling = [_start(functools.partial(Method, name, task, progress)) for name in names]
    compiling_energy = _start(functools.partial(measure_block_means, task))
    methods = [answer() for answer in compiling]
    energy = compiling_energy()
    for name, method in zip(names, methods, strict=True):
        sampled = method.sample()
        if name == REFERENCE:
            outcomes[name] = Outcome(method, sampled.path, sampled.seconds, None, None)
            continue
        followed = method.follow(outcomes[REFERENCE].path.videos)
        outcomes[name] = Outcome(
            method, sampled.path, sampled.seconds, followed.path.velocities, followed.seconds
        )
    progress("values", "block means", 0)
    return outcomes, energy(outcomes[REFERENCE].path.videos)


def _write(
    folder: pathlib.Path,
    measured: Callable[[], dict[str, Any]],
    clip: Clip,
    outcomes: dict[str, Outcome],
) -> dict[str, Any]:
    """Writes the folder and returns the record, which is made while the pictures are drawn."""
    samples = {
        name: to_bytes(np.asarray(outcome.path.final[0])) for name, outcome in outcomes.items()
    }
    reference = samples[REFERENCE]
    clips = {"Real clip": clip.pixels} | {name.upper(): c for name, c in samples.items()}
    differences = {
        name.upper(): difference(sample, reference)
        for name, sample in samples.items()
        if name != REFERENCE
    }
    sheet = clips | {f"|{name} - BF16| x{DIFFERENCE_GAIN}": d for name, d in differences.items()}
    # Leaving the block waits for both pictures, so none is written after the folder is gone.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        drawn = (
            pool.submit(write_animation, folder / "comparison.gif", clips),
            pool.submit(write_contact_sheet, folder / "contact_sheet.png", sheet),
        )
        record = measured()
        page = make_page(record, clips, differences)
        for picture in drawn:
            picture.result()
    (folder / "report.json").write_text(
        json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    (folder / "report.html").write_text(page, encoding="utf-8")
    return record


@contextlib.contextmanager
def _folder(output: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder beside the output that takes its place in the end, or vanishes.

    An empty folder and one that holds nothing but an earlier run are replaced; anything else that
    exists is left alone.
    """
    output = output.absolute()
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise InputError(f"output {output} exists and is not a folder")
    try:
        if output.is_dir() and (foreign := {p.name for p in output.iterdir()} - set(FILES)):
            raise InputError(
                f"output {output} exists and holds other files ({min(foreign)}); choose another"
            )
        folder = pathlib.Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise InputError(f"cannot write to {output}: {error.strerror or error}") from error
    try:
        yield folder
        try:
            folder.chmod(0o755)
            _put_in_place(folder, output)
        except OSError as error:
            raise InputError(f"cannot write to {output}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(folder: pathlib.Path, output: pathlib.Path) -> None:
    """Renames the folder; an earlier output goes only when the new one is there."""
    if not output.is_dir():
        folder.rename(output)
        return
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as old:
        earlier = output.rename(pathlib.Path(old) / "earlier")
        try:
            folder.rename(output)
        except OSError:
            earlier.rename(output)
            raise


def _start[Result](work: Callable[[], Result]) -> Callable[[], Result]:
    """Starts `work` in another thread; what is returned waits for its result.

    The thread is a daemon: after Ctrl-C it ends with the process instead of being waited for.
    """
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def target() -> None:
        try:
            answers.put((True, work()))
        except BaseException as error:
            answers.put((False, error))

    threading.Thread(target=target, daemon=True).start()

    def answer() -> Result:
        # A wait without an end would not let a signal through on every platform.
        while True:
            with contextlib.suppress(queue.Empty):
                done, result = answers.get(timeout=0.2)
                break
        if not done:
            raise result
        return result

    return answer


def _in_thread[Result](work: Callable[[], Result]) -> Result:
    """Runs `work` in another thread, so that Ctrl-C need not wait for a compiled function."""
    return _start(work)()
