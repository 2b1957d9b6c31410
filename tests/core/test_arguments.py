"""What the public call accepts, refuses and explains."""

import dataclasses
import inspect
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax import AttentionConfig, _attention, _dispatch, _implementations

from .cases import PRESETS, video_like

QUERY, KEY, VALUE = video_like(0, 2, 3, 20, 4, 2, 16)
SCHEDULE = vc_jax.DenoisingSchedule(8)


def call(query=QUERY, key=KEY, value=VALUE, **arguments):
    return vc_jax.dot_product_attention(query, key, value, **({"config": "bf16"} | arguments))


def step(query=QUERY, key=KEY, value=VALUE, **arguments):
    state = vc_jax.init_state("bf16", 2, 20, 2, 16)
    arguments = {"config": "bf16", "step": 0, "schedule": SCHEDULE} | arguments
    return vc_jax.attention_step(query, key, value, state, **arguments)


def explain(query=QUERY, key=KEY, value=VALUE, **arguments):
    return vc_jax.explain(query, key, value, **({"config": "bf16"} | arguments))


ENTRIES = {"call": call, "step": step, "explain": explain}


def test_every_parameter_of_jax_nn_is_there_with_its_kind_and_default():
    ours = inspect.signature(vc_jax.dot_product_attention).parameters
    for name, theirs in inspect.signature(jax.nn.dot_product_attention).parameters.items():
        assert ours[name].kind == theirs.kind
        assert ours[name].default == theirs.default
    assert list(ours)[:5] == ["query", "key", "value", "bias", "mask"]
    extra = {"config": "int8", "state": None}
    assert {n: ours[n].default for n in extra} == extra


def test_explain_and_step_take_the_arguments_of_the_call():
    names = set(inspect.signature(vc_jax.dot_product_attention).parameters)
    assert set(inspect.signature(vc_jax.explain).parameters) == names
    assert names <= set(inspect.signature(vc_jax.attention_step).parameters)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bias", jnp.zeros((1, 1, 3, 20))),
        ("bias", 0.0),
        ("is_causal", True),
        ("local_window_size", 8),
        ("local_window_size", 0),
        ("local_window_size", (4, 4)),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(entry, name, value):
    with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
        ENTRIES[entry](**{name: value})


def test_a_numpy_false_is_not_causal():
    call(is_causal=np.False_)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("error", "name", "arguments"),
    [
        (ValueError, "query", {"query": QUERY[0, 0]}),
        (ValueError, "query", {"query": QUERY[None]}),
        (ValueError, "query", {"query": QUERY[:, :0]}),
        (ValueError, "key", {"key": KEY[0]}),
        (ValueError, "key", {"key": KEY[:, :0], "value": VALUE[:, :0]}),
        (ValueError, "key", {"key": KEY[:1], "value": VALUE[:1]}),
        (ValueError, "key", {"key": KEY[..., :8], "value": VALUE[..., :8]}),
        (ValueError, "query", {"query": QUERY[:, :, :3]}),
        (ValueError, "value", {"value": VALUE[..., :8]}),
        (ValueError, "value", {"value": VALUE[:, :19]}),
        (ValueError, "value", {"value": VALUE[:, :, :1]}),
        (ValueError, "value", {"value": VALUE[:1]}),
        (ValueError, "value", {"value": VALUE[0]}),
        (TypeError, "query", {"query": QUERY.astype(jnp.int32)}),
        (TypeError, "key", {"key": KEY.astype(jnp.int8)}),
        (TypeError, "value", {"value": VALUE.astype(bool)}),
        (TypeError, "value", {"value": VALUE.astype(jnp.complex64)}),
        (TypeError, "query", {"query": [[1.0]]}),
        (ValueError, "scale", {"scale": jnp.ones(2)}),
        (ValueError, "scale", {"scale": float("nan")}),
        (ValueError, "scale", {"scale": float("inf")}),
        (TypeError, "scale", {"scale": "auto"}),
        (ValueError, "key_value_seq_lengths", {"key_value_seq_lengths": [20]}),
        (ValueError, "key_value_seq_lengths", {"key_value_seq_lengths": [20, 21]}),
        (ValueError, "key_value_seq_lengths", {"key_value_seq_lengths": [-1, 20]}),
        (ValueError, "key_value_seq_lengths", {"key_value_seq_lengths": [[20, 20]]}),
        (TypeError, "key_value_seq_lengths", {"key_value_seq_lengths": [20.0, 20.0]}),
        (TypeError, "key_value_seq_lengths", {"key_value_seq_lengths": [True, True]}),
        (ValueError, "query_seq_lengths", {"query_seq_lengths": [3, 4]}),
        (ValueError, "query_seq_lengths", {"query_seq_lengths": 3}),
        (TypeError, "query_seq_lengths", {"query_seq_lengths": np.array([1.0, 2.0])}),
        (ValueError, "mask", {"mask": np.ones((2, 1, 1, 19), bool)}),
        (ValueError, "mask", {"mask": np.ones((3, 1, 1, 20), bool)}),
        (ValueError, "mask", {"mask": np.ones((2, 2, 1, 20), bool)}),
        (ValueError, "mask", {"mask": np.ones((2, 20), bool)}),
        (TypeError, "mask", {"mask": np.ones((2, 1, 1, 20), np.complex64)}),
        (ValueError, "config", {"config": "fp7"}),
        (TypeError, "config", {"config": 8}),
        (TypeError, "config", {"config": None}),
        (ValueError, "implementation", {"implementation": "cuda"}),
    ],
)
def test_a_wrong_argument_is_named(entry, error, name, arguments):
    with pytest.raises(error, match=rf"^{name}\b"):
        ENTRIES[entry](**arguments)


