"""Building blocks shared by the video DiTs: projections, norms, embeddings, RoPE, patches.

Dimension letters: B batch, S rows (tokens), D channels of the residual stream, N heads, H head
dimension, G groups of rows that share one modulation (1, latent frames, or S), F frequencies.
Norms, modulation and rotations compute in float32 and return the dtype of their input.

A layer's `split` says what the last axes of its parameters may be split over on a mesh
(`vc_jax.models.mesh`).
"""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from .checks import check_shape

_INIT = nnx.initializers.normal(0.02)


def precision_of(dtype: DTypeLike) -> jax.lax.Precision | None:
    """Float32 layers multiply in full float32 (no TF32), as the peers do; others as configured."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def linear(
    in_features: int,
    out_features: int,
    *,
    rngs: nnx.Rngs,
    dtype: DTypeLike,
    param_dtype: DTypeLike | None = None,
    bias: bool = True,
) -> nnx.Linear:
    """A dense layer that computes in `dtype` and stores `param_dtype` (default: the same)."""
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=bias,
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.dtype(param_dtype if param_dtype is not None else dtype),
        precision=precision_of(dtype),
        kernel_init=_INIT,
        rngs=rngs,
    )


class HeadsIn(nnx.Module):
    """`count` projections to heads (query, key, value, ...) as one matrix product.

    The kernel is [D, count, N, H], so that a mesh axis can split the heads of all of them at once.
    """

    split: ClassVar = {"kernel": ("fsdp", None, "tensor", None), "bias": (None, "tensor", None)}

    def __init__(
        self,
        features: int,
        count: int,
        heads: int,
        head_dim: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        bias: bool = True,
    ):
        shape = (count, heads, head_dim)
        self.dtype = jnp.dtype(dtype)
        self.kernel = nnx.Param(_INIT(rngs.params(), (features, *shape), self.dtype))
        self.bias = nnx.Param(jnp.zeros(shape, self.dtype)) if bias else None

    def __call__(self, x: Float[Array, "b s d"]) -> list[Float[Array, "b s n h"]]:
        x, kernel = x.astype(self.dtype), self.kernel[...]
        y = jnp.einsum("bsd,dcnh->bscnh", x, kernel, precision=precision_of(self.dtype))
        if self.bias is not None:
            y = y + self.bias[...]
        return [y[:, :, index] for index in range(kernel.shape[1])]


class HeadsOut(nnx.Module):
    """Heads back to channels; the kernel is [N, H, D]."""

    split: ClassVar = {"kernel": ("tensor", None, "fsdp")}

    def __init__(
        self,
        heads: int,
        head_dim: int,
        features: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        bias: bool = True,
    ):
        self.dtype = jnp.dtype(dtype)
        self.kernel = nnx.Param(_INIT(rngs.params(), (heads, head_dim, features), self.dtype))
        self.bias = nnx.Param(jnp.zeros((features,), self.dtype)) if bias else None

    def __call__(self, x: Float[Array, "b s n h"]) -> Float[Array, "b s d"]:
        x, kernel = x.astype(self.dtype), self.kernel[...]
        y = jnp.einsum("bsnh,nhd->bsd", x, kernel, precision=precision_of(self.dtype))
        return y if self.bias is None else y + self.bias[...]


class LayerNorm(nnx.Module):
    """LayerNorm over the last axis in float32; `affine` adds a float32 scale and bias."""

    def __init__(self, features: int, *, epsilon: float = 1e-6, affine: bool = False):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32)) if affine else None
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32)) if affine else None

    def in_float32(self, x: Array) -> Float[Array, "..."]:
        """Without the rounding to the input's dtype."""
        centred = x.astype(jnp.float32)
        centred = centred - jnp.mean(centred, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.epsilon)
        if self.scale is not None and self.bias is not None:
            y = y * self.scale[...] + self.bias[...]
        return y

    def __call__(self, x: Array) -> Array:
        return self.in_float32(x).astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMSNorm in float32 over as many trailing axes as `shape` has, with a scale of that shape.

    `shape=(H,)` normalises each head by itself, `shape=(N, H)` all heads together.
    """

    def __init__(self, *shape: int, epsilon: float = 1e-6):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(shape, jnp.float32))

    def in_float32(self, x: Array) -> Float[Array, "..."]:
        """Without the rounding to the input's dtype."""
        scale = self.scale[...]
        axes = tuple(range(-scale.ndim, 0))
        y = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(y), axis=axes, keepdims=True)
        return y * jax.lax.rsqrt(mean_square + self.epsilon) * scale

    def __call__(self, x: Array) -> Array:
        return self.in_float32(x).astype(x.dtype)


