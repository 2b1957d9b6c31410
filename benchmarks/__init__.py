"""Benchmarks behind `vc-jax bench`."""
