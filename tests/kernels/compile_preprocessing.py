"""The preprocessing kernels for `compile_check`: each at the Wan2.2 720p shape and at short ones.

A kernel of 16-bit tokens that spills registers is a fault. One of float32 tokens may: they go
through the tensor core in three pieces.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from vc_jax import _fused
from vc_jax.pallas_kernels import clustering, preparation, statistics

E4M3 = jnp.float8_e4m3fn
NO_SPILL = "0 bytes spill stores, 0 bytes spill loads"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Tokens of a call, and its number of clusters."""

    batch: int
    length: int
    heads: int
    key_heads: int
    head_dim: int
    clusters: int


WAN = Shape(1, 75_600, 40, 40, 128, 295)
SHORT = Shape(1, 4096, 24, 24, 128, 32)
SMALL = Shape(2, 1000, 4, 2, 64, 10)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function that launches kernels, and its abstract arguments."""

    name: str
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    may_spill: bool

    def __str__(self) -> str:
        return self.name


def kernels(shape: Shape, dtype, masked: bool) -> Iterator[Kernel]:
    """Every kernel of a shape; `masked` calls have a mask and an order, others have neither."""

    def array(*sizes: int, of=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, of)

    b, s, n, k, h = dataclasses.astuple(shape)[:5]
    query, tokens = array(b, s, n, h, of=dtype), array(b, s, k, h, of=dtype)
    count, valid = array(b, of=jnp.int32), array(b, s, of=jnp.bool_) if masked else None
    order = array(b, k, s, of=jnp.int32) if masked else None
    blocks = -(-s // 256) * 2
    key_scale, channels, means = array(b, k, blocks), array(b, k, h), array(b, k, blocks, h)
    centroids = array(b, k, shape.clusters, h)
    label = f"{jnp.dtype(dtype).name} S={s} D={h} {'masked, ordered' if masked else 'plain'}"

    def entry(name: str, call: Callable[..., Any], *arguments) -> Kernel:
        return Kernel(f"{name}, {label}", call, arguments, dtype == jnp.float32)

    for wanted in (("sum", "squares"), ("sum", "high", "low")):
        of_channels = functools.partial(statistics.channel_statistics, wanted=wanted)
        yield entry(f"channel {', '.join(wanted)}", of_channels, tokens, valid)
    of_values = statistics.ValueStatistics(
        means if masked else None, None if masked else channels, channels
    )
    values = (tokens, count, order, of_values)
    for code_dtype in (jnp.int8, E4M3):
        name = jnp.dtype(code_dtype).name
        formats = {"rotate": True, "code_dtype": code_dtype}
        queries = functools.partial(preparation.quantize_queries, scale=0.1, **formats)
        yield entry(f"queries {name}", queries, query, key_scale, channels)
        keys = functools.partial(preparation.quantize_keys, **formats)
        yield entry(f"keys {name}", keys, tokens, count, order, channels, channels)
        codes = functools.partial(preparation.quantize_queries_and_values, scale=0.1, **formats)
        yield entry(f"queries {name} and values", codes, (query, key_scale, channels), values)
    of_all = functools.partial(statistics.statistics, key_mean=True, squares=True, smooth=masked)
    yield entry("statistics", of_all, query, tokens, tokens, count, order, valid)
    yield entry("values", preparation.quantize_values, *values)
    for stride in (1, 4):
        nearest = functools.partial(clustering.nearest, stride=stride)
        yield entry(f"labels, stride {stride}", nearest, tokens, centroids, valid)

    def cluster(value, valid, start):
        return _fused.cluster_order_fused(value, valid, shape.clusters, 1, centroids=start)

    yield entry("clustering", cluster, tokens, valid, centroids)
    yield entry("chain", clustering.chain, centroids)


def all_kernels() -> list[Kernel]:
    """Every shape and every dtype of tokens."""
    return [
        *kernels(WAN, jnp.bfloat16, masked=True),
        *kernels(WAN, jnp.bfloat16, masked=False),
        *kernels(SHORT, jnp.bfloat16, masked=True),
        *kernels(SMALL, jnp.float16, masked=True),
        *kernels(WAN, jnp.float32, masked=True),
    ]


_logs_seen: list[str] = []


def fault(kernel: Kernel, device, folder: pathlib.Path) -> str | None:
    """Compiles a kernel; what is wrong with it, by the assembler's logs in a folder."""
    for old in folder.iterdir():
        old.unlink()
    place = functools.partial(
        jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(device)
    )
    arguments = jax.tree.map(lambda x: place(x.shape, x.dtype), kernel.arguments)
    traced = jax.jit(lambda *arrays: kernel.call(*arrays)).trace(*arguments)
    try:
        traced.lower(lowering_platforms=("cuda",)).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    logs = [path.read_text() for path in folder.glob("*.ptxas")]
    _logs_seen.extend(logs)
    # A launch of kernels that were all assembled before leaves no log of its own.
    if not _logs_seen:
        return "no assembler log"
    spilt = any(NO_SPILL not in log for log in logs)
    return "registers are spilled" if spilt and not kernel.may_spill else None