class Mlp(nnx.Module):
    """Dense, activation, dense."""

    split: ClassVar = {
        "fc_in.kernel": ("fsdp", "tensor"),
        "fc_in.bias": ("tensor",),
        "fc_out.kernel": ("tensor", "fsdp"),
    }

    def __init__(
        self,
        in_features: int,
        hidden: int,
        out_features: int,
        activation: Callable[[Array], Array],
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ):
        self.activation = activation
        self.fc_in = linear(in_features, hidden, rngs=rngs, dtype=dtype)
        self.fc_out = linear(hidden, out_features, rngs=rngs, dtype=dtype)

    def __call__(self, x: Array) -> Array:
        return self.fc_out(self.activation(self.fc_in(x)))


class SwiGlu(nnx.Module):
    """value · silu(gate), projected back; gate and value are one matrix product [D, 2, hidden]."""

    split: ClassVar = {
        "gate_value": ("fsdp", None, "tensor"),
        "fc_out.kernel": ("tensor", "fsdp"),
    }

    def __init__(self, features: int, hidden: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.dtype = jnp.dtype(dtype)
        self.gate_value = nnx.Param(_INIT(rngs.params(), (features, 2, hidden), self.dtype))
        self.fc_out = linear(hidden, features, rngs=rngs, dtype=dtype, bias=False)

    def __call__(self, x: Array) -> Array:
        kernel, precision = self.gate_value[...], precision_of(self.dtype)
        y = jnp.einsum("bsd,dcf->bscf", x.astype(self.dtype), kernel, precision=precision)
        return self.fc_out(jax.nn.silu(y[:, :, 0]) * y[:, :, 1])


# Functions of this module, because those that JAX has jitted do not pickle.


def silu(x: Array) -> Array:
    return jax.nn.silu(x)


def gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def gelu_exact(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def timestep_embedding(timestep: ArrayLike, features: int) -> Float[Array, "... features"]:
    """Sinusoid of a timestep in float32: cosines first, then sines, periods 2π to 2π·10⁴."""
    half = features // 2
    frequencies = np.exp(-math.log(10_000.0) * np.arange(half) / half).astype(np.float32)
    angles = jnp.asarray(timestep, jnp.float32)[..., None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def modulated(
    norm: LayerNorm | RMSNorm,
    x: Float[Array, "b s d"],
    shift: Float[Array, "b g d"],
    scale: Float[Array, "b g d"],
) -> Float[Array, "b s d"]:
    """norm(x) · (1 + scale) + shift, rounded once at the end.

    Each of the G rows of a modulation serves S/G rows of x.
    """
    y = _grouped(norm.in_float32(x), shift)
    return (y * (1.0 + scale[:, :, None]) + shift[:, :, None]).reshape(x.shape).astype(x.dtype)


def add_gated(
    x: Float[Array, "b s d"], branch: Float[Array, "b s d"], gate: Float[Array, "b g d"]
) -> Float[Array, "b s d"]:
    """x + gate · branch in float32."""
    y = _grouped(branch, gate).astype(jnp.float32) * gate[:, :, None]
    return (x.astype(jnp.float32) + y.reshape(x.shape)).astype(x.dtype)


def _grouped(x: Array, modulation: Array) -> Array:
    batch, rows, features = x.shape
    groups = modulation.shape[1]
    if rows % groups:
        raise ValueError(f"timestep: {groups} entries an item do not divide {rows} rows")
    return x.reshape(batch, groups, rows // groups, features)


def grid_rope(
    grid: Sequence[int], axes: Sequence[int], theta: float
) -> tuple[Float[Array, "s half"], Float[Array, "s half"]]:
    """Cosines and sines of a (t, h, w) grid, one entry a channel pair: [S, sum(axes) / 2].

    The angles are float64 on the host, an axis at a time, so that no [S, ...] constant enters the
    program.
    """
    cosines, sines = [], []
    for axis, (length, channels) in enumerate(zip(grid, axes, strict=True)):
        frequencies = theta ** (-np.arange(0, channels, 2) / channels)
        angles = np.outer(np.arange(length), frequencies)
        shape = [1, 1, 1, angles.shape[1]]
        shape[axis] = length
        for tables, function in ((cosines, np.cos), (sines, np.sin)):
            table = jnp.asarray(function(angles).astype(np.float32).reshape(shape))
            tables.append(jnp.broadcast_to(table, (*grid, angles.shape[1])))
    cos, sin = (jnp.concatenate(tables, axis=-1) for tables in (cosines, sines))
    return cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, sin.shape[-1])


def rotate_pairs(x: Float[Array, "b s n h"], cos: Array, sin: Array) -> Float[Array, "b s n h"]:
    """RoPE on neighbouring channels (2i, 2i + 1); `cos` and `sin` are [S, H / 2]."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[:, None], sin[:, None]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def rotate_halves(x: Float[Array, "b s n h"], cos: Array, sin: Array) -> Float[Array, "b s n h"]:
    """RoPE on channels (i, i + R) for R = `cos.shape[-1]`; channels from 2R on pass through."""
    width = cos.shape[-1]
    y = x.astype(jnp.float32)
    first, second, rest = y[..., :width], y[..., width : 2 * width], y[..., 2 * width :]
    cos, sin = cos[:, None], sin[:, None]
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def latent_grid(
    latents: Array, patch: Sequence[int], channels: int | None = None
) -> tuple[int, ...]:
    """Rows along (t, h, w) of latents [B, C, T, H, W] under a patch; checks the shape.

    Raises:
      ValueError: another number of axes or channels, or sizes that the patch does not divide.
    """
    dims = {"batch": None, "channels": channels, "t": None, "h": None, "w": None}
    check_shape("latents", latents, dims)
    if any(size % step for size, step in zip(latents.shape[2:], patch, strict=True)):
        raise ValueError(f"latents: {latents.shape[2:]} is not divisible by the patch {patch}")
    return tuple(size // step for size, step in zip(latents.shape[2:], patch, strict=True))


def patchify(latents: Float[Array, "b c t h w"], patch: Sequence[int]) -> Float[Array, "b s cp"]:
    """Latents to rows in (t, h, w) order; within a row the order is (c, pt, ph, pw)."""
    batch, channels = latents.shape[:2]
    t, h, w = latent_grid(latents, patch)
    pt, ph, pw = patch
    x = latents.reshape(batch, channels, t, pt, h, ph, w, pw).transpose(0, 2, 4, 6, 1, 3, 5, 7)
    return x.reshape(batch, t * h * w, channels * pt * ph * pw)


def unpatchify(
    rows: Float[Array, "b s cp"],
    grid: Sequence[int],
    patch: Sequence[int],
    *,
    channels_first: bool,
) -> Float[Array, "b c t h w"]:
    """Rows to latents; a row is (c, pt, ph, pw) if `channels_first`, else (pt, ph, pw, c)."""
    batch = rows.shape[0]
    if channels_first:
        x = rows.reshape(batch, *grid, -1, *patch).transpose(0, 4, 1, 5, 2, 6, 3, 7)
    else:
        x = rows.reshape(batch, *grid, *patch, -1).transpose(0, 7, 1, 4, 2, 5, 3, 6)
    return x.reshape(batch, x.shape[1], *(g * p for g, p in zip(grid, patch, strict=True)))
