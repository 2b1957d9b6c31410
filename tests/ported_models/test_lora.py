"""LoRAs at load against a merge by hand: every key style, every model, both layouts."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from vc_jax.models.common import placing
from vc_jax.models.common.lora import LoraError
from vc_jax.models.wan import Wan, WanConfig

from . import golden, renamed
from .test_weight_files import write_raw

RANK, ALPHA = 3, 1.5
WAN = WanConfig(num_layers=2, num_heads=1, head_dim=6, ffn_dim=8, text_dim=8)
FFN = "blocks.1.ffn.net.0.proj"
Tensors = dict[str, np.ndarray]
HYPHEN = "___lorahyphen___"


def keys(style: str, module: str, down: np.ndarray, up: np.ndarray) -> tuple[Tensors, float]:
    """A pair under a style's keys, and what its product is multiplied by."""
    alpha = np.array(ALPHA, np.float32)
    dotted = {
        "diffusers": f"transformer.{module}",
        "peft": f"base_model.model.{module}",
        "bare": module,
        "authors": f"diffusion_model.{module}",
        "kohya": f"lora_unet_{module.replace('.', '_')}",
        "longcat": f"lora{HYPHEN}{module.replace('.', HYPHEN)}",
    }[style]
    if style in ("diffusers", "peft"):
        adapter = ".default" if style == "peft" else ""
        pair = {
            f"{dotted}.lora_A{adapter}.weight": down,
            f"{dotted}.lora_B{adapter}.weight": up,
        }
        return pair, 1.0
    pair = {f"{dotted}.lora_down.weight": down, f"{dotted}.lora_up.weight": up}
    if style == "longcat":
        return pair | {f"{dotted}.alpha_scale": alpha}, ALPHA
    if style == "bare":
        return pair, 1.0
    return pair | {f"{dotted}.alpha": alpha}, ALPHA / RANK


STYLES = ("diffusers", "peft", "bare", "authors", "kohya", "longcat")


def matrices(weights: Tensors) -> list[str]:
    return [
        n.removesuffix(".weight") for n in weights if n.endswith("weight") and weights[n].ndim > 1
    ]


def made(
    weights: Tensors, styles: tuple[str, ...] = STYLES, seed: int = 0
) -> tuple[Tensors, Tensors]:
    """A LoRA of all matrices, the styles taking turns, and by hand what it adds to each tensor."""
    generator = np.random.default_rng(seed)
    lora, added = {}, {}
    for number, module in enumerate(matrices(weights)):
        shape = weights[f"{module}.weight"].shape
        down = generator.standard_normal((RANK, *shape[1:])).astype(np.float32)
        up = generator.standard_normal((shape[0], RANK, *[1] * (len(shape) - 2)))
        up = up.astype(np.float32)
        pair, factor = keys(styles[number % len(styles)], module, down, up)
        lora |= pair
        product = up.reshape(shape[0], RANK) @ down.reshape(RANK, -1)
        added[f"{module}.weight"] = factor * product.reshape(shape)
    return lora, added


def merged(weights: Tensors, *terms: tuple[float, Tensors]) -> Tensors:
    result = {name: array.astype(np.float32) for name, array in weights.items()}
    for strength, added in terms:
        for name, array in added.items():
            result[name] = result[name] + strength * array
    return result


def close(first: Any, second: Any, rtol: float = 1e-5) -> None:
    for leaves in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        a, b = (np.asarray(leaf, np.float32) for leaf in leaves)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5 * float(np.max(np.abs(b))))


