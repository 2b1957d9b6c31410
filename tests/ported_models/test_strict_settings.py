"""The models and the sampler under JAX's strict promotion settings, as a user may set them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vc_jax.models.sampling import sample

from . import golden
from .test_bad_arguments import model, sampling_case, settings


@pytest.mark.parametrize("name", golden.NAMES)
def test_sampling_under_strict_promotion_is_the_same(name):
    port = model(name)
    latents, conditioning = sampling_case(name)
    latents = jax.tree.map(lambda x: jnp.ones_like(x) * 0.5, latents)
    chosen = settings(port, num_steps=2)

    def run():
        return sample(port, latents, conditioning, sampling=chosen, progress=False)

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        strict = run()
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(strict))
