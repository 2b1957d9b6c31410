"""Checks that need several devices; `test_integration` runs them in a process with four."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vc_jax.models import maxdiffusion

from . import golden
from .test_integration import context, expected, flat, heads_first

RULES = (
    ("activation_batch", ("data", "fsdp")),
    ("heads", "tensor"),
    ("length", "context"),
    ("kv_length", "context"),
)


def check_maxdiffusion(shape: tuple[int, ...], heads: int, preset: str, bound: float) -> None:
    """Self-attention with a mask, sharded over the axes of MaxDiffusion's mesh."""
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "fsdp", "context", "tensor"))
    query, key, value = (heads_first(131, seed, heads) for seed in range(3))
    keep = jnp.asarray(np.arange(131) < np.array([[100], [131]]))
    kernel = maxdiffusion.attention_kernel(preset, min_key_length=128)
    given = context(mesh=mesh, heads=heads, attention_mask=keep)
    run = jax.jit(lambda q, k, v: kernel(q, k, v, given))
    with nn.logical_axis_rules(RULES):
        out = run(query, key, value)
        crossing = run(flat(query), flat(key), flat(value))
    wanted = expected(query, key, value, mask=keep[:, None, None])
    error = golden.relative_l2(out, wanted)
    assert error < bound, (shape, preset, error)
    assert golden.relative_l2(crossing, wanted) < 1e-5, shape


def check_sharded_model() -> None:
    """A model whose heads lie on two devices and whose batch on two others gives the same."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "tensor"))
    heads_axis = {"qkv": 3, "cross_q": 3, "cross_kv": 3, "out": 1, "cross_out": 1}

    def place(name: str, shape: tuple[int, ...]) -> NamedSharding:
        spec: list[str | None] = [None] * len(shape)
        _, part, *rest = [*name.split("."), ""]
        if name.startswith("blocks.") and rest[0] == "kernel" and part in heads_axis:
            spec[heads_axis[part]] = "tensor"
        return NamedSharding(mesh, PartitionSpec(*spec))

    data = golden.fixture("wan_t2v")
    port = data.model(sharding=place)
    kernel = port.blocks.qkv.kernel[...]
    assert kernel.addressable_shards[0].data.shape == (2, 256, 3, 1, 128)
    assert port.blocks.out.kernel[...].addressable_shards[0].data.shape == (2, 1, 128, 256)
    arguments = {
        name: jax.device_put(array, NamedSharding(mesh, PartitionSpec("data")))
        for name, array in data.arguments("main").items()
    }
    out = jax.jit(lambda arguments: golden.call(port, arguments))(arguments)
    assert golden.relative_l2(out, data.expected("main/sample")) < data.tolerance("main/sample")


if __name__ == "__main__":
    assert jax.device_count() == 4
    check_sharded_model()
    # 131 rows divide by nothing; three heads do not divide by two and are left whole.
    check_maxdiffusion((2, 1, 1, 2), 3, "bf16", 1e-5)
    check_maxdiffusion((1, 1, 2, 2), 4, "bf16", 1e-5)
    check_maxdiffusion((1, 2, 1, 2), 4, "int8", 0.1)
