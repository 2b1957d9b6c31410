"""Calls for the fused preparation, and how its results may differ from the definition's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import vc_jax
from vc_jax import _fused, _prepare

BARE = {"center_keys": False, "rotate": False}
FORMATS = {
    **{name: vc_jax.PRESETS[name] for name in ("int8", "fp8")},
    "int8 bare": dataclasses.replace(vc_jax.PRESETS["int8"], **BARE),
    "fp8 bare": dataclasses.replace(vc_jax.PRESETS["fp8"], **BARE),
    "int8 balanced": dataclasses.replace(
        vc_jax.PRESETS["int8"], balance_channels=True, rotate=False
    ),
    "fp8 balanced": dataclasses.replace(vc_jax.PRESETS["fp8"], balance_channels=True),
}

# On the CPU most of the time is the compiler's.
FAST_COMPILE = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
prepare = jax.jit(
    vc_jax.prepare, static_argnames=("config", "smooth"), compiler_options=FAST_COMPILE
)
"""The definition."""
fused = jax.jit(
    _fused.prepare_fused,
    static_argnames=("config", "smooth", "interpret"),
    compiler_options=FAST_COMPILE,
)
mean_key = jax.jit(vc_jax.mean_key, compiler_options=FAST_COMPILE)
channel_balance = jax.jit(vc_jax.channel_balance, compiler_options=FAST_COMPILE)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call. `counts` are the valid keys of each batch row, `None` for no mask at all.

    Attributes:
      prefix: whether valid keys come first; else any of them are valid.
      ordered: whether keys are taken in a random order, valid ones first.
    """

    format: str = "int8"
    dtype: type = jnp.bfloat16
    rows: int = 70
    length: int = 300
    heads: int = 2
    key_heads: int = 1
    head_dim: int = 64
    batch: int = 1
    counts: tuple[int, ...] | None = None
    prefix: bool = False
    ordered: bool = True
    smooth: bool = True
    seed: int = 0

    def __str__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default and field.name not in ("dtype", "format")
        ]
        return ", ".join([self.format, jnp.dtype(self.dtype).name, *changed])

    @property
    def config(self) -> vc_jax.AttentionConfig:
        return FORMATS[self.format]

    @property
    def valid(self) -> np.ndarray | None:
        """bool [B, S]."""
        if self.counts is None:
            return None
        random = np.random.default_rng(self.seed + 1)
        places = [
            np.arange(self.length) if self.prefix else random.permutation(self.length)
            for _ in self.counts
        ]
        return np.stack([place < n for place, n in zip(places, self.counts, strict=True)])

    @property
    def order(self) -> np.ndarray | None:
        """int32 [B, K, S], position -> token, valid tokens first."""
        if not self.ordered:
            return None
        random = np.random.default_rng(self.seed + 2)
        place = random.random((self.batch, self.key_heads, self.length))
        if self.valid is not None:
            place = place + ~self.valid[:, None]
        return np.argsort(place, -1).astype(np.int32)

    def tensors(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Normal queries, keys with a mean, values in five groups; NaN where keys are invalid.

        Two channels of the keys are large, the queries' small.
        """
        random = np.random.default_rng(self.seed)
        size = self.head_dim
        query = random.normal(size=(self.batch, self.rows, self.heads, size))
        shape = (self.batch, self.length, self.key_heads, size)
        key = random.normal(size=shape) + 2 * random.normal(size=size)
        key[..., :2] *= 30
        query[..., :2] /= 30
        value = 1.5 * random.normal(size=(5, size))[random.integers(5, size=shape[:3])]
        value = value + random.normal(size=shape) + random.normal(size=size)
        if self.valid is not None:
            key, value = (np.where(self.valid[:, :, None, None], x, np.nan) for x in (key, value))
        query, key, value = (
            jnp.asarray(x.astype(np.float32)).astype(self.dtype) for x in (query, key, value)
        )
        return query, key, value


def both(call: Call, tensors=None, interpret: bool = True, scale: float = 0.1):
    """What the definition prepares and what the kernels prepare, with the same order and mean."""
    query, key, value = call.tensors() if tensors is None else tensors
    valid = None if call.valid is None else jnp.asarray(call.valid)
    common = {
        "scale": jnp.float32(scale),
        "config": call.config,
        "smooth": call.smooth,
        "order": None if call.order is None else jnp.asarray(call.order),
        "kv_count": None if valid is None else jnp.sum(valid, 1, dtype=jnp.int32),
    }
    mean, balance = None, None
    if call.config.center_keys:
        mean = mean_key(key, valid)
    if call.config.balance_channels:
        balance = channel_balance(query, key, valid, key_mean=mean)
    common |= {"key_mean": mean, "balance": balance}
    want = prepare(query, key, value, **common)
    got = fused(query, key, value, key_valid=valid, interpret=interpret, **common)
    return jax.tree.map(np.asarray, (want, got))


def ranks(codes: np.ndarray) -> np.ndarray:
    """Codes as integers that neighbours in value differ by one in."""
    if codes.dtype == np.int8:
        return codes.astype(np.int32)
    bits = codes.view(np.uint8).astype(np.int32)
    return np.where(bits < 0x80, bits, -(bits & 0x7F))


def assert_same(want: vc_jax.Prepared8, got: vc_jax.Prepared8, share: float = 1e-3) -> None:
    """Every array of the layout; `share` of the codes may be the neighbour on a rounding edge."""
    e4m3 = want.query_codes.dtype != np.int8
    for name, one in vars(want).items():
        other = getattr(got, name)
        if one is None:
            assert other is None, name
            continue
        assert one.shape == other.shape, name
        assert one.dtype == other.dtype, name
        if name.endswith("codes"):
            distance = np.abs(ranks(one) - ranks(other))
            assert distance.max(initial=0) <= 1, (name, distance.max())
            assert np.mean(distance > 0) <= share, (name, np.mean(distance > 0))
        elif name in ("value_scale", "kv_count") or (name == "key_scale" and e4m3):
            np.testing.assert_array_equal(one, other, name)
        elif name == "block_means":
            one, other = one.astype(np.float32), other.astype(np.float32)
            assert np.mean(one != other) <= share, name
            np.testing.assert_allclose(other, one, rtol=2.0**-7, atol=1e-5, err_msg=name)
        else:
            rtol = 1e-3 if name == "query_scale" and e4m3 else 1e-5
            atol = 1e-5 * np.abs(one).max() if name == "value_mean" else 0.0
            np.testing.assert_allclose(other, one, rtol=rtol, atol=atol, err_msg=name)


@functools.partial(jax.jit, static_argnames="heads")
def _scores(query, key, heads: int):
    return jnp.einsum("bnth,bnph->bntp", query, jnp.repeat(key, heads // key.shape[1], 1))


def scores(prepared: vc_jax.Prepared8) -> np.ndarray:
    """What the codes stand for: attention scores [B, N, T, P], float32."""
    restored = _prepare.restore(jax.tree.map(jnp.asarray, prepared))
    return np.asarray(_scores(restored.query, restored.key, restored.query.shape[1]))
