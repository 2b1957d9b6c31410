"""What the ported models share as Flax NNX modules: stacked blocks, loading, saving, state."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array

import vc_jax
import vc_jax.sharding

from ..attention import AttentionControl, AttentionLike, ModelState, check_attention
from ..mesh import ModelMesh, roles_of
from . import checkpoint, memory, release
from .checks import Dims, check_flags, check_float_dtype, check_shape
from .lora import LoraLike, Loras
from .schedulers import Sampling
from .tensor_map import TensorMap

Latents = Array | dict[str, Array]
"""[B, C, T, H, W], or a dict of arrays (MiniMax-H3: `video` and `audio` rows)."""


def stack_blocks(create: Callable[[nnx.Rngs], nnx.Module], layers: int, rngs: nnx.Rngs) -> Any:
    """`layers` copies of a block as one module whose parameters have a leading layer axis."""

    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stacked(rngs: nnx.Rngs) -> nnx.Module:
        return create(rngs)

    return stacked(rngs)


def run_blocks(
    blocks: nnx.Module,
    body: Callable[[Any, Any, Any], tuple[Any, Any]],
    carry: Any,
    per_layer: Any = None,
    *,
    scan: bool = True,
    remat: bool = False,
    mesh: ModelMesh | None = None,
) -> tuple[Any, Any]:
    """Runs stacked blocks in order: `body(block, carry, layer_inputs) -> (carry, layer_outputs)`.

    Args:
      blocks: from `stack_blocks`.
      body: one layer; `block` is a module of one layer's parameters.
      carry: what goes from layer to layer.
      per_layer: a pytree with a leading layer axis, sliced for each layer.
      scan: one compiled block in a `lax.scan`, or a Python loop (longer to compile; shows every
        layer to callbacks and profilers).
      remat: recompute each layer in the backward pass.
      mesh: where the layers run; the carry is rows of tokens [B, S, ...] (or several such arrays).

    Returns:
      The last carry and the layers' outputs stacked on a leading axis.
    """
    graphdef, parameters = nnx.split(blocks)

    roles = None if mesh is None else roles_of(blocks)

    def layer(carry: Any, inputs: Any) -> tuple[Any, Any]:
        parameters, extra = inputs
        if mesh is None or roles is None:
            return body(nnx.merge(graphdef, parameters), carry, extra)
        parameters = mesh.gathered(parameters, roles)
        carry, output = body(nnx.merge(graphdef, parameters), mesh.rows(carry), extra)
        return mesh.rows(carry), output

    if remat:
        layer = jax.checkpoint(layer, prevent_cse=not scan)
    if scan:
        return jax.lax.scan(layer, carry, (parameters, per_layer))
    outputs = []
    for index in range(jax.tree.leaves(parameters)[0].shape[0]):
        carry, output = layer(carry, _slice((parameters, per_layer), index))
        outputs.append(output)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def _slice(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


def _make_folder(folder: Path, config: str) -> Exception | None:
    """A folder for a model, with its configuration; or why it cannot be one."""
    if folder.is_dir() and any(folder.glob("*.safetensors*")):
        return ValueError(f"path: {folder} already holds safetensors")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(config + "\n")
    except OSError as error:
        return error
    return None


class VideoTransformer(nnx.Module):
    """Base of the ported models.

    A subclass sets `config_class` and `layouts` (checkpoint layouts by name), and takes
    `(config, *, attention, cross_attention, dtype, scan_layers, remat, mesh, rngs)`. An unknown
    attention is refused before anything is made: `ValueError` or `TypeError` by argument.
    """

    config_class: ClassVar[type]
    layouts: ClassVar[dict[str, Callable[[Any], TensorMap]]]
    batch_axes: ClassVar[dict[str, int]] = {}
    """Batch axis of conditioning entries in which it is not the first."""

    config: Any
    blocks: Any
    attention: AttentionLike
    scan_layers: bool
    remat: bool
    mesh: ModelMesh | None
    sampling: Sampling
    """How the model is sampled; `sampling.origins()` tells where each number came from."""

    def __init__(
        self,
        config: Any,
        *,
        attention: AttentionLike = "bf16",
        cross_attention: AttentionLike = "bf16",
        dtype: DTypeLike = jnp.bfloat16,
        scan_layers: bool = True,
        remat: bool = False,
        mesh: ModelMesh | Mesh | None = None,
    ):
        if not isinstance(config, self.config_class):
            expected = self.config_class.__name__
            raise TypeError(f"config: expected a {expected}, got {type(config).__name__}")
        check_attention(attention)
        check_attention(cross_attention, "cross_attention")
        check_float_dtype("dtype", dtype)
        self.config = config
        self.attention = attention
        self.cross_attention = cross_attention
        self.dtype = jnp.dtype(dtype)
        self.scan_layers = scan_layers
        self.remat = remat
        self.mesh = None if mesh is None else ModelMesh.of(mesh)
        self.sampling = release.attributed(*self.release_sampling(None))

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        config: Any = None,
        dtype: DTypeLike = jnp.bfloat16,
        sharding: checkpoint.ShardingLike = None,
        mesh: ModelMesh | Mesh | None = None,
        memory_kind: str | None = None,
        sampling: Sampling | None = None,
        variant: str | None = None,
        loras: Sequence[LoraLike] = (),
        **options: Any,
    ) -> Self:
        """Loads safetensors, tensor by tensor, into the stacked parameters.

        Args:
          path: a folder with `config.json` and one or more `.safetensors` (with an index when
            there are several), or one `.safetensors` file. The layout (diffusers or original)
            is recognised by the tensors' names; a prefix `model.diffusion_model.` is understood.
            FP8 and INT8 matrices with their scales are dequantised.
          config: overrides `config.json`; needed where there is none.
          dtype: of the matrices and the computation; norms, time embeddings and what else the
            peer keeps in float32 stay float32.
          sharding: a `jax.sharding.Sharding` for every parameter, or a function of the
            parameter's dotted name and shape that returns one; None for the default device.
          mesh: the model runs on it (`vc_jax.models.mesh`), its parameters are stored in parts as
            its layers say. Every process reads the parts of its own devices only.
          memory_kind: `"pinned_host"` keeps the parameters in the host's memory, each moved there
            when it is complete; `vc_jax.models.sampling.sample` copies them to the devices for the
            model's own steps. None for the devices' memory.
          sampling: overrides what the checkpoint's files (see `release`) and the constants of the
            release say; `model.sampling` tells where each number came from.
          variant: which of several copies in a folder: `"ema"` for `model_ema.safetensors`,
            `"fp16"` for `diffusion_pytorch_model.fp16.safetensors`.
          loras: LoRAs to merge, in float32, each a file or a (file, strength) pair: the styles of
            keys are listed in `vc_jax.models.common.lora`. The names may be of any layout.
          **options: further arguments of the constructor (`attention`, `scan_layers`, ...).

        Raises:
          FileNotFoundError: no safetensors at `path`, no such file among `loras`.
          LoraError: a LoRA with keys or shapes that do not fit the model, all in one list.
          checkpoint.CheckpointError: missing, unexpected and mis-shaped tensors, all in one list.
          NotImplementedError: a schedule or guidance beside the transformer that is not ported;
            not with `sampling`.
          ValueError, TypeError: an unknown attention or memory, before any file is opened; a field
            of the configuration.
        """
        for name in ("attention", "cross_attention"):
            if name in options:
                check_attention(options[name], name)
        if mesh is not None and sharding is not None:
            raise ValueError("sharding: mesh says where parameters are; pass one of them")
        mesh = None if mesh is None else ModelMesh.of(mesh)
        check_float_dtype("dtype", dtype)
        if memory_kind is not None:
            memory.check_kind(memory_kind)
        reader = checkpoint.Reader(path, variant)
        if config is None:
            config = reader.config(cls.config_class)
        config = cls.adapt_config(config, reader.shapes)
        abstract = nnx.eval_shape(
            lambda: cls(config, dtype=dtype, mesh=mesh, rngs=nnx.Rngs(0), **options)  # type: ignore[call-arg]
        )
        layouts = {name: layout(config) for name, layout in cls.layouts.items()}
        layout = layouts[checkpoint.detect_layout(layouts, reader)]
        merged = Loras(loras, layouts)
        if sampling is None:
            files = release.Files(reader.folder)
            constants = abstract.release_sampling(files)
            said = release.settings(constants[0], files)
            sampling = release.attributed(*constants, said)
        abstract.sampling = sampling
        if mesh is not None:
            sharding = mesh.parameter_sharding(abstract)
        if memory_kind is not None:
            sharding = memory.with_kind(sharding, memory_kind)
        return checkpoint.load(abstract, layout, reader, sharding, merged)

    @classmethod
    def adapt_config(cls, config: Any, shapes: dict[str, tuple[int, ...]]) -> Any:
        """Fills in what a configuration does not say but the tensors do."""
        return config

    def to_pretrained(
        self, path: str | Path, *, layout: str = "diffusers", max_shard_bytes: int = 5 * 10**9
    ) -> None:
        """Writes `config.json` and safetensors in a layout; loading them again is exact.

        Of a model that is spread over processes, all have to call it: the first one writes, and the
        others return when it is done.

        Files beside the transformer (scheduler, guider, index), from which `sampling` may come, are
        not written: copy them, or pass `sampling=` when loading.

        Args:
          path: a folder, created if needed.
          layout: a key of `layouts`.
          max_shard_bytes: a new file is begun when a shard would exceed this.

        Raises:
          ValueError: an unknown layout, or a folder that already holds safetensors (a reader
            would take the old files for part of the model).
        """
        if layout not in self.layouts:
            raise ValueError(f"layout: expected one of {sorted(self.layouts)}, got {layout!r}")
        folder, spread = Path(path), checkpoint.is_spread(self)
        text = json.dumps(self.config.to_dict(layout), indent=2)
        problem = None
        if not spread or jax.process_index() == 0:
            problem = _make_folder(folder, text)
        # All processes or none: one that raised alone would leave the others waiting.
        refused = problem is not None
        if spread:
            refused = bool(multihost_utils.broadcast_one_to_all(np.int32(refused)))
        if refused:
            raise problem or ValueError(f"path: the first process cannot write to {folder}")
        checkpoint.save(self, self.layouts[layout](self.config), folder, max_shard_bytes)
        if spread:
            multihost_utils.sync_global_devices("written")

    def in_use(self) -> Self:
        """The model with the parameters outside its blocks as they are multiplied with: on a mesh
        brought together along `fsdp_axis`, once instead of wherever one is used."""
        if self.mesh is None:
            return self
        graphdef, blocks, rest = nnx.split(self, nnx.PathContains("blocks", exact=True), ...)
        return nnx.merge(graphdef, blocks, self.mesh.gathered(rest, roles_of(self)))

    def in_memory(self, kind: str) -> Self:
        """The same model with its parameters in another memory of their devices: `"pinned_host"`,
        where they wait for `sample`, or `"device"`, where a call of the model needs them.

        Those of this one stay where they are, until it is let go.

        Raises:
          ValueError: a memory that the devices do not have.
        """
        memory.check_kind(kind)
        graphdef, state = nnx.split(self)
        return nnx.merge(graphdef, memory.moved(state, kind))

    def num_parameters(self) -> int:
        """Number of parameters; works on an abstract model (`nnx.eval_shape`) too."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))

    def block(self, index: int) -> Any:
        """One layer's block, as a module of its own."""
        graphdef, parameters = nnx.split(self.blocks)
        return nnx.merge(graphdef, _slice(parameters, index))

    def release_sampling(self, files: release.Files | None) -> tuple[Sampling, str]:
        """The constants of the release that the configuration belongs to, and its name.

        Args:
          files: what stands around the checkpoint, where it tells releases apart; None for a model
            that comes from no checkpoint.
        """
        raise NotImplementedError

    def conditioning_keys(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the conditioning's entries: those that it must have, and those that it may."""
        raise NotImplementedError

    def conditioning_shapes(
        self, latents: Latents, conditioning: dict[str, Any]
    ) -> dict[str, Dims]:
        """Shapes of those entries that are single arrays. Checks the latents.

        Raises:
          ValueError: latents of another shape.
        """
        raise NotImplementedError

    def check_conditioning(self, conditioning: dict[str, Any]) -> None:
        """Refuses a conditioning with unknown or without needed entries.

        Raises:
          ValueError: names the entries, and those that the model takes.
        """
        needed, optional = self.conditioning_keys()
        accepted = f"{type(self).__name__} takes {sorted(needed)} and optionally {sorted(optional)}"
        unknown = sorted(set(conditioning) - {*needed, *optional})
        if unknown:
            raise ValueError(f"conditioning: unknown {unknown}; {accepted}")
        missing = sorted(name for name in needed if conditioning.get(name) is None)
        if missing:
            raise ValueError(f"conditioning: {missing} missing; {accepted}")

    def check_sampling(self, latents: Latents, conditioning: dict[str, Any]) -> None:
        """Refuses latents and conditioning that do not fit the model or each other.

        Raises:
          ValueError: names the argument or entry.
        """
        self.check_conditioning(conditioning)
        shapes = self.conditioning_shapes(latents, conditioning)
        for name, value in conditioning.items():
            if name in shapes and value is not None:
                check_shape(f"conditioning[{name!r}]", value, shapes[name])
                if name.endswith("_mask"):
                    check_flags(f"conditioning[{name!r}]", value)

    def sampling_state(self, latents: Latents, conditioning: dict[str, Any]) -> ModelState:
        """A fresh state for sampling these latents (both guided halves)."""
        raise NotImplementedError

    def impose[Value: Latents](self, latents: Value, conditioning: dict[str, Any]) -> Value:
        """Latents with the parts put in that the conditioning gives."""
        return latents

    @property
    def needs_next_time(self) -> bool:
        """Whether `denoise` has to be told the time after the step too, as `next_time`."""
        return False

    def denoise(
        self,
        latents: Latents,
        time: Latents,
        conditioning: dict[str, Any],
        control: AttentionControl,
    ) -> tuple[Latents, ModelState | None]:
        """The velocity noise − data and the new state, at the time that the schedule names."""
        raise NotImplementedError

    def init_attention_state(self, batch: int, kv_length: int) -> ModelState:
        """A fresh V-Smooth state for all layers of one self-attention call per layer.

        Args:
          batch: rows of the batch, both halves of a guided batch included.
          kv_length: keys of the call (padding included).
        """
        if callable(self.attention):
            raise ValueError("attention: a callable keeps no state; pass a preset or a config")
        config = self.config
        sizes = (batch, kv_length, config.num_heads, config.head_dim)
        if self.mesh is None:
            return vc_jax.init_state(self.attention, *sizes, layers=config.num_layers)
        return vc_jax.sharding.init_state(
            self.attention, *sizes, layers=config.num_layers, **self.mesh.attention_axes
        )
