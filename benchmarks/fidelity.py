"""How close each number format comes to exact attention on real tensors: `vc-jax bench fidelity`.

Every layer and head of the shipped video DiT at several noise levels, and heads from a file, each
against attention in float64; where the error comes from; what clustering removes.
"""

import argparse
import itertools
import pathlib
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._fidelity_measures import METHODS, Head, measure_head
from ._results import environment, markdown_table, write_results

DEFAULT_TIMES = (0.9, 0.6, 0.3)
SPREADS = (0.0, 1.0, 2.0, 3.0, 4.0, np.inf)


def dit_heads(times: Sequence[float], height: int, width: int) -> Iterable[Head]:
    """Heads of the shipped model on the shipped clip, noised to each time."""
    from ..models import load_video_dit
    from ..models.sample_clip import load_clip

    model = load_video_dit(compute_dtype=jnp.float32)
    pixels = load_clip(None, 16, height, width).pixels
    video = jnp.asarray(pixels, jnp.float32)[None] / 127.5 - 1
    noise = jax.random.normal(jax.random.key(3), video.shape)
    given = jnp.arange(video.shape[1])[None] < 4
    for time in times:
        t = jnp.where(given, 0.0, time)
        share = t[:, :, None, None, None]
        _, inputs = model.attention_inputs((1 - share) * video + share * noise, t)
        for layer, head in np.ndindex(inputs.query.shape[0], inputs.query.shape[3]):
            arrays = (np.asarray(x[layer, 0, :, head], np.float32) for x in inputs)
            yield Head(f"t{time:g}/layer{layer}/head{head}", *arrays)


def file_heads(path: pathlib.Path) -> Iterable[Head]:
    """Heads of an .npz file with arrays q_NAME, k_NAME, v_NAME of [S, H]."""
    with np.load(path) as file:
        for name in sorted(n[2:] for n in file.files if n.startswith("q_")):
            arrays = (file[f"{kind}_{name}"].astype(np.float32) for kind in "qkv")
            yield Head(f"{path.stem}/{name}", *arrays)


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
    """Error by method, and energy removed by the number of clusters."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

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
    parse = argparse.ArgumentParser(prog="vc-jax bench fidelity", description=__doc__)
    parse.add_argument("--times", nargs="+", type=float, default=list(DEFAULT_TIMES))
    parse.add_argument("--size", nargs=2, type=int, default=[88, 160], metavar=("HEIGHT", "WIDTH"))
    parse.add_argument("--heads", nargs="*", type=pathlib.Path, default=[], metavar="FILE.npz")
    parse.add_argument("--output", type=pathlib.Path, default=pathlib.Path("benchmark-results"))
    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    arguments = parser().parse_args(argv)
    sources: dict[str, list[Head]] = {}
    for path in arguments.heads:
        sources[path.stem] = list(file_heads(path))
    for time in arguments.times:
        sources[f"video DiT, t = {time:g}"] = list(dit_heads([time], *arguments.size))
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
