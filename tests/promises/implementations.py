"""What the promises are tested on: implementations of the attention call and their configurations.

A further kernel is a line in `UNDER_TEST`: it inherits every test of this folder.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax._decode import decode
from vc_jax._implementations import Implementation, Static

from ..core import oracles
from ..core.cases import CONFIGS, ERROR, LENGTHS, QUERY_LENGTHS, ragged

LSE_ERROR = {"bf16": 2e-6, "int8": 0.05, "fp8": 0.06, "nvfp4": 0.15, "nvfp4 bare": 3.0}
"""Largest error of the normaliser; without centring and rotation NVFP4 is off by nats."""
UNIT = {"float32": 0.0, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""What rounding to a dtype may add to a relative error."""


@dataclasses.dataclass(frozen=True)
class UnderTest:
    """An implementation and what it takes.

    Attributes:
      name: what `implementation=` takes.
      configs: names of `CONFIGS`; it has to refuse every other.
      gpu: compute capability of the GPU that it needs; `None`: runs on the CPU.
      entry: put into the register for the time of a test; `None`: it is there already.
      dtype: of queries, keys and values.
      normaliser: whether it returns one.
      any_pattern: whether it takes keys that are no prefix.
      batch: rows of the shared batch; the last two hold 129 and 300 valid keys, the first none.
      slow: whether it takes the first of several garbage values only.
    """

    name: str
    configs: tuple[str, ...]
    gpu: str | None = None
    entry: Implementation | None = None
    dtype: str = "float32"
    normaliser: bool = True
    any_pattern: bool = True
    batch: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    slow: bool = False

    def why_not_here(self) -> str | None:
        """Why this machine cannot run it."""
        capability = str(getattr(jax.devices()[0], "compute_capability", ""))
        return None if self.gpu in (None, capability) else f"needs a GPU of capability {self.gpu}"


def _run_interpreted(static: Static, prepared: Any, dtype: Any):
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from vc_jax.pallas_kernels import hopper, hopper_fp4

    options = {
        "out_dtype": dtype,
        "return_residual": static.residual,
        "config": hopper.Config(warpgroups=1, cluster=1, key_slots=2, value_slots=2),
        "interpret": plgpu.InterpretGPUParams(),
    }
    if static.config.qk == "nvfp4":
        return hopper_fp4.attention(decode(prepared), **options)
    return hopper.attention(prepared, softmax=static.config.softmax, **options)


INTERPRETED = Implementation(lambda request: None, on_prepared=_run_interpreted)
EIGHT_BIT = ("int8", "fp8")
LOW_BIT = (*EIGHT_BIT, "nvfp4")
UNDER_TEST = (
    UnderTest("xla", tuple(CONFIGS)),
    UnderTest("hopper interpreted", LOW_BIT, entry=INTERPRETED, batch=(0, 4, 5), slow=True),
    UnderTest("hopper", LOW_BIT, gpu="9.0"),
    UnderTest("cudnn", ("bf16",), gpu="9.0", dtype="bfloat16", normaliser=False, any_pattern=False),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration on an implementation, and the batch that it is tested on."""

    under_test: UnderTest
    config: str

    def __str__(self) -> str:
        return f"{self.under_test.name}-{self.config}"

    @property
    def inputs(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[B, 9, 4, 64] queries, [B, 300, 2, 64] keys and values."""
        query, key, value = (
            x[np.array(self.under_test.batch)].astype(self.under_test.dtype) for x in ragged()
        )
        return query, key, value

    @property
    def lengths(self) -> np.ndarray:
        """Valid keys of each batch row."""
        return LENGTHS[list(self.under_test.batch)]

    @property
    def query_lengths(self) -> np.ndarray:
        """Queries of each batch row that count."""
        return QUERY_LENGTHS[list(self.under_test.batch)]

    @property
    def key_valid(self) -> np.ndarray:
        return oracles.prefix(self.lengths, 300)

    @property
    def query_valid(self) -> np.ndarray:
        return oracles.prefix(self.query_lengths, 9)

    @property
    def error(self) -> float:
        """Relative L2 error of the output that is allowed."""
        return ERROR[self.config] + UNIT[self.under_test.dtype]

    @property
    def lse_error(self) -> float:
        return LSE_ERROR.get(self.config) or LSE_ERROR[self.config.split()[0]]

    def few(self, *values):
        """All values, or the first where each of them takes seconds."""
        return values[:1] if self.under_test.slow else values

    def attend(self, *inputs, **arguments):
        """The public call on this implementation; outside of `jit` it compiles once a shape."""
        return vc_jax.dot_product_attention(
            *inputs,
            config=CONFIGS[self.config],
            implementation=self.under_test.name,
            **arguments,
        )

    def __call__(self, inputs=None, lengths=None, query_lengths=None, scale=0.125):
        """Output and normaliser (`None` where it has none) of the one program of most tests."""
        residual = self.under_test.normaliser
        out = self.attend(
            *(self.inputs if inputs is None else inputs),
            **self.ragged(lengths, query_lengths, scale),
            return_residual=residual,
        )
        return out if residual else (out, None)

    def ragged(self, lengths=None, query_lengths=None, scale=0.125):
        """Arguments of that program: lengths, the batch's own unless given, and the scale."""
        keys = self.lengths if lengths is None else lengths
        rows = self.query_lengths if query_lengths is None else query_lengths
        return {
            "scale": jnp.float32(scale),
            "key_value_seq_lengths": jnp.asarray(keys, jnp.int32),
            "query_seq_lengths": jnp.asarray(rows, jnp.int32),
        }

    def masked(self, keep, inputs=None):
        """The second program: keys by a mask [B, S], every query."""
        inputs = self.inputs if inputs is None else inputs
        mask = jnp.asarray(keep)[:, None, None, :]
        return self.attend(*inputs, mask=mask, return_residual=True)

    def exact(self, inputs=None, **arguments):
        """Output and normaliser in float64, of the lengths of the batch unless others are given."""
        common = {"scale": 0.125, "key_valid": self.key_valid, "query_valid": self.query_valid}
        return oracles.attention(
            *(self.inputs if inputs is None else inputs), **(common | arguments)
        )


@functools.cache
def clean(case: Case):
    """Output and normaliser of the batch as it is."""
    return case()


def every(*configs: str, normaliser=False, any_pattern=False, quick=False):
    """A test of every implementation: of all it takes, or of some configurations.

    Args:
      configs: names; none: all.
      normaliser, any_pattern: of those implementations only that have it.
      quick: of those only that are not interpreted.
    """
    cases = []
    for x in UNDER_TEST:
        if (normaliser and not x.normaliser) or (any_pattern and not x.any_pattern):
            continue
        if quick and x.slow:
            continue
        marks = [] if x.gpu is None else [pytest.mark.gpu]
        cases += [
            pytest.param(Case(x, name), marks=marks, id=re.sub(r"\s", "_", f"{x.name}-{name}"))
            for name in x.configs
            if not configs or name in configs
        ]
    return pytest.mark.parametrize("case", cases)
