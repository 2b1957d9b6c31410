"""Models and the sampler on meshes of 8 devices, against one device."""

import dataclasses
import functools
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vc_jax
from vc_jax.models import VideoDiT, VideoDiTConfig
from vc_jax.models.common import placing
from vc_jax.models.mesh import ModelMesh
from vc_jax.models.sample_job.methods import Method, Task
from vc_jax.models.sampling import sample
from vc_jax.models.video_dit import sampler

from ..sharding import devices
from . import golden
from .test_sampling import wan_case

ROUNDING = 2e-5
"""Of float32 programs that sum in another order."""


@functools.cache
def mesh() -> ModelMesh:
    """Weights are stored in parts over all devices."""
    return dataclasses.replace(ModelMesh.make(batch=2, seq=2, tensor=2), fsdp_axis=("batch", "seq"))


@functools.cache
def ring() -> ModelMesh:
    return ModelMesh.make(batch=2, ring=2, seq=2)


def parameters(model: nnx.Module) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}


def same_parameters(name: str) -> None:
    """Read in parts as read whole; the devices hold parts of all that is large."""
    data = golden.fixture(name)
    whole = parameters(data.model())
    with mock.patch.object(placing, "_SMALL", 0):  # or these would be put together on the host
        parts = parameters(data.model(mesh=mesh()))
    for path, array in parts.items():
        np.testing.assert_array_equal(array, whole[path], err_msg=path)
    held = sum(array.addressable_shards[0].data.size for array in parts.values())
    assert held < 0.3 * sum(array.size for array in parts.values())
    kernel = parts["blocks.video.qkv.kernel" if name.startswith("hunyuan") else "blocks.qkv.kernel"]
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size


def check_wan_is_read_in_parts():
    same_parameters("wan_t2v")


def check_hunyuan_video15_is_read_in_parts():
    same_parameters("hunyuan_video15")


def check_longcat_video_is_read_in_parts():
    same_parameters("longcat_video")


def check_minimax_h3_is_read_in_parts():
    same_parameters("minimax_h3")


def forward(name: str, case: str, where: ModelMesh) -> None:
    """Against the peer's own output; rows in numbers that nothing divides."""
    data = golden.fixture(name)
    port = data.model(mesh=where, attention="bf16", cross_attention="bf16")
    out = golden.run(port, data.arguments(case))
    out = out[0] if isinstance(out, tuple) else out
    tensor = f"{case}/sample"
    assert golden.relative_l2(out, data.expected(tensor)) < data.tolerance(tensor)


def check_hunyuan_video15():
    forward("hunyuan_video15", "main", mesh())


def check_longcat_video():
    """Two attention calls a layer, and text for a part of the rows."""
    forward("longcat_video", "continuation", mesh())


def check_minimax_h3():
    forward("minimax_h3", "no_keyframe", ring())


@functools.cache
def sampled(attention: str, where: ModelMesh | None) -> np.ndarray:
    """Three guided steps of Wan, with a state in the carry where values are clustered."""
    port = golden.fixture("wan_t2v").model(attention=attention, cross_attention="bf16", mesh=where)
    _, latents, positive, negative = wan_case()
    settings = dataclasses.replace(port.sampling, num_steps=3, boundary=None)
    schedule = vc_jax.DenoisingSchedule(3, smoothing_fraction=0.7, refresh_every=2)
    given = {"negative": negative, "sampling": settings, "progress": False}
    if attention != "bf16":
        given["schedule"] = schedule
    result = sample(port, latents, positive, **given)
    assert where is None or result.sharding.is_fully_replicated
    return np.asarray(result)


def check_sampling_in_bf16():
    """The same latents by changing the mesh alone."""
    for where in (mesh(), ring()):
        assert golden.relative_l2(sampled("bf16", where), sampled("bf16", None)) < ROUNDING


def check_sampling_in_int8():
    """Rounding sorts some tokens differently: as far from unquantised attention as one device."""
    exact = sampled("bf16", None)
    one = golden.relative_l2(sampled("int8", None), exact)
    assert one > 1e-4
    assert golden.relative_l2(sampled("int8", mesh()), exact) < 1.3 * one


def check_weights_are_brought_together_a_layer_at_a_time():
    """No collective of the compiled program has the weights of several layers."""
    data = golden.fixture("wan_t2v")
    graph, state = nnx.split(data.model(mesh=mesh(), attention="bf16", cross_attention="bf16"))
    arguments = data.arguments("main")

    def run(state: nnx.State, arguments: dict[str, np.ndarray]) -> jax.Array:
        return golden.call(nnx.merge(graph, state), arguments)

    program = golden.quick_jit(run).lower(state, arguments).compile().as_text() or ""
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather", program)
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in gathered]
    kernel = state["blocks"]["qkv"]["kernel"].get_value()
    of_a_layer = kernel.size // kernel.shape[0] // mesh().size("tensor")
    assert of_a_layer in sizes
    assert max(sizes) < 2 * of_a_layer


def check_rows_that_nothing_divides_outside_of_a_trace():
    rows = np.zeros((2, 3, 5), np.float32)
    placed = mesh().rows(jnp.asarray(rows)).sharding
    assert placed.is_equivalent_to(mesh().sharding("batch"), 3)
    assert jax.jit(mesh().rows)(rows).shape == rows.shape


def check_the_sample_job_on_two_devices():
    """What `vc-jax sample --mesh batch=1,seq=2` compiles, against one device."""
    config = VideoDiTConfig(width=32, num_layers=2, num_heads=2, head_dim=32, mlp_width=64)
    model = VideoDiT(config, rngs=nnx.Rngs(0))
    shape = model.output.kernel.shape
    model.output.kernel[...] = 0.1 * jax.random.normal(jax.random.key(1), shape)
    pixels, noise = (sampler.draw_noise(seed, (1, 3, 20, 28, 3)) for seed in range(2))
    one = Task(model, pixels, 1, noise, 3)
    two = dataclasses.replace(one, mesh=ModelMesh.make(batch=1, seq=2))
    found = [Method("bf16", task, lambda *_: None).sample().path for task in (one, two)]
    for got, want in zip(found[1], found[0], strict=True):
        assert len(got.sharding.device_set) == 1
        assert golden.relative_l2(got, want) < 5e-3


def check_clips_that_the_batch_axis_does_not_divide():
    port = golden.fixture("wan_t2v").model(mesh=ModelMesh.make(batch=8))
    _, latents, positive, negative = wan_case()
    settings = dataclasses.replace(port.sampling, num_steps=1, boundary=None)
    with pytest.raises(ValueError, match="4 clips, guided halves included"):
        sample(port, latents, positive, negative=negative, sampling=settings, progress=False)


if __name__ == "__main__":
    devices.run(sys.modules["__main__"])
