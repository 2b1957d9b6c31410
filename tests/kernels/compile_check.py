"""Compile every kernel for its GPUs on a machine without one and look at what comes out.

Needs the CUDA plugin of the JAX version that is installed (`jax-cuda13-plugin`, `jax-cuda13-pjrt`)
and `nvidia-cuda-nvdisasm`. Fails on a register spill, on products that the assembler serialised
(C7512, C7513), and when an attention kernel's main loop has other tensor-core instructions than it
should. The Hopper kernels and the preprocessing (`compile_preprocessing`) are for sm_90a, the `mma`
kernel is for sm_89, sm_90a and sm_120a.

    python -m tests.kernels.compile_check
"""

import collections
import dataclasses
import functools
import importlib.util
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
os.environ["MOSAIC_GPU_DUMP_SASS"] = "1"
_FOLDER = tempfile.TemporaryDirectory()
os.environ["MOSAIC_GPU_DUMP_TO"] = _FOLDER.name

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from vc_jax.pallas_kernels import hopper, hopper_fp4, mma  # noqa: E402
from vc_jax.pallas_kernels.layout import Prepared8  # noqa: E402

from . import compile_preprocessing  # noqa: E402

DATA = pathlib.Path(__file__).parent / "data"
TARGET = DATA / "h200.textproto"
TARGETS = ("h200", "l40s", "rtx5090", "rtx_pro_6000")
E4M3 = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Variant:
    """A compiled form of the Hopper kernel."""

    attention = staticmethod(hopper.attention)
    target = "h200"
    spills = 0
    """Bytes that may be spilled."""

    code_dtype: type = E4M3
    head_dim: int = 128
    softmax: str = "expcast"
    means: bool = True
    out_dtype: type = jnp.bfloat16
    residual: bool = False
    rows: int = 1000
    length: int = 5376

    def __str__(self) -> str:
        parts = [jnp.dtype(self.code_dtype).name, f"D={self.head_dim}", self.softmax]
        parts += ["means" if self.means else "no means", jnp.dtype(self.out_dtype).name]
        return ", ".join(parts + ["lse"] * self.residual)

    def __call__(self, prepared) -> object:
        return self.attention(
            prepared,
            softmax=self.softmax,
            out_dtype=self.out_dtype,
            return_residual=self.residual,
        )

    def arguments(self, array) -> object:
        """Arrays of the prepared layout, batch 2, four heads on two; `array(shape, dtype)`."""
        size, length, blocks = self.head_dim, self.length, self.length // 128
        return Prepared8(
            array((2, 4, self.rows, size), self.code_dtype),
            array((2, 4, self.rows), jnp.float32),
            array((2, 2, length, size), self.code_dtype),
            array((2, 2, blocks), jnp.float32),
            array((2, 2, size + 8, length), E4M3),
            array((2, 2, size), jnp.float32),
            array((2, 2, blocks, size), jnp.bfloat16) if self.means else None,
            None if self.means else array((2, 2, size), jnp.float32),
            array((2,), jnp.int32),
            array((2, 4, self.rows), jnp.float32),
        )

    @property
    def loop_instructions(self) -> tuple[tuple[str, int], ...]:
        """Tensor-core instructions of one step of the main loop, by name and number."""
        steps = self.head_dim // 32
        scores = (
            ("IGMMA.64x256x32.S8.S8", steps)
            if self.code_dtype == jnp.int8
            else ("QGMMA.64x256x32.F16.E4M3.E4M3", steps)
        )
        return scores, (f"QGMMA.64x{self.head_dim + 8}x32.F32.E4M3.E4M3", 8)


