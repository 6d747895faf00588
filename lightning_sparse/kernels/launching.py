"""Whether Triton's kernels run on a device, and their launch there."""

# The annotations of the kernels stay strings, so that the module can be imported without triton.
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn

try:
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]
except ImportError:  # PyTorch for CPUs comes without it
    triton = tl = None

__all__ = ["is_available", "jit", "launch", "tl", "triton"]

NUMBERS = {
    *("num_elements", "capacity", "programs", "num_layers", "num_slices", "num_workers", "divisor"),
    *("ends_row", "values_row", "offsets_row"),
}
"""Arguments of kernels of which Triton would compile each value that is 1 or a multiple of 16 for itself."""


def jit(kernel: Callable[..., Any]) -> Any:
    """Makes a kernel of a function; None where there is no triton."""
    if triton is None:
        return None
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    keep = {"do_not_specialize": [name for name in names if name in NUMBERS]}
    # A load of bits that is not known to be aligned has them lie as the accesses to coordinates do, one a thread; else
    # they go from thread to thread in every round. Parts of a payload begin anywhere.
    unaligned = ("bits", "values", "offsets", "ends")
    return triton.jit(kernel, **keep, do_not_specialize_on_alignment=[name for name in names if name in unaligned])


@jit
def _nothing(place: tl.tensor) -> None:
    tl.store(place, 0)


def launch(kernel: Any, programs: int | tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Launches so many programs of a kernel on the device of its first argument."""
    grid = (programs,) if isinstance(programs, int) else programs
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments, **constants)


def is_available(device: torch.device) -> bool:
    """Whether kernels run for tensors of this device: it is a GPU, triton is installed and can build them.

    Said once where they cannot be built, as without a C compiler: the plain way gives the same bits and takes longer.
    """
    return triton is not None and device.type == "cuda" and _can_build(device)


@lru_cache(maxsize=64)
def _can_build(device: torch.device) -> bool:
    try:
        launch(_nothing, 1, torch.zeros(1, dtype=torch.int32, device=device))
    except Exception as error:  # whatever stops a compiler
        rank_zero_warn(
            f"lightning_sparse: the fused kernels cannot be built for {device} and are not used: selecting takes "
            f"longer and waits for the device. Triton says: {type(error).__name__}: {error}"
        )
        return False
    return True
