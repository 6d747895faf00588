"""Observes optimizer steps on an averaged module and calls of ``averager.step()``."""

from collections import Counter
from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.drift.shared_weights import SharedWeights
from lightning_sparse.engine.optimizer_steps import ParameterStepObserver, changes_weights

MAX_UNSEEN = 20
"""Steps of an optimizer without a call of ``averager.step()`` before a warning."""
CALLS_BEFORE_WARNING = 40
"""Calls before a warning about too many calls."""
LOST_STEP = (
    "An optimizer's step while the model has the mean of all workers' weights (in averaged_weights(), in validation) "
    "would be lost, because each worker's own weights are restored afterwards. Step before or after."
)


class ObservedSteps(ParameterStepObserver):
    """Rejects lost steps, and warns about missing calls unless a strategy calls ``averager.step()`` in ``on_step``."""

    def __init__(self, observed: Iterable[Tensor], shared: SharedWeights) -> None:
        super().__init__(observed, "guides/local-training")
        self._shared = shared
        self._steps_since_call: Counter[int] = Counter()
        self._calls = self._idle_calls = self._steps = 0

    def _before(self, optimizer: Optimizer) -> None:
        if self._shared.is_loaded and changes_weights(optimizer):
            raise RuntimeError(LOST_STEP)

    def _after(self, optimizer: Optimizer) -> None:
        if self.on_step is not None or not changes_weights(optimizer):
            return
        self._steps += 1
        self._steps_since_call[id(optimizer)] += 1
        if self._steps_since_call[id(optimizer)] == MAX_UNSEEN:
            self._warn(
                "calls",
                f"{type(optimizer).__name__} took {MAX_UNSEEN} steps without a call of averager.step(), so "
                "workers exchange nothing and their weights differ. Call it after each optimizer step",
            )

    def averager_stepped(self) -> None:
        """Count a call of ``averager.step()``, and warn if many calls follow no optimizer step."""
        self._calls += 1
        self._idle_calls += self._steps > 0 and not self._steps_since_call
        self._steps_since_call.clear()
        if self._calls >= CALLS_BEFORE_WARNING and 5 * self._idle_calls >= 2 * self._calls:
            self._warn(
                "calls",
                f"averager.step() was called {self._calls} times for {self._steps} optimizer steps, and every_n_steps "
                "counts calls. Call it once after each optimizer step",
            )
