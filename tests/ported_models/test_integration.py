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
PAGES = {"integration.md": 7, "models.md": 6, "scaling.md": 1}
"""Pages with examples, and how many there are at least."""


def run_on_devices(count: int, *arguments: str) -> None:
    """A fresh interpreter with CPU devices: a process has as many as it started with."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(REPOSITORY),
        # What is optimised here costs more than it saves.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count} "
        "--xla_backend_optimization_level=0",
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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention": "int9"}, ValueError, r"^attention: expected one of .*'int8'.* got 'int9'"),
        ({"attention": 3}, TypeError, r"^attention: expected .* got int"),
        ({"cross_attention": "x"}, ValueError, r"^cross_attention: expected one of .* got 'x'"),
        ({"cross_attention": None}, TypeError, r"^cross_attention: expected .* got NoneType"),
        ({"min_key_length": -1}, ValueError, "min_key_length must be at least 0, got -1"),
        ({"min_key_length": 1.5}, TypeError, "min_key_length must be an integer"),
    ],
)
def test_maxdiffusion_kernels_with_bad_options_are_not_made(options, error, message):
    with pytest.raises(error, match=message):
        maxdiffusion.attention_kernel(**options)
    with pytest.raises(error, match=message):
        maxdiffusion.register("vc_bad", **options)


def test_maxdiffusion_sizes_have_to_agree():
    query, key, value = (heads_first(8, seed) for seed in range(3))
    kernel = maxdiffusion.attention_kernel("bf16")
    rows = (query, key, value)
    unsplit = tuple(flat(x) for x in rows)
    short = heads_first(7, 0)
    sizeless = {"dim_head": None}
    for arrays, given, message in (
        (rows, {"heads": 4}, r"query: expected \[batch=2, context\['heads'\]=4, rows"),
        (rows, {"dim_head": 32}, r"query: expected .*head_dim=32\], got \[2, 3, 8, 64\]"),
        ((query, key[:1], value), {}, r"key: expected \[batch=2"),
        ((query, key, short), {}, r"value: expected .*rows=8.* got \[2, 3, 7, 64\]"),
        (unsplit, {"heads": 6}, r"query: expected .*context\['heads'\] · head_dim=384\], got"),
        (unsplit, {"heads": 5} | sizeless, r"query: .* multiple of context\['heads'\] = 5"),
        ((unsplit[0], unsplit[1], flat(short)), {}, r"value: expected .*rows=8"),
        ((query[0, 0], *rows[1:]), {}, r"query: expected \[batch=8, rows"),
        (rows, {"attention_mask": jnp.ones((2, 9))}, r"attention_mask'\]: expected .*keys=8"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel(*arrays, context(**given))


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
    run_on_devices(4, "-m", "tests.ported_models.sharded_checks")


def examples(page: str) -> list[str]:
    text = (REPOSITORY / "docs" / page).read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def script_of(blocks: list[str]) -> str:
    """Each example stands alone, in a namespace of its own."""
    return "\n".join(f"exec(compile({block!r}, 'example', 'exec'), {{}})" for block in blocks)


def test_the_examples_of_the_pages_run():
    blocks = []
    for page, count in PAGES.items():
        assert len(examples(page)) >= count, page
        blocks += examples(page)
    # As many devices as no power of two: what divides by six divides by two, too.
    run_on_devices(6, "-c", script_of(blocks))


def test_the_examples_with_a_mesh_run_on_one_device():
    blocks = [block for page in PAGES for block in examples(page) if "Mesh(" in block]
    assert len(blocks) == 2
    run_on_devices(1, "-c", script_of(blocks))
