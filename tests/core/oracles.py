"""Independent references in float64 NumPy: what the formulas say, written for clarity, not speed.

Nothing here imports the package under test.
"""

from fractions import Fraction

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64)
E2M1 = ml_dtypes.float4_e2m1fn
E2M1_VALUES = np.arange(16, dtype=np.uint8).view(E2M1).astype(np.float64)
TOP = Fraction("119.65")


def attention(query, key, value, *, scale=None, key_valid=None, query_valid=None):
    """Softmax attention in float64, [B, T, N, H] and natural-log normaliser [B, T, N].

    `key_valid` [B, S] and `query_valid` [B, T] select; rows of no key give zeros and -inf.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, rows, heads, size = query.shape
    groups = heads // key.shape[2]
    scale = size**-0.5 if scale is None else float(scale)
    out, lse = np.zeros(query.shape), np.full((batch, rows, heads), -np.inf)
    for b in range(batch):
        keep = np.ones(key.shape[1], bool) if key_valid is None else np.asarray(key_valid[b], bool)
        live = np.ones(rows, bool) if query_valid is None else np.asarray(query_valid[b], bool)
        if not keep.any():
            continue
        for n in range(heads):
            scores = query[b, live, n] @ key[b, keep, n // groups].T * scale
            largest = scores.max(1, keepdims=True)
            weight = np.exp(scores - largest)
            total = weight.sum(1, keepdims=True)
            out[b, live, n] = weight @ value[b, keep, n // groups] / total
            lse[b, live, n] = (largest + np.log(total))[:, 0]
    return out, lse


def attention_gradient(query, key, value, cotangent, *, scale, key_valid, query_valid):
    """Gradients of `attention`'s output in float64: query, key, value and scale."""
    query, key, value, cotangent = (
        np.asarray(x, np.float64) for x in (query, key, value, cotangent)
    )
    groups = query.shape[2] // key.shape[2]
    dq, dk, dv, dscale = np.zeros(query.shape), np.zeros(key.shape), np.zeros(value.shape), 0.0
    for b, n in np.ndindex(query.shape[0], query.shape[2]):
        keep, live, k = np.asarray(key_valid[b]), np.asarray(query_valid[b]), n // groups
        if not keep.any():
            continue
        q, g, ks, vs = query[b, live, n], cotangent[b, live, n], key[b, keep, k], value[b, keep, k]
        products = q @ ks.T
        weights = np.exp(products * scale - (products * scale).max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        inner = g @ vs.T
        dscores = weights * (inner - (weights * inner).sum(1, keepdims=True))
        dq[b, live, n] = scale * dscores @ ks
        dk[b, keep, k] += scale * dscores.T @ q
        dv[b, keep, k] += weights.T @ g
        dscale += (dscores * products).sum()
    return dq, dk, dv, dscale


def prefix(lengths, limit):
    """Validity [B, limit] of the first `lengths` tokens."""
    return np.arange(limit) < np.asarray(lengths)[:, None]


def expcast_code(log2_ratio) -> Fraction:
    """8·(u + 8) + 56 - 0.35 exactly, for the binary number `u` exactly."""
    return 8 * Fraction(float(log2_ratio)) + TOP


def expcast_byte(log2_ratio) -> int:
    """clip(RNE(code), 0, 120); Python rounds fractions half to even."""
    if np.isneginf(log2_ratio):
        return 0
    return min(max(round(expcast_code(log2_ratio)), 0), 120)


def expcast_bytes(log2_ratio):
    """The same for arrays, in float64: exact but for values within 1e-13 of a boundary."""
    code = 8.0 * np.asarray(log2_ratio, np.float64) + 119.65
    return np.clip(np.rint(code), 0, 120).astype(np.uint8)


def cast_bytes(log2_ratio):
    """The E4M3 byte of 256·2^u, rounded to nearest even from float64 by table."""
    probability = 256.0 * np.exp2(np.asarray(log2_ratio, np.float64))
    return nearest_even(probability, E4M3_VALUES[:127]).astype(np.uint8)


def nearest_even(values, table):
    """Index of the nearest entry of an ascending table; ties to the even index."""
    values = np.asarray(values, np.float64)
    upper = np.clip(np.searchsorted(table, values), 1, len(table) - 1)
    lower = upper - 1
    below, above = values - table[lower], table[upper] - values
    take_lower = (below < above) | ((below == above) & (lower % 2 == 0))
    return np.where(take_lower, lower, upper)


def total_variation(weights, exact):
    """Half the L1 distance of the normalised rows."""
    weights, exact = (x / x.sum(-1, keepdims=True) for x in (weights, exact))
    return 0.5 * np.abs(weights - exact).sum(-1)


def kmeans(values, centroids, steps):
    """Plain Lloyd in float64: labels against the last centroids, and these centroids.

    An empty cluster takes a row of the values, of k spread evenly.
    """
    values, centroids = np.asarray(values, np.float64), np.array(centroids, np.float64)
    k = len(centroids)
    rows = values[np.floor((np.arange(k) + 0.5) * (len(values) / k)).astype(int)]

    def assign():
        return ((values[:, None] - centroids) ** 2).sum(-1).argmin(1)

    for _ in range(steps):
        labels = assign()
        for c in range(len(centroids)):
            some = (labels == c).any()
            centroids[c] = values[labels == c].mean(0) if some else rows[c]
    return assign(), centroids


def hadamard(size):
    """Sylvester matrix of order `size`, a power of two: (-1)^popcount(i & j) / sqrt(size)."""
    i = np.arange(size)
    bits = np.array([[bin(a & b).count("1") for b in i] for a in i])
    return (-1.0) ** bits / np.sqrt(size)


def round_half(values):
    """Nearest float16, as float64."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32).astype(np.float16).astype(np.float64)


GROUP = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
BLOCK = 128
STEP = 256
COUNT_ROWS = 8


class Prepared8Rows:
    """Attention over the 8-bit prepared layout, one query row at a time, in float64.

    Reads the layout as its description says it: key scales and means per block of 128 keys, row
    maxima per step of 256, transposed value codes in group order, means in units of the value
    scale.
    """

    def __init__(self, prepared, softmax: str):
        self.half = np.asarray(prepared.query_codes).dtype == E4M3
        self.softmax = softmax
        self.query = np.asarray(prepared.query_codes).astype(np.float64)
        self.query_scale = np.asarray(prepared.query_scale)
        self.key = np.asarray(prepared.key_codes).astype(np.float64)
        self.key_scale = np.asarray(prepared.key_scale)
        stored = np.asarray(prepared.value_codes).astype(np.float64)[:, :, :-COUNT_ROWS]
        self.residual = np.empty_like(stored)
        for p in range(stored.shape[-1]):
            self.residual[..., p // 16 * 16 + GROUP[p % 16]] = stored[..., p]
        self.value_scale = np.asarray(prepared.value_scale).astype(np.float64)
        blocks = (*self.residual.shape[:2], self.residual.shape[3] // BLOCK, self.residual.shape[2])
        means = prepared.block_means
        self.means = np.zeros(blocks) if means is None else np.asarray(means).astype(np.float64)
        self.count = np.asarray(prepared.kv_count)

    def _step(self, b, n, t, j):
        """Products of codes and their multipliers, for the valid keys of a step."""
        k = n // (self.query.shape[1] // self.key.shape[1])
        span = np.arange(STEP * j, min(STEP * (j + 1), self.count[b]))
        scores = self.key[b, k, span] @ self.query[b, n, t]
        multiplier = self.query_scale[b, n, t] * self.key_scale[b, k, span // BLOCK]
        if self.half:
            scores, multiplier = round_half(scores), multiplier.astype(np.float16)
        return scores, multiplier.astype(np.float64)

    def _anchored(self, scores, multiplier, largest):
        """Codes against a row maximum, and the score that stands for code 119.65."""
        largest = np.float32(largest)
        bias = np.float32(119.65) - largest
        if self.half:
            bias = round_half(bias - np.abs(bias) * np.float32(2.0**-11))
        value = multiplier * scores + float(bias)
        top = float(np.float32(119.65)) - float(bias) if self.half else float(largest)
        return np.clip(np.rint(round_half(value)), 0, 120), top

    def row(self, b, n, t):
        """Output [H] and the log normaliser of the prepared scores."""
        k = n // (self.query.shape[1] // self.key.shape[1])
        steps = [self._step(b, n, t, j) for j in range(-(-self.count[b] // STEP))]
        if not steps:
            return np.zeros(self.query.shape[-1]), -np.inf
        scaled = [multiplier * scores for scores, multiplier in steps]
        running = np.maximum.accumulate([s.max() for s in scaled])
        parts = []
        for j, (scores, multiplier) in enumerate(steps):
            if self.softmax == "exp":
                probability = 256.0 * np.exp2((scaled[j] - running[j]) / 8)
                weights, top = E4M3_VALUES[nearest_even(probability, E4M3_VALUES[:127])], running[j]
            else:
                own = scaled[j].max() if self.softmax == "expcast" else running[j]
                codes, top = self._anchored(scores, multiplier, own)
                weights = E4M3_VALUES[codes.astype(int)]
            span = np.arange(STEP * j, STEP * j + len(scores))
            values = self.residual[b, k][:, span].T + self.means[b, k][span // BLOCK]
            parts.append((top, weights.sum(), weights @ values))
        reference = max(top for top, _, _ in parts)
        factors = [2.0 ** ((top - reference) / 8) for top, _, _ in parts]
        total = sum(f * total for f, (_, total, _) in zip(factors, parts))
        out = sum(f * out for f, (_, _, out) in zip(factors, parts))
        lse = np.log(total / 256) + reference * np.log(2) / 8
        return out / total * self.value_scale[b, k], lse
