"""Kernels for GPUs, in Triton, and how they are launched. Whatever they do there is a plain way for as well."""

from lightning_sparse.kernels.launching import is_available, launch, tl, warm_up

__all__ = ["is_available", "launch", "tl", "warm_up"]
