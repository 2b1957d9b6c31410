"""Errors of quantised attention against float64, head by head, and where they come from."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vc_jax

CODES_PER_NAT = 8.0 / np.log(2.0)
ROWS = 256
"""Query rows of a head that are compared."""


@dataclasses.dataclass(frozen=True)
class Head:
    """One head's queries, keys and values, float32 [S, H]."""

    name: str
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray

    def rows(self) -> np.ndarray:
        """The queries that are compared, spread over the sequence."""
        chosen = np.linspace(0, len(self.query) - 1, min(ROWS, len(self.query))).round()
        return self.query[chosen.astype(int)]


def _config(**fields) -> vc_jax.AttentionConfig:
    return vc_jax.AttentionConfig(**fields)


_HADAMARD = {"smooth_values": False, "softmax": "exp"}
METHODS: dict[str, vc_jax.AttentionConfig] = {
    "SageAttention2-like (INT8 QK, FP8 PV)": _config(qk="int8", rotate=False, **_HADAMARD),
    "FP8 + Hadamard": _config(qk="e4m3", pv="e4m3", center_keys=False, **_HADAMARD),
    "V-Smooth, exp": _config(qk="int8", softmax="exp"),
    "V-Smooth, ExpCast as in the paper": _config(qk="int8", softmax="expcast_running"),
    "INT8 QK, block-anchored ExpCast, balanced channels": _config(balance_channels=True),
    "the same with E4M3 QK": _config(qk="e4m3", balance_channels=True),
    "V-Smooth, block-anchored ExpCast (int8)": vc_jax.PRESETS["int8"],
    "the same with E4M3 QK (fp8)": vc_jax.PRESETS["fp8"],
    "NVFP4": _config(qk="nvfp4", pv="nvfp4", **_HADAMARD),
    "NVFP4, V-Smooth, balanced channels": _config(
        qk="nvfp4", pv="nvfp4", softmax="exp", balance_channels=True
    ),
    "NVFP4, V-Smooth (nvfp4)": vc_jax.PRESETS["nvfp4"],
}
"""What the table compares."""


def exact_scores(head: Head) -> np.ndarray:
    """Natural-log scores [rows, S], float64."""
    query, key = head.rows().astype(np.float64), head.key.astype(np.float64)
    return query @ key.T / np.sqrt(key.shape[1])


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@functools.partial(jax.jit, static_argnames="config")
def _attend(query, key, value, config):
    batched = (x[None, :, None] for x in (query, key, value))
    out: Any = vc_jax.dot_product_attention(*batched, config=config, implementation="xla")
    return out[0, :, 0]


def method_errors(head: Head, exact: np.ndarray, config) -> dict[str, float]:
    """Relative L2 and L1, cosine and gain of one configuration on one head."""
    out = np.asarray(_attend(head.rows(), head.key, head.value, config), np.float64)
    inner, energy = (out * exact).sum(), (exact**2).sum()
    return {
        "relative_l2": float(np.linalg.norm(out - exact) / np.sqrt(energy)),
        "relative_l1": float(np.abs(out - exact).sum() / np.abs(exact).sum()),
        "cosine": float(inner / np.sqrt(energy * (out**2).sum())),
        "gain": float(inner / energy),
    }


@functools.partial(jax.jit, static_argnames=("clusters", "steps"))
def _order(value, clusters: int, steps: int):
    found = vc_jax.kmeans(value, clusters, steps=steps)
    places = vc_jax.similar_clusters_together(found.centroids)
    return vc_jax.cluster_order(found.labels), vc_jax.cluster_order(found.labels, places)


