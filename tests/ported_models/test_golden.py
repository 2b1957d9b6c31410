"""The ported models give the peers' numbers, tensor by tensor, through both checkpoint layouts."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vc_jax.models.common import layers
from vc_jax.models.common.layers import grid_rope, rotate_pairs
from vc_jax.models.hunyuan_video15 import HunyuanVideo15Config

from . import golden, renamed

CASES = [(name, case) for name in golden.NAMES for case in golden.fixture(name).cases]


class Recorder:
    """Plain attention that keeps its arguments and results."""

    def __init__(self, calls: list[dict[str, Any]]):
        self.calls = calls

    def __call__(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
        out = golden.plain_attention(query, key, value, **options)
        self.calls.append({"q": query, "k": key, "v": value, "out": out})
        return out


@functools.cache
def model(name: str, attention: Any = golden.plain_attention) -> Any:
    return golden.fixture(name).model(attention=attention, cross_attention=attention)


class Record(NamedTuple):
    """What one pass in the plain loop showed: attention calls and inputs of LayerNorms."""

    own: list[dict[str, Any]]
    cross: list[dict[str, Any]]
    normed: list[Any]


@functools.cache
def recorded(name: str, case: str) -> Record:
    record = Record([], [], [])
    data, in_float32 = golden.fixture(name), layers.LayerNorm.in_float32
    attention, cross = Recorder(record.own), Recorder(record.cross)
    loop = data.model(attention=attention, cross_attention=cross, scan_layers=False)
    arguments = data.arguments(case)
    static = {key: arguments.pop(key) for key in data.case(case).get("static_arguments", {})}

    def spy(norm: Any, x: Any) -> Any:
        record.normed.append(x)
        return in_float32(norm, x)

    @golden.quick_jit
    def run(arguments: dict[str, Any]) -> tuple[Any, Record]:
        return golden.call(loop, {**arguments, **static}), record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers.LayerNorm, "in_float32", spy)
        result, shown = run(arguments)
    # The loop gives the same as the scan.
    check(name, {f"{case}/sample": result[0] if isinstance(result, tuple) else result})
    return shown


def outputs(port: Any, name: str, case: str, *, quick: bool = False) -> dict[str, Any]:
    """The final outputs of a case by their stored names."""
    result = golden.run(port, golden.fixture(name).arguments(case), quick=quick)
    if name == "minimax_h3":
        return {f"{case}/sample": result[0], f"{case}/audio_sample": result[1]}
    if case == "cache_fill":
        return {
            f"{case}/kv_cache.{layer}.{part}": stack[layer].swapaxes(1, 2)
            for part, stack in zip("kv", result[1], strict=True)
            for layer in range(port.config.num_layers)
        }
    return {f"{case}/sample": result}


def check(name: str, tensors: dict[str, Any]) -> None:
    data = golden.fixture(name)
    for tensor, actual in tensors.items():
        error, bound = golden.relative_l2(actual, data.expected(tensor)), data.tolerance(tensor)
        print(f"{name:16} {tensor:36} {error:.2e}  bound {bound:.1e}")
        assert error <= bound, tensor


def port_of(name: str, case: str, attention: Any) -> Any:
    """The model of a case, whose configuration may differ from the others'."""
    data = golden.fixture(name)
    override = data.case(case).get("constructor_override")
    if not override:
        return model(name, attention)
    config = data.config(**override)
    return data.model(config=config, attention=attention, cross_attention=attention)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_outputs_are_the_peers(name, case):
    check(name, outputs(port_of(name, case, golden.plain_attention), name, case))


@pytest.mark.parametrize(("name", "case"), CASES)
def test_outputs_are_the_peers_with_the_bf16_preset(name, case):
    """The preset computes in the inputs' dtype, here float32."""
    check(name, outputs(port_of(name, case, "bf16"), name, case, quick=True))


@pytest.mark.parametrize("name", golden.NAMES)
def test_the_other_layout_holds_the_same_model(name, tmp_path):
    data = golden.fixture(name)
    weights = load_file(data.weights)
    file = tmp_path / "model.safetensors"
    save_file(renamed.other_layout(name, weights, data.config().num_heads), file)
    other = data.model(path=file)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (other, model(name))))
    check(name, outputs(other, name, "main"))


