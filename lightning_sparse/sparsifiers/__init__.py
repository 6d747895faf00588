"""Sparsifiers, one module each: pure tensors, no communication and no Lightning."""
