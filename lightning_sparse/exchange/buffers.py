"""Memory that the exchange reuses in every step, and copies between host and device."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

STEPS_BEFORE_FREE = 100
"""After every so many steps, memory is freed if these steps used less than a quarter of it."""


class Buffers:
    """Tensors by name that are allocated once, grow on demand, and shrink long after a burst.

    Capacities change a little from step to step; a fresh allocation for each would cost page faults on a CPU.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[object, torch.dtype, torch.device], Tensor] = {}
        self._peaks: dict[tuple[object, torch.dtype, torch.device], int] = {}
        self._steps = 0

    def forget(self) -> None:
        """Free all memory, except that of tensors in use."""
        for key in list(self._held):
            record_current_stream(self._held.pop(key))

    def end_step(self) -> None:
        """Every STEPS_BEFORE_FREE steps, free memory that these steps did not need."""
        self._steps += 1
        if self._steps % STEPS_BEFORE_FREE == 0:
            for key, held in list(self._held.items()):
                if 4 * self._peaks.get(key, 0) < held.numel():
                    record_current_stream(self._held.pop(key))
            self._peaks.clear()

    def take(self, name: object, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of shape (numel,); the same memory for the same name, dtype and device."""
        key = (name, dtype, device)
        self._peaks[key] = max(numel, self._peaks.get(key, 0))
        capacity = numel
        if key in self._held and self._held[key].numel() < numel:
            # Free it before allocating the larger tensor. The tensor has 50 % reserve, so that a slowly growing density
            # does not allocate in every step.
            record_current_stream(self._held.pop(key))
            capacity += numel // 2
        if key not in self._held:
            self._held[key] = torch.empty(capacity, dtype=dtype, device=device)
        return self._held[key][:numel]


def record_current_stream(tensor: Tensor) -> None:
    """Delay reuse of a tensor's memory until the current stream is done.

    Call this before you free the tensor: the allocator considers only the stream that allocated it.
    """
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on a device, without waiting for the copy."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)  # a copy from unpinned memory would wait
    return tensor.to(device)


@lru_cache(maxsize=128)
def numbers_on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers as float64 on a device, cached, because a new copy needs pinned memory. Not to be modified."""
    return copy_to_device(torch.tensor(numbers, dtype=torch.float64), device)


def copy_to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Start copying a tensor to the host; return a function that waits.

    The function returns the copy. Until then, the caller can enqueue work on a GPU.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu
    copied = tensor.to("cpu", non_blocking=True)  # torch takes pinned memory for it
    event: torch.cuda.Event = torch.cuda.current_stream(tensor.device).record_event()

    def wait() -> Tensor:
        event.synchronize()
        return copied

    return wait
