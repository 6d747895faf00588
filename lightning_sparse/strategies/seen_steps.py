"""Steps of optimizers that bypass Lightning, and fits in which no step is seen."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

MOST_BATCHES = 200
"""Batches without an exchange before the warning; at least twice as many as gradients are accumulated over."""


class SeesSteps(Strategy):
    """Knows whether a step comes through Lightning, and warns where a fit exchanges nothing.

    ``self.optimizers(use_pl_optimizer=False)`` and hooks of single parameters step without Lightning. Observers of
    optimizer steps see these; ``_is_stepping`` tells them that the strategy handles the step itself.
    """

    _is_stepping = False
    _batches = 0
    _progress_at_start: object = None
    _call_each_step = "step() after"
    """What a loop without torch optimizers calls, in words."""

    @property
    @abstractmethod
    def _progress(self) -> object:
        """Changes with every exchange, or with every step that counts towards one; None before the fit."""

    @contextmanager
    def _nothing_counts(self) -> Iterator[None]:
        """Within it an optimizer may step without an exchange."""
        before, self._is_stepping = self._is_stepping, True
        try:
            yield
        finally:
            self._is_stepping = before

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._batches, self._progress_at_start = 0, self._progress

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._batches += 1
        assert self.lightning_module is not None
        accumulated = getattr(self.lightning_module.trainer, "accumulate_grad_batches", 1)
        if self._batches == max(MOST_BATCHES, 2 * accumulated) + 1:
            self._warn_of_no_exchange(self._batches - 1)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if 0 < self._batches <= MOST_BATCHES:
            self._warn_of_no_exchange(self._batches)

    def _warn_of_no_exchange(self, batches: int) -> None:
        if self._progress == self._progress_at_start:
            rank_zero_warn(
                f"lightning_sparse: in {batches} batches no torch.optim.Optimizer stepped on parameters of the model, "
                "so nothing was exchanged and the weights differ. If you update weights by other means, call "
                f"strategy.state.{self._call_each_step} each update. See docs/troubleshooting.md."
            )
