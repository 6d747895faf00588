"""Launches Triton's kernels, and checks whether a device can run them."""

# Annotations of the kernels stay strings, so that the module imports without triton.
from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

try:
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]
except ImportError:  # PyTorch for CPUs does not include triton
    triton = tl = None

__all__ = ["is_available", "jit", "launch", "run_or_disable", "tl", "triton"]

UNSPECIALISED = {
    *("num_elements", "capacity", "programs", "num_layers", "num_slices", "num_workers", "divisor"),
    *("ends_row", "values_row", "offsets_row"),
}
"""Arguments for which Triton would otherwise compile kernels anew if they are 1 or a multiple of 16."""


def jit(kernel: Callable[..., Any]) -> Any:
    """Compile a function as a kernel; return None without triton."""
    if triton is None:
        return None
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    keep = {"do_not_specialize": [name for name in names if name in UNSPECIALISED]}
    # Without known alignment, each thread loads the bits of its own coordinates. With it, threads would exchange bits
    # in every round. Parts of a payload may start at any address.
    unaligned = ("bits", "values", "offsets", "ends")
    return triton.jit(kernel, **keep, do_not_specialize_on_alignment=[name for name in names if name in unaligned])


@jit
def _store_zero(address: tl.tensor) -> None:
    tl.store(address, 0)


def launch(kernel: Any, programs: int | tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument."""
    grid = (programs,) if isinstance(programs, int) else programs
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments, **constants)


def is_available(device: torch.device) -> bool:
    """Return whether this device is a GPU for which triton can build kernels."""
    return triton is not None and device.type == "cuda" and device not in _disabled and _can_build(device)


_disabled: set[torch.device] = set()


@lru_cache(maxsize=64)
def _can_build(device: torch.device) -> bool:
    return run_or_disable(device, lambda: launch(_store_zero, 1, torch.zeros(1, dtype=torch.int32, device=device)))


def run_or_disable(device: torch.device, run: Callable[[], None]) -> bool:
    """Return whether a run of kernels succeeds, which builds them.

    If a kernel cannot be built, this worker warns and from then on uses tensor operations on the device, which give the
    same bits and take longer.
    """
    try:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # a compiler may fail in any way
        _disabled.add(device)
        rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
        warnings.warn(
            f"lightning_sparse: {rank}the fused kernels cannot be built for {device} and are not used. Selecting takes "
            f"longer and synchronises with the device. Triton's error: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return False
    return True
