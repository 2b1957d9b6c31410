"""What the Hopper kernel says about arguments it cannot take, on any machine."""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from vc_jax.pallas_kernels import hopper
from vc_jax.pallas_kernels.layout import Prepared8

from .cases import Case, prepared_and_reference
from .test_hopper_interpreted import SMALL

NAMES = (
    *("query_codes", "query_scale", "key_codes", "key_scale", "value_codes", "value_scale"),
    *("block_means", "kv_count"),
)
INTERPRET = plgpu.InterpretGPUParams()


def arrays(**others) -> Prepared8:
    """A call that would be taken: batch 1, two heads on one, 8 queries, 512 stored keys."""
    given = {
        "query_codes": jnp.zeros((1, 2, 8, 64), jnp.int8),
        "query_scale": jnp.zeros((1, 2, 8), jnp.float32),
        "key_codes": jnp.zeros((1, 1, 512, 64), jnp.int8),
        "key_scale": jnp.zeros((1, 1, 4), jnp.float32),
        "value_codes": jnp.zeros((1, 1, 72, 512), jnp.float8_e4m3fn),
        "value_scale": jnp.zeros((1, 1, 64), jnp.float32),
        "block_means": jnp.zeros((1, 1, 4, 64), jnp.bfloat16),
        "value_mean": None,
        "kv_count": jnp.full(1, 300, jnp.int32),
        "score_excess": jnp.ones((1, 2, 8), jnp.float32),
    }
    # Past the constructor, which refuses wrong arrays in the tests' own way.
    prepared = object.__new__(Prepared8)
    for name, value in (given | others).items():
        object.__setattr__(prepared, name, value)
    return prepared


@pytest.mark.parametrize("name", NAMES)
def test_an_array_of_another_rank_is_named(name):
    given = arrays()
    with pytest.raises(ValueError, match=rf"prepared\.{name} must be"):
        hopper.attention(arrays(**{name: getattr(given, name)[0]}))


def test_what_is_not_prepared_is_refused():
    with pytest.raises(TypeError, match="prepared must be a Prepared8, got tuple"):
        hopper.attention(tuple(vars(arrays()).values()))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_array_is_named(name):
    with pytest.raises(TypeError, match=rf"{name} must be an array, got list"):
        hopper.attention(arrays(**{name: [1.0]}))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "block_means"])
def test_only_means_can_be_left_out(name):
    with pytest.raises(TypeError, match=rf"{name} must be an array, got NoneType"):
        hopper.attention(arrays(**{name: None}))


@pytest.mark.parametrize(("name", "axis"), [("query_codes", 2), ("key_codes", 1), ("key_codes", 2)])
def test_an_empty_axis_is_named(name, axis):
    shape = list(getattr(arrays(), name).shape)
    shape[axis] = 0
    with pytest.raises(ValueError, match=rf"{name} must be .*, no axis empty"):
        hopper.attention(arrays(**{name: jnp.zeros(shape, jnp.int8)}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"config": 3}, "config must be a Config or None, got 3"),
        ({"interpret": True}, "interpret must be False or InterpretGPUParams, got True"),
        ({"interpret": None}, "interpret must be False or InterpretGPUParams, got None"),
        ({"out_dtype": "nonsense"}, "out_dtype must be float32, bfloat16 or float16"),
        ({"out_dtype": None}, "out_dtype must be float32, bfloat16 or float16"),
        ({"out_dtype": 3}, "out_dtype must be float32, bfloat16 or float16"),
    ],
)
def test_an_option_of_another_kind_is_named(options, words):
    with pytest.raises(TypeError, match=words):
        hopper.attention(arrays(), **options)


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"warpgroups": 0}, ValueError, "warpgroups must be 1, 2 or 3, got 0"),
        ({"warpgroups": 4}, ValueError, "warpgroups must be 1, 2 or 3, got 4"),
        ({"warpgroups": 2.0}, TypeError, "warpgroups must be an int, got 2.0"),
        ({"cluster": 0}, ValueError, "cluster must be 1, 2 or 4, got 0"),
        ({"cluster": 3}, ValueError, "cluster must be 1, 2 or 4, got 3"),
        ({"cluster": True}, TypeError, "cluster must be an int, got True"),
        ({"key_slots": 1}, ValueError, "key_slots must be at least 2, got 1"),
        ({"value_slots": -1}, ValueError, "value_slots must be at least 2, got -1"),
        ({"compute_registers": 236}, ValueError, "compute_registers must be a multiple of 8"),
        ({"copy_registers": 16}, ValueError, "copy_registers must be a multiple of 8 from 24"),
        # Two warpgroups of 248 and one of 24 are more than three of 168.
        ({"compute_registers": 248}, ValueError, "compute_registers must be at most 240 with"),
        ({"warpgroups": 3}, ValueError, "compute_registers must be at most 160 with warpgroups=3"),
    ],
)
def test_a_config_that_cannot_run_is_refused(fields, kind, words):
    with pytest.raises(kind, match=words):
        hopper.Config(**fields)


@pytest.mark.parametrize(
    "fields", [{"warpgroups": 1}, {"warpgroups": 3, "compute_registers": 160}, {"cluster": 4}]
)
def test_a_config_within_the_limits_is_taken(fields):
    assert vars(hopper.Config(**fields)) == vars(hopper.Config()) | fields


@pytest.mark.parametrize("count", [-1, 513])
def test_a_known_number_of_keys_out_of_range_is_refused(count):
    counts = np.array([count], np.int32)
    with pytest.raises(ValueError, match=f"kv_count must be from 0 to 512 keys, got {count}"):
        hopper.attention(arrays(kv_count=counts))


def test_traced_numbers_of_keys_out_of_range_are_clamped():
    case = Case(batch=2, rows=8, heads=1, length=256)
    prepared = jax.tree.map(jnp.asarray, prepared_and_reference(case)[0])

    @jax.jit
    def attend(counts):
        return hopper.attention(
            dataclasses.replace(prepared, kv_count=counts),
            out_dtype=jnp.float32,
            return_residual=True,
            config=SMALL,
            interpret=INTERPRET,
        )

    expected = attend(np.array([256, 0], np.int32))
    # 600 keys would be three steps, two of them behind the arrays.
    for got, wanted in zip(attend(np.array([600, -300], np.int32)), expected):
        np.testing.assert_array_equal(got, wanted)
    assert np.isfinite(expected[0]).all()
