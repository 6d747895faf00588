"""Memory that the exchange uses again in every step, and the way to the host."""

import torch
from torch import Tensor

PATIENCE = 100
"""So many uses in a row that need less than a quarter of what is held give the rest back."""


class Buffers:
    """Tensors by name that are allocated once, grow when more is asked for, and shrink when a burst is long over.

    Capacities change a little from step to step; a fresh allocation for each would cost page faults on a CPU.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[object, torch.dtype, torch.device], Tensor] = {}
        self._small_uses: dict[tuple[object, torch.dtype, torch.device], int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(one.nbytes for one in self._held.values())

    def take(
        self, name: object, numel: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False
    ) -> Tensor:
        """Returns a tensor of shape (numel,) with whatever is in it; the same memory for the same name."""
        key = (name, dtype, device)
        held = self._held.get(key)
        if held is not None:
            self._small_uses[key] = self._small_uses.get(key, 0) + 1 if 4 * numel < held.numel() else 0
        if held is None or held.numel() < numel or self._small_uses[key] >= PATIENCE:
            # Freed before the other one is made. Half as much again, so that a slowly growing density does not
            # allocate in every step.
            self._held.pop(key, None)
            self._small_uses[key] = 0
            room = numel if held is None else numel + numel // 2
            made = torch.empty(room, dtype=dtype, device=device)
            held = self._held[key] = made.pin_memory() if pinned else made
        return held[:numel]


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
