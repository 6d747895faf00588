"""A running step is told from other methods of an optimizer."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_sparse.engine.optimizer_steps import _is_inside


class Wrapper(torch.optim.SGD):
    """Asks inside its step, and inside another method, whether its step runs."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        return _is_inside(self)

    def save(self) -> bool:
        return _is_inside(self)


def test_only_a_step_counts_as_a_running_step() -> None:
    optimizer = Wrapper([torch.nn.Parameter(torch.ones(1))])
    assert optimizer.step()
    assert not optimizer.save()
    assert not _is_inside(optimizer)
