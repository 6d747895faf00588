"""Kernels in Triton and C. Tensor operations that give the same bits exist for each of them."""

from lightning_sparse.kernels.launching import is_available, launch, tl, warm_up

__all__ = ["is_available", "launch", "tl", "warm_up"]
