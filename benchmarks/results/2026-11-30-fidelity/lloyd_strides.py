"""Energy of block means by how many tokens a Lloyd step looks at, and by what distances are.

`python lloyd_strides.py FILE.json [HEIGHT WIDTH]`: heads of the shipped DiT on the shipped clip (88
x 160 if nothing is said: 14 080 tokens, some minutes on two cores), clusters from scratch, and from
the centroids of the time before. Distances are those of float32 values, or of the codes that the
fused kernels compare.
"""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
from flax import nnx

import vc_jax
from vc_jax import _vsmooth
from vc_jax.benchmarks import fidelity
from vc_jax.pallas_kernels import _nearest

TIMES = ((0.9, 0.95), (0.6, 0.9), (0.3, 0.6))
LAYERS = (0, 3, 6)


def attention(query, key, value):
    """In bfloat16 on a GPU, where scores of long sequences would not fit."""
    if jax.default_backend() != "gpu":
        return jax.nn.dot_product_attention(query, key, value)
    half = (x.astype(jnp.bfloat16) for x in (query, key, value))
    out = jax.nn.dot_product_attention(*half, implementation="cudnn")
    return out.astype(query.dtype)


@functools.partial(jax.jit, static_argnums=0)
def values_of(graph, parameters, video, time):
    """Values [layers, S, H] of the first head."""
    model = nnx.merge(graph, parameters)
    noise = jax.random.normal(jax.random.key(3), video.shape)
    given = jnp.arange(video.shape[1])[None] < 4
    t = jnp.where(given, 0.0, time)
    share = t[:, :, None, None, None]
    noisy = (1 - share) * video + share * noise
    inputs = model.attention_inputs(noisy, t, attention=attention)[1]
    return inputs.value[jnp.asarray(LAYERS), 0, :, 0].astype(jnp.float32)


def exact_labels(values, centroids):
    inner = jnp.matmul(values, centroids.T, precision="highest")
    return jnp.argmin(jnp.sum(centroids**2, -1) - 2 * inner, -1)


def code_labels(values, centroids):
    codes = _nearest.codes_of(centroids[None, None], jnp.bfloat16)
    rows = values.astype(jnp.bfloat16)
    tokens = _nearest.token_codes(rows, codes.scale[0, 0], codes.shift[0, 0], True)
    inner = jnp.matmul(
        tokens.astype(jnp.float32), codes.centroid[0, 0].astype(jnp.float32).T, precision="highest"
    )
    distance = inner.astype(jnp.int32) * (2 << codes.bits) + codes.base[0, 0]
    return jnp.argmin(distance[:, : len(centroids)], -1)


LABELS = {"float32": exact_labels, "codes": code_labels}


@functools.partial(jax.jit, static_argnames=("k", "steps", "stride", "distances"))
def energy(values, k, steps, stride, distances, centroids=None):
    """Mean energy of heads [n, S, H], and their centroids."""
    labels_of = LABELS[distances]

    def head(arrays):
        value, centroids = arrays
        sample = value[::stride]
        for _ in range(steps):
            labels = labels_of(sample, centroids)
            count = jax.ops.segment_sum(jnp.ones(len(sample)), labels, k)[:, None]
            total = jax.ops.segment_sum(sample, labels, k)
            centroids = jnp.where(count > 0, total / jnp.maximum(count, 1), centroids)
        return labels_of(value, centroids), centroids

    if centroids is None:
        valid = jnp.ones(values.shape[1], bool)
        centroids = jax.vmap(lambda value: _vsmooth.spread_rows(value, valid, k))(values)
    labels, centroids = jax.lax.map(head, (values, centroids))
    order = _vsmooth.cluster_order(labels, _vsmooth.similar_clusters_together(centroids))
    sorted_values = jnp.take_along_axis(values, order[..., None], 1)
    return jnp.mean(_vsmooth.mean_energy(sorted_values)), centroids


def main(output: pathlib.Path, height: int = 88, width: int = 160) -> None:
    clip = fidelity.shipped_clip(height, width)
    graph, parameters = nnx.split(clip.model)
    times = sorted({time for pair in TIMES for time in pair})
    at = {time: values_of(graph, parameters, clip.video, time) for time in times}
    now = jnp.concatenate([at[time] for time, _ in TIMES])
    earlier = jnp.concatenate([at[time] for _, time in TIMES])
    length = now.shape[1]
    blocks, usual = length // 128, vc_jax.default_clusters(length)
    rows = [{"tokens": length, "default_clusters": usual, "device": jax.default_backend()}]
    rows.append({"what": "sequence order", "cold": float(jnp.mean(_vsmooth.mean_energy(now)))})

    def add(row, cold, warm=None):
        rows.append(row | {"cold": float(cold)} | ({} if warm is None else {"warm": float(warm)}))
        print(rows[-1], flush=True)
        output.write_text(json.dumps(rows, indent=1) + "\n")

    for k in sorted({blocks // 4, blocks // 3, blocks // 2, blocks}):
        add({"what": "converged", "clusters": k}, energy(now, k, 25, 1, "float32")[0])
    for k in sorted({usual, blocks // 2, blocks}):
        for stride in (1, 2, 3, 4, 8):
            for distances in LABELS:
                cold = energy(now, k, 3, stride, distances)[0]
                start = energy(earlier, k, 3, stride, distances)[1]
                warm = energy(now, k, 1, stride, distances, start)[0]
                add({"what": distances, "clusters": k, "stride": stride}, cold, warm)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
