"""What PyTorch and Lightning look up again and again, though it stays what it is while tests run."""

import functools
import importlib.metadata
import sys
from typing import Any


def remember_entry_points() -> None:
    """To be called before Lightning is imported: every Trainer asks, and all installed packages are read each time."""
    find = importlib.metadata.entry_points

    @functools.cache
    def find_along(path: tuple[str, ...], **parameters: Any) -> Any:
        return find(**parameters)

    importlib.metadata.entry_points = lambda **parameters: find_along(tuple(sys.path), **parameters)


def remember_number_of_gpus() -> None:
    """Every step of an optimizer asks: without GPUs the same library is searched for in all folders each time."""
    import torch

    count = getattr(torch.cuda, "_raw_device_count_nvml", None)
    if count is None:
        return

    @functools.cache
    def count_or_fail() -> int:
        try:
            return count()
        except (OSError, AttributeError):
            return -1  # as PyTorch takes it

    torch.cuda._raw_device_count_nvml = count_or_fail
