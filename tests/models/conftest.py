"""Small models without compiling an initialiser."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vc_jax.models.video_dit import VideoDiT, VideoDiTConfig


@pytest.fixture(scope="session")
def random_model() -> Callable[..., VideoDiT]:
    """A function of a config: the model with every parameter random, output layer included."""

    def build(config: VideoDiTConfig, scale: float = 0.15) -> VideoDiT:
        rng = np.random.default_rng(0)
        model = nnx.eval_shape(lambda: VideoDiT(config, rngs=nnx.Rngs(0)))
        definition, abstract = nnx.split(model, nnx.Param)
        filled = jax.tree.map(
            lambda a: jnp.asarray(scale * rng.standard_normal(a.shape), jnp.float32), abstract
        )
        return nnx.merge(definition, filled)

    return build
