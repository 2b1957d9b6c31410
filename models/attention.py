"""How the models call attention: one argument for all of them, with the V-Smooth state.

`attention=` of a model is a preset's name (`"bf16"`, `"int8"`, `"fp8"`, `"nvfp4"`), a
`vc_jax.AttentionConfig`, or any callable with the signature of `jax.nn.dot_product_attention`
(arrays [B, T, N, H]). It serves the self- or joint attention over video rows;
`cross_attention=`, of the same kinds, serves attention to text and within text.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import vc_jax
import vc_jax.sharding

from .common.checks import check_flags, check_index
from .mesh import ModelMesh

AttentionFunction = Callable[..., Any]
"""Has the signature of `jax.nn.dot_product_attention`."""
AttentionLike = str | vc_jax.AttentionConfig | AttentionFunction
"""A preset's name, a `vc_jax.AttentionConfig` or a callable like `dot_product_attention`."""
SelfAttention = Callable[[Array, Array, Array], tuple[Array, vc_jax.AttentionState | None]]
"""What a block calls: query, key and value to the output and the layer's new state."""
LayerInputs = tuple[vc_jax.AttentionState | None, Bool[Array, ""] | None]
"""What `AttentionControl.per_layer` has for one layer: its state and whether it runs in bf16."""
ModelState = vc_jax.AttentionState | dict[str, vc_jax.AttentionState]
"""The V-Smooth state of a model, by call where a layer makes several."""


def check_attention(attention: AttentionLike, name: str = "attention") -> None:
    """Refuses what is no `attention=` argument, before anything is built or computed with it.

    Raises:
      ValueError: an unknown preset; the message names the argument.
      TypeError: not a name, configuration or callable; likewise.
    """
    if callable(attention):
        return
    if isinstance(attention, str):
        if attention not in vc_jax.PRESETS:
            raise ValueError(
                f"{name}: expected one of {sorted(vc_jax.PRESETS)}, a vc_jax.AttentionConfig or a "
                f"callable, got {attention!r}"
            )
    elif not isinstance(attention, vc_jax.AttentionConfig):
        raise TypeError(
            f"{name}: expected a preset's name, a vc_jax.AttentionConfig or a callable with the "
            f"signature of jax.nn.dot_product_attention, got {type(attention).__name__}"
        )


def attention_function(attention: AttentionLike, name: str = "attention") -> AttentionFunction:
    """The function behind an `attention=` argument.

    Raises:
      ValueError, TypeError: as `check_attention`.
    """
    check_attention(attention, name)
    if callable(attention):
        return attention
    return functools.partial(vc_jax.dot_product_attention, config=attention)


def attention_to_text(attention: AttentionLike, mesh: ModelMesh | None) -> AttentionFunction:
    """The function behind a `cross_attention=` argument, from rows on a mesh to a text's.

    Raises:
      ValueError, TypeError: as `check_attention`.
    """
    function = attention_function(attention, "cross_attention")
    return function if mesh is None else mesh.by_rows(function)