@dataclasses.dataclass(frozen=True)
class MmaVariant(Variant):
    """A compiled form of the `mma` kernel, for one of its GPUs."""

    attention = staticmethod(mma.attention)
    target: str = "h200"

    @property
    def spills(self) -> int:
        """At head dim 128 the output and INT8 scores of 256 keys are 192 of 255 registers."""
        if self.head_dim == 64:
            return 0
        return 256 if self.code_dtype == jnp.int8 else 8

    def __str__(self) -> str:
        return f"mma for {self.target}: {super().__str__()}"

    @property
    def loop_instructions(self) -> tuple[tuple[str, int], ...]:
        """As above: 256 keys by 16 rows of a warp, 8 columns a product."""
        scores, values = self.head_dim // 32 * 32, (self.head_dim + 8) // 8 * 8
        unpacked = self.target == "h200"  # two float16 products for one of E4M3
        if self.code_dtype == jnp.int8:
            first = ("IMMA.16832.S8.S8", scores)
        elif unpacked:
            first = ("HMMA.16816.F16", 2 * scores)
        else:
            first = ("QMMA.16832.F16.E4M3.E4M3", scores)
        if unpacked:
            return first, ("HMMA.16816.F32", 2 * values)
        return first, ("QMMA.16832.F32.E4M3.E4M3", values)