def test_nvfp4_names_a_head_size_that_has_no_groups_of_16():
    inputs = video_like(0, 1, 3, 20, 1, 1, 40)
    for entry in (vc_jax.dot_product_attention, vc_jax.explain):
        with pytest.raises(ValueError, match=r"head dim.*multiple of 16.*40"):
            entry(*inputs, config="nvfp4")


def test_unknown_keywords_are_refused():
    with pytest.raises(TypeError, match="dropout"):
        call(dropout=0.1)


@pytest.mark.parametrize("name", ["hopper", "mma", "cudnn"])
def test_a_named_implementation_raises_its_reason_where_it_cannot_run(name):
    if jax.default_backend() != "cpu":
        pytest.skip("this machine may support it")
    with pytest.raises(NotImplementedError, match=name):
        call(config="int8", implementation=name)
    found = vc_jax.explain(QUERY, KEY, VALUE, implementation=name)
    assert found.implementation is None
    assert list(found.reasons) == [name]
    assert len(found.reasons[name]) > 10


def test_the_implementation_changes_only_the_speed():
    np.testing.assert_array_equal(call(implementation="xla"), call())


def test_all_reasons_come_out_together_if_nothing_is_left(monkeypatch):
    xla = dataclasses.replace(
        _implementations.IMPLEMENTATIONS["xla"], unsupported=lambda request: "is on holiday"
    )
    monkeypatch.setitem(_implementations.IMPLEMENTATIONS, "xla", xla)
    with pytest.raises(NotImplementedError, match=r"hopper.*mma.*cudnn.*xla: is on holiday"):
        call()
    assert explain().implementation is None


def test_the_fastest_implementation_that_supports_the_call_is_taken(monkeypatch):
    def run(static, prepared, dtype):
        batch, heads, rows, size = prepared.query_codes.shape
        return jnp.full((batch, rows, heads, size), 7.0), None

    def unsupported(request):
        return "needs config='int8'" if request.config.qk != "int8" else None

    fake = _implementations.Implementation(unsupported, on_prepared=run)
    monkeypatch.setitem(_implementations.IMPLEMENTATIONS, "hopper", fake)
    query = QUERY * 1.5  # nothing compiled for it yet
    assert (np.asarray(call(query[:, :2], config="int8")) == 7).all()
    assert not (np.asarray(call(query[:, :2])) == 7).any()
    found = vc_jax.explain(QUERY, KEY, VALUE)
    assert found.implementation == "hopper"
    assert "hopper" in found.reasons["xla"]


@pytest.mark.parametrize(
    ("capability", "preset", "chosen"),
    [
        ((9, 0), "int8", "hopper"),
        ((8, 9), "int8", "mma"),
        ((12, 0), "fp8", "mma"),
        ((12, 0), "nvfp4", "xla"),
        ((8, 0), "int8", "xla"),
    ],
)
def test_the_compute_capability_chooses_the_kernel(monkeypatch, capability, preset, chosen):
    device = ("gpu", capability, "a card")
    monkeypatch.setattr(_dispatch, "default_device", lambda: device)
    shape = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16)
    found = vc_jax.explain(shape, shape, shape, config=preset)
    assert found.implementation == chosen
    if chosen == "hopper":
        assert found.reasons["mma"] == "slower than hopper"
    if capability == (8, 0):
        needed = "needs compute capability 8.9 or 9.0 or 12.0, this GPU has 8.0"
        assert found.reasons["mma"] == needed


