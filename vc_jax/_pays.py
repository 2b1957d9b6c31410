"""From which length a low-bit call is faster than BF16 attention, as measured.

One NVIDIA H200 (700 W, driver 580.159.04), JAX 0.11.2, 2026-12-01: bfloat16, 24 heads, head dim
128, calls inside one jitted scan of 40; the time of the faster of FlashAttention-3 and cuDNN over
that of `"fp8"` (`benchmarks/results/2026-12-01-short/README.md`).
"""

import math

from ._config import AttentionConfig

MEASURED = "'fp8' on one H200, JAX 0.11.2, 2026-12-01, 24 heads"
_LENGTHS = (1024, 2048, 4096, 8192)
_CALL = (0.42, 0.56, 0.95, 1.35)
"""Times as fast as BF16, clustering in each call."""
_UNSMOOTHED = (0.81, 0.93, 1.32, 1.56)
"""The same without V-Smooth, and of `attention_step` after the window but for 1 to 8 %."""
_DEVICE = "H200"


def _times(lengths: float, figures: tuple[float, ...]) -> float:
    """Interpolated in the logarithm of the length; the nearest figure beyond the table."""
    if lengths <= _LENGTHS[0]:
        return figures[0]
    for i, longer in enumerate(_LENGTHS[1:]):
        if lengths <= longer:
            share = math.log2(lengths / _LENGTHS[i])
            return figures[i] + share * (figures[i + 1] - figures[i])
    return figures[-1]


def _from(figures: tuple[float, ...]) -> int:
    """The length from which figures are at least 1, in steps of 256."""
    return next(n for n in range(256, _LENGTHS[-1] + 1, 256) if _times(n, figures) >= 1)


def advice(
    config: AttentionConfig, implementation: str | None, device: str, kv_length: int
) -> str | None:
    """A sentence on whether a call pays; `None` where nothing was measured.

    Args:
      implementation: that runs it.
      device: the device's name.
      kv_length: keys, about as many as queries.
    """
    if not config.quantized or implementation is None:
        return None
    if implementation == "xla":
        return "slower than config='bf16' at any length: the XLA reference"
    if implementation != "hopper" or _DEVICE not in device:
        return None
    if config.qk == "nvfp4":
        # The kernel alone, 2026-12-01: 0.84 and 0.87 times cuDNN (`docs/gpus.md`).
        return "slower than config='bf16' at any length: without FP4 units, to judge 4 bits by"
    figures = _CALL if config.smooth_values else _UNSMOOTHED
    first = _from(figures)
    if kv_length < first:
        return f"slower than config='bf16' here: pays from about {first} tokens ({MEASURED})"
    return f"faster than config='bf16' here: pays from about {first} tokens ({MEASURED})"
