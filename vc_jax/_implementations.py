"""The implementations of the attention, fastest first: what each one supports, and how it runs.

An implementation says in one sentence why it cannot take a call (`unsupported`). If it takes it, it
runs on prepared inputs (quantised configurations) or on the inputs themselves (`"bf16"`); what
comes before and after is `_dispatch`'s. The numerics are the configuration's; an implementation
only changes the speed.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from ._arguments import Inputs
from ._config import AttentionConfig
from ._plain import plain_attention
from ._prepare import Prepared, Prepared4
from ._reference import reference_attention
from .pallas_kernels.layout import Prepared8


@dataclasses.dataclass(frozen=True)
class Static:
    """What is fixed when a call is traced.

    Attributes:
      config: the numerics.
      implementation: a name of `IMPLEMENTATIONS`.
      smooth: whether V-Smooth is on in this call.
      residual: whether the normaliser is wanted.
    """

    config: AttentionConfig
    implementation: str
    smooth: bool
    residual: bool


@dataclasses.dataclass(frozen=True)
class Request:
    """What an implementation needs to know to accept or refuse a call.

    Attributes:
      config: the numerics.
      query, key: abstract arrays, BTNH and BSKH.
      prefix: whether valid keys are the first ones of every row.
      residual: whether the normaliser is wanted.
      platform: `"cpu"`, `"gpu"`, `"tpu"`.
      compute_capability: of an NVIDIA GPU, as `(major, minor)`; `None` elsewhere.
    """

    config: AttentionConfig
    query: jax.ShapeDtypeStruct
    key: jax.ShapeDtypeStruct
    prefix: bool
    residual: bool
    platform: str
    compute_capability: tuple[int, int] | None


Result = tuple[Array, Array | None]
"""The output [B, T, N, H] and the normaliser [B, T, N], `None` where nobody asks for it."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run a call.

    Attributes:
      unsupported: `None` if it takes a call, else the reason why not.
      on_prepared: quantised attention; gets the output's dtype. The normaliser is that of the
        scores as they are in the prepared inputs.
      on_inputs: unquantised attention.
      fused_preprocessing: whether fused GPU kernels cluster and (8-bit layouts) prepare for it,
        where they support the call; otherwise XLA does.
    """

    unsupported: Callable[[Request], str | None]
    on_prepared: Callable[[Static, Prepared, DTypeLike], Result] | None = None
    on_inputs: Callable[[Static, Inputs], Result] | None = None
    fused_preprocessing: bool = False

    def reason_against(self, request: Request) -> str | None:
        """Why this implementation cannot take a call, or `None`."""
        if request.config.quantized and self.on_prepared is None:
            return "computes unquantised attention only (config='bf16')"
        if not request.config.quantized and self.on_inputs is None:
            return "computes quantised attention only"
        return self.unsupported(request)


def _reference_kernel(static: Static, prepared: Prepared, dtype: DTypeLike) -> Result:
    out, lse = reference_attention(prepared, static.config)
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(out, -most, most).astype(dtype), (lse if static.residual else None)


def _plain_kernel(static: Static, inputs: Inputs) -> Result:
    query, key, value = inputs.query, inputs.key, inputs.value
    return plain_attention(query, key, value, scale=inputs.scale, key_valid=inputs.validity.key)


def _hopper_kernel(static: Static, prepared: Prepared, dtype: DTypeLike) -> Result:
    from .pallas_kernels import hopper, hopper_fp4  # Pallas takes a while to import.

    if isinstance(prepared, Prepared4):
        from ._decode import decode

        return hopper_fp4.attention(
            decode(prepared), out_dtype=dtype, return_residual=static.residual
        )
    return hopper.attention(
        prepared,
        softmax=static.config.softmax,
        out_dtype=dtype,
        return_residual=static.residual,
    )


def _mma_kernel(static: Static, prepared: Prepared, dtype: DTypeLike) -> Result:
    from .pallas_kernels import mma

    assert isinstance(prepared, Prepared8)
    return mma.attention(
        prepared,
        softmax=static.config.softmax,
        out_dtype=dtype,
        return_residual=static.residual,
    )


def _needs_capability(request: Request, *capabilities: tuple[int, int]) -> str | None:
    """Why a GPU kernel for some compute capabilities cannot run on the device, or `None`."""
    if request.platform != "gpu" or request.compute_capability is None:
        return f"needs an NVIDIA GPU, this is {request.platform}"
    if request.compute_capability in capabilities:
        return None
    needed = " or ".join(f"{major}.{minor}" for major, minor in capabilities)
    major, minor = request.compute_capability
    return f"needs compute capability {needed}, this GPU has {major}.{minor}"


def _kernel_arguments(request: Request):
    """What the kernels' `unsupported` are asked about a call."""
    config = request.config
    code_dtype = jnp.int8 if config.qk == "int8" else jnp.float8_e4m3fn
    return code_dtype, request.query.shape[-1], config.softmax, request.query.dtype


