"""What lowering the preprocessing kernels for a GPU lets through to callers; needs no GPU."""

import warnings

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
import pytest

from vc_jax.pallas_kernels import preparation

TOKENS = jax.ShapeDtypeStruct((1, 300, 2, 64), jnp.bfloat16)


def lower_for_a_gpu(function, *shapes) -> str:
    """The program of a jitted function, lowered with every warning an error."""
    # Pallas looks at the device that it compiles for.
    mesh = jax.sharding.AbstractMesh(
        (1,),
        ("x",),
        axis_types=(jax.sharding.AxisType.Auto,),
        abstract_device=jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu"),
    )
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_no_warning_reaches_callers_when_a_kernel_is_lowered():
    """Which happens after the call that traced it has returned."""
    before = list(warnings.filters)
    text = lower_for_a_gpu(lambda x: preparation.channel_statistics(x, None), TOKENS)
    assert "gpu.triton" in text
    assert warnings.filters == before


def test_the_filter_is_for_this_librarys_kernels_only():
    """A caller's own Triton kernel still warns, so the check above can fail."""

    def double(source, target):
        target[...] = source[...] * 2

    call = pl.pallas_call(
        double,
        out_shape=jax.ShapeDtypeStruct((128,), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )
    with pytest.raises(DeprecationWarning, match="Triton backend is deprecated"):
        lower_for_a_gpu(call, jax.ShapeDtypeStruct((128,), jnp.float32))
