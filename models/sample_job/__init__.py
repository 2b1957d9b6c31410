"""`vc-jax sample`: one clip sampled with several attention methods, and a report."""

from .clip import InputError
from .job import FILES, not_finite, run, summary
from .options import Options, default_size, default_steps

__all__ = [
    "FILES",
    "InputError",
    "Options",
    "default_size",
    "default_steps",
    "not_finite",
    "run",
    "summary",
]