def uses_state(attention: AttentionLike) -> bool:
    """Whether an `attention=` argument clusters its values, and so gains from a state.

    Raises:
      ValueError, TypeError: as `check_attention`.
    """
    check_attention(attention)
    if callable(attention):
        return False
    return (vc_jax.PRESETS[attention] if isinstance(attention, str) else attention).clustered


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["state", "step", "high_precision_layers", "bf16_steps_mask"],
    meta_fields=["schedule"],
)
@dataclasses.dataclass(frozen=True)
class AttentionControl:
    """What one forward pass tells its self-attention calls, besides query, key and value.

    Attributes:
      state: V-Smooth state with a leading layer axis (`model.init_attention_state`), or None for
        stateless calls. With a state, a model returns `(output, new_state)`.
      step: number of the denoising step, 0 first, an int or a traced int32; needed with `state`
        or `bf16_steps_mask`.
      high_precision_layers: bool [layers], True where a layer runs as `"bf16"`. May be traced.
      bf16_steps_mask: bool [steps], True where a step runs as `"bf16"`. May be traced.
      schedule: `vc_jax.DenoisingSchedule`, static; needed with `state`.
    """

    state: ModelState | None = None
    step: Int[Array, ""] | int | None = None
    high_precision_layers: Bool[Array, "layers"] | None = None
    bf16_steps_mask: Bool[Array, "steps"] | None = None
    schedule: vc_jax.DenoisingSchedule | None = None

    def per_layer(self, num_layers: int) -> tuple[ModelState | None, Bool[Array, "layers"] | None]:
        """The state and the bf16 flag of each layer, as two pytrees with a leading layer axis.

        Raises:
          TypeError: a step that is no integer scalar.
          ValueError: a missing or misshapen field or a step out of range (where its value is
            known: not in a trace), by name.
        """
        if self.state is not None and (self.step is None or self.schedule is None):
            raise ValueError("control.state needs control.step and control.schedule")
        if self.step is not None:
            check_index("control.step", self.step, self._num_steps())
        flags = self.high_precision_layers
        for name in ("high_precision_layers", "bf16_steps_mask"):
            if getattr(self, name) is not None:
                check_flags(f"control.{name}", getattr(self, name))
        if flags is not None:
            flags = jnp.asarray(flags, bool)
            if flags.shape != (num_layers,):
                raise ValueError(
                    f"control.high_precision_layers: expected [{num_layers}], got {flags.shape}"
                )
        if self.bf16_steps_mask is not None:
            if self.step is None:
                raise ValueError("control.bf16_steps_mask needs control.step")
            by_step = jnp.asarray(self.bf16_steps_mask, bool)
            count = by_step.size if self.schedule is None else self.schedule.num_steps
            if by_step.shape != (count,):
                raise ValueError(
                    f"control.bf16_steps_mask: expected [{count}], got {by_step.shape}"
                )
            now = by_step[self.step]
            flags = jnp.zeros((num_layers,), bool) if flags is None else flags
            flags = flags | now
        return self.state, flags

    def _num_steps(self) -> int | None:
        """How many steps there are, as far as the fields say."""
        if self.schedule is not None:
            return self.schedule.num_steps
        steps = self.bf16_steps_mask
        return None if steps is None else jnp.size(steps)


NO_CONTROL = AttentionControl()


def attend(
    attention: AttentionLike,
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s n h"],
    value: Float[Array, "b s n h"],
    control: AttentionControl,
    state: vc_jax.AttentionState | None,
    high_precision: Bool[Array, ""] | None,
    key_value_seq_lengths: Int[Array, "b"] | None = None,
    mesh: ModelMesh | None = None,
) -> tuple[Float[Array, "b t n h"], vc_jax.AttentionState | None]:
    """One self-attention call of one layer, and the layer's new state.

    Args:
      attention: the model's `attention=` argument.
      query, key, value: after norms and RoPE.
      control: what the whole pass shares: step and schedule.
      state: this layer's state, or None.
      high_precision: this layer's flag at this step; a traced branch to `"bf16"`, or None.
      key_value_seq_lengths: valid keys of each item, if some are pads.
      mesh: where the rows lie; a callable `attention` is left to XLA's partitioner there.

    Raises:
      ValueError: a state with a callable `attention`.
    """
    lengths: dict[str, Any] = {}
    if key_value_seq_lengths is not None:
        lengths["key_value_seq_lengths"] = key_value_seq_lengths

    step: Callable[..., Any] = vc_jax.attention_step
    if mesh is not None:
        step = functools.partial(vc_jax.sharding.sharded_attention_step, **mesh.attention_axes)

    def self_attention(attention: AttentionLike) -> AttentionFunction:
        if mesh is None or callable(attention):
            return attention_function(attention)
        call = vc_jax.sharding.sharded_attention
        return functools.partial(call, config=attention, **mesh.attention_axes)

    def low(
        query: Array, key: Array, value: Array, state: vc_jax.AttentionState | None
    ) -> tuple[Any, vc_jax.AttentionState | None]:
        if state is None:
            return self_attention(attention)(query, key, value, **lengths), None
        if callable(attention):
            raise ValueError("control.state: a callable attention keeps no state; pass a preset")
        assert control.step is not None  # checked by per_layer
        assert control.schedule is not None  # likewise
        attended: Any = step(
            query,
            key,
            value,
            state,
            step=control.step,
            schedule=control.schedule,
            config=attention,
            **lengths,
        )
        return attended

    def high(
        query: Array, key: Array, value: Array, state: vc_jax.AttentionState | None
    ) -> tuple[Any, vc_jax.AttentionState | None]:
        return self_attention("bf16")(query, key, value, **lengths), state

    if high_precision is None:
        return low(query, key, value, state)
    return jax.lax.cond(high_precision, high, low, query, key, value, state)
