"""Fragments and copies of the `mma` kernel, by enumerating lanes; what it says about arguments."""

import numpy as np
import pytest
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu.mma import MMALayouts

from vc_jax.pallas_kernels import mma
from vc_jax.pallas_kernels.layout import GROUP_ORDER, STEP
from vc_jax.pallas_kernels.mma import _ring as ring

from .test_hopper_arguments import arrays


def test_sums_lie_where_mosaics_own_products_have_them():
    # Operands of 8 bits: `test_jax_internals` enumerates their lanes.
    assert MMALayouts(np.dtype("int8")).acc == fa.WGMMA_LAYOUT


def test_four_packed_codes_of_a_score_fragment_are_a_word_of_a_left_operand():
    # A thread's sums are columns 2t, 2t + 1 of 8; a word of a left operand is 4t.. of 16.
    for t in range(4):
        packed = [8 * tile + 2 * t + e for tile in range(2) for e in range(2)]
        np.testing.assert_array_equal(GROUP_ORDER[4 * t : 4 * t + 4], packed)


def test_copies_are_waited_for_before_their_slot_is_read_and_started_after():
    parts, steps = 2 * ring.PARTS, 3
    held, pending, taken = {}, list(range(ring.SLOTS - 1)), 0
    for number in range(parts * steps):
        part = number % parts
        left = ring.started(part) - part - 1  # groups that may still be under way
        while len(pending) > left:
            arrived = pending.pop(0)
            held[arrived % ring.SLOTS] = arrived
        assert held[number % ring.SLOTS] == number
        first = number - part + ring.started(part)
        for new in range(first, first + ring.STARTS[part]):
            assert new - ring.SLOTS < number  # what was there has been read
            held.pop(new % ring.SLOTS, None)
            pending.append(new)
        taken += 1
    assert taken * 64 == 2 * STEP * steps


@pytest.mark.parametrize("width", [64, 128])
def test_eight_rows_of_a_fragment_lie_in_different_banks(width):
    pieces = width // 16
    for column in range(pieces):
        places = []
        for row in range(8):
            line = row if width == 128 else row // 2
            places.append(width * row + 16 * (column ^ (line % pieces)))
        assert len({place % 128 for place in places}) == 8


def test_what_it_cannot_take_is_named():
    with pytest.raises(NotImplementedError, match="the mma kernel needs softmax"):
        mma.attention(arrays(), softmax="sigmoid")
    with pytest.raises(TypeError, match="prepared must be a Prepared8, got tuple"):
        mma.attention(tuple(vars(arrays()).values()))
    with pytest.raises(ValueError, match=r"prepared\.kv_count must be from 0 to 512"):
        mma.attention(arrays(kv_count=np.full(1, 900, np.int32)))