@pytest.fixture(scope="module")
def wan(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wan")
    golden.random_model(Wan, WAN, dtype=jnp.float32).to_pretrained(folder)
    return folder


def weights_of(folder: Path) -> Tensors:
    return load_file(folder / "diffusion_pytorch_model.safetensors")


def load(path: Path, *loras: Any, **options: Any) -> Any:
    options = {"dtype": jnp.float32, "config": WAN} | options
    return Wan.from_pretrained(path, loras=loras, **options)


def saved(tensors: Tensors, file: Path, metadata: dict[str, str] | None = None) -> Path:
    save_file({n: np.ascontiguousarray(a) for n, a in tensors.items()}, file, metadata)
    return file


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("name", golden.NAMES)
def test_every_model_with_names_of_either_layout(name, other, tmp_path):
    """Of all matrices at once: fused, split, interleaved by head, swapped halves, convolutions."""
    data = golden.fixture(name)
    config = data.config()
    weights = {k: v.astype(np.float32) for k, v in load_file(data.weights).items()}
    if other:
        weights = renamed.other_layout(name, weights, config.num_heads)
    weights.pop("rope.inv_freq", None)
    lora, added = made(weights)
    expected = data.model(
        path=saved(merged(weights, (0.5, added)), tmp_path / "merged.safetensors")
    )
    file = saved(lora, tmp_path / "lora.safetensors")
    close(data.model(loras=[(file, 0.5)]), expected)


@pytest.mark.parametrize("style", STYLES)
def test_every_style(style, wan, tmp_path):
    weights = weights_of(wan)
    lora, added = made(weights, (style,))
    expected = load(saved(merged(weights, (1.0, added)), tmp_path / "merged.safetensors"))
    close(load(wan, saved(lora, tmp_path / "lora.safetensors")), expected)


def test_several_with_strengths_add_up(wan, tmp_path):
    weights = weights_of(wan)
    (first, of_first), (second, of_second) = (made(weights, seed=seed) for seed in (1, 2))
    second = {k: v for k, v in second.items() if "attn1" not in k}
    of_second = {k: v for k, v in of_second.items() if "attn1" not in k}
    both = merged(weights, (0.75, of_first), (-2, of_second))
    files = [saved(t, tmp_path / f"{n}.safetensors") for n, t in enumerate((first, second))]
    expected = load(saved(both, tmp_path / "merged.safetensors"))
    close(load(wan, (files[0], 0.75), (str(files[1]), -2)), expected)


@pytest.mark.parametrize("fused", [False, True])
def test_one_of_three_projections_alone(fused, tmp_path):
    """A LoRA of q leaves k and v as they are, also where the checkpoint has one matrix for all."""
    data = golden.fixture("longcat_video")
    weights = {k: v.astype(np.float32) for k, v in load_file(data.weights).items()}
    split = renamed.other_layout("longcat_video", weights, data.config().num_heads)
    module = "blocks.1.self_attn.to_q"
    lora, added = made({f"{module}.weight": split[f"{module}.weight"]}, ("authors",))
    expected = data.model(path=saved(merged(split, (1.0, added)), tmp_path / "merged.safetensors"))
    file = data.weights if fused else saved(split, tmp_path / "split.safetensors")
    got = data.model(path=file, loras=[saved(lora, tmp_path / "lora.safetensors")])
    close(got, expected)


def test_longcats_parts_of_a_fused_matrix(tmp_path):
    """`lora_down` has a third of its rows for each of q, k and v; each has its own `lora_up`."""
    data = golden.fixture("longcat_video")
    weights = load_file(data.weights)
    name = "blocks.0.attn.qkv"
    rows, width = weights[f"{name}.weight"].shape
    generator = np.random.default_rng(0)
    down = generator.standard_normal((3 * RANK, width)).astype(np.float32)
    ups = generator.standard_normal((3, rows // 3, RANK)).astype(np.float32)
    key = f"lora{HYPHEN}{name.replace('.', HYPHEN)}"
    lora = {f"{key}.lora_down.weight": down, f"{key}.alpha_scale": np.float32(0.5)}
    lora |= {f"{key}.lora_up.blocks.{i}.weight": up for i, up in enumerate(ups)}
    product = [up @ down[RANK * i : RANK * (i + 1)] for i, up in enumerate(ups)]
    changed = merged(weights, (0.5, {f"{name}.weight": np.concatenate(product)}))
    expected = data.model(path=saved(changed, tmp_path / "merged.safetensors"))
    close(data.model(loras=[saved(lora, tmp_path / "lora.safetensors")]), expected)


def test_differences_of_weights_biases_and_modulation(tmp_path):
    """As the authors' distilled releases have them, under the names of their own layout."""
    data = golden.fixture("wan_t2v")
    peer = {k: v.astype(np.float32) for k, v in load_file(data.weights).items()}
    weights = renamed.other_layout("wan_t2v", peer, data.config().num_heads)
    names = {
        "diffusion_model.blocks.1.self_attn.norm_q.diff": "blocks.1.self_attn.norm_q.weight",
        "diffusion_model.blocks.1.norm3.diff_b": "blocks.1.norm3.bias",
        "diffusion_model.blocks.0.self_attn.q.diff_b": "blocks.0.self_attn.q.bias",
        "diffusion_model.blocks.0.diff_m": "blocks.0.modulation",
        "diffusion_model.head.modulation.diff": "head.modulation",
        "diffusion_model.patch_embedding.diff": "patch_embedding.weight",
    }
    generator = np.random.default_rng(0)
    lora = {k: generator.normal(size=weights[n].shape).astype(np.float32) for k, n in names.items()}
    changed = merged(weights, (0.5, {n: lora[k] for k, n in names.items()}))
    expected = data.model(path=saved(changed, tmp_path / "merged.safetensors"))
    close(data.model(loras=[(saved(lora, tmp_path / "lora.safetensors"), 0.5)]), expected)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8"])
def test_a_quantised_matrix_is_dequantised_first(dtype, wan, tmp_path):
    weights = weights_of(wan)
    lora, added = made({f"{FFN}.weight": weights[f"{FFN}.weight"]}, ("authors",))
    codes = (8 * weights.pop(f"{FFN}.weight")).astype("i1" if dtype == "I8" else jnp.float8_e4m3fn)
    scale = np.linspace(0.1, 0.2, len(codes), dtype=np.float32)[:, None]
    stored = weights | {f"{FFN}.weight": codes, f"{FFN}.weight_scale": scale}
    write_raw(tmp_path / "quantised.safetensors", stored, {f"{FFN}.weight": dtype})
    plain = weights | {f"{FFN}.weight": codes.astype(np.float32) * scale}
    expected = load(saved(merged(plain, (1.0, added)), tmp_path / "merged.safetensors"))
    file = saved(lora, tmp_path / "lora.safetensors")
    close(load(tmp_path / "quantised.safetensors", file), expected)


def test_alpha_of_the_metadata_and_a_bias(wan, tmp_path):
    weights = weights_of(wan)
    lora, added = made({f"{FFN}.weight": weights[f"{FFN}.weight"]}, ("diffusers",))
    lora[f"transformer.{FFN}.lora_B.bias"] = bias = np.arange(8, dtype=np.float32)
    said = {"transformer.r": RANK, "transformer.lora_alpha": 6, "transformer.alpha_pattern": {}}
    metadata = {"lora_adapter_metadata": json.dumps(said)}
    file = saved(lora, tmp_path / "lora.safetensors", metadata)
    changed = merged(weights, (2.0, added | {f"{FFN}.bias": bias}))
    close(load(wan, file), load(saved(changed, tmp_path / "merged.safetensors")))
    for text, words in (
        (json.dumps(said | {"transformer.use_rslora": True}), "use_rslora is not supported"),
        (json.dumps(said | {"transformer.lora_alpha": "6"}), "lora_alpha is no number: '6'"),
        ("{", "no valid JSON"),
    ):
        with pytest.raises(LoraError, match=words):
            load(wan, saved(lora, file, {"lora_adapter_metadata": text}))


def test_merged_in_float32_and_on_a_mesh(wan, tmp_path, monkeypatch):
    """The sum is rounded to bfloat16, not its terms; also where parameters are read in parts."""
    weights = weights_of(wan)
    lora, added = made(weights)
    file = saved(lora, tmp_path / "lora.safetensors")
    sums = merged(weights, (1e-3, added))
    expected = load(saved(sums, tmp_path / "merged.safetensors"), dtype=jnp.bfloat16)
    monkeypatch.setattr(placing, "_SMALL", 0)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))
    for options in ({}, {"mesh": mesh}):
        got = load(wan, (file, 1e-3), dtype=jnp.bfloat16, **options)
        assert got.head.kernel.dtype == jnp.bfloat16
        close(got, expected, rtol=0.01)
        for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            if a.dtype == jnp.bfloat16:
                # A few sums lie so near a middle that their last bits decide how they are rounded.
                assert np.mean(np.asarray(a) != np.asarray(b)) < 0.02


PAIR = {"lora_A.weight": (RANK, 6), "lora_B.weight": (8, RANK)}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"blocks.1.ffn.net.7.lora_A.weight": (RANK, 6)}, "belongs to no tensor of the model"),
        ({"blocks.2.ffn.net.2.lora_A.weight": (RANK, 6)}, r"blocks\.2.*belongs to no tensor"),
        ({f"{FFN}.dora_scale": (8, 1)}, r"dora_scale: belongs to no tensor"),
        ({"text_encoder.q.lora_A.weight": (RANK, 6)}, r"text_encoder\.q\.lora_A"),
        ({f"{FFN}.lora_A.weight": (RANK, 6)}, r"proj\.lora_A\.weight: a half of a pair"),
        ({f"{FFN}.lora_up.weight": (8, RANK)}, r"proj\.lora_up\.weight: a half of a pair"),
        ({f"{FFN}.alpha": ()}, r"alpha without its matrices"),
        (
            {f"{FFN}.{end}": shape for end, shape in (PAIR | {"alpha": (3,)}).items()},
            r"alpha: expected a number, got shape \(3,\)",
        ),
        ({f"{FFN}.lora_A.weight": (2, 6), f"{FFN}.lora_B.weight": (8, 3)}, "ranks differ"),
        ({f"{FFN}.lora_A.weight": (3, 5), f"{FFN}.lora_B.weight": (8, 3)}, r"expected \(8, 6\)"),
        ({f"{FFN}.diff_b": (6,)}, r"diff_b: expected \(8,\), got \(6,\)"),
        ({"blocks.0.norm1.diff": (6,)}, r"norm1\.diff: belongs to no tensor"),
        ({"blocks.0.attn1.norm_q.diff_b": (6,)}, r"norm_q\.bias is no tensor of the model"),
        (
            {f"{p}{FFN}.{end}": shape for p in ("", "transformer.") for end, shape in PAIR.items()},
            "means the same as",
        ),
    ],
)
def test_what_does_not_fit_is_named(tensors, words, wan, tmp_path):
    good = {f"blocks.0.ffn.net.0.proj.{end}": shape for end, shape in PAIR.items()}
    ones = {name: np.ones(shape, np.float32) for name, shape in (good | tensors).items()}
    file = saved(ones, tmp_path / "lora.safetensors")
    with pytest.raises(LoraError, match=words) as caught:
        load(wan, file)
    assert str(file) in str(caught.value)


