"""Public functions say what they take and return; `tests/typing/user.py` is for the checkers."""

import inspect
import typing

import pytest

import vc_jax
import vc_jax.flax
from tests.typing import user

PUBLIC = {
    f"vc_jax.{name}": member
    for name in vc_jax.__all__
    if inspect.isroutine(member := inspect.unwrap(getattr(vc_jax, name)))
} | {"vc_jax.flax.attention_fn": vc_jax.flax.attention_fn}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_are_annotated(name):
    signature = inspect.signature(PUBLIC[name])
    assert signature.return_annotation is not signature.empty
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    bare = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.annotation is parameter.empty and parameter.kind not in several
    ]
    assert bare == []


@pytest.mark.parametrize("function", [vc_jax.dot_product_attention, vc_jax.attention_step])
def test_the_result_follows_from_return_residual(function):
    wanted = inspect.signature(function).parameters
    overloads = typing.get_overloads(function)
    assert len(overloads) == 3
    for overload in overloads:
        got = inspect.signature(overload).parameters
        assert list(got) == list(wanted)
        for name in set(got) - {"return_residual"}:
            assert str(got[name]) == str(wanted[name])


def test_the_users_module_imports():
    assert user.configurations()["mine"].clusters == 12
