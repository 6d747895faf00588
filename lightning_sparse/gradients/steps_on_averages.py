"""Whether each optimizer step uses gradients that were averaged, once, before it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.engine.grouping import local
from lightning_sparse.engine.optimizer_steps import Arguments, StepObserver, UnexchangedParameters, changes_weights

MOST_EMPTY_CALLS = 20
"""Consecutive calls without a gradient before the warning."""


class StepsOnAverages:
    """Warns once of a loop that calls ``average_gradients`` at the wrong place, or twice.

    Args:
        module: the model.
        parameters: those whose gradients are exchanged.
        holds_any_of: returns whether parameter groups have one of them.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Iterable[Tensor],
        holds_any_of: Callable[[Iterable[Mapping[str, Any]]], bool],
    ) -> None:
        held = list(parameters)
        self._ids = {id(parameter) for parameter in held}
        self._unexchanged = UnexchangedParameters(module, held)
        self._averaged: dict[int, tuple[int, int]] = {}
        self._said: set[str] = set()
        self._empty_calls = 0
        self._observer = StepObserver(holds_any_of, self._before, self._after)

    def close(self) -> None:
        """Observes no more steps."""
        self._observer.close()

    def require_new(self, parameters: Iterable[Tensor]) -> None:
        """Warns where these gradients are about to be averaged, and all of them have been since the last backward.

        Raises:
            RuntimeError: there are none, and the module has others.
        """
        marks = {id(one): _mark_of(one) for one in parameters if one.grad is not None}
        self._empty_calls = 0 if marks else self._empty_calls + 1
        if not marks:
            self._require_exchanged(self._unexchanged.first_with_gradient())
        if self._empty_calls == MOST_EMPTY_CALLS:
            self._warn(
                f"average_gradients() found no gradients in {MOST_EMPTY_CALLS} calls. Call it after backward() and "
                "before zero_grad()"
            )
        if marks and all(self._averaged.get(key) == mark for key, mark in marks.items()):
            self._warn(
                "average_gradients() was called twice for the same gradients. The second call sends them again and "
                "delays the rest. Call it once per optimizer step"
            )

    def averaged(self, parameters: Iterable[Tensor]) -> None:
        """Notes the parameters whose gradients were averaged just now."""
        self._averaged |= {id(one): _mark_of(one) for one in parameters if one.grad is not None}

    def _before(self, optimizer: Optimizer, _: Arguments) -> None:
        self._require_exchanged(self._unexchanged.first_of(optimizer))

    def _require_exchanged(self, name: str | None) -> None:
        if name is not None:
            raise RuntimeError(
                f"{name!r} has a gradient that is not exchanged: the model has other parameters than when "
                "shard_exchange was called. Call fully_shard first, and shard_exchange after it."
            )

    def _after(self, optimizer: Optimizer) -> None:
        own = [one for group in optimizer.param_groups for one in group["params"] if id(one) in self._ids]
        # Not before the step: its closure may average.
        missing = sum(one.grad is not None and id(one) not in self._averaged for one in own)
        if missing and changes_weights(optimizer):
            self._warn(
                f"{type(optimizer).__name__} stepped on {missing} gradients that average_gradients() had not averaged, "
                "so replicas differ. Call it after the last backward, before optimizer.step() and zero_grad()"
            )
        for parameter in own:
            self._averaged.pop(id(parameter), None)

    def _warn(self, text: str) -> None:
        if text[:40] not in self._said:
            self._said.add(text[:40])
            rank_zero_warn(f"lightning_sparse: {text}. See docs/big-models.md.")


def _mark_of(parameter: Tensor) -> tuple[int, int]:
    assert parameter.grad is not None
    gradient = local(parameter.grad)
    return gradient.data_ptr(), gradient._version
