"""Whether a loop calls ``averager.step()`` once per optimizer step."""

from collections import Counter

from lightning.fabric.utilities import rank_zero_warn
from torch.optim import Optimizer

MOST_UNSEEN = 20
"""An optimizer's steps without a call before the warning."""
ENOUGH_CALLS = 40
"""Calls before the warning that there are too many of them."""


class StepLedger:
    """Counts optimizer steps and calls of ``averager.step()``, and warns once where they do not fit."""

    def __init__(self) -> None:
        self._since_call: Counter[int] = Counter()
        self._calls = self._idle_calls = self._steps = 0
        self._has_warned = False

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Counts a step of an optimizer on the model's parameters."""
        self._steps += 1
        self._since_call[id(optimizer)] += 1
        if self._since_call[id(optimizer)] == MOST_UNSEEN:
            self._warn(
                f"{type(optimizer).__name__} took {MOST_UNSEEN} steps without a call of averager.step(), so workers "
                "exchange nothing and their weights differ. Call it after each optimizer step"
            )

    def averager_stepped(self) -> None:
        """Counts a call. Without any optimizer's step, as where weights are updated by hand, calls are not judged."""
        self._calls += 1
        self._idle_calls += self._steps > 0 and not self._since_call
        self._since_call.clear()
        if self._calls >= ENOUGH_CALLS and 5 * self._idle_calls >= 2 * self._calls:
            self._warn(
                f"averager.step() was called {self._calls} times for {self._steps} optimizer steps, and every_n_steps "
                "counts calls. Call it once after each optimizer step"
            )

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(f"lightning_sparse: {text}. See docs/local-training.md.")
