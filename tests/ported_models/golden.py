"""The golden data of the peers' own implementations, and how a ported model is fed with it.

A case's inputs carry the peers' argument names; `call` maps them to the models'. Tensors and
tolerances are those of each fixture's `manifest.json`.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from vc_jax.models.hunyuan_video15 import HunyuanVideo15
from vc_jax.models.longcat_video import KVCache, LongCatVideo
from vc_jax.models.minimax_h3 import MiniMaxH3, PackedLayout
from vc_jax.models.wan import Wan

ROOT = Path(__file__).parent / "fixtures"
CLASSES: dict[str, Any] = {
    "wan_t2v": Wan,
    "wan_ti2v": Wan,
    "hunyuan_video15": HunyuanVideo15,
    "minimax_h3": MiniMaxH3,
    "longcat_video": LongCatVideo,
}
NAMES = tuple(CLASSES)

plain_attention = functools.partial(jax.nn.dot_product_attention, implementation="xla")
"""The attention of the FP32 parity tests."""


quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""Leaves out optimisations that cost more time in compilation than they save here."""


@dataclasses.dataclass(frozen=True)
class Fixture:
    """One peer's golden data."""

    name: str
    manifest: dict[str, Any]
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]

    @property
    def weights(self) -> Path:
        return ROOT / self.name / "weights.safetensors"

    @property
    def cases(self) -> list[str]:
        return [case["name"] for case in self.manifest["cases"]]

    def case(self, name: str) -> dict[str, Any]:
        return next(case for case in self.manifest["cases"] if case["name"] == name)

    def arguments(self, case: str) -> dict[str, Any]:
        """The case's arguments by the peers' names."""
        entry = self.case(case)
        files = {"inputs.safetensors": self.inputs, "outputs.safetensors": self.outputs}
        arrays = {
            name: files[argument["file"]][argument["tensor"]]
            for name, argument in entry["arguments"].items()
        }
        return arrays | entry.get("static_arguments", {})

    def expected(self, tensor: str) -> np.ndarray:
        return self.outputs[tensor]

    def tolerance(self, tensor: str) -> float:
        return self.manifest["tolerance"]["tensors"][tensor]["suggested_rel_l2"]

    def config(self, **overrides: Any) -> Any:
        settings = self.manifest["config"] | overrides
        return CLASSES[self.name].config_class.from_dict(settings)

    def model(self, **options: Any) -> Any:
        """The ported model with the peer's weights, in float32 and with plain attention."""
        options = {
            "attention": plain_attention,
            "cross_attention": plain_attention,
            "dtype": jnp.float32,
            "config": self.config(),
        } | options
        return CLASSES[self.name].from_pretrained(options.pop("path", self.weights), **options)


@functools.cache
def fixture(name: str) -> Fixture:
    folder = ROOT / name
    return Fixture(
        name,
        json.loads((folder / "manifest.json").read_text()),
        load_file(folder / "inputs.safetensors"),
        load_file(folder / "outputs.safetensors"),
    )


def call(model: Any, arguments: dict[str, Any], **extra: Any) -> Any:
    """Runs a ported model on a case's arguments."""
    given = dict(arguments)
    latents, timestep = given.pop("hidden_states"), given.pop("timestep")
    text = given.pop("encoder_hidden_states")
    if isinstance(model, Wan):
        return model(latents, timestep, text, **given, **extra)
    if isinstance(model, HunyuanVideo15):
        rest = [given.pop(name) for name in _HUNYUAN_REST]
        return model(latents, timestep, text, *rest, **given, **extra)
    if isinstance(model, LongCatVideo):
        return _call_longcat(model, latents, timestep, text[:, 0], given, extra)
    audio, indices = given.pop("audio_hidden_states"), given.pop("timestep_indices")
    layout = packed(given | {"timestep_indices": indices})
    return model(latents, audio, text, timestep, indices, layout, **extra)


def run(port: Any, arguments: dict[str, Any], control: Any = None, *, quick: bool = True) -> Any:
    """As `call`, compiled; calls of the same shapes share one compilation, whatever the weights.

    `quick` is `quick_jit`.
    """
    static = {name: value for name, value in arguments.items() if not isinstance(value, np.ndarray)}
    arrays = {name: arguments[name] for name in arguments if name not in static}
    graph, state = nnx.split(port)
    compiled = _quick if quick else _optimised
    return compiled(graph, tuple(sorted(static.items())), state, arrays, control)


def _forward(graph: Any, static: Any, state: Any, arguments: dict[str, Any], control: Any) -> Any:
    extra = {} if control is None else {"control": control}
    return call(nnx.merge(graph, state), arguments | dict(static), **extra)


_optimised = jax.jit(_forward, static_argnums=(0, 1))
_quick = quick_jit(_forward, static_argnums=(0, 1))


_HUNYUAN_REST = (
    "encoder_attention_mask",
    "encoder_hidden_states_2",
    "encoder_attention_mask_2",
    "image_embeds",
)


def _call_longcat(
    model: LongCatVideo, latents: Any, timestep: Any, text: Any, given: Any, extra: Any
) -> Any:
    options = dict(extra)
    mask = given.pop("encoder_attention_mask", None)
    options["skip_cross_attention"] = given.pop("skip_crs_attn", False)
    options["return_kv"] = given.pop("return_kv", False)
    options["num_cond_latents"] = given.pop("num_cond_latents", 0)
    if given:
        options["kv_cache"] = cache_of(given, model.config.num_layers)
    return model(latents, timestep, text, mask, **options)


def cache_of(tensors: dict[str, np.ndarray], num_layers: int) -> KVCache:
    """The peer's cache [1, heads, rows, head_dim] a layer, as the model's."""
    stacks = (
        jnp.stack([tensors[f"kv_cache.{layer}.{part}"] for layer in range(num_layers)])
        for part in "kv"
    )
    return KVCache(*(stack.swapaxes(2, 3) for stack in stacks))


def packed(given: dict[str, Any]) -> PackedLayout:
    return PackedLayout(
        positions=given["position_ids"],
        tags=given["token_tags"],
        text_indices=given["text_indices"],
        audio_indices=given["audio_indices"],
        video_indices=given["video_indices"],
        time_indices=given["timestep_indices"],
    )


def random_model(cls: Any, config: Any, **options: Any) -> Any:
    """A model with random parameters of the size that keeps activations near one."""
    abstract = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), **options))
    graph, state = nnx.split(abstract)
    generator = np.random.default_rng(0)
    for path, leaf in nnx.to_flat_state(state):
        shape, dtype = leaf.get_value().shape, leaf.get_value().dtype
        fan_in = shape[-2] if len(shape) > 1 else 25
        values = generator.standard_normal(shape, np.float32) * (0.5 / np.sqrt(fan_in))
        values = values + 1.0 if path[-1] == "scale" else values
        leaf.set_value(jnp.asarray(values, dtype))
    return nnx.merge(graph, state)


def relative_l2(actual: Any, expected: Any) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
