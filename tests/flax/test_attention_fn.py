import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vc_jax
from vc_jax.flax import attention_fn

B, T, FEATURES, HEADS = 2, 150, 64, 2
INPUTS = jax.random.normal(jax.random.key(0), (B, T, FEATURES))
VALID = jnp.arange(T) < jnp.array([[150], [90]])
KEEP = nn.make_attention_mask(VALID, VALID)
KEYS_ONLY = VALID[:, None, None]


def nnx_layer(function, **options):
    return nnx.MultiHeadAttention(
        num_heads=HEADS,
        in_features=FEATURES,
        decode=False,
        rngs=nnx.Rngs(0),
        attention_fn=function,
        **options,
    )


def linen_layer(function, **options):
    return nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=function, **options)


def run_nnx(function, inputs=INPUTS, mask=None, **options):
    return nnx_layer(function, **options)(inputs, mask=mask)


def run_linen(function, inputs=INPUTS, mask=None, **options):
    layer = linen_layer(function, **options)
    parameters = layer.init(jax.random.key(1), INPUTS)
    return layer.apply(parameters, inputs, mask=mask)


HOSTS = [
    pytest.param(run_nnx, nnx.dot_product_attention, id="nnx"),
    pytest.param(run_linen, nn.dot_product_attention, id="linen"),
]


def error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize(("run", "own"), HOSTS)
@pytest.mark.parametrize(("config", "limit"), [("bf16", 1e-5), ("int8", 0.05), ("nvfp4", 0.3)])
def test_a_layer_computes_what_it_computes_with_flaxs_own_function(run, own, config, limit):
    difference = error(run(attention_fn(config)), run(own))
    assert difference < limit
    if config != "bf16":
        assert difference > 1e-5


@pytest.mark.parametrize(("run", "own"), HOSTS)
def test_the_float_mask_of_make_attention_mask_is_honoured(run, own):
    assert KEEP.dtype == jnp.float32
    got, want = run(attention_fn("bf16"), mask=KEEP), run(own, mask=KEEP)
    assert error(got[0], want[0]) < 1e-5
    assert error(got[1, :90], want[1, :90]) < 1e-5
    assert error(got[1, :90], run(own)[1, :90]) > 0.01


@pytest.mark.parametrize(("run", "own"), HOSTS)
def test_masked_keys_change_nothing(run, own):
    del own
    spoiled = jnp.where(VALID[..., None], INPUTS, 1e4)
    function = attention_fn("int8")
    clean, other = (run(function, x, mask=KEYS_ONLY)[1, :90] for x in (INPUTS, spoiled))
    np.testing.assert_array_equal(clean, other)


def test_a_key_mask_may_be_traced():
    layer = nnx_layer(attention_fn("int8"))
    traced = nnx.jit(lambda layer, x, mask: layer(x, mask=mask))(layer, INPUTS, KEYS_ONLY)
    assert error(traced, layer(INPUTS, mask=KEYS_ONLY)) < 0.02


def test_a_mask_of_queries_and_keys_may_be_traced():
    layer = nnx_layer(attention_fn("int8"))
    traced = nnx.jit(lambda layer, x, mask: layer(x, mask=mask))(layer, INPUTS, KEEP)
    assert error(traced, layer(INPUTS, mask=KEEP)) < 0.02


@pytest.mark.parametrize(("run", "own"), HOSTS)
def test_dropout_raises_unless_deterministic(run, own):
    del own
    function = attention_fn("int8")
    quiet = run(function, dropout_rate=0.5, deterministic=True)
    np.testing.assert_array_equal(quiet, run(function))


def test_dropout_that_is_not_deterministic_raises():
    layer = nnx_layer(attention_fn("int8"), dropout_rate=0.5, deterministic=False)
    with pytest.raises(NotImplementedError, match="dropout_rate"):
        layer(INPUTS, rngs=nnx.Rngs(dropout=0))
    linen = linen_layer(attention_fn("int8"), dropout_rate=0.5, deterministic=False)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    with pytest.raises(NotImplementedError, match="dropout_rate"):
        linen.init(rngs, INPUTS)


def test_causal_attention_raises():
    with pytest.raises(NotImplementedError, match="is_causal"):
        nnx_layer(attention_fn("int8"))(INPUTS, is_causal=True)


def test_sowing_weights_raises():
    with pytest.raises(NotImplementedError, match="module"):
        nnx_layer(attention_fn("int8"))(INPUTS, sow_weights=True)


def test_a_precision_that_is_asked_for_raises():
    with pytest.raises(NotImplementedError, match="precision"):
        run_nnx(attention_fn("int8"), precision="highest")


def test_a_float32_softmax_can_be_asked_of_bf16_only():
    out = run_linen(attention_fn("bf16"), force_fp32_for_softmax=True)
    np.testing.assert_array_equal(out, run_linen(attention_fn("bf16")))
    with pytest.raises(NotImplementedError, match="force_fp32_for_softmax"):
        run_linen(attention_fn("int8"), force_fp32_for_softmax=True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("run", "own"), HOSTS)
def test_the_layers_dtype_is_the_outputs(run, own, dtype):
    del own
    assert run(attention_fn("fp8"), dtype=dtype).dtype == dtype