@pytest.mark.parametrize("name", ["wan_t2v", "wan_ti2v"])
def test_wan_intermediates(name):
    data, port = golden.fixture(name), model(name)
    arguments = data.arguments("main")
    own, cross, _ = recorded(name, "main")
    grid = layers.latent_grid(arguments["hidden_states"], port.config.patch)
    cos, sin = (np.repeat(table, 2, axis=-1) for table in port.rope(grid))
    embedding = port.time_embedding(arguments["timestep"])
    projection = port.time_projection(jax.nn.silu(embedding))
    tensors = {
        "main/rope.cos": cos,
        "main/rope.sin": sin,
        "main/temb": embedding if name == "wan_ti2v" else embedding[:, 0],
        "main/context": port.text_mlp(jnp.asarray(arguments["encoder_hidden_states"])),
        "main/block0.out": golden.quick_jit(first_block_rows, static_argnums=0)(name, arguments),
    }
    if name == "wan_t2v":
        tensors["main/timestep_proj"] = projection[:, 0]
    tensors |= attention_tensors("main/block0.self_attn", own[0])
    tensors |= attention_tensors("main/block0.cross_attn", cross[0], "qkv")
    check(name, tensors)
    assert covered(data, "main") == set(tensors) | {"main/sample"}


def test_hunyuan_intermediates():
    name = "hunyuan_video15"
    data = golden.fixture(name)
    stages = golden.quick_jit(hunyuan_stages)
    for case in ("text_only", "main"):
        tensors, lengths = stages(data.arguments(case))
        valid = np.arange(tensors["block0.text_in"].shape[1]) < np.asarray(lengths)[:, None]
        np.testing.assert_array_equal(valid, data.expected(f"{case}/block0.text_mask"))
        for tensor in ("block0.text_in", "block0.out"):
            check(name, {f"{case}/{tensor}": tensors[tensor]})
    # Pads as queries are nobody's business: rows are compared where a fixture's meaning says.
    calls = attention_tensors("block0.attn", recorded(name, "main").own[0])
    valid = data.expected("main/block0.text_mask")
    everywhere = np.ones(tensors["block0.in"].shape[:2], bool)
    rows = {
        "text_refined": data.arguments("main")["encoder_attention_mask"].astype(bool),
        "block0.text_out": valid,
        "last_block.text_out": valid,
        **dict.fromkeys(calls, np.concatenate([everywhere, valid], axis=1)),
    }
    for tensor, actual in (tensors | calls).items():
        if tensor in rows:
            check_rows(name, f"main/{tensor}", actual, rows[tensor])
        else:
            check(name, {f"main/{tensor}": actual})
    stored = {f"main/{tensor}" for tensor in tensors | calls}
    assert covered(data, "main") == stored | {"main/sample", "main/block0.text_mask"}


def test_hunyuan_rope_at_the_released_head_dimension():
    data = golden.fixture("hunyuan_video15")
    config = HunyuanVideo15Config()
    cos, sin = grid_rope(data.manifest["rope_real"]["grid_t_h_w"], config.rope_axes, 256.0)
    turned = rotate_pairs(jnp.asarray(data.expected("rope_real.q_in")), cos, sin)
    for tensor, actual in (("cos", cos), ("sin", sin)):
        doubled = np.repeat(actual, 2, axis=-1)
        assert golden.relative_l2(doubled, data.expected(f"rope_real.{tensor}")) <= 1e-5
    assert golden.relative_l2(turned, data.expected("rope_real.q_out")) <= 1e-5


def test_minimax_intermediates():
    name = "minimax_h3"
    data, tensors = golden.fixture(name), {}
    for case in ("main", "no_keyframe"):
        arguments = data.arguments(case)
        text, x, embedding, rope, out = golden.quick_jit(minimax_first_block)(arguments)
        tensors[f"{case}/block0.out"] = out
        if case == "main":
            tensors |= {"main/text_refined": text, "main/block0.in": x, "main/temb": embedding}
            for part, table in zip(("cos", "sin"), rope, strict=True):
                tensors[f"main/rope.{part}"] = np.concatenate([table, table], axis=-1)
    tensors |= attention_tensors("main/block0.attn", recorded(name, "main").own[0])
    check(name, tensors)
    assert covered(data, "main") == {key for key in tensors if key.startswith("main/")} | {
        "main/sample",
        "main/audio_sample",
    }


def test_longcat_intermediates():
    name = "longcat_video"
    data, port = golden.fixture(name), model(name)
    arguments = data.arguments("main")
    own, cross, _ = recorded(name, "main")
    grid = layers.latent_grid(arguments["hidden_states"], port.config.patch)
    cos, sin = (np.repeat(table, 2, axis=-1) for table in port.rope(grid))
    text, mask = arguments["encoder_hidden_states"][:, 0], arguments["encoder_attention_mask"]
    context, _ = port.context(jnp.asarray(text), jnp.asarray(mask))
    tensors = {
        "main/rope.cos": cos,
        "main/rope.sin": sin,
        "main/temb": port.time_embedding(arguments["timestep"], grid[0]),
        "main/context": context.reshape(1, -1, context.shape[-1]),
    }
    tensors |= attention_tensors("main/block0.self_attn", own[0])
    for part in "kv":
        # The peer packs the rows of the batch.
        packed = cross[0][part].reshape(-1, *cross[0][part].shape[2:])
        tensors[f"main/block0.cross_attn.{part}"] = packed
    noise, cond = recorded(name, "continuation").own[:2]
    tensors["continuation/block0.self_attn.out_noise"] = noise["out"]
    tensors["continuation/block0.self_attn.out_cond"] = cond["out"]
    check(name, tensors)
    for case in ("main", "continuation", "cache_use"):
        # A block has three norms; the fourth one reads what the first block has written.
        check(name, {f"{case}/block0.out": recorded(name, case).normed[3]})


