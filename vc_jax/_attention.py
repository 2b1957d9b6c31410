"""The public call, `dot_product_attention`, and `explain`, which says what would run it."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, overload

import jax
from jaxtyping import Array, Float, Int

from ._arguments import Inputs, bind
from ._config import AttentionConfig
from ._dispatch import attend, choose, default_device, request_of, select_implementation
from ._explicit_axes import spread
from ._implementations import Result, Static
from ._order import AttentionState, check_state, order_from_state
from ._pays import advice
from ._tracing import is_symbolic, own_promotion

Output = Float[Array, "*b t n h"]
Normaliser = Float[Array, "*b t n"]
MaybeAbstract = Array | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation a call runs on, and why not the others.

    Attributes:
      implementation: the name; `None` if none supports the call.
      reasons: name -> why it does not run, for every other implementation.
      config: the numerics.
      device: what the choice was made for.
      advice: whether the call is faster than with `config="bf16"` there, and from which length one
        is; `None` where nothing was measured.
    """

    implementation: str | None
    reasons: dict[str, str]
    config: AttentionConfig
    device: str
    advice: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.implementation or 'nothing'} runs this call on {self.device}"]
        lines += [f"  {self.advice}"] if self.advice else []
        lines += [f"  {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


@overload
def dot_product_attention(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k h"],
    bias: None = None,
    mask: Array | None = None,
    *,
    config: AttentionConfig | str = "int8",
    scale: Float[Array, ""] | float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    key_value_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    local_window_size: None = None,
    state: AttentionState | None = None,
    implementation: str | None = None,
    return_residual: Literal[False] = False,
) -> Output: ...


@overload
def dot_product_attention(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k h"],
    bias: None = None,
    mask: Array | None = None,
    *,
    config: AttentionConfig | str = "int8",
    scale: Float[Array, ""] | float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    key_value_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    local_window_size: None = None,
    state: AttentionState | None = None,
    implementation: str | None = None,
    return_residual: Literal[True],
) -> tuple[Output, Normaliser]: ...


@overload
def dot_product_attention(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k h"],
    bias: None = None,
    mask: Array | None = None,
    *,
    config: AttentionConfig | str = "int8",
    scale: Float[Array, ""] | float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    key_value_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    local_window_size: None = None,
    state: AttentionState | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Output | tuple[Output, Normaliser]: ...


@own_promotion
def dot_product_attention(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k h"],
    bias: None = None,
    mask: Array | None = None,
    *,
    config: AttentionConfig | str = "int8",
    scale: Float[Array, ""] | float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    key_value_seq_lengths: Int[Array, " b"] | Sequence[int] | None = None,
    local_window_size: None = None,
    state: AttentionState | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Output | tuple[Output, Normaliser]:
    """Low-bit attention with the signature of `jax.nn.dot_product_attention`.

    Lengths and masks may be traced; they never cause a recompilation. Invalid keys change nothing,
    whatever bytes they hold. A row without a valid key and rows past `query_seq_lengths` give
    zeros. The gradient is that of unquantised attention at the same inputs (straight-through).

    Numbers of clusters and of tokens that a Lloyd step looks at follow from S unless the
    configuration fixes them, so padding an array may change a code, as any other order of the keys
    would. Where channels are balanced the queries of a head share the factors.

    Args:
      query: [B, T, N, H] or [T, N, H]; float32, bfloat16 or float16.
      key, value: [B, S, K, H] or [S, K, H], N a multiple of K.
      bias, is_causal, local_window_size: must be `None` or `False`.
      mask: 1 or True keeps a key: bool, or 0 and 1 of any dtype. [B or 1, 1, 1 or T, S] that
        leaves every query the same keys or none (those give zeros), traced or not; a concrete one
        may have a head axis. A traced mask that leaves two queries different keys, or holds
        anything else than 0 and 1, turns its batch row to NaN; a concrete one raises.
      config: an `AttentionConfig` or a preset's name: `"bf16"`, `"int8"`, `"fp8"`, `"nvfp4"`.
      scale: of the scores; `None`: 1/sqrt(H).
      query_seq_lengths, key_value_seq_lengths: int [B], valid prefix of each row.
      state: an `AttentionState` whose order of the keys is used if it was made for the same valid
        keys; otherwise, and without a state, the values are clustered in this call.
      implementation: one of `"hopper"`, `"mma"`, `"cudnn"`, `"xla"`; `None`: the fastest one that
        supports the call.
      return_residual: also return the log normaliser.

    Returns:
      The output, in the shape and dtype of `query`; with `return_residual` also the natural-log
      normaliser of the scores, float32 [B, T, N] ([T, N]), -inf for a row without a valid key.
      With ExpCast it is taken from the decoded row sum, which is biased by at most 0.072 nats
      (about +0.009 on flat rows); in merged pieces of the same configuration the bias cancels.
      No gradient flows through it: merge pieces where none is needed, such as in a sampler.

    Raises:
      NotImplementedError: an argument that cannot be honoured, or an implementation that does not
        support the call, by name.
      TypeError, ValueError: a wrong argument, by name.
    """
    call = bind(
        query,
        key,
        value,
        bias,
        mask,
        config=config,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
    )
    request = request_of(call.inputs, call.config, return_residual)
    chosen = select_implementation(request, implementation)
    static = Static(call.config, chosen, call.config.smooth_values, return_residual)
    if state is not None:
        check_state(state, call.inputs, call.config, layered=False)
    (out, lse), _ = spread(_attend, static, call.config, call.inputs, state)
    out = out.reshape(query.shape)
    return (out, lse.reshape(query.shape[:-1])) if lse is not None else out


def _attend(
    static: Static, inputs: Inputs, state: AttentionState | None, step: None
) -> tuple[Result, AttentionState | None]:
    """Attention in the order of a state, if there is one, and that state as it was."""
    del step
    order = None
    if state is not None:
        order = order_from_state(state, inputs, static.config, static.implementation)
    return attend(static, inputs, order), state


@own_promotion
def explain(
    query: MaybeAbstract,
    key: MaybeAbstract,
    value: MaybeAbstract,
    bias: None = None,
    mask: MaybeAbstract | None = None,
    *,
    config: AttentionConfig | str = "int8",
    scale: MaybeAbstract | float | None = None,
    is_causal: bool = False,
    query_seq_lengths: MaybeAbstract | Sequence[int] | None = None,
    key_value_seq_lengths: MaybeAbstract | Sequence[int] | None = None,
    local_window_size: None = None,
    state: AttentionState | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Explanation:
    """Which implementation `dot_product_attention` would run with these arguments, and why.

    On a card where whole calls were measured it also says whether this one pays (`advice`).

    Arrays may be `jax.ShapeDtypeStruct`s. Raises what the call itself would raise for its
    arguments; an implementation that refuses is in the result's `reasons`.
    """
    call = bind(
        query,
        key,
        value,
        bias,
        mask,
        config=config,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
    )
    if state is not None:
        check_state(state, call.inputs, call.config, layered=False)
    request = request_of(call.inputs, call.config, return_residual)
    chosen, reasons = choose(request, implementation)
    device, length = default_device()[2], call.inputs.key.shape[1]
    known = None if is_symbolic(length) else advice(call.config, chosen, device, length)
    return Explanation(chosen, reasons, call.config, device, known)
