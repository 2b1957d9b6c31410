"""The preprocessing kernels for `compile_check`: each at the Wan2.2 720p shape and at a small one.

The compiler is asked to fail where a kernel of 16-bit tokens spills registers. Float32 tokens may:
they go through the tensor core in three pieces.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from vc_jax import _fused
from vc_jax.pallas_kernels import clustering, preparation

E4M3 = jnp.float8_e4m3fn
NO_SPILL = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


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
    per_head, channels = array(b, k), array(b, k, h)
    means = array(b, k, -(-s // 256) * 2, h, of=jnp.bfloat16) if masked else array(b, k, 1, h)
    centroids = array(b, k, shape.clusters, h)
    label = f"{jnp.dtype(dtype).name} D={h} {'masked, ordered' if masked else 'plain'}"

    def entry(name: str, call: Callable[..., Any], *arguments) -> Kernel:
        return Kernel(f"{name}, {label}", call, arguments, dtype == jnp.float32)

    for wanted in (("sum", "squares"), ("sum", "high", "low")):
        statistics = functools.partial(preparation.channel_statistics, wanted=wanted)
        yield entry(f"channel {', '.join(wanted)}", statistics, tokens, valid)
    for code_dtype in (jnp.int8, E4M3):
        name = jnp.dtype(code_dtype).name
        formats = {"rotate": True, "code_dtype": code_dtype}
        queries = functools.partial(preparation.quantize_queries, scale=0.1, **formats)
        yield entry(f"queries {name}", queries, query, per_head, per_head, channels)
        keys = functools.partial(preparation.quantize_keys, **formats)
        yield entry(f"keys {name}", keys, tokens, count, order, channels, channels)
    yield entry("value statistics", preparation.value_statistics, tokens, count, order)
    yield entry("values", preparation.quantize_values, tokens, count, order, means, channels)
    for stride in (1, 4):
        nearest = functools.partial(clustering.nearest, stride=stride)
        yield entry(f"labels, stride {stride}", nearest, tokens, centroids, valid)

    def cluster(value, valid, start):
        return _fused.cluster_order_fused(value, valid, shape.clusters, 1, centroids=start)

    yield entry("clustering", cluster, tokens, valid, centroids)
    yield entry("chain", clustering.chain, centroids)


def all_kernels() -> list[Kernel]:
    """Both shapes and every dtype of tokens."""
    return [
        *kernels(WAN, jnp.bfloat16, masked=True),
        *kernels(WAN, jnp.bfloat16, masked=False),
        *kernels(SMALL, jnp.float16, masked=True),
        *kernels(WAN, jnp.float32, masked=True),
    ]


def fault(kernel: Kernel, device) -> str | None:
    """Compiles a kernel; why it cannot be compiled."""
    # Pallas looks at the device that it compiles for.
    mesh = jax.sharding.AbstractMesh(
        (1,),
        ("x",),
        axis_types=(jax.sharding.AxisType.Auto,),
        abstract_device=jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu"),
    )
    place = functools.partial(
        jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(device)
    )
    arguments = jax.tree.map(lambda x: place(x.shape, x.dtype), kernel.arguments)

    def call(*arrays):
        return kernel.call(*arrays)

    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",))
    try:
        lowered.compile(compiler_options={} if kernel.may_spill else NO_SPILL)
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return None
