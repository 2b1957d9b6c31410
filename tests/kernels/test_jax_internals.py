"""What the Hopper kernel takes for granted of JAX's internals, looked at without a GPU.

`docs/jax_internals.md` lists it; these tests hold the page and the installed JAX to it.
"""

import inspect
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import fragmented_array as fa

import vc_jax
from vc_jax._decode import decode
from vc_jax.pallas_kernels import _ptx as ptx
from vc_jax.pallas_kernels import hopper, hopper_fp4
from vc_jax.pallas_kernels.layout import E4M3, Prepared8

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "jax_internals.md"
ROWS, COLUMNS = 64, 32
OPCODE = r"(?<![\w.])[a-z][a-z0-9]*(?:\.[A-Za-z0-9]+)+"


def tiled(array: np.ndarray, tiles: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """The array with its last axes split into tiles, tiles into smaller tiles and so on."""
    for tile in tiles:
        rank = array.ndim - len(tile)
        lead, rest = array.shape[:rank], array.shape[rank:]
        split = [n for size, t in zip(rest, tile, strict=True) for n in (size // t, t)]
        axes = range(rank, rank + len(split))
        order = [*range(rank), *axes[::2], *axes[1::2]]
        array = array.reshape(*lead, *split).transpose(order)
    return array


@pytest.mark.parametrize(
    ("layout", "width"), [(fa.WGMMA_LAYOUT, 8), (fa.WGMMA_LAYOUT_8BIT, 16)], ids=["32bit", "8bit"]
)
def test_a_thread_holds_the_elements_that_the_kernel_takes_from_its_registers(layout, width):
    elements = tiled(np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS), layout.tiling.tiles)
    assert layout.warp_dims == (-7,)
    assert layout.lane_dims == (-3, -2)
    assert layout.vector_dim == -1
    registers = layout.registers_shape((ROWS, COLUMNS))
    each = width // 4
    for group in range(COLUMNS // width):
        for half in range(2):
            index = ptx.fragment_index(group, half)
            assert all(i < n for i, n in zip(index, registers, strict=True))
            for warp, lane in np.ndindex(4, 32):
                place = list(index)
                place[-7], place[-3], place[-2] = warp, lane // 4, lane % 4
                place[-1:] = []
                row = 16 * warp + 8 * half + lane // 4
                first = row * COLUMNS + width * group + each * (lane % 4)
                np.testing.assert_array_equal(elements[tuple(place)], first + np.arange(each))


def test_a_thread_holds_the_rows_that_the_kernel_takes_from_its_registers():
    layout = fa.WGMMA_ROW_LAYOUT
    assert layout.registers_shape((ROWS,)) == (1, 1, 2, 1, 1)
    rows = tiled(np.arange(ROWS), layout.tiling.tiles)
    assert layout.warp_dims == (-4,)
    assert layout.lane_dims == (-2, fa.Replicated(times=4))
    for warp, half, lane in np.ndindex(4, 2, 32):
        assert rows[0, warp, half, lane // 4, 0] == 16 * warp + 8 * half + lane // 4


def lowered(code_dtype, softmax: str) -> str:
    """The program for a GPU that holds the kernel, with the kernel's own strings readable."""

    def array(shape, dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    prepared = Prepared8(
        array((1, 1, 64, 128), code_dtype),
        array((1, 1, 64), jnp.float32),
        array((1, 1, 256, 128), code_dtype),
        array((1, 1, 2), jnp.float32),
        array((1, 1, 136, 256), E4M3),
        array((1, 1, 128), jnp.float32),
        array((1, 1, 2, 128), jnp.bfloat16),
        None,
        array((1,), jnp.int32),
        array((1, 1, 64), jnp.float32),
    )

    def call(prepared):
        return hopper.attention(prepared, softmax=softmax, return_residual=True)

    return lowered_text(call, prepared)


def lowered_fp4() -> str:
    """The same of the NVFP4 kernel, with its preparation."""

    def call(query, key):
        prepared = vc_jax.prepare(query, key, key, "nvfp4")
        return hopper_fp4.attention(decode(prepared), return_residual=True)

    tokens = [jax.ShapeDtypeStruct((1, n, 1, 128), jnp.bfloat16) for n in (64, 256)]
    return lowered_text(call, *tokens)


def lowered_text(call, *arguments) -> str:
    text = jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return re.sub(r"\\[0-9A-F]{2}", " ", text)


def listed() -> set[str]:
    """The instructions of the page's table."""
    section = PAGE.read_text().split("## Inline PTX")[1].split("\n## ")[0]
    rows = "".join(line for line in section.splitlines() if line.startswith("| `"))
    return set(re.findall(OPCODE, rows))


def test_the_page_lists_every_instruction_that_the_kernel_can_ask_for():
    source = inspect.getsource(ptx).replace("{kind}", "")
    quoted = "".join(re.findall(r'"[^"\n]*\$0[^"\n]*"|"[^"\n]*; ?"', source))
    written = set(re.findall(rf"{OPCODE}(?= [$\w%{{])", quoted))
    assert len(written) > 20
    assert sorted(written - listed()) == []


def test_the_kernel_emits_every_instruction_that_the_page_lists():
    kinds = [(dtype, softmax) for dtype in (jnp.int8, E4M3) for softmax in ("expcast", "exp")]
    text = "".join(lowered(*kind) for kind in kinds) + lowered_fp4()
    assert [opcode for opcode in sorted(listed()) if f"{opcode} " not in text] == []