def orders(head: Head, clusters: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders of the tokens by cluster: as numbered, and similar clusters together."""
    plain, chained = _order(jnp.asarray(head.value), clusters, steps)
    return np.asarray(plain), np.asarray(chained)


def energy_removed(value: np.ndarray) -> float:
    """Share of the energy that the means of 128-token blocks hold."""
    return float(vc_jax.mean_energy(jnp.asarray(value)))


@functools.partial(jax.jit, static_argnames=("config", "smooth"))
def _restored(query, key, value, order, config, smooth):
    query, key, value = (x[None, :, None] for x in (query, key, value))
    mean = vc_jax.mean_key(key) if config.center_keys else None
    balance = None
    if config.balance_channels:
        balance = vc_jax.channel_balance(query, key, key_mean=mean)
    common = {"key_mean": mean, "balance": balance, "smooth": smooth}
    prepared = vc_jax.prepare(query, key, value, config, order=order[None, None], **common)
    return vc_jax.restore(prepared)


def _restore(head: Head, order: np.ndarray, config, smooth: bool = True):
    count = len(order)
    arrays = (head.rows(), head.key, head.value, order)
    found = _restored(*arrays, config, smooth)
    query, key, value = (np.asarray(x[0, 0], np.float64) for x in found)
    return query, key[:count], value[:count]


def value_error(head: Head, order: np.ndarray, smooth: bool = True) -> float:
    """Squared relative error of the quantised values in an order."""
    value = head.value[order].astype(np.float64)
    restored = _restore(head, order, vc_jax.PRESETS["int8"], smooth)[2]
    return float(((restored - value) ** 2).sum() / (value**2).sum())


def probability_codes(scores: np.ndarray, how: str) -> np.ndarray:
    """Quantised probabilities of natural-log scores, unnormalised, by the method's own formulas."""
    codes = scores * CODES_PER_NAT
    top = codes.max(-1, keepdims=True)
    if how == "exp":
        below = jnp.asarray((codes - top) / 8.0, jnp.float32)
        return np.asarray(vc_jax.decode_codes(vc_jax.exp_then_cast(below)), np.float64)
    anchor = top
    if how == "expcast":
        pad = -codes.shape[-1] % 256
        steps = np.pad(codes, ((0, 0), (0, pad)), constant_values=-np.inf)
        anchor = steps.reshape(len(codes), -1, 256).max(-1)
        anchor = np.repeat(anchor, 256, -1)[:, : codes.shape[-1]]
    below = jnp.asarray((codes - anchor) / 8.0, jnp.float32)
    decoded = np.asarray(vc_jax.decode_codes(vc_jax.expcast(below)), np.float64)
    return decoded * np.exp2((anchor - top) / 8.0)


def error_shares(head: Head, exact: np.ndarray, config) -> dict[str, float]:
    """Relative L2 when only Q and K, only P, or only V are quantised."""
    clusters = vc_jax.default_clusters(len(head.key))
    order = orders(head, clusters, config.lloyd_steps)[1]
    query, key, value = _restore(head, order, config)
    scores, plain = exact_scores(head), head.value.astype(np.float64)
    weights = softmax(scores)
    how = "exp" if config.softmax == "exp" else "expcast"
    codes = probability_codes(scores[:, order], how)
    outputs = {
        "qk": softmax(query @ key.T / CODES_PER_NAT) @ plain[order],
        "p": codes / codes.sum(-1, keepdims=True) @ plain[order],
        "v": weights[:, order] @ value,
    }
    norm = np.linalg.norm(exact)
    return {name: float(np.linalg.norm(out - exact) / norm) for name, out in outputs.items()}


def variation_by_row(head: Head, order: np.ndarray) -> dict[str, np.ndarray]:
    """Standard deviation of each row's scores and its total variation for each softmax."""
    scores = exact_scores(head)[:, order]
    weights = softmax(scores)
    found = {"spread": scores.std(-1)}
    for how in ("exp", "expcast_running", "expcast"):
        codes = probability_codes(scores, how)
        quantised = codes / codes.sum(-1, keepdims=True)
        found[how] = 0.5 * np.abs(quantised - weights).sum(-1)
    return found


def measure_head(head: Head) -> dict:
    """Everything the report says about one head."""
    scores = exact_scores(head)
    exact = softmax(scores) @ head.value.astype(np.float64)
    blocks = len(head.key) / 128
    sequence = np.arange(len(head.key))
    centred = head.value - head.value.mean(0)
    energies: dict[str, Mapping[str, float]] = {}
    for per_cluster in (1, 1.5, 2, 2.5, 4, 8):
        clusters = max(1, round(blocks / per_cluster))
        for steps in (1, 3, 12):
            plain, chained = orders(head, clusters, steps)
            energies[f"{per_cluster:g} blocks a cluster, {steps} steps"] = {
                "plain": energy_removed(head.value[plain]),
                "chained": energy_removed(head.value[chained]),
            }
    clusters = vc_jax.default_clusters(len(head.key))
    plain, chained = orders(head, clusters, vc_jax.PRESETS["int8"].lloyd_steps)
    in_sequence = value_error(head, sequence)
    return {
        "head": head.name,
        "tokens": len(head.key),
        "logit_sigma": float(scores.std(-1).mean()),
        "methods": {name: method_errors(head, exact, c) for name, c in METHODS.items()},
        "shares": {n: error_shares(head, exact, vc_jax.PRESETS[n]) for n in ("int8", "fp8")},
        "energy": {
            "sequence": energy_removed(head.value),
            "sequence, global mean taken out": energy_removed(centred),
            "default": energy_removed(head.value[chained]),
        },
        "energy_by_clusters": energies,
        "value_error_ratio": {
            "k-means": value_error(head, plain) / in_sequence,
            "k-means, chained": value_error(head, chained) / in_sequence,
            "sequence, no means": value_error(head, sequence, False) / in_sequence,
        },
        "variation": {
            k: [round(float(x), 5) for x in v] for k, v in variation_by_row(head, chained).items()
        },
    }
