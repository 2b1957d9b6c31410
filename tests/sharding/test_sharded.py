"""`vc_jax.sharding`: on 8 simulated devices in a process of their own, and what needs none."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from vc_jax import sharding

from . import any_mesh, devices, sharded_checks


@pytest.mark.parametrize("name", devices.checks(sharded_checks))
def test_on_eight_devices(name):
    failure = devices.results(sharded_checks.__name__)[name]
    assert failure is None, failure


def test_any_mesh_is_refused_by_name_or_computed():
    [failure] = devices.results(any_mesh.__name__).values()
    assert failure is None, failure


def mesh(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def wan(heads: int = 40, kv_heads: int | None = None):
    """Abstract tensors of a 720p clip of Wan2.2-A14B."""
    of_query, of_keys = (
        jax.ShapeDtypeStruct((1, 75_600, n, 128), jnp.bfloat16) for n in (heads, kv_heads or heads)
    )
    return of_query, of_keys, of_keys


@pytest.mark.parametrize(
    ("heads", "axes", "method"),
    [
        (40, {"a": 8}, "ulysses"),
        (40, {"a": 2, "b": 4}, "ulysses"),
        (40, {"a": 16}, "ring"),
        (40, {"a": 2, "b": 8}, "ulysses+ring"),
        (56, {"a": 2, "b": 8}, "ulysses+ring"),
        (24, {"a": 3, "b": 5}, "ring"),
    ],
)
def test_the_method_follows_from_heads_and_axes(heads, axes, method):
    got = sharding.communication(*wan(heads), mesh=mesh(**axes), sequence_axis=tuple(axes))
    assert got.method == method
    assert str(heads) in got.reason


def test_bytes_of_a_clip_over_eight_devices():
    """4 tensors of 9 450 tokens, seven eighths of which leave the device; 7 pieces of 2 tensors."""
    part = 9_450 * 40 * 128 * 2
    ulysses = sharding.communication(*wan(), mesh=mesh(a=8), sequence_axis="a")
    assert ulysses.sent == 4 * part * 7 / 8
    assert [t.tensor for t in ulysses.transfers] == ["query", "key", "value", "output"]
    ring = sharding.communication(*wan(), mesh=mesh(a=8), sequence_axis="a", method="ring")
    assert ring.sent == 7 * (2 * part + 4 * 9_450 * 40)
    assert "order" in str(ring)


@pytest.mark.parametrize(
    ("axes", "options", "method", "why"),
    [
        ({"a": 8}, {}, "ulysses", "8 devices divide 40 key heads"),
        ({"a": 16}, {}, "ring", "16 devices do not divide 40 key heads"),
        ({"a": 2, "b": 8}, {}, "ulysses+ring", "16 devices do not divide 40 key heads, 8 do"),
        ({"a": 8}, {"method": "ring"}, "ring", "asked for"),
    ],
)
def test_explain_names_the_method_and_why_and_what_runs_on_a_device(axes, options, method, why):
    given = {"mesh": mesh(**axes), "sequence_axis": tuple(axes), **options}
    got = sharding.explain(*wan(), **given)
    assert got.communication.method == method
    assert got.on_device.implementation == "xla"
    assert "hopper" in got.on_device.reasons
    for words in (method, why, "on each device", "xla"):
        assert words in str(got)


def test_explain_refuses_what_the_call_refuses():
    given = {"mesh": mesh(a=8), "sequence_axis": "a"}
    with pytest.raises(ValueError, match="implementation must be"):
        sharding.explain(*wan(), implementation="fast", **given)
    with pytest.raises(NotImplementedError, match="too coarse"):
        sharding.explain(*wan(), method="ring", config="nvfp4", **given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sequence_axis": "c"}, "sequence_axis must be of"),
        ({"sequence_axis": "a", "head_axis": "a"}, "cannot both"),
        ({"sequence_axis": "a", "method": "tree"}, "method must be"),
        ({"method": "ring"}, "method must be None without sequence_axis"),
        ({"sequence_axis": ("a", "b"), "method": "ulysses"}, "use 'ring'"),
        ({"sequence_axis": "b", "method": "ulysses+ring"}, "two mesh axes"),
        ({"batch_axis": "a"}, "batch_axis must divide"),
        ({"head_axis": ("a", "b")}, "head_axis must divide"),
        ({"mesh": None, "sequence_axis": "a"}, "mesh must be given"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(options, words):
    given = {"mesh": mesh(a=2, b=8)} | options
    with pytest.raises(ValueError, match=words):
        sharding.communication(*wan(), **given)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda *x: sharding.sharded_attention(*x, **given), *wan())


def test_a_ring_in_nvfp4_is_refused():
    given = {"mesh": mesh(a=8), "sequence_axis": "a", "method": "ring", "config": "nvfp4"}
    with pytest.raises(NotImplementedError, match="too coarse"):
        jax.eval_shape(lambda *x: sharding.sharded_attention(*x, **given), *wan())