@pytest.mark.parametrize("name", PRESETS)
def test_explain_says_in_words_which_implementation_runs_and_why_not_the_others(name):
    found = vc_jax.explain(QUERY, KEY, VALUE, config=name)
    assert dataclasses.is_dataclass(found)
    assert found.implementation in _implementations.IMPLEMENTATIONS
    assert set(found.reasons) == set(_implementations.IMPLEMENTATIONS) - {found.implementation}
    assert all(found.reasons.values())
    assert found.config == vc_jax.PRESETS[name]
    text = str(found)
    assert text.startswith(f"{found.implementation} runs this call")
    assert all(f"{other}: {reason}" in text for other, reason in found.reasons.items())


@pytest.mark.parametrize(
    ("length", "config", "word"),
    [
        (1024, "fp8", "slower than config='bf16'"),
        (8192, "int8", "faster than config='bf16'"),
        (3000, vc_jax.AttentionConfig(smooth_values=False), "faster than config='bf16'"),
        (8192, "nvfp4", "slower than config='bf16' at any length"),
        (8192, "bf16", None),
    ],
)
def test_explain_says_whether_a_call_pays_on_a_card_that_was_measured(
    monkeypatch, length, config, word
):
    shape = jax.ShapeDtypeStruct((1, length, 24, 128), jnp.bfloat16)
    monkeypatch.setattr(_dispatch, "default_device", lambda: ("gpu", (9, 0), "NVIDIA H200"))
    monkeypatch.setattr(_attention, "default_device", lambda: ("gpu", (9, 0), "NVIDIA H200"))
    found = vc_jax.explain(shape, shape, shape, config=config)
    assert (found.advice is None) == (word is None)
    if found.advice is not None and word is not None:
        assert found.advice.startswith(word)
        assert found.advice in str(found)
    monkeypatch.setattr(_attention, "default_device", lambda: ("gpu", (9, 0), "another card"))
    other = vc_jax.explain(shape, shape, shape, config=config)
    assert other.advice is None or other.implementation == "xla"


def test_explain_takes_shapes_instead_of_arrays():
    arguments = {
        "mask": jnp.ones((2, 1, 1, 20), bool),
        "query_seq_lengths": jnp.array([3, 2]),
        "key_value_seq_lengths": jnp.array([20, 2]),
        "scale": jnp.float32(0.5),
        "state": vc_jax.init_state("int8", 2, 20, 2, 16),
    }
    shapes, abstract = jax.eval_shape(lambda: ((QUERY, KEY, VALUE), arguments))
    want = vc_jax.explain(QUERY, KEY, VALUE, **arguments)
    assert vc_jax.explain(*shapes, **abstract) == want
    assert vc_jax.explain(*shapes, **arguments) == want
    with pytest.raises(NotImplementedError, match="key_value_seq_lengths"):
        vc_jax.explain(*shapes, mask=jax.ShapeDtypeStruct((2, 4, 1, 20), bool))


def test_explain_computes_nothing():
    size = 10**6  # 2 × 10^12 scores, 1 TB of values
    shape = jax.ShapeDtypeStruct((16, size, 128, 128), jnp.float32)
    assert vc_jax.explain(shape, shape, shape).implementation


def test_a_long_call_that_falls_to_slow_xla_warns_once_a_shape():
    if jax.default_backend() != "cpu":
        pytest.skip("this machine may have a kernel")
    shape = jax.ShapeDtypeStruct((1, 8192, 1, 16), jnp.float32)

    def run(**arguments):
        jax.eval_shape(lambda *x: vc_jax.dot_product_attention(*x, **arguments), *[shape] * 3)

    _dispatch._warn_slow.cache_clear()
    run(implementation="xla")
    with pytest.warns(UserWarning, match=r"query \[1, 8192, 1, 16\].*slow XLA") as caught:
        run()
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    shape = jax.ShapeDtypeStruct((1, 8193, 1, 16), jnp.float32)
    with pytest.warns(UserWarning, match=r"8193.*slow XLA"):
        run()


def test_a_state_that_no_call_could_take_is_named_at_once():
    with pytest.raises(ValueError, match="head_dim must be a multiple of 16 for NVFP4, got 40"):
        vc_jax.init_state("nvfp4", 1, 128, 1, 40)


def test_forward_mode_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"no forward-mode derivative.*jax\.grad"):
        jax.jvp(lambda q: vc_jax.dot_product_attention(q, KEY, VALUE), (QUERY,), (QUERY,))


