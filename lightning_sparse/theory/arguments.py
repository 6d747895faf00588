"""Checks of the arguments of the theory's functions."""

from math import isfinite

from torch import Tensor


def is_whole(number: float) -> bool:
    """Return whether this is a whole number of at least 1."""
    return number >= 1 and number % 1 == 0


def require_real(*tensors: Tensor) -> None:
    """Raise ValueError if a tensor is complex."""
    for tensor in tensors:
        if tensor.is_complex():
            raise ValueError(f"Got {tensor.dtype}. Must be real: convert complex tensors with torch.view_as_real.")


def require(**numbers: float) -> None:
    """Raise ValueError if a number is outside the range of its name."""
    for name, value in numbers.items():
        if name.startswith("num_"):
            is_allowed, allowed = is_whole(value), "a whole number of at least 1"
        elif name in ("density", "contraction"):
            is_allowed, allowed = 0 < value <= 1, "within (0, 1]"
        elif name in ("learning_rate", "smoothness"):
            is_allowed, allowed = value > 0, "finite and above 0"
        else:
            is_allowed, allowed = value >= 0, "finite and at least 0"
        if not (is_allowed and isfinite(value)):
            raise ValueError(f"Invalid {name}={value}. Must be {allowed}.")
