"""Checks that optimizer steps use averaged gradients."""

from collections.abc import Collection, Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.engine.optimizer_steps import ParameterStepObserver, UnexchangedParameters, changes_weights


class GradientStepObserver(ParameterStepObserver):
    """Warns once if an optimizer steps on gradients that were not averaged; rejects unexchanged gradients."""

    def __init__(self, module: nn.Module, parameters: Collection[Tensor]) -> None:
        super().__init__(parameters, "guides/big-models")
        self._unexchanged = UnexchangedParameters(module, parameters)
        self._averaged: set[int] = set()

    def averaged(self, parameters: Iterable[Tensor]) -> None:
        """Record the parameters whose gradients have just been averaged."""
        self._averaged.update(map(id, parameters))

    def require_exchanged(self, optimizer: Optimizer | None = None) -> None:
        """Raise RuntimeError if a gradient, of this optimizer or of the whole module, is not exchanged."""
        if (name := self._unexchanged.first(optimizer)) is not None:
            raise RuntimeError(
                f"{name!r} has a gradient that is not exchanged: the model's parameters have changed since the call of "
                "ShardGradientAverager. Call fully_shard first, and ShardGradientAverager after it."
            )

    def _before(self, optimizer: Optimizer) -> None:
        self.require_exchanged(optimizer)

    def _after(self, optimizer: Optimizer) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if id(weight) in self._ids]
        # Not before the step, because its closure may average.
        missing = sum(weight.grad is not None and id(weight) not in self._averaged for weight in weights)
        if missing and changes_weights(optimizer):
            self._warn(
                f"{type(optimizer).__name__} stepped on {missing} gradients that average_gradients() had not averaged, "
                "so replicas differ. Call it after the last backward, before optimizer.step() and zero_grad()",
            )
        self._averaged.difference_update(map(id, weights))
