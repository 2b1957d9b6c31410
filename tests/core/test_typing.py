"""Public functions say what they take and return; `tests/typing/user.py` is for the checkers."""

import ast
import inspect
import pathlib

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


@pytest.mark.parametrize(
    ("file", "name"),
    [("_attention.py", "dot_product_attention"), ("_state.py", "attention_step")],
)
def test_the_result_follows_from_return_residual(file, name):
    source = ast.parse((pathlib.Path(vc_jax.__file__).parent / file).read_text())
    found = [
        node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    signatures = []
    for node in found:
        flag = [arg for arg in node.args.kwonlyargs if arg.arg == "return_residual"]
        node.args.kwonlyargs.remove(*flag)
        node.args.kw_defaults.pop()
        signatures.append(ast.dump(node.args))
    assert len(found) == 4
    assert len(set(signatures)) == 1


def test_the_users_module_imports():
    assert user.configurations()["mine"].clusters == 12
