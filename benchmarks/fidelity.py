"""How close each number format comes to exact attention on real tensors: `vc-jax bench fidelity`.

Every layer and head of the shipped video DiT at several noise levels, and heads from a file, each
against attention in float64; where the error comes from; what clustering removes.
"""

import argparse
import itertools
import pathlib
import statistics
import sys
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from vc_jax._command_line import complain, once, path, positive, share

from ..models import VideoDiT, load_video_dit
from ..models.sample_job.clip import InputError, load_clip, to_model
from ._command_line import parser_of
from ._fidelity_measures import METHODS, Head, measure_head
from ._results import announce_figure, environment, markdown_table, pyplot, write_results

_FRAMES = 16
DEFAULT_TIMES = (0.9, 0.6, 0.3)
SPREADS = (0.0, 1.0, 2.0, 3.0, 4.0, np.inf)


class Clip(NamedTuple):
    """The shipped model and the shipped clip, which it continues."""

    model: VideoDiT
    video: Float[jax.Array, "1 F height width 3"]


def shipped_clip(height: int, width: int) -> Clip:
    """The shipped model with the shipped clip at a size.

    Raises:
      InputError: no such size, or OpenCV is not installed.
    """
    model = load_video_dit(compute_dtype="float32")
    try:
        model.config.grid(_FRAMES, height, width)
    except ValueError as error:
        raise InputError(f"--size: {error}") from error
    pixels = load_clip(None, _FRAMES, height, width).pixels
    return Clip(model, jnp.asarray(to_model(pixels)))


def dit_heads(clip: Clip, time: float) -> Iterable[Head]:
    """Heads of the shipped model on the shipped clip, noised to a time from 0 to 1."""
    video = clip.video
    noise = jax.random.normal(jax.random.key(3), video.shape)
    given = jnp.arange(video.shape[1])[None] < 4
    t = jnp.where(given, 0.0, time)
    share = t[:, :, None, None, None]
    _, inputs = clip.model.attention_inputs((1 - share) * video + share * noise, t)
    for layer, head in np.ndindex(inputs.query.shape[0], inputs.query.shape[3]):
        arrays = (np.asarray(x[layer, 0, :, head], np.float32) for x in inputs)
        yield Head(f"t{time:g}/layer{layer}/head{head}", *arrays)


def file_heads(path: pathlib.Path) -> list[Head]:
    """Heads of an .npz file with arrays q_NAME [T, H], k_NAME and v_NAME [S, H].

    Raises:
      InputError: no such file, or one that does not hold that.
    """
    try:
        with path.open("rb") as opened, np.lib.npyio.NpzFile(opened) as file:
            found = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise InputError(f"--heads: no file at {path}") from None
    except (EOFError, OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"--heads: cannot read {path} as an .npz file") from error
    names = sorted(name[2:] for name in found if name.startswith("q_"))
    if not names:
        raise InputError(f"--heads: {path} has no arrays q_NAME, k_NAME, v_NAME")
    return [_file_head(path, name, found) for name in names]


def _file_head(path: pathlib.Path, name: str, found: Mapping[str, np.ndarray]) -> Head:
    arrays = []
    for key in (f"q_{name}", f"k_{name}", f"v_{name}"):
        if key not in found:
            raise InputError(f"--heads: {path} has q_{name} but no {key}")
        array = found[key]
        if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "fiu":
            raise InputError(
                f"--heads: {key} of {path} must be real [tokens, channels], "
                f"got {array.dtype} {list(array.shape)}"
            )
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise InputError(f"--heads: {key} of {path} must be finite in float32")
        arrays.append(array)
    query, key, value = arrays
    if key.shape != value.shape or query.shape[1] != key.shape[1] or key.shape[1] % 16:
        shapes = ", ".join(str(list(array.shape)) for array in arrays)
        raise InputError(
            f"--heads: q_{name}, k_{name}, v_{name} of {path} must be [T, H], [S, H], [S, H] with "
            f"H a multiple of 16, got {shapes}"
        )
    return Head(f"{path.stem}/{name}", query, key, value)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def method_table(heads: Sequence[dict[str, Any]]) -> str:
    """Errors of every method, averaged over heads."""
    rows = []
    for method in METHODS:
        found = [head["methods"][method] for head in heads]
        rows.append(
            (
                method,
                100 * _mean(e["relative_l2"] for e in found),
                100 * max(e["relative_l2"] for e in found),
                100 * _mean(e["relative_l1"] for e in found),
                _mean(1 - e["cosine"] for e in found),
                _mean(e["gain"] for e in found),
            )
        )
    columns = ("method", "rel. L2 %", "worst head %", "rel. L1 %", "1 - cosine", "gain")
    return markdown_table(columns, rows)


def share_table(heads: Sequence[dict[str, Any]]) -> str:
    """Relative L2 with one operand quantised at a time."""
    rows = []
    for preset in ("int8", "fp8"):
        found = [head["shares"][preset] for head in heads]
        rows.append((preset, *(100 * _mean(s[k] for s in found) for k in ("qk", "p", "v"))))
    return markdown_table(("preset", "Q and K only %", "P only %", "V only %"), rows)


