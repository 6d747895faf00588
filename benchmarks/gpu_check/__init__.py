"""Checks of the package on the GPUs of a machine."""