QKV = jax.random.normal(jax.random.key(2), (3, 2, 3, 140, 2, 32))


def test_extra_batch_axes_are_one_batch():
    got = attention_fn("int8")(*QKV)
    flat = attention_fn("int8")(*QKV.reshape(3, 6, 140, 2, 32))
    assert got.shape == QKV.shape[1:]
    np.testing.assert_array_equal(got.reshape(flat.shape), flat)


@pytest.mark.parametrize("shape", [(2, 3, 1, 1, 140), (1, 3, 1, 1, 140), (1, 1, 140), (140,)])
def test_masks_broadcast_over_extra_batch_axes_as_in_flax(shape):
    mask = jax.random.bernoulli(jax.random.key(3), 0.6, shape)
    got = attention_fn("bf16")(*QKV, mask=mask)
    full = jnp.broadcast_to(mask, (2, 3, 2, 140, 140))
    assert error(got, nnx.dot_product_attention(*QKV, mask=full)) < 1e-5


def test_a_known_mask_with_extra_batch_axes_is_known_under_jit():
    keep = np.broadcast_to(np.arange(140) < 100, (2, 3, 1, 140, 140))
    got = jax.jit(lambda *qkv: attention_fn("bf16")(*qkv, mask=keep))(*QKV)
    assert error(got, nnx.dot_product_attention(*QKV, mask=keep)) < 1e-5


def test_lengths_are_those_of_the_public_call():
    lengths = jnp.array([[140, 100, 3], [1, 77, 128]])
    got = attention_fn("int8")(*QKV, key_value_seq_lengths=lengths)
    want = vc_jax.dot_product_attention(
        *QKV.reshape(3, 6, 140, 2, 32), key_value_seq_lengths=lengths.reshape(-1)
    )
    np.testing.assert_array_equal(got.reshape(want.shape), want)


def test_no_batch_axis_is_one_row():
    got = attention_fn("int8")(*QKV[:, 0, 0])
    np.testing.assert_array_equal(got, attention_fn("int8")(*QKV[:, 0, :1])[0])


@pytest.mark.parametrize("own", [nnx.dot_product_attention, nn.dot_product_attention])
def test_every_argument_of_flaxs_function_is_named_in_its_order(own):
    names = [p for p in inspect.signature(own).parameters if p != "promote_dtype"]
    ours = [p for p in inspect.signature(attention_fn("int8")).parameters]
    assert set(names) <= set(ours)
    positional = [p for p in ours if p in names]
    assert positional == [p for p in names if p in positional]


def test_an_argument_that_flax_does_not_have_raises():
    with pytest.raises(TypeError, match="input_positions"):
        nnx_layer(attention_fn("int8"))(INPUTS, input_positions=jnp.arange(T))


@pytest.mark.parametrize(
    "name", ["bias", "einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"]
)
def test_what_cannot_be_honoured_raises_by_name(name):
    with pytest.raises(NotImplementedError, match=name):
        attention_fn("int8")(*QKV[:, 0], **{name: jnp.einsum})


def test_mistakes_name_the_argument():
    with pytest.raises(ValueError, match="config must be one of"):
        attention_fn("int9")
    with pytest.raises(ValueError, match="implementation must be"):
        attention_fn("int8", implementation="fast")
    with pytest.raises(TypeError, match="scale must be"):
        attention_fn("int8", scale="big")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="key must have the batch axes"):
        attention_fn("int8")(QKV[0], QKV[1, :, :2], QKV[2])
    with pytest.raises(ValueError, match="mask must"):
        attention_fn("int8")(*QKV, mask=jnp.ones((3, 2, 1, 1, 140)))
    with pytest.raises(ValueError, match="key_value_seq_lengths must"):
        attention_fn("int8")(*QKV, key_value_seq_lengths=jnp.ones(6, jnp.int32))


def test_the_scale_is_honoured():
    got = attention_fn("bf16", scale=0.5)(*QKV[:, 0])
    want = jax.nn.dot_product_attention(*QKV[:, 0], scale=0.5)
    assert error(got, want) < 1e-5


def test_equal_settings_are_one_compilation():
    traces = []

    @nnx.jit
    def run(layer, x):
        traces.append(1)
        return layer(x)

    for _ in range(2):
        run(nnx_layer(attention_fn("int8")), INPUTS)
    assert len(traces) == 1


def test_gradients_reach_the_layers_parameters():
    layer = nnx_layer(attention_fn("int8"))
    gradients = nnx.grad(lambda layer: jnp.sum(layer(INPUTS) ** 2))(layer)
    for leaf in jax.tree.leaves(gradients):
        assert np.all(np.isfinite(leaf))
    assert float(jnp.abs(gradients.query.kernel[...]).max()) > 0


def test_a_scale_is_a_finite_number():
    assert attention_fn(scale=np.float32(0.5)) == attention_fn(scale=0.5)
    with pytest.raises(TypeError, match="scale must be a number"):
        attention_fn(scale=True)
    with pytest.raises(ValueError, match="scale must be finite"):
        attention_fn(scale=float("nan"))


def test_a_mask_that_is_no_array_is_named():
    x = jnp.ones((1, 4, 2, 16))
    with pytest.raises(TypeError, match="mask must be an array, got list"):
        attention_fn()(x, x, x, mask=[True] * 4)
