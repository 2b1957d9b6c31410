"""The checker of shapes and dtypes that `conftest.py` puts on every function of the package."""

import sys
from collections.abc import Callable

import jax
from beartype import beartype

CHECKED = (
    *(f"vc_jax._{name}" for name in ("arguments", "compare", "config")),
    *(f"vc_jax._{name}" for name in ("expcast", "fused", "implementations", "order", "plain")),
    *(f"vc_jax._{name}" for name in ("prepare", "preprocessing", "quantize", "reference")),
    *(f"vc_jax._{name}" for name in ("schedule", "state", "vsmooth")),
    *("vc_jax.flax", "vc_jax.pallas_kernels"),
)
"""Modules whose functions are checked. `_attention`, `_dispatch` and the decorators of `_tracing`
stand between a warning and the line that it is about, from which a checker's frames would lead
away."""
CHECK_THEMSELVES = {
    "attention",
    "__call__",
    "_mask",
    "attention_fn",
    "attention_step",
    "bind",
    "check_arguments",
    "check_arrays",
    "check_integer",
    "check_kinds",
    "check_options",
    "compare",
    "default_clusters",
    "default_lloyd_stride",
    "dot_product_attention",
    "explain",
    "hadamard_matrix",
    "init_state",
    "kmeans",
    "plain_attention",
    "reset",
    "resolve_config",
    "unsupported",
}
"""Functions that take anything and say by name what is wrong with it. Tests of their own hold them
to that, and what they hand on is checked."""
CONTAINERS = {"Inputs.__init__", "Prepared8.__init__", "Validity.__init__"}
"""Of the dataclasses those that carry arrays are checked; configurations check themselves."""


def checked(function: Callable) -> Callable:
    """`function` with its annotations checked at every call, unless it does so itself."""
    if function.__name__ in CHECK_THEMSELVES:
        return function
    if function.__name__ == "__init__":
        return _of_arrays(beartype(function)) if function.__qualname__ in CONTAINERS else function
    return beartype(function)


def _of_arrays(check: Callable) -> Callable:
    """The check of a container, where the package makes it of arrays.

    JAX's transformations also build it: of placeholders, shapes, axes and partition specifications,
    and of arrays with an axis more.
    """

    def check_arrays(*arguments, **named) -> None:
        caller = sys._getframe(1)
        while caller.f_back and caller.f_globals["__name__"].startswith("jaxtyping"):
            caller = caller.f_back
        by_jax = caller.f_globals["__name__"].startswith("jax.")
        fields = [*arguments[1:], *named.values()]
        if not by_jax and all(x is None or isinstance(x, jax.Array | bool) for x in fields):
            check(*arguments, **named)

    return check_arrays
