"""Kernels in Triton and C. Tensor operations replace each of them, with the same bits except in drifts."""