@dataclasses.dataclass(frozen=True)
class Fp4Variant(Variant):
    """A compiled form of the kernel of NVFP4 in float16 products."""

    def __str__(self) -> str:
        return super().__str__().replace(jnp.dtype(self.code_dtype).name, "NVFP4 in float16")

    def __call__(self, prepared) -> object:
        return hopper_fp4.attention(
            prepared, out_dtype=self.out_dtype, return_residual=self.residual
        )

    def arguments(self, array) -> object:
        """As above, decoded."""
        size, length, blocks = self.head_dim, self.length, self.length // 128
        return hopper_fp4.Decoded4(
            array((2, 4, self.rows, size), jnp.float16),
            array((2, 4, self.rows), jnp.float32),
            array((2, 2, length, size), jnp.float16),
            array((2, 2, blocks), jnp.float32),
            array((2, 2, size, length), jnp.float16),
            array((2, 2, size), jnp.float32),
            array((2, 2, 16 * blocks, size), jnp.bfloat16) if self.means else None,
            None if self.means else array((2, 2, size), jnp.float32),
            array((2,), jnp.int32),
        )

    @property
    def loop_instructions(self) -> tuple[tuple[str, int], ...]:
        """Two blocks of keys, two of values, and the means of two blocks."""
        wanted = collections.Counter({"HGMMA.64x128x16.F32": 2 * (self.head_dim // 16)})
        wanted[f"HGMMA.64x{self.head_dim}x16.F32"] += 16
        if self.means:
            wanted[f"HGMMA.64x{self.head_dim}x16.F32.BF16"] = 2
        return tuple(wanted.items())


def fp4_variants() -> list[Fp4Variant]:
    """Every feature at least once."""
    return [
        Fp4Variant(softmax="exp"),
        Fp4Variant(softmax="exp", means=False),
        Fp4Variant(softmax="exp", head_dim=64, out_dtype=jnp.float16),
        Fp4Variant(softmax="exp", head_dim=64, means=False, residual=True),
        Fp4Variant(softmax="exp", out_dtype=jnp.float32, residual=True, rows=77),
        Fp4Variant(softmax="exp", rows=1, length=256, residual=True, means=False),
    ]


def mma_variants() -> list[MmaVariant]:
    """Every feature at least once, and the formats on every compute capability."""
    found = []
    for target, dtype in itertools.product(("l40s", "h200", "rtx5090"), (jnp.int8, E4M3)):
        for means in (True, False):
            found.append(MmaVariant(code_dtype=dtype, target=target, means=means))
        found.append(
            MmaVariant(
                code_dtype=dtype,
                target=target,
                head_dim=64,
                softmax="expcast_running",
                out_dtype=jnp.float32,
                residual=True,
                rows=77,
            )
        )
    found += [
        MmaVariant(code_dtype=x, softmax="exp", target="rtx_pro_6000") for x in (jnp.int8, E4M3)
    ]
    return found


def variants() -> list[Variant]:
    """Every feature at least once, and every pair of formats and softmax."""
    dtypes = (jnp.int8, E4M3)
    found = [
        Variant(code_dtype=dtype, softmax=softmax, means=means)
        for dtype, softmax, means in itertools.product(dtypes, hopper.SOFTMAX, (True, False))
    ]
    for dtype in dtypes:
        found.append(Variant(code_dtype=dtype, head_dim=64, out_dtype=jnp.float16))
        found.append(Variant(code_dtype=dtype, out_dtype=jnp.float32, residual=True, rows=77))
        found.append(Variant(code_dtype=dtype, rows=1, length=256, residual=True))
    return found


def compile_variant(variant: Variant, device) -> tuple[str, str]:
    """The assembler's log and the machine code."""
    folder = pathlib.Path(_FOLDER.name)
    for old in folder.iterdir():
        old.unlink()

    sharding = SingleDeviceSharding(device)
    arguments = variant.arguments(functools.partial(jax.ShapeDtypeStruct, sharding=sharding))
    with jax.default_device(device):
        traced = jax.jit(variant.__call__).trace(arguments)
        traced.lower(lowering_platforms=("cuda",)).compile()
    log = "".join(path.read_text() for path in folder.glob("*.ptxas"))
    code = "".join(path.read_text() for path in folder.glob("*.sass*"))
    return log, code


def loop_bodies(code: str) -> list[str]:
    """Text between each label and the backward branches to it."""
    lines = code.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.L_x_\d+):", line))}
    bodies = []
    for i, line in enumerate(lines):
        jump = re.search(r"\bBRA\b.*?(\.L_x_\d+)", line)
        if jump and labels.get(jump[1], i + 1) <= i:
            bodies.append("\n".join(lines[labels[jump[1]] : i + 1]))
    return bodies


def faults(variant: Variant, log: str, code: str) -> list[str]:
    """What is wrong with a compiled variant."""
    found = []
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    if not spilled:
        found.append("no assembler log")
    elif max(spilled) > variant.spills:
        found.append(f"{max(spilled)} bytes of registers are spilled")
    found += [f"the assembler says {c}" for c in ("C7512", "C7513") if c in log]
    wanted = variant.loop_instructions
    if not code:
        found.append("no machine code to look at: is nvdisasm there?")
    elif not any(products(body) == dict(wanted) for body in loop_bodies(code)):
        found.append(f"no loop has exactly {dict(wanted)}")
    return found


def products(body: str) -> dict[str, int]:
    """Tensor-core instructions in machine code, by name, and how many there are."""
    return collections.Counter(re.findall(r"\b[A-Z]*MMA\.[\w.]*\w", body))


def _find_nvdisasm() -> None:
    """Point Mosaic at the wheel's disassembler (it looks below its CUDA folder)."""
    spec = importlib.util.find_spec("nvidia.cu13")
    if spec is not None and spec.submodule_search_locations:
        import jax.experimental.mosaic.gpu.core  # noqa: F401  (sets the variable itself)

        os.environ["MOSAIC_GPU_CUDA_ROOT"] = next(iter(spec.submodule_search_locations))


def _report(name: object, problems: str) -> bool:
    print(f"{'FAULT' if problems else 'ok   '} {name} {problems}", flush=True)
    return bool(problems)


def check(target: str) -> int:
    """Check every kernel for one GPU; 1 if any has a fault."""
    _find_nvdisasm()
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=(DATA / f"{target}.textproto").read_text(),
        topology="1x1x1",
    )
    device, bad = topology.devices[0], 0
    folder = pathlib.Path(_FOLDER.name)
    preprocessing = compile_preprocessing.all_kernels() if target == "h200" else []
    for kernel in preprocessing:
        bad += _report(kernel, compile_preprocessing.fault(kernel, device, folder) or "")
    attention = [v for v in [*variants(), *fp4_variants(), *mma_variants()] if v.target == target]
    for variant in attention:
        bad += _report(variant, "; ".join(faults(variant, *compile_variant(variant, device))))
    total = len(preprocessing) + len(attention)
    print(f"jax {jax.__version__}, {target}: {bad} of {total} kernels have faults", flush=True)
    return 1 if bad else 0


def main(argv: list[str]) -> int:
    """Check the GPUs that are named, or all; 1 if any kernel has a fault.

    A process assembles for one GPU only.
    """
    if len(argv) == 1:
        return check(argv[0])
    command = [sys.executable, "-m", __spec__.name]
    others = [subprocess.run([*command, target]).returncode for target in argv or TARGETS]
    return max(others)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
