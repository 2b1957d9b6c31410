"""The models' own rules of promotion, whichever a user has set for own code."""

import functools
from collections.abc import Callable

import jax


def own_promotion[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A public function or method under JAX's usual rules of promotion.

    `jax_numpy_rank_promotion="raise"` and `jax_numpy_dtype_promotion="strict"` are about the code
    that a user writes, not about the models it calls.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return call
