"""Kernels in Triton and C. Tensor operations replace each of them, with the same bits.

Only weights after an exchange of drifts on a CPU may differ in the last bit.
"""
