"""The stages of preprocessing: what is compiled and timed, and the bytes each one has to move."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import vc_jax
from vc_jax import _fused

from ..pallas_kernels import clustering, preparation, statistics
from ..pallas_kernels.layout import STEP
from ._workloads import Workload

CONFIG = vc_jax.PRESETS["int8"]
GROUPS = 512
"""Centres of the values of a head."""
FLASH_KMEANS_CLUSTERS, FLASH_KMEANS_STEPS = (64, 256, 512), 4
"""What flash-kmeans is usually timed with."""
COPY = "copy"
# XLA's functions are not timed here, and choosing the fastest matrix products takes long.
_untuned = functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})


@dataclasses.dataclass(frozen=True)
class Stage:
    """Something to time.

    Attributes:
      name: of the row.
      function: of arrays.
      arguments: its arrays.
      bytes: that it cannot help reading and writing.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    bytes: float


class Inputs(NamedTuple):
    """Queries, keys and values, BTNH."""

    query: Array
    key: Array
    value: Array


def clustered_inputs(workload: Workload, seed: int = 0) -> Inputs:
    """Normal queries, keys with a mean of their own in each channel, and clustered values.

    A value is one of `GROUPS` normal centres of its head, drawn for each token, plus half of a
    normal vector: means of clusters can hold 80 % of the energy. All in bfloat16.
    """
    shape = (workload.batch, workload.length, workload.heads, workload.head_dim)

    @jax.jit
    def draw(key):
        keys = jax.random.split(key, 6)
        normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        head = jnp.arange(workload.heads)
        group = jax.random.randint(keys[4], shape[:3], 0, GROUPS)
        centres = normal(keys[3], (workload.heads, GROUPS, workload.head_dim))
        value = centres[head, group] + 0.5 * normal(keys[2], shape)
        key = normal(keys[1], shape) + normal(keys[5], shape[2:])
        return Inputs(normal(keys[0], shape), key, value)

    return draw(jax.random.key(seed))


def bytes_of(tree: Any) -> float:
    """Bytes of the arrays, or abstract arrays, of a pytree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _stage(name: str, function, *arguments, reads: float | None = None) -> Stage:
    """A stage that reads its arguments once, or `reads` bytes, and writes its results."""
    written = bytes_of(jax.eval_shape(function, *arguments))
    return Stage(name, function, arguments, written + (reads or bytes_of(arguments)))


def copy_stage(workload: Workload) -> Stage:
    """Every bit of an array the size of the values turned round; arithmetic takes no time."""
    words = workload.batch * workload.length * workload.heads * workload.head_dim // 2
    return _stage(COPY, jnp.invert, jnp.zeros(words, jnp.uint32))


def stages(workload: Workload, inputs: Inputs, presets: Sequence[str]) -> list[Stage]:
    """Every stage at a workload's shape, the copy first."""
    clusters = vc_jax.default_clusters(workload.length)
    stride = CONFIG.lloyd_stride or vc_jax.default_lloyd_stride(workload.length, clusters)
    order, centroids = jax.jit(
        lambda value: _fused.cluster_order_fused(
            value, None, clusters, CONFIG.lloyd_steps, stride=stride
        )
    )(inputs.value)
    return [
        copy_stage(workload),
        *_preparation_stages(inputs, order, presets),
        *_clustering_stages(inputs.value, centroids, stride),
        *_whole_preparations(inputs, order, presets),
        *_whole_clusterings(inputs.value, centroids, stride),
    ]


