"""Where weights are and how fast they get there: checkpoints into a GPU, experts from host memory.

Wan2.2-A14B at full size. A checkpoint of a few layers is written, and read from the page cache.
Then both experts, with random weights made on the device, wait in page-locked host memory and
sample a 720p clip in turns. Limit the allocator to see what a smaller card would do:
XLA_PYTHON_CLIENT_MEM_FRACTION=0.53 leaves 80 GB of an H200.
"""

import argparse
import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vc_jax._command_line import complain, positive

from ..models.common import memory
from ..models.common.tensor_files import DTYPES
from ..models.sampling import sample
from ._command_line import missing_gpu, parser_of
from ._results import environment, markdown_table, write_results
from ._video_models import VIDEO_MODELS, VideoModel, random_parameters

MODEL = "wan-a14b"
FILES = ("F32", "BF16")
_CHECKED_LAYERS = 2


def parser() -> argparse.ArgumentParser:
    """The benchmark's own arguments."""
    parse = parser_of("memory", __doc__)
    add = parse.add_argument
    add("--attention", default="int8", choices=("bf16", "int8", "fp8"), help="(default: int8)")
    add("--layers", type=positive(int), help="depth of the experts instead of their own")
    add("--file-layers", type=positive(int), default=2, help="of the checkpoint (default: 2)")
    add("--steps", type=positive(int), default=2, help="half of them an expert's (default: 2)")
    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
      0; 1 where experts that wait give other bits than resident ones; 2 without a GPU.
    """
    arguments = parser().parse_args(argv)
    if arguments.steps % 2:
        return complain("bench memory", f"--steps: must be even, got {arguments.steps}")
    reason = missing_gpu()
    if reason is not None:
        return complain("bench memory", reason)
    start = time.perf_counter()

    def log(text: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {text}", flush=True)

    model = VIDEO_MODELS[MODEL]
    report: dict[str, Any] = {"environment": environment(), "attention": arguments.attention}
    report["loading"] = [
        measure_loading(model.with_layers(arguments.file_layers), kind, log) for kind in FILES
    ]
    full = model.with_layers(arguments.layers)
    report["experts"] = measure_experts(full, arguments.attention, arguments.steps, log)
    report["same_bits"] = same_bits(model.with_layers(_CHECKED_LAYERS), arguments.attention)
    log(f"experts that wait give the bits of resident ones: {report['same_bits']}")
    text = _text(report)
    write_results(arguments.output, "memory", report, text)
    print(text)
    return 0 if report["same_bits"] else 1


def _text(report: dict[str, Any]) -> str:
    loading, experts = report["loading"], report["experts"]
    return "\n\n".join(
        [
            "# Weights on their way",
            markdown_table(list(loading[0]), [list(row.values()) for row in loading]),
            markdown_table(["experts", ""], [list(item) for item in experts.items()]),
        ]
    )


def measure_loading(model: VideoModel, kind: str, log: Callable[[str], None]) -> dict[str, Any]:
    """A checkpoint of the model in one number type, from the page cache to BF16 parameters; the
    second time, when everything is compiled."""
    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(model, Path(folder), kind)
        seconds = []
        for _ in range(2):
            before = time.perf_counter()
            loaded = model.kind.from_pretrained(folder)
            jax.block_until_ready(jax.tree.leaves(loaded))
            seconds.append(time.perf_counter() - before)
            del loaded
    row = {"file": kind, "GB": size / 1e9, "first, s": seconds[0], "second, s": seconds[1]}
    row["GB/s"] = size / 1e9 / seconds[1]
    log(f"{kind}: {row['GB/s']:.2f} GB of file a second")
    return row


def write_checkpoint(model: VideoModel, folder: Path, kind: str) -> int:
    """Random tensors and the configuration; returns the bytes of the file."""
    (folder / "config.json").write_text(json.dumps(model.config.to_dict("diffusers")))
    layout, header, end = model.kind.layouts["diffusers"](model.config), {}, 0
    for entry in layout.entries:
        for name, shape in entry.tensors():
            begin, end = end, end + int(np.prod(shape)) * DTYPES[kind].itemsize
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    block = np.random.default_rng(0).uniform(-0.02, 0.02, 2**24).astype(DTYPES[kind]).tobytes()
    with (folder / "diffusion_pytorch_model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, end, len(block)):
            stream.write(block[: end - begin])
    return end


def experts_of(model: VideoModel, attention: str) -> list[Any]:
    """Two experts with random weights, made on the device and moved to the host's memory."""
    graph, abstract = model.graph(attention)
    make = jax.jit(functools.partial(random_parameters, abstract))
    return [nnx.merge(graph, make(jnp.uint32(s))).in_memory("pinned_host") for s in range(2)]


def clip(model: VideoModel, experts: Sequence[Any], steps: int) -> jax.Array:
    """A clip in so many steps, half of them the high-noise expert's, with guidance."""
    latents, _, conditioning = model.inputs()
    negative = {"text": jnp.zeros_like(conditioning["text"])}
    settings = dataclasses.replace(experts[0].sampling, num_steps=steps)
    times = settings.timesteps() / 1000
    middle = float(times[steps // 2 - 1] + times[steps // 2]) / 2
    settings = dataclasses.replace(settings, boundary=middle)
    given = {"negative": negative, "sampling": settings, "progress": False}
    high, low = experts
    return jax.block_until_ready(sample(high, latents, conditioning, low_noise_model=low, **given))


def measure_experts(
    model: VideoModel, attention: str, steps: int, log: Callable[[str], None]
) -> dict[str, Any]:
    """Memory and seconds of a clip whose experts wait in host memory."""
    before = time.perf_counter()
    experts = experts_of(model, attention)
    parameters = nnx.state(experts[1])
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(parameters))
    found: dict[str, Any] = {"an expert, GB": size / 1e9}
    log(f"two experts of {size / 1e9:.1f} GB made in {time.perf_counter() - before:.1f} s")
    found["allocator's limit, GB"] = _gigabytes("bytes_limit")
    found["in use while both wait, GB"] = _gigabytes("bytes_in_use")
    seconds = []
    for _ in range(2):
        before = time.perf_counter()
        jax.block_until_ready(jax.tree.leaves(memory.on_device(parameters)))
        seconds.append(time.perf_counter() - before)
    found["copying one to the device (the switch), s"] = seconds[1]
    found["copying, GB/s"] = size / 1e9 / seconds[1]
    log(f"copied to the device in {seconds[0]:.2f} and {seconds[1]:.2f} s")
    for name in ("with compilation", "again"):
        before = time.perf_counter()
        finite = bool(jnp.isfinite(clip(model, experts, steps)).all())
        found[f"{steps} guided steps, {name}, s"] = time.perf_counter() - before
        log(f"{steps} guided steps, {name}: {time.perf_counter() - before:.1f} s, {finite=}")
    found["finite"] = finite
    found["peak, GB"] = _gigabytes("peak_bytes_in_use")
    log(f"peak {found['peak, GB']} GB")
    return found


def _gigabytes(name: str) -> float | None:
    """Of the first device's allocator; None where it does not tell."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats[name] / 1e9 if name in stats else None


def same_bits(model: VideoModel, attention: str) -> bool:
    """Whether experts that wait give what resident ones give."""
    waiting = experts_of(model, attention)
    resident = [expert.in_memory("device") for expert in waiting]
    first, second = (np.asarray(clip(model, experts, 2)) for experts in (waiting, resident))
    return np.array_equal(first, second)
