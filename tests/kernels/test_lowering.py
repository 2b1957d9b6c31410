"""Every kernel traces and lowers for a GPU that need not be there, with 64-bit types on too.

`compile_check` compiles the same kernels; this needs no CUDA plugin.
"""

import jax
import jax.numpy as jnp
import pytest

from vc_jax._arguments import bind
from vc_jax._dispatch import attend
from vc_jax._implementations import IMPLEMENTATIONS, Static

from . import compile_preprocessing

H200 = jax.sharding.AbstractMesh(
    (1,),
    ("x",),
    axis_types=(jax.sharding.AxisType.Auto,),
    abstract_device=jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu"),
)
KERNELS = [
    kernel
    for dtype, masked in ((jnp.bfloat16, True), (jnp.float32, False))
    for kernel in compile_preprocessing.kernels(compile_preprocessing.SMALL, dtype, masked)
]
FUSED = [name for name, each in IMPLEMENTATIONS.items() if each.fused_preprocessing]


def lowered(call, *arguments, x64):
    with jax.enable_x64(x64), jax.sharding.use_abstract_mesh(H200):
        # A function of its own: what was traced without 64-bit types is not looked up.
        traced = jax.jit(lambda *arrays: call(*arrays)).trace(*arguments)
        traced.lower(lowering_platforms=("cuda",))
    return jax.tree.map(lambda x: x.dtype, traced.out_info)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_every_preprocessing_kernel_lowers_with_64_bit_types(kernel):
    narrow, wide = (lowered(kernel.call, *kernel.arguments, x64=x64) for x64 in (False, True))
    assert narrow == wide


@pytest.mark.parametrize("implementation", FUSED)
@pytest.mark.parametrize("config", ["int8", "fp8"])
def test_a_whole_call_lowers_with_64_bit_types(config, implementation):
    tokens = jax.ShapeDtypeStruct((1, 300, 2, 64), jnp.bfloat16)

    def call(query, key, value, lengths):
        call = bind(query, key, value, config=config, key_value_seq_lengths=lengths)
        return attend(Static(call.config, implementation, True, True), call.inputs)

    arguments = (tokens, tokens, tokens, jax.ShapeDtypeStruct((1,), jnp.int32))
    assert lowered(call, *arguments, x64=True) == (jnp.bfloat16, jnp.float32)
