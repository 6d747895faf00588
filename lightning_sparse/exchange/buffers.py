"""Memory that the exchange uses again in every step, and the way to the host."""

import torch
from torch import Tensor

PATIENCE = 100
"""What so many steps in a row needed less than a quarter of, or not at all, is given back."""


class Buffers:
    """Tensors by name that are allocated once, grow when more is asked for, and shrink when a burst is long over.

    Capacities change a little from step to step; a fresh allocation for each would cost page faults on a CPU.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[object, torch.dtype, torch.device], Tensor] = {}
        self._most: dict[tuple[object, torch.dtype, torch.device], int] = {}
        self._steps = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(held.nbytes for held in self._held.values())

    def forget(self) -> None:
        """Gives everything back, where sizes are no longer those of before. Who was given memory keeps it."""
        for key in list(self._held):
            self._drop(key)

    def end_step(self) -> None:
        """Looks now and then what is no longer needed."""
        self._steps += 1
        if self._steps % PATIENCE == 0:
            for key, held in list(self._held.items()):
                if 4 * self._most.get(key, 0) < held.numel():
                    self._drop(key)
            self._most.clear()

    def take(
        self, name: object, numel: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False
    ) -> Tensor:
        """Returns a tensor of shape (numel,) with whatever is in it; the same memory for the same name."""
        key = (name, dtype, device)
        self._most[key] = max(numel, self._most.get(key, 0))
        held = self._held.get(key)
        if held is None or held.numel() < numel:
            room = numel
            if held is not None:
                # Freed before the other one is made. Half as much again, so that a slowly growing density does not
                # allocate in every step.
                del held
                self._drop(key)
                room += numel // 2
            made = torch.empty(room, dtype=dtype, device=device)
            held = self._held[key] = made.pin_memory() if pinned else made
        return held[:numel]

    def _drop(self, key: tuple[object, torch.dtype, torch.device]) -> None:
        let_go(self._held.pop(key))


def let_go(tensor: Tensor) -> None:
    """Keeps memory that is about to be freed from others until what is enqueued in this stream is done with it.

    Without it the allocator goes by the stream in which the tensor was made, and that may be another one.
    """
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def without_wait(table: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a tensor of the CPU on another device, for which the host does not wait."""
    if device.type == "cuda":
        return table.pin_memory().to(device, non_blocking=True)  # of memory that is not pinned it would
    return table.to(device)


class HostCopy:
    """A copy of a tensor on the host, begun at once; on a GPU by way of pinned memory, while other work is enqueued.

    Args:
        tensor: what is copied.
        buffers: where the pinned memory is held.
    """

    def __init__(self, tensor: Tensor, buffers: Buffers) -> None:
        self._copy, self._event = tensor, None
        if tensor.device.type == "cuda":
            pinned = buffers.take("on the host", tensor.numel(), tensor.dtype, torch.device("cpu"), pinned=True)
            self._copy = pinned.view(tensor.shape)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """Returns the copy once it is there: the step's wait for the device."""
        if self._event is None:
            return self._copy.cpu()
        self._event.synchronize()
        return self._copy.clone()
