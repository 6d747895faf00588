"""Observes optimizer steps on an averaged module without a strategy."""

from collections import Counter
from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.drift.shared_weights import SharedWeights
from lightning_sparse.engine.optimizer_steps import ParameterStepObserver, changes_weights

MAX_UNSEEN = 20
"""Steps of an optimizer without a call of ``averager.step()`` before a warning."""
LOST_STEP = (
    "An optimizer's step while the model has the mean of all workers' weights (in averaged_weights(), in validation) "
    "would be lost, because each worker's own weights are restored afterwards. Step before or after."
)


class DriftStepObserver(ParameterStepObserver):
    """Rejects lost steps, and warns about missing calls unless a strategy calls ``averager.step()`` in ``on_step``."""

    def __init__(self, observed: Iterable[Tensor], shared: SharedWeights) -> None:
        super().__init__(observed, "guides/local-training")
        self._shared = shared
        self._steps_since_call: Counter[int] = Counter()

    def _before(self, optimizer: Optimizer) -> None:
        if self._shared.is_loaded and changes_weights(optimizer):
            raise RuntimeError(LOST_STEP)

    def _after(self, optimizer: Optimizer) -> None:
        if self.on_step is not None or not changes_weights(optimizer):
            return
        self._steps_since_call[id(optimizer)] += 1
        if self._steps_since_call[id(optimizer)] == MAX_UNSEEN:
            self._warn(
                f"{type(optimizer).__name__} took {MAX_UNSEEN} steps without a call of averager.step(), so "
                "workers exchange nothing and their weights differ. Call it after each optimizer step",
            )

    def averager_stepped(self) -> None:
        """Note a call of ``averager.step()``."""
        self._steps_since_call.clear()
