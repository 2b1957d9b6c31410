"""The attention kernels that users would pick instead, as far as they are installed.

Each is called the way its own package documents, with BTNH arrays of 16 bits.
"""

import dataclasses
import importlib
import importlib.metadata
import math
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class TorchAttention:
    """Attention of PyTorch, on JAX's arrays without a copy. It cannot be traced.

    Attributes:
      bind: takes query, key and value and gives what starts a call on them, which results in a
        PyTorch tensor.
      wait: until that and all calls before it are done; the result as an array of JAX.
    """

    bind: Callable[[jax.Array, jax.Array, jax.Array], Callable[[], Any]]
    wait: Callable[[Any], jax.Array]


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _cudnn() -> tuple[str, Attention]:
    def attention(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")

    return f"cuDNN through jax {jax.__version__}", attention


def _tokamax() -> tuple[str, Attention]:
    # tokamax's benchmarking imports xprof, which attention does not need.
    tools: Any = types.ModuleType("xprof.cli.tools")
    tools.get_kernel_stats_tool = None
    for module in (types.ModuleType("xprof"), types.ModuleType("xprof.cli"), tools):
        sys.modules.setdefault(module.__name__, module)
    tokamax = importlib.import_module("tokamax")

    def attention(query, key, value):
        return tokamax.dot_product_attention(query, key, value, implementation="mosaic")

    return f"tokamax {_version('tokamax')} mosaic", attention


def _flash_attention_3() -> tuple[str, Attention]:
    """FlashAttention-3 through the XLA FFI target of the `flash_attn3_jax` wheel."""
    import flash_attn3_jax_lib.flash_api as api  # pyright: ignore[reportMissingImports]

    for name, target in api.get_ffi_registrations().items():
        jax.ffi.register_ffi_target(name, target, platform="CUDA")

    def attention(query, key, value):
        batch, length, heads, size = query.shape
        results = (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
            jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32),
            jax.ShapeDtypeStruct((1, 1, 1), jnp.float32),
        )
        absent16 = jnp.zeros((0,), query.dtype)
        absent_int, absent_float = jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.float32)
        optional = [absent16] * 3 + [absent_int] * 8 + [absent16] * 2 + [absent_int]
        optional += [absent_float] * 3 + [absent_int]
        attributes: dict[str, Any] = {
            "max_seqlen_q": length,
            "max_seqlen_q_has_value": True,
            "max_seqlen_k": key.shape[1],
            "max_seqlen_k_has_value": True,
            "softmax_scale_val": 1.0 / math.sqrt(size),
            "softmax_scale_has_value": True,
            "pack_gqa_val": False,
            "pack_gqa_has_value": False,
            "is_causal": False,
            "window_size_left": -1,
            "window_size_right": -1,
            "attention_chunk": 0,
            "softcap": 0.0,
            "is_rotary_interleaved": False,
            "num_splits": 1,
            "sm_margin": 0,
        }
        call = jax.ffi.ffi_call("flash_mha_fwd", results)
        return call(query, key, value, *optional, **attributes)[0]

    return f"flash_attn3_jax {_version('flash-attn3-jax')}", attention


def _flash_attention_4() -> tuple[str, TorchAttention]:
    torch: Any = importlib.import_module("torch")
    attention: Any = importlib.import_module("flash_attn.cute").flash_attn_func

    def bind(*arrays: jax.Array) -> Callable[[], Any]:
        tensors = [torch.from_dlpack(jax.block_until_ready(array)) for array in arrays]

        def start() -> Any:
            out = attention(*tensors, causal=False)
            return out[0] if isinstance(out, tuple) else out

        return start

    def wait(out):
        torch.cuda.synchronize()
        return jax.dlpack.from_dlpack(out)

    return f"flash-attn-4 {_version('flash-attn-4')}", TorchAttention(bind, wait)


PEERS: dict[str, Callable[[], tuple[str, Attention]]] = {
    "FlashAttention-3 BF16": _flash_attention_3,
    "cuDNN BF16": _cudnn,
    "tokamax BF16": _tokamax,
}
TORCH_PEERS: dict[str, Callable[[], tuple[str, TorchAttention]]] = {
    "FlashAttention-4 BF16": _flash_attention_4,
}


def _available[Peer](
    loaders: Mapping[str, Callable[[], tuple[str, Peer]]],
) -> tuple[dict[str, tuple[str, Peer]], dict[str, str]]:
    found, missing = {}, {}
    for name, load in loaders.items():
        try:
            found[name] = load()
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing


def available_peers() -> tuple[dict[str, tuple[str, Attention]], dict[str, str]]:
    """Peers that import, by name with their version, and why the others do not."""
    return _available(PEERS)


def available_torch_peers() -> tuple[dict[str, tuple[str, TorchAttention]], dict[str, str]]:
    """As `available_peers`, for those of PyTorch."""
    return _available(TORCH_PEERS)
