"""What lowering the preprocessing kernels for a GPU lets through to callers; needs no GPU."""

import pathlib
import warnings

import jax
import jax.numpy as jnp

import vc_jax
from vc_jax.pallas_kernels import statistics

TOKENS = jax.ShapeDtypeStruct((1, 300, 2, 64), jnp.bfloat16)


def test_no_warning_reaches_callers_when_a_kernel_is_lowered():
    """Which happens after the call that traced it has returned."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced = jax.jit(lambda x: statistics.channel_statistics(x, None)).trace(TOKENS)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_nothing_is_written_for_the_deprecated_backend():
    folder = pathlib.Path(vc_jax.__file__).parent
    sources = [*folder.glob("*.py"), *(folder / "pallas_kernels").rglob("*.py")]
    assert len(sources) > 30
    for source in sources:
        assert "pallas.triton" not in source.read_text(), source
