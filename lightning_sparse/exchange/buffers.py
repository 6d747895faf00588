"""Memory that the exchange uses again in every step."""

import torch
from torch import Tensor


class Buffers:
    """Tensors by name that are allocated once and grow when more is asked for.

    Capacities change a little from step to step; a fresh allocation for each would cost page faults on a CPU.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[object, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: object, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a tensor of shape (numel,) with whatever is in it; the same memory for the same name."""
        key = (name, dtype, device)
        held = self._held.get(key)
        if held is None or held.numel() < numel:
            # Freed before the larger one is made. Half as much again, so that a slowly growing density does not
            # allocate in every step.
            self._held.pop(key, None)
            room = numel if held is None else numel + numel // 2
            held = self._held[key] = torch.empty(room, dtype=dtype, device=device)
        return held[:numel]
