"""Low-bit attention inside other people's models, and the integration page's own examples."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vc_jax.models import maxdiffusion

from . import golden

REPOSITORY = Path(__file__).parents[2]
PAGES = {"integration.md": 7, "models.md": 4}
"""Pages with examples, and how many there are at least."""


def run_on_four_devices(*arguments: str) -> None:
    """A fresh interpreter with four CPU devices: a process has as many as it started with."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(REPOSITORY),
        # What is optimised here costs more than it saves.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
    }
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def context(**fields: Any) -> dict[str, Any]:
    """What MaxDiffusion hands to a kernel, as far as kernels read it."""
    base = {
        "heads": 3,
        "mesh": None,
        "axis_names_q": ("activation_batch", "heads", "length", "d_kv"),
        "axis_names_kv": ("activation_batch", "heads", "kv_length", "d_kv"),
        "attention_mask": None,
        "scale": 64**-0.5,
        "is_causal": False,
        "mask_padding_tokens": True,
        "residual_checkpoint_name": None,
        "dtype": jnp.float32,
        "dim_head": 64,
    }
    return base | fields


def heads_first(length: int, seed: int, heads: int = 3) -> jax.Array:
    shape = (2, heads, length, 64)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def flat(x: jax.Array) -> jax.Array:
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def expected(query: Any, key: Any, value: Any, **options: Any) -> jax.Array:
    out = golden.plain_attention(*(x.swapaxes(1, 2) for x in (query, key, value)), **options)
    return out.reshape(*out.shape[:2], -1)


def test_maxdiffusion_self_attention_comes_with_heads_first():
    query, key, value = (heads_first(160, seed) for seed in range(3))
    kernel = maxdiffusion.attention_kernel("int8", min_key_length=128)
    out = kernel(query, key, value, context())
    assert out.shape == (2, 160, 192)
    error = golden.relative_l2(out, expected(query, key, value))
    assert 1e-4 < error < 0.1


def test_maxdiffusion_cross_attention_comes_unsplit_and_stays_bf16():
    query, key, value = heads_first(160, 0), heads_first(200, 1), heads_first(200, 2)
    kernel = maxdiffusion.attention_kernel("int8", min_key_length=128)
    out = kernel(flat(query), flat(key), flat(value), context())
    np.testing.assert_allclose(out, expected(query, key, value), atol=2e-5)


def test_maxdiffusion_short_self_attention_stays_bf16():
    query, key, value = (heads_first(160, seed) for seed in range(3))
    out = maxdiffusion.attention_kernel("int8")(query, key, value, context())
    np.testing.assert_allclose(out, expected(query, key, value), atol=2e-5)


def test_maxdiffusion_scale_and_mask_are_honoured():
    query, key, value = (heads_first(160, seed) for seed in range(3))
    keep = np.arange(160) < np.array([[100], [160]])
    kernel = maxdiffusion.attention_kernel("bf16")
    out = kernel(query, key, value, context(attention_mask=keep, scale=0.3))
    wanted = expected(query, key, value, mask=keep[:, None, None], scale=0.3)
    np.testing.assert_allclose(out, wanted, atol=2e-5)


def test_maxdiffusion_results_carry_the_name_for_rematerialisation():
    query, key, value = (heads_first(8, seed) for seed in range(3))
    kernel = maxdiffusion.attention_kernel(golden.plain_attention)
    given = context(residual_checkpoint_name="attn_output")
    program = jax.make_jaxpr(lambda q, k, v: kernel(q, k, v, given))(query, key, value)
    assert "name=attn_output" in str(program)


def test_maxdiffusion_refuses_what_it_cannot_do():
    query, key, value = (heads_first(8, seed) for seed in range(3))
    with pytest.raises(NotImplementedError, match="is_causal"):
        maxdiffusion.attention_kernel()(query, key, value, context(is_causal=True))
    for name in ("vc_ring", "my_ulysses"):
        with pytest.raises(ValueError, match="contains 'ring' or 'ulysses'"):
            maxdiffusion.register(name)


def test_maxdiffusion_itself_finds_the_registered_kernel():
    attention_flax = pytest.importorskip("maxdiffusion.models.attention_flax")
    maxdiffusion.register("vc_test", "bf16", min_key_length=1)
    operation = attention_flax.NNXAttentionOp(
        mesh=None, attention_kernel="vc_test", scale=64**-0.5, heads=3, dim_head=64
    )
    query, key, value = (heads_first(160, seed) for seed in range(3))
    out = operation.apply_attention(query, key, value)
    np.testing.assert_allclose(out, expected(query, key, value), atol=2e-5)


def test_meshes_of_several_devices():
    run_on_four_devices("-m", "tests.ported_models.sharded_checks")


def test_the_examples_of_the_pages_run():
    script = []
    for page, count in PAGES.items():
        text = (REPOSITORY / "docs" / page).read_text()
        blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        assert len(blocks) >= count, page
        # Each example stands alone, in a namespace of its own.
        script += [f"exec(compile({block!r}, {page!r}, 'exec'), {{}})" for block in blocks]
    run_on_four_devices("-c", "\n".join(script))