def test_all_problems_come_in_one_error(wan, tmp_path):
    wrong = {f"{name}.lora_A.weight": np.ones((RANK, 6), np.float32) for name in ("x", "y", "z")}
    with pytest.raises(LoraError, match=r"\(3\)") as caught:
        load(wan, saved(wrong, tmp_path / "lora.safetensors"))
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("loras", "error", "words"),
    [
        ("lora.safetensors", TypeError, "expected a list"),
        ([("lora.safetensors",)], TypeError, "expected a path or a"),
        ([("lora.safetensors", "1")], TypeError, "expected a path or a"),
        ([("lora.safetensors", True)], TypeError, "expected a path or a"),
        # A pair from JSON, and a strength of NumPy: only the file is missing.
        ([["absent.safetensors", np.float32(0.5)]], FileNotFoundError, "no file absent"),
        ([("lora.safetensors", float("nan"))], ValueError, "finite strength"),
        (["absent.safetensors"], FileNotFoundError, "no file absent"),
    ],
)
def test_what_is_no_lora_is_refused(loras, error, words, wan):
    with pytest.raises(error, match=words):
        Wan.from_pretrained(wan, config=WAN, loras=loras)


def test_a_file_without_tensors_is_refused(wan, tmp_path):
    with pytest.raises(LoraError, match="it has no tensors"):
        load(wan, saved({}, tmp_path / "lora.safetensors"))


def test_a_file_that_is_none_is_refused(wan, tmp_path):
    (tmp_path / "lora.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load(wan, tmp_path / "lora.safetensors")