def _hopper_unsupported(request: Request) -> str | None:
    reason = _needs_capability(request, (9, 0))
    if reason is not None:
        return reason
    from .pallas_kernels import hopper, hopper_fp4

    if request.config.qk == "nvfp4":
        return hopper_fp4.unsupported(request.query.shape[-1], request.query.dtype)
    return hopper.unsupported(*_kernel_arguments(request))


def _mma_unsupported(request: Request) -> str | None:
    if request.config.qk == "nvfp4":
        return "has 8-bit products only, no NVFP4"
    reason = _needs_capability(request, (8, 9), (9, 0), (12, 0))
    if reason is not None:
        return reason
    from .pallas_kernels import mma

    return mma.unsupported(*_kernel_arguments(request))


def _cudnn_kernel(static: Static, inputs: Inputs) -> Result:
    valid, dtype = inputs.validity.key, inputs.query.dtype
    key, value = inputs.key.astype(dtype), inputs.value.astype(dtype)
    query = (inputs.query.astype(jnp.float32) * inputs.scale).astype(dtype)
    if valid is None:
        out = jax.nn.dot_product_attention(query, key, value, scale=1.0, implementation="cudnn")
        return out, None
    count = jnp.sum(valid, 1, dtype=jnp.int32)
    keep = valid[:, :, None, None]
    out = jax.nn.dot_product_attention(
        query,
        jnp.where(keep, key, 0),
        jnp.where(keep, value, 0),
        scale=1.0,
        query_seq_lengths=jnp.full_like(count, query.shape[1]),
        key_value_seq_lengths=jnp.maximum(count, 1),
        implementation="cudnn",
    )
    return jnp.where(count[:, None, None, None] > 0, out, 0), None


def _cudnn_unsupported(request: Request) -> str | None:
    if request.platform != "gpu" or request.compute_capability is None:
        return f"needs an NVIDIA GPU, this is {request.platform}"
    if request.query.dtype == jnp.float32 or request.query.dtype != request.key.dtype:
        return "needs bfloat16 or float16 inputs of one dtype"
    if request.residual:
        return "returns its normaliser in 16 bits only"
    if not request.prefix:
        return "needs valid keys to come first"
    size = request.query.shape[-1]
    limit = 256 if request.compute_capability >= (9, 0) else 128
    if size % 8 or size > limit:
        return f"needs a head dim that is a multiple of 8 up to {limit}, got {size}"
    return None


IMPLEMENTATIONS: dict[str, Implementation] = {
    "hopper": Implementation(
        _hopper_unsupported, on_prepared=_hopper_kernel, fused_preprocessing=True
    ),
    "mma": Implementation(_mma_unsupported, on_prepared=_mma_kernel),
    "cudnn": Implementation(_cudnn_unsupported, on_inputs=_cudnn_kernel),
    "xla": Implementation(
        lambda request: None, on_prepared=_reference_kernel, on_inputs=_plain_kernel
    ),
}
"""Every implementation by the name that `implementation=` takes, fastest first."""


def check_implementation(name: str | None) -> None:
    """Raise `ValueError` unless a name is that of an implementation, or `None`."""
    if name is not None and name not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be None or one of {tuple(IMPLEMENTATIONS)}, got {name!r}"
        )
