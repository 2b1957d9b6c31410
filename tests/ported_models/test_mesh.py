"""Models and the sampler on meshes: on 8 simulated devices, and what needs none."""

import jax
import pytest
from jax.sharding import AxisType

from vc_jax.models.mesh import ModelMesh
from vc_jax.models.wan import Wan

from ..sharding import devices
from . import golden, mesh_checks


@pytest.mark.parametrize("name", devices.checks(mesh_checks))
def test_on_eight_devices(name):
    failure = devices.results(mesh_checks.__name__)[name]
    assert failure is None, failure


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"sequence": 2}, "'sequence' is none of batch, fsdp, ring, seq, tensor"),
        ({"seq": 0}, "seq must be at least 1"),
        ({"batch": 2, "seq": 64}, "128 devices are needed, there "),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        ModelMesh.make(**sizes)


def mesh_of(*names: str) -> jax.sharding.Mesh:
    return jax.make_mesh((1,) * len(names), names)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"batch_axis": "c"}, "batch_axis: expected of"),
        ({"batch_axis": "a", "sequence_axis": "a"}, "sequence_axis: 'a' is batch_axis already"),
        ({"tensor_axis": ("a", "a")}, "tensor_axis: 'a' is tensor_axis already"),
        ({"tensor_axis": "a", "fsdp_axis": "a"}, "fsdp_axis: 'a' is tensor_axis already"),
    ],
)
def test_axes_that_exclude_each_other_are_refused(axes, words):
    with pytest.raises(ValueError, match=words):
        ModelMesh(mesh_of("a", "b"), **axes)


def test_weights_may_lie_where_tokens_do_and_axes_become_automatic():
    made = ModelMesh(mesh_of("a", "b"), sequence_axis="a", fsdp_axis=("a", "b"))
    assert set(made.mesh.axis_types) == {AxisType.Auto}
    assert ModelMesh.of(made) is made
    named = ModelMesh.of(mesh_of("ring", "seq"))
    assert named.sequence_axis == ("ring", "seq")
    with pytest.raises(ValueError, match="'a' is none of"):
        ModelMesh.of(mesh_of("a"))
    with pytest.raises(TypeError, match="expected a Mesh or a ModelMesh, got dict"):
        ModelMesh.of({"seq": 1})


def test_a_mesh_and_a_sharding_are_refused_together():
    data = golden.fixture("wan_t2v")
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ValueError, match="sharding: mesh says"):
        Wan.from_pretrained(data.weights, sharding=place, mesh=mesh_of("seq"))
