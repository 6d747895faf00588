"""Kernels in Triton and C. Tensor operations that give the same bits exist for each of them."""
