"""Kernels in Triton and C. Tensor operations that give the same bits exist for each of them."""

from lightning_sparse.kernels.launching import is_available, launch, run_or_disable, tl

__all__ = ["is_available", "launch", "run_or_disable", "tl"]
