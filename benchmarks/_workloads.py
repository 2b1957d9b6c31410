"""Shapes by name, and the random inputs that are timed on them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Workload:
    """A self-attention shape: B sequences of S tokens, N heads of H channels."""

    name: str
    length: int
    heads: int
    head_dim: int = 128
    batch: int = 1

    @property
    def flops(self) -> float:
        """Multiply-adds of both products, counted as two operations each."""
        return 4.0 * self.batch * self.heads * self.length**2 * self.head_dim


WORKLOADS = {
    entry.name: entry
    for entry in (
        Workload("s4k-h24", 4096, 24),
        Workload("s8k-h24", 8192, 24),
        Workload("s32k-h16", 32768, 16),
        Workload("longcat-480p", 37440, 32),
        Workload("s75k-h8", 75600, 8),
        Workload("wan-720p", 75600, 40),
        Workload("minimax-h3", 73500, 56),
        Workload("hunyuan-720p", 113585, 16),
    )
}


def random_inputs(
    workload: Workload,
    *,
    logit_sigma: float = 1.0,
    value_offset: float = 0.5,
    channel_offset: float = 0.0,
    seed: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normal queries, keys and values in bfloat16, BTNH.

    Values have a mean of `value_offset` plus, in each channel of each head, that of a normal
    distribution of deviation `channel_offset`.
    """
    shape = (workload.batch, workload.length, workload.heads, workload.head_dim)

    @jax.jit
    def draw(key):
        keys = jax.random.split(key, 3)
        query, key, value = jax.vmap(lambda k: jax.random.normal(k, shape, jnp.float32))(keys)
        offset = jax.random.normal(jax.random.fold_in(keys[2], 0), shape[2:], jnp.float32)
        value = value + (value_offset + channel_offset * offset)
        return tuple(x.astype(jnp.bfloat16) for x in (query * logit_sigma, key, value))

    return draw(jax.random.key(seed))


def exact_rows(query, key, value, rows: int = 256) -> tuple[jax.Array, jax.Array]:
    """Attention of `rows` rows of the first head, in float32 at highest precision, and which."""
    chosen = jnp.linspace(0, query.shape[1] - 1, rows).astype(jnp.int32)

    @functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})
    def attend(query, key, value):
        q, k, v = (x[0, :, 0].astype(jnp.float32) for x in (query, key, value))
        with jax.default_matmul_precision("highest"):
            scores = q[chosen] @ k.T / jnp.sqrt(jnp.float32(q.shape[-1]))
            return jax.nn.softmax(scores, axis=-1) @ v

    return attend(query, key, value), chosen


def relative_error(out, exact, chosen) -> float:
    """|out - exact| / |exact| over the chosen rows of the first head."""
    got = out[0, chosen, 0].astype(jnp.float32)
    return float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact))