def cluster_table(heads: Sequence[dict[str, Any]]) -> str:
    """Energy removed for numbers of clusters and of Lloyd steps."""
    rows = [
        (name, *(100 * _mean(h["energy"][name] for h in heads),) * 2)
        for name in ("sequence", "sequence, global mean taken out")
    ]
    for name in heads[0]["energy_by_clusters"]:
        found = [head["energy_by_clusters"][name] for head in heads]
        rows.append((name, *(100 * _mean(e[k] for e in found) for k in ("plain", "chained"))))
    columns = ("order", "energy removed %", "similar clusters together %")
    return markdown_table(columns, rows)


def ratio_table(heads: Sequence[dict[str, Any]]) -> str:
    """Squared error of the quantised values over that in sequence order with means."""
    names = heads[0]["value_error_ratio"]
    rows = [(name, _mean(h["value_error_ratio"][name] for h in heads)) for name in names]
    return markdown_table(("order", "squared value error / in sequence order"), rows)


def variation_table(heads: Sequence[dict[str, Any]]) -> str:
    """Total variation by the spread of a row's scores."""
    columns = {
        key: np.concatenate([head["variation"][key] for head in heads])
        for key in ("spread", "exp", "expcast_running", "expcast")
    }
    rows = []
    for low, high in itertools.pairwise(SPREADS):
        inside = (columns["spread"] >= low) & (columns["spread"] < high)
        if inside.any():
            means = (100 * columns[k][inside].mean() for k in ("exp", "expcast_running", "expcast"))
            rows.append((f"{low:g} to {high:g}", int(inside.sum()), *map(float, means)))
    names = ("spread of the scores", "rows", "exp, cast %", "ExpCast of the paper %", "anchored %")
    return markdown_table(names, rows)


def report(heads: Sequence[dict[str, Any]], title: str) -> str:
    """Markdown of one group of heads."""
    sigma = _mean(head["logit_sigma"] for head in heads)
    parts = [
        f"## {title}\n\n{len(heads)} heads, {heads[0]['tokens']:,} tokens, "
        f"mean standard deviation of a row's scores {sigma:.2f}\n",
        method_table(heads),
        share_table(heads),
        cluster_table(heads),
        ratio_table(heads),
        "Total variation of a row, mean:\n\n" + variation_table(heads),
    ]
    return "\n\n".join(parts) + "\n"


def plot(groups: dict[str, list[dict[str, Any]]], path: pathlib.Path) -> None:
    """Error by method, and energy removed by clusters; nothing without Matplotlib."""
    plt = pyplot()
    if plt is None:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    places = np.arange(len(METHODS))
    for offset, (title, heads) in enumerate(groups.items()):
        errors = [100 * _mean(head["methods"][m]["relative_l2"] for head in heads) for m in METHODS]
        width = 0.8 / len(groups)
        left.barh(places + offset * width, errors, width, label=title)
        names = [n for n in heads[0]["energy_by_clusters"] if n.endswith("3 steps")]
        xs = [float(n.split()[0]) for n in names]
        for key, style in (("plain", "--"), ("chained", "-")):
            ys = [100 * _mean(h["energy_by_clusters"][n][key] for h in heads) for n in names]
            label = title if key == "chained" else None
            right.plot(xs, ys, style, color=f"C{offset}", marker="o", ms=3, label=label)
    left.set_yticks(places + 0.3, list(METHODS), fontsize=7)
    left.invert_yaxis()
    left.set(xscale="log", xlabel="relative L2 error, % (mean over heads)")
    right.set(xlabel="blocks a cluster", ylabel="energy removed by block means, %")
    right.set_title("solid: similar clusters together; dashed: as numbered", fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    """Command line of this benchmark."""
    parse = parser_of("fidelity", __doc__)
    add = parse.add_argument
    add(
        "--times",
        nargs="+",
        type=share,
        default=list(DEFAULT_TIMES),
        metavar="TIME",
        help="share of noise in the video, 0 to 1 (default: 0.9 0.6 0.3)",
    )
    add(
        "--size",
        nargs=2,
        type=positive(int),
        default=[88, 160],
        metavar=("HEIGHT", "WIDTH"),
        help="of the video, multiples of 4 (default: 88 160)",
    )
    add("--heads", nargs="+", type=path, default=[], metavar="FILE.npz", help="other heads")
    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 2, before anything is measured, where a file or size is no good."""
    arguments = parser().parse_args(argv)
    try:
        sources = {str(file): file_heads(file) for file in arguments.heads}
        clip = shipped_clip(*arguments.size)
    except InputError as error:
        return complain("bench fidelity", error)
    announce_figure()
    # Named in short where that tells the files apart.
    stems = [pathlib.Path(file).stem for file in sources]
    if len(set(stems)) == len(stems):
        sources = dict(zip(stems, sources.values(), strict=True))
    for time in once(arguments.times):
        sources[f"video DiT, t = {time}"] = list(dit_heads(clip, time))
    return run(sources, arguments.output)


def run(sources: dict[str, list[Head]], output: pathlib.Path) -> int:
    """Measure groups of heads and write the report."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for title, heads in sources.items():
        groups[title] = []
        for head in heads:
            groups[title].append(measure_head(head))
            print(f"{title}: {head.name}", file=sys.stderr, flush=True)
    about = environment()
    text = "\n".join(report(found, title) for title, found in groups.items())
    write_results(output, "fidelity", {"environment": about, "groups": groups}, text)
    plot(groups, output / "fidelity.png")
    print(text)
    return 0
