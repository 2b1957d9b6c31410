"""Checks the fused preparation on a Hopper GPU and times short calls: `balanced.json`.

python balanced.py OUTPUT.json [TOKENSxHEADS ...]
"""

import dataclasses
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp

import vc_jax
from vc_jax import _fused

CALLS = 20
INT8 = vc_jax.AttentionConfig(balance_channels=True)
FP8 = vc_jax.AttentionConfig(qk="e4m3", balance_channels=True)
CODES = ("query_codes", "key_codes", "value_codes", "block_means")


def inputs(length: int, heads: int):
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (1, length, heads, 128)
    query, key, value = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys[:3])
    key_offset, value_offset = (
        jax.random.normal(k, (1, 1, heads, 128), jnp.bfloat16) for k in keys[3:]
    )
    return query, key + key_offset, value + 0.5 * value_offset


def shares_of_other_codes(preset: str, smooth: bool) -> dict[str, float]:
    """How many codes of the fused preparation are not those of the definition."""
    tensors = inputs(5000, 3)
    config = dataclasses.replace(vc_jax.PRESETS[preset], balance_channels=True)
    order = jnp.tile(jax.random.permutation(jax.random.key(5), 5000), (1, 3, 1)).astype(jnp.int32)

    def fused(*tensors):
        found = _fused.statistics_fused(*tensors, config, order=order, smooth=smooth)
        given = found._asdict()
        return _fused.prepare_fused(*tensors, config, order=order, smooth=smooth, **given)

    def defined(query, key, value):
        mean = vc_jax.mean_key(key)
        balance = vc_jax.channel_balance(query, key, key_mean=mean)
        sizes = {"key_mean": mean, "balance": balance}
        return vc_jax.prepare(query, key, value, config, order=order, smooth=smooth, **sizes)

    one, other = jax.jit(fused)(*tensors), jax.jit(defined)(*tensors)
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in CODES}
    return {
        name: float(jnp.mean(a.astype(jnp.float32) != b.astype(jnp.float32)))
        for name, (a, b) in pairs.items()
        if a is not None
    }


def scanned_call(attention):
    @jax.jit
    def run(query, key, value):
        def body(query, _):
            return query + attention(query, key, value) * jnp.bfloat16(1e-3), None

        return jax.lax.scan(body, query, None, length=CALLS)[0]

    return run


def scanned_steps(config: vc_jax.AttentionConfig, first: int | None):
    schedule = vc_jax.DenoisingSchedule(CALLS)

    @jax.jit
    def run(query, key, value):
        def body(carry, step):
            query, state = carry
            out, state = vc_jax.attention_step(
                query, key, value, state, step=step, schedule=schedule, config=config
            )
            return (query + out * jnp.bfloat16(1e-3), state), None

        state = vc_jax.init_state(config, 1, *key.shape[1:])
        steps = jnp.arange(CALLS) if first is None else jnp.full(CALLS, first)
        return jax.lax.scan(body, (query, state), steps)[0][0]

    return run


def microseconds(functions, tensors) -> dict[str, float]:
    for function in functions.values():
        jax.block_until_ready(function(*tensors))
    rounds = {name: [] for name in functions}
    for _ in range(3):
        for name, function in functions.items():
            start, runs = time.perf_counter(), 0
            while time.perf_counter() - start < 0.12:
                jax.block_until_ready(function(*tensors))
                runs += 1
            rounds[name].append((time.perf_counter() - start) / runs / CALLS * 1e6)
    return {name: statistics.median(times) for name, times in rounds.items()}


def main() -> None:
    output, *shapes = sys.argv[1:]
    for preset in ("fp8", "int8"):
        for smooth in (True, False):
            print(preset, smooth, shares_of_other_codes(preset, smooth), flush=True)
    table = []
    for shape in shapes or ["4096x24"]:
        length, heads = map(int, shape.split("x"))
        functions = {
            "cuDNN": scanned_call(
                lambda *x: jax.nn.dot_product_attention(*x, implementation="cudnn")
            ),
            "fp8 call": scanned_call(lambda *x: vc_jax.dot_product_attention(*x, config=FP8)),
            "int8 call": scanned_call(lambda *x: vc_jax.dot_product_attention(*x, config=INT8)),
            "fp8 after": scanned_steps(FP8, CALLS - 2),
            "fp8 steps": scanned_steps(FP8, None),
        }
        times = microseconds(functions, inputs(length, heads))
        table.append({"S": length, "H": heads, **times})
        print(table[-1], flush=True)
    with open(output, "w") as file:
        json.dump(table, file, indent=1)


main()
