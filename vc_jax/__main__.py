"""`python -m vc_jax`: the same as the command `vc-jax`."""

from vc_jax._cli import entry_point

if __name__ == "__main__":
    entry_point()