def test_a_configuration_is_frozen_hashable_and_equal_by_value():
    config = AttentionConfig()
    assert config == AttentionConfig()
    assert hash(config) == hash(AttentionConfig())
    assert config != AttentionConfig(rotate=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rotate = False
    assert vc_jax.PRESETS["int8"] == config
    fields = {f.name for f in dataclasses.fields(config)}
    assert {"qk", "pv", "softmax", "center_keys", "rotate", "smooth_values"} <= fields
    assert "balance_channels" in fields
    assert {"clusters", "lloyd_steps"} <= fields


def test_presets_are_what_their_names_say():
    formats = {name: (c.qk, c.pv, c.softmax) for name, c in vc_jax.PRESETS.items()}
    assert formats == {
        "bf16": ("none", "none", "exp"),
        "int8": ("int8", "e4m3", "expcast"),
        "fp8": ("e4m3", "e4m3", "expcast"),
        "nvfp4": ("nvfp4", "nvfp4", "exp"),
    }
    for name, config in vc_jax.PRESETS.items():
        on = name != "bf16"
        assert config.center_keys == config.rotate == config.smooth_values == on


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("qk", {"qk": "int4"}),
        ("pv", {"pv": "fp8"}),
        ("softmax", {"softmax": "sigmoid"}),
        ("softmax", {"qk": "nvfp4", "pv": "nvfp4", "softmax": "expcast"}),
        ("pv", {"qk": "int8", "pv": "nvfp4"}),
        ("pv", {"qk": "none", "pv": "e4m3"}),
        ("center_keys", {"center_keys": 1}),
        ("rotate", {"rotate": None}),
        ("smooth_values", {"smooth_values": "yes"}),
        ("clusters", {"clusters": 0}),
        ("clusters", {"clusters": 2.0}),
        ("lloyd_steps", {"lloyd_steps": 0}),
        ("lloyd_steps", {"lloyd_steps": True}),
        ("warm_lloyd_steps", {"warm_lloyd_steps": -1}),
    ],
)
def test_a_wrong_field_of_a_configuration_is_named(field, arguments):
    with pytest.raises(ValueError, match=rf"AttentionConfig\.{field}\b"):
        AttentionConfig(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"softmax": "expcast"}, {"center_keys": True}, {"rotate": True}, {"smooth_values": True}],
)
def test_an_unquantised_configuration_with_a_field_that_would_do_nothing_is_refused(arguments):
    """Nothing that a caller passes is ignored."""
    off = {"softmax": "exp", "center_keys": False, "rotate": False, "smooth_values": False}
    with pytest.raises(ValueError, match="AttentionConfig"):
        AttentionConfig(qk="none", pv="none", **(off | arguments))


def test_importing_the_package_imports_neither_flax_nor_the_models():
    code = "import sys, vc_jax; print([m for m in sys.modules if 'flax' in m or 'models' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("field", "value"),
    [("clusters", 3), ("lloyd_steps", 5), ("warm_lloyd_steps", 2), ("lloyd_stride", 2)],
)
def test_a_clustering_field_without_clustering_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be left out when smooth_values"):
        AttentionConfig(smooth_values=False, **{field: value})


def test_lengths_may_be_a_list_of_traced_numbers():
    def out(*lengths):
        return call(config="int8", key_value_seq_lengths=list(lengths))

    np.testing.assert_array_equal(jax.jit(out)(7, 20), out(7, 20))
    with pytest.raises(ValueError, match=r"key_value_seq_lengths must have shape \(2,\)"):
        call(key_value_seq_lengths=[])


@pytest.mark.parametrize("name", ["int8", "fp8", "nvfp4"])
def test_switching_to_64_bits_between_calls_changes_nothing(name):
    before = call(config=name)
    with jax.enable_x64(True):
        after = call(config=name)
    np.testing.assert_array_equal(before, after)


def test_plain_attention_names_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"value must be float \[b s k h\] with .* s = \d+"):
        vc_jax.plain_attention(QUERY, KEY, VALUE[:, :5])


def test_preparation_takes_a_presets_name_and_refuses_others():
    prepared = jax.eval_shape(lambda *x: vc_jax.prepare(*x, "fp8"), QUERY, KEY, VALUE)
    assert prepared.key_codes.dtype == jnp.float8_e4m3fn
    with pytest.raises(ValueError, match="config must be"):
        vc_jax.prepare(QUERY, KEY, VALUE, "int9")