def _preparation_stages(inputs: Inputs, order, presets: Sequence[str]) -> Iterator[Stage]:
    query, key, value = inputs
    count = jnp.full(key.shape[0], key.shape[1], jnp.int32)
    config = vc_jax.PRESETS[presets[0]] if presets else vc_jax.PRESETS["int8"]
    sizes = functools.partial(_fused.channel_sizes_fused, config=config)
    yield _stage("key mean", sizes, query, key)
    mean, balance = jax.jit(sizes)(query, key)
    blocks = -(-key.shape[1] // STEP) * 2
    key_scale = jnp.ones((key.shape[0], key.shape[2], blocks), jnp.float32)
    for preset in presets:
        formats = {"rotate": True, "code_dtype": _code_dtype(preset)}
        quantise = functools.partial(preparation.quantize_keys, **formats)
        yield _stage(f"keys, {preset}", quantise, key, count, order, mean, balance)
        quantise = functools.partial(preparation.quantize_queries, scale=0.1, **formats)
        yield _stage(f"queries, {preset}", quantise, query, key_scale, balance)
    for smooth, when in ((True, ""), (False, " (after the window)")):
        look = functools.partial(statistics.value_statistics, smooth=smooth)
        yield _stage(f"value statistics{when}", look, value, count, order)
        found = jax.jit(look)(value, count, order)
        yield _stage(f"values{when}", preparation.quantize_values, value, count, order, found)


def _code_dtype(preset: str):
    return jnp.int8 if vc_jax.PRESETS[preset].qk == "int8" else jnp.float8_e4m3fn


def _clustering_stages(value, centroids, stride: int) -> Iterator[Stage]:
    k = centroids.shape[2]
    for step in dict.fromkeys((1, stride)):
        nearest = functools.partial(clustering.nearest, stride=step)
        which = "all tokens" if step == 1 else f"every {step}th token"
        read = bytes_of(value) / step
        labels = jax.jit(nearest)(value, centroids)
        counts = bytes_of(labels.counts)
        yield _stage(f"labels of {which}, k = {k}", nearest, value, centroids, reads=read)
        where = jax.jit(clustering.offsets)(labels)
        yield _stage(f"offsets, {which}", clustering.offsets, labels, reads=counts)
        order = jax.jit(clustering.order_by)(labels, where)
        reads = bytes_of((labels.label, labels.rank, where.before, where.first))
        yield _stage(f"order, {which}", clustering.order_by, labels, where, reads=reads)
        means = functools.partial(clustering.cluster_means, stride=step)
        reads = read + bytes_of(order)
        arguments = (value, order, where, centroids)
        yield _stage(f"centroid means, {which}", means, *arguments, reads=reads)
    yield _stage("chain", clustering.chain, centroids)


def _whole_preparations(inputs: Inputs, order, presets: Sequence[str]) -> Iterator[Stage]:
    query, key, value = map(bytes_of, inputs)
    for preset in presets:
        for smooth in (True, False):

            def prepare(query, key, value, order, preset=preset, smooth=smooth):
                config = vc_jax.PRESETS[preset]
                tensors = (query, key, value, config)
                found = _fused.statistics_fused(*tensors, order=order, smooth=smooth)
                given = {"order": order, "smooth": smooth, **found._asdict()}
                return _fused.prepare_fused(*tensors, **given)

            # The key mean and the value scales are of all tokens: keys and values are read twice.
            reads = query + 2 * key + 2 * value + (3 if smooth else 2) * bytes_of(order)
            when = "in the window" if smooth else "after the window"
            yield _stage(f"PREPARATION {preset}, {when}", prepare, *inputs, order, reads=reads)


def _whole_clusterings(value, centroids, stride: int) -> Iterator[Stage]:
    def cluster(name: str, clusters: int, steps: int, stride: int, start=None) -> Stage:
        def run(value, start=None):
            return _fused.cluster_order_fused(
                value, None, clusters, steps, stride=stride, centroids=start
            )

        # A step reads the tokens it looks at to label them and to add them up.
        reads = (2 * steps / stride + 1) * bytes_of(value)
        arguments = (value,) if start is None else (value, start)
        return _stage(name, run, *arguments, reads=reads)

    k, warm, cold = centroids.shape[2], CONFIG.warm_lloyd_steps, CONFIG.lloyd_steps
    yield cluster(f"REFRESH, k = {k}, {warm} step(s)", k, warm, stride, centroids)
    yield cluster(f"COLD CLUSTERING, k = {k}, {cold} steps", k, cold, stride)
    for clusters in sorted({*FLASH_KMEANS_CLUSTERS, k}):
        default = vc_jax.default_lloyd_stride(value.shape[1], clusters)
        for step in dict.fromkeys((1, default)):
            yield _bare_kmeans(value, clusters, step)


def _bare_kmeans(value, clusters: int, stride: int) -> Stage:
    """Labels and centroids only, as flash-kmeans gives them, from a cold start."""
    steps = FLASH_KMEANS_STEPS

    def run(value):
        start = _fused.starting_rows(value, None, clusters)
        labels, centroids = clustering.kmeans(value, start, start, steps, stride=stride)
        return labels.label, centroids

    which = "all tokens" if stride == 1 else f"every {stride}th token"
    name = f"k-means, k = {clusters}, {steps} steps over {which}"
    return _stage(name, run, value, reads=(2 * steps / stride + 1) * bytes_of(value))


def check_codes(workload: Workload, preset: str, tokens: int = 4096, heads: int = 2) -> dict:
    """Share of the codes of a slice, randomly ordered, that differ from XLA's."""
    small = dataclasses.replace(
        workload, length=min(tokens, workload.length), heads=min(heads, workload.heads)
    )
    inputs, config = clustered_inputs(small), vc_jax.PRESETS[preset]
    place = jax.random.uniform(jax.random.key(1), (small.batch, small.heads, small.length))
    order = jnp.argsort(place, -1).astype(jnp.int32)
    mean = vc_jax.mean_key(inputs.key)
    balance = vc_jax.channel_balance(inputs.query, inputs.key, key_mean=mean)
    fixed = {"config": config, "order": order}
    given = {"key_mean": mean, "balance": balance}
    with_xla = _untuned(functools.partial(vc_jax.prepare, **fixed))(*inputs, **given)
    fused = jax.jit(functools.partial(_fused.prepare_fused, **fixed))(*inputs, **given)
    found: dict[str, Any] = {"preset": preset, "tokens": small.length, "heads": small.heads}
    for name in ("query_codes", "key_codes", "value_codes"):
        one, other = (getattr(x, name).astype(jnp.float32) for x in (with_xla, fused))
        found[name] = float(jnp.mean(one != other))
    return found


def check_energy(workload: Workload, value: Array, heads: int = 2) -> dict[str, Any]:
    """Share of the values' energy that block means hold, sorted by each k-means, cold."""
    value = value[:1, :, :heads]
    length = value.shape[1]
    clusters = vc_jax.default_clusters(length)
    stride = CONFIG.lloyd_stride or vc_jax.default_lloyd_stride(length, clusters)
    by_head = jnp.swapaxes(value, 1, 2)

    @_untuned
    def energies(value, by_head):
        fused, _ = _fused.cluster_order_fused(
            value, None, clusters, CONFIG.lloyd_steps, stride=stride
        )
        found = vc_jax.kmeans(by_head, clusters, steps=CONFIG.lloyd_steps, stride=stride)
        places = vc_jax.similar_clusters_together(found.centroids)
        xla = vc_jax.cluster_order(found.labels, places)
        held = [
            jnp.mean(vc_jax.mean_energy(jnp.take_along_axis(by_head, order[..., None], 2)))
            for order in (fused, xla)
        ]
        return *held, jnp.mean(vc_jax.mean_energy(by_head))

    fused, xla, unsorted = (float(x) for x in energies(value, by_head))
    return {
        "workload": workload.name,
        "heads": value.shape[2],
        "clusters": clusters,
        "fused": fused,
        "xla": xla,
        "unsorted": unsorted,
    }