def minimax_first_block(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Refined text, packed sequence, time embedding, RoPE tables, first block's output."""
    port = model("minimax_h3")
    video, audio = arguments["hidden_states"], arguments["audio_hidden_states"]
    text = port.refine_text(arguments["encoder_hidden_states"])
    x = port.pack(video, audio, text, golden.packed(arguments))
    embedding = port.time_embedding(arguments["timestep"])
    rope = port.rope(arguments["position_ids"])
    rows = arguments["timestep_indices"] * 3 + arguments["token_tags"]
    out, _ = port.block(0)(x, jax.nn.silu(embedding), rows, rope, stateless)
    return text, x, embedding, rope, out


def first_block_rows(name: str, arguments: dict[str, Any]) -> Any:
    """Wan's residual stream after the first block."""
    port = model(name)
    config = port.config
    latents = jnp.asarray(arguments["hidden_states"])
    modulation = port.time_projection(jax.nn.silu(port.time_embedding(arguments["timestep"])))
    modulation = modulation.reshape(*modulation.shape[:2], 6, config.hidden)
    x = port.patch_embedding(layers.patchify(latents, config.patch))
    rope = port.rope(layers.latent_grid(latents, config.patch))
    context = port.text_mlp(jnp.asarray(arguments["encoder_hidden_states"]))
    return port.block(0)(x, modulation, context, rope, stateless, golden.plain_attention)[0]


def hunyuan_stages(arguments: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The stages up to the blocks' outputs by their stored names, and the text's lengths."""
    port = model("hunyuan_video15")
    latents, timestep = jnp.asarray(arguments["hidden_states"]), arguments["timestep"]
    text, keep = arguments["encoder_hidden_states"], arguments["encoder_attention_mask"]
    rest = [arguments[f"encoder_{kind}_2"] for kind in ("hidden_states", "attention_mask")]
    rows, lengths = port.text_rows(timestep, text, keep, *rest, arguments["image_embeds"])
    video = port.patch_embedding(layers.patchify(latents, port.config.patch))
    rope = port.rope(layers.latent_grid(latents, port.config.patch))
    embedding = port.time_embedding(timestep)

    def joint(query: Any, key: Any, value: Any) -> tuple[Any, None]:
        options = {"key_value_seq_lengths": lengths + video.shape[1]}
        return golden.plain_attention(query, key, value, **options), None

    streams = [(video, rows)]
    for index in range(2):
        *both, _ = port.block(index)(*streams[-1], jax.nn.silu(embedding)[:, None], rope, joint)
        streams.append(tuple(both))
    refined = port.refiner(text, keep.astype(bool), timestep, golden.plain_attention)
    return {
        "rope.cos": jnp.repeat(rope[0], 2, axis=-1),
        "rope.sin": jnp.repeat(rope[1], 2, axis=-1),
        "temb": embedding,
        "text_refined": refined,
        "block0.in": video,
        "block0.text_in": rows,
        "block0.out": streams[1][0],
        "block0.text_out": streams[1][1],
        "last_block.text_out": streams[2][1],
    }, lengths


def stateless(query: Any, key: Any, value: Any) -> tuple[Any, None]:
    return golden.plain_attention(query, key, value), None


def attention_tensors(prefix: str, call: dict[str, Any], parts: Any = None) -> dict[str, Any]:
    return {f"{prefix}.{part}": call[part] for part in parts or ("q", "k", "v", "out")}


def check_rows(name: str, tensor: str, actual: Any, rows: np.ndarray) -> None:
    """As `check`, on the rows that a fixture's meaning restricts it to."""
    data = golden.fixture(name)
    error = golden.relative_l2(np.asarray(actual)[rows], data.expected(tensor)[rows])
    print(f"{name:16} {tensor:36} {error:.2e}  bound {data.tolerance(tensor):.1e}")
    assert error <= data.tolerance(tensor), tensor


def covered(data: golden.Fixture, case: str) -> set[str]:
    return {output["tensor"] for output in data.case(case)["outputs"].values()}
