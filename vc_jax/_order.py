"""The state that carries the order of the keys over denoising steps, and how it changes.

Clustering costs time, and values change slowly from one denoising step to the next: an order made
at one step serves the next few. The state is a pytree of fixed structure, shapes and dtypes, so
it goes through `lax.scan` carries, `nnx.split`, Linen collections and checkpoints.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._arguments import Inputs
from ._config import (
    AttentionConfig,
    check_head_dim,
    check_integer,
    default_clusters,
    resolve_config,
)
from ._fused import starting_rows
from ._preprocessing import key_order
from ._tracing import Size, is_symbolic, own_promotion
from ._vsmooth import sequence_order, still_apart
from .pallas_kernels._varying import vary_together


class AttentionState(NamedTuple):
    """What one attention layer (or a stack of L layers) remembers between denoising steps.

    4·B·K·S bytes of permutation, 4·B·K·k·H of centroids and B·S of validity a layer: 12.1 MB of
    permutation for 75 600 tokens and 40 heads. A configuration that does not cluster has the same
    arrays with S and k of 1 (checkpoints refuse arrays without elements).

    Attributes:
      permutation: int32 [(L,) B, K, S], position -> token, valid tokens first.
      centroids: float32 [(L,) B, K, k, H], where the next clustering starts.
      key_valid: bool [(L,) B, S], the keys that were valid when the order was made.
      made: bool [(L,) B], whether the order comes from clustering; alike in all rows.
    """

    permutation: Int[Array, "*l b k s"]
    centroids: Float[Array, "*l b k c h"]
    key_valid: Bool[Array, "*l b s"]
    made: Bool[Array, "*l b"]


@own_promotion
def init_state(
    config: AttentionConfig | str,
    batch: int,
    kv_length: int,
    kv_heads: int,
    head_dim: int,
    layers: int | None = None,
) -> AttentionState:
    """A state without an order; its structure does not change afterwards.

    Args:
      config: the configuration of the calls, or a preset's name.
      batch, kv_length, kv_heads, head_dim: B, S, K and H of the calls' keys. B may be a symbol of
        `jax.export`.
      layers: adds a leading axis of that size, for `attention_step(layer=...)`.

    Raises:
      ValueError: a size that is not an integer >= 1, by name.
    """
    config = resolve_config(config)
    sizes = {"batch": batch, "kv_length": kv_length, "kv_heads": kv_heads, "head_dim": head_dim}
    if layers is not None:
        sizes["layers"] = layers
    for name, size in sizes.items():
        if name != "batch" or not is_symbolic(size):
            check_integer(name, size, 1)
    check_head_dim("head_dim", head_dim, config)
    return _empty_state(config, batch, kv_length, kv_heads, head_dim, layers)


def _empty_state(
    config: AttentionConfig, batch: Size, length: int, heads: int, size: int, layers: int | None
) -> AttentionState:
    lead = () if layers is None else (layers,)
    length = length if config.clustered else 1
    clusters = (config.clusters or default_clusters(length)) if config.clustered else 1
    order = jnp.arange(length, dtype=jnp.int32)
    return AttentionState(
        jnp.broadcast_to(order, (*lead, batch, heads, length)),
        jnp.zeros((*lead, batch, heads, clusters, size), jnp.float32),
        jnp.zeros((*lead, batch, length), bool),
        jnp.zeros((*lead, batch), bool),
    )


def reset(state: AttentionState) -> AttentionState:
    """The state without its order: the next call in the window clusters from scratch.

    For a change of the model under the same latents, such as Wan2.2's switch of experts. Values
    that were nothing like those to come (all equal, another scale, not finite) need none: two
    refreshes on ordinary values bring back what a fresh state would hold.

    Raises:
      TypeError: `state` is no AttentionState.
    """
    if not isinstance(state, AttentionState):
        raise TypeError(f"state must be an AttentionState, got {type(state).__name__}")
    return state._replace(made=jnp.zeros_like(state.made))


def check_state(state, inputs: Inputs, config: AttentionConfig, layered: bool) -> None:
    """Raise unless a state fits the keys and the configuration of a call.

    Args:
      layered: whether the state must have a leading layer axis.
    """
    if not isinstance(state, AttentionState):
        raise TypeError(f"state must be an AttentionState, got {type(state).__name__}")
    batch, length, heads, size = inputs.key.shape
    layers = 1 if layered else None
    made = jax.eval_shape(lambda: _empty_state(config, batch, length, heads, size, layers))
    for name, got, want in zip(AttentionState._fields, state, made, strict=True):
        shape = got.shape[1:] if layered and got.ndim else got.shape
        expected = want.shape[1:] if layered else want.shape
        if shape != expected or got.ndim != want.ndim or got.dtype != want.dtype:
            lead = "layers, " if layered else ""
            made_by = "init_state(layers=...)" if layered else "init_state without layers"
            raise ValueError(
                f"state.{name} must be {want.dtype} [{lead}{', '.join(map(str, expected))}] "
                f"for these keys and this configuration, got {got.dtype} {list(got.shape)}; make "
                f"it with {made_by}{'' if layered else ', or pass layer'}"
            )


def _key_valid(inputs: Inputs) -> Bool[Array, "b s"]:
    if inputs.validity.key is not None:
        return inputs.validity.key
    return jnp.ones(inputs.key.shape[:2], bool)


def same_keys(state: AttentionState, inputs: Inputs) -> Bool[Array, ""]:
    """Whether the state holds an order that was made for the valid keys of a call."""
    valid = _key_valid(inputs)
    return jnp.all(state.made) & jnp.all(state.key_valid == valid)


def _like(state: AttentionState, new: AttentionState, inputs: Inputs) -> AttentionState:
    """A new state, varying over the manual mesh axes that any new state here can vary over."""
    valid = _key_valid(inputs)
    arrays = (new.permutation, new.centroids)
    arrays = vary_together(*arrays, along=(inputs.value, valid, state))
    flags = vary_together(new.key_valid, new.made, along=(valid, state.key_valid, state.made))
    return AttentionState(*arrays, *flags)


def unchanged(state: AttentionState, inputs: Inputs) -> AttentionState:
    """The state as it is, of the type that a new one has here."""
    return _like(state, state, inputs)


def order_from_state(
    state: AttentionState, inputs: Inputs, config: AttentionConfig, implementation: str
) -> Int[Array, "b k s"] | None:
    """The order of a checked state if it was made for the same valid keys, else one made here."""
    if not config.clustered:
        return None
    return _order(state, inputs, config, implementation)


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def _order(
    state: AttentionState, inputs: Inputs, config: AttentionConfig, implementation: str
) -> Array:
    same = same_keys(state, inputs)

    def vary(order: Array) -> Array:
        return vary_together(order, along=(inputs.value, inputs.validity.key, state))[0]

    return lax.cond(
        same,
        lambda: vary(state.permutation),
        lambda: vary(key_order(inputs, config, implementation)[0]),
    )


def refreshed(
    state: AttentionState,
    inputs: Inputs,
    config: AttentionConfig,
    implementation: str,
    same: Bool[Array, ""],
) -> AttentionState:
    """The state with a new order for these keys, for the whole batch.

    Args:
      same: whether the state's order was made for the same valid keys.
    """
    order, centroids = _key_order_warm(inputs, config, implementation, state, same)
    made = AttentionState(order, centroids, _key_valid(inputs), jnp.ones_like(state.made))
    return _like(state, made, inputs)


def after_window(state: AttentionState, inputs: Inputs, same: Bool[Array, ""]) -> AttentionState:
    """The state with the order of the sequence if its own was made for other keys."""
    valid = _key_valid(inputs)
    sequence = jnp.arange(valid.shape[1], dtype=jnp.int32)[None]
    if inputs.validity.key is not None:
        sequence = sequence_order(valid)
    order = jnp.where(same, state.permutation, sequence[:, None])
    # Not `made`: there are no centroids that a later clustering could start from.
    new = AttentionState(order, state.centroids, valid, state.made & same)
    return _like(state, new, inputs)


def _key_order_warm(
    inputs: Inputs,
    config: AttentionConfig,
    implementation: str,
    state: AttentionState,
    warm: Bool[Array, ""],
) -> tuple[Array, Array]:
    """Cluster from the state's centroids if there are any for these keys, else from scratch.

    From scratch, too, if the centroids no longer tell the values of a head apart: a state heals.
    """
    rows = starting_rows(
        lax.stop_gradient(inputs.value), inputs.validity.key, state.centroids.shape[2]
    )
    return lax.cond(
        warm & still_apart(rows, state.centroids),
        lambda: key_order(inputs, config, implementation, state.centroids),
        lambda: key_order(inputs, config, implementation),
    )
