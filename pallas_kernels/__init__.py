"""Fused GPU kernels on the prepared layout, one family of files a GPU generation."""
