"""Checks that each optimizer step uses gradients that were averaged once."""

from collections.abc import Collection, Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.engine.grouping import local
from lightning_sparse.engine.optimizer_steps import ParameterStepObserver, UnexchangedParameters, changes_weights

MAX_EMPTY_CALLS = 20
"""Consecutive calls without a gradient before the warning."""


class AveragedStepObserver(ParameterStepObserver):
    """Warns once about a misplaced or repeated call of ``average_gradients``."""

    def __init__(self, module: nn.Module, parameters: Collection[Tensor]) -> None:
        super().__init__(parameters, "guides/big-models")
        self._unexchanged = UnexchangedParameters(module, parameters)
        self._averaged: dict[int, tuple[int, int]] = {}
        self._empty_calls = 0

    def require_new(self, parameters: Iterable[Tensor]) -> None:
        """Warn of repeated calls without gradients or without new ones.

        Raises:
            RuntimeError: only parameters that are not exchanged have gradients.
        """
        marks = _marks_of(parameters)
        self._empty_calls = 0 if marks else self._empty_calls + 1
        if not marks:
            self._require_exchanged(self._unexchanged.first())
        if self._empty_calls == MAX_EMPTY_CALLS:
            self._warn(
                "no gradients",
                f"average_gradients() found no gradients in {MAX_EMPTY_CALLS} calls. Call it after backward() and "
                "before zero_grad()",
            )
        if marks and marks.items() <= self._averaged.items():
            self._warn(
                "called twice",
                "average_gradients() was called twice for the same gradients. The second call sends them again and "
                "delays the rest. Call it once per optimizer step",
            )

    def averaged(self, parameters: Iterable[Tensor]) -> None:
        """Record the parameters whose gradients have just been averaged."""
        self._averaged |= _marks_of(parameters)

    def _before(self, optimizer: Optimizer) -> None:
        self._require_exchanged(self._unexchanged.first(optimizer))

    def _require_exchanged(self, name: str | None) -> None:
        if name is not None:
            raise RuntimeError(
                f"{name!r} has a gradient that is not exchanged: the model's parameters have changed since the call of "
                "ShardGradientAverager. Call fully_shard first, and ShardGradientAverager after it."
            )

    def _after(self, optimizer: Optimizer) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if id(weight) in self._ids]
        # Not before the step, because its closure may average.
        missing = sum(weight.grad is not None and id(weight) not in self._averaged for weight in weights)
        if missing and changes_weights(optimizer):
            self._warn(
                "not averaged",
                f"{type(optimizer).__name__} stepped on {missing} gradients that average_gradients() had not averaged, "
                "so replicas differ. Call it after the last backward, before optimizer.step() and zero_grad()",
            )
        for weight in weights:
            self._averaged.pop(id(weight), None)


def _marks_of(parameters: Iterable[Tensor]) -> dict[int, tuple[int, int]]:
    """Return address and version of each gradient by the parameter's id."""
    gradients = {id(parameter): local(parameter.grad) for parameter in parameters if parameter.grad is not None}
    return {key: (gradient.data_ptr(), gradient._version) for key, gradient in gradients.items()}
