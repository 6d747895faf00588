"""Logs the statistics of exchanges through the LightningModule after optimizer steps.

Lightning repeats logged numbers in the rows of later batches until new values replace them. A sum over rows would then
count an exchange several times. So the log resets numbers after a row contains them. Each exchange is in at most one
row, and in exactly one if every step has a row. At the end of an epoch, Lightning drops numbers that no row contains
yet. The log repeats them with the next step, unless this step has its own exchange.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator

from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.step_stats import StepStats, step_metrics

MAX_UNLOGGED = 256
_LOG = LightningModule.log


class StepLog:
    """Collects the exchanges of an averager until an optimizer step logs them."""

    def __init__(self, averager: Averager) -> None:
        self._steps: deque[StepStats] = deque(maxlen=MAX_UNLOGGED)  # not logged yet
        averager.subscribe(self._steps.append)
        self._of_batch: list[StepStats] = []  # logged in this batch
        self._newest: list[StepStats] = []  # in the numbers that were logged last
        self._lost: list[StepStats] = []  # dropped at the end of an epoch; logged again
        self._log = NumberLog()
        self._shown: set[str] = set()  # keys of entries for the next row
        self._row: int | None = None  # the batch of the next row; None if it has no row

    def begin_batch(self, trainer: Any) -> None:
        """Reset numbers that a row of the loggers has contained."""
        self._of_batch.clear()
        batch = trainer.fit_loop.epoch_loop._batches_that_stepped
        results: Any = trainer._results or {}
        entries = [self._log.entries[key] for key in self._shown if self._log.entries[key] is results.get(key)]
        current = [entry for entry in entries if not entry.has_reset]
        if self._row is not None and batch > self._row:
            for entry in current:
                entry.reset()
            self._shown.clear()
        elif self._shown and not current:
            self._lost = self._newest
            self._shown.clear()
        self._row = batch if trainer._logger_connector.should_update_logs else None

    def write(self, module: LightningModule | None, averager: Averager) -> None:
        """Log statistics since the last step and the averager's metrics if Lightning allows it."""
        if not (self._steps or self._lost) or module is None or module.trainer.barebones:
            return  # with barebones=True, Lightning would warn about a call that is not the user's
        hook = module._current_fx_name
        allowed = _FxValidator.functions.get(hook or "")
        if allowed is None:
            return  # the next step logs these too
        on_step = True in allowed["allowed_on_step"]
        steps = list(self._steps or self._lost)
        self._lost = []
        if on_step:  # several optimizers may step in a batch, and the row has the numbers that are logged last
            self._of_batch += steps
            steps = self._of_batch
            # The new numbers include those that another hook has logged in this batch.
            for key in [key for key in self._shown if not key.startswith(f"{hook}.")]:
                self._log.entries[key].reset()
                self._shown.remove(key)
        self._newest = list(steps)
        self._shown |= self._log.log(module, step_metrics(steps) | averager.own_metrics(), on_step=on_step)
        self._steps.clear()


class NumberLog:
    """Logs numbers, first through the module and later into Lightning's entry.

    The result is the same, but ``LightningModule.log`` takes a third of a millisecond per number to validate arguments
    and to move the entry to its device.

    Attributes:
        entries: Lightning's entries of our numbers, by Lightning's key.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}

    def log(self, module: LightningModule, values: Mapping[str, float], *, on_step: bool = True) -> set[str]:
        """Log numbers by name; return their keys, without those of an epoch's entries."""
        results, hook = module.trainer._results, module._current_fx_name
        assert results is not None
        is_overridden = getattr(module.log, "__func__", None) is not _LOG  # an overridden log gets every number
        # For a float, Lightning makes a tensor on the device and waits. A tensor with sync_dist must be on the device.
        tensors = torch.tensor([*values.values()], device="cpu", dtype=torch.float64)
        if not on_step:
            tensors = tensors.to(module.device, torch.float32)
        resets = module.trainer._logger_connector.should_reset_tensors
        keys = set()
        for name, tensor in zip(values, tensors.unbind(), strict=True):
            key = f"{hook}.{name}"
            is_ours = key in self.entries and self.entries[key] is results.get(key)
            # In an epoch's first batch, Lightning's first log in a hook resets entries of the last epoch.
            if on_step and is_ours and not is_overridden and not resets(str(hook)):
                results.update_metrics(key, tensor, 1)
                keys.add(key)
                continue
            # At the end of an epoch, Lightning warns without sync_dist. batch_size avoids a search through the batch.
            # enable_graph differs from the default, although the tensor has no graph, so that Lightning rejects a
            # user's metric with an equal name.
            is_epochs = not on_step
            module.log(
                name, tensor, enable_graph=True, on_step=on_step, on_epoch=is_epochs, sync_dist=is_epochs, batch_size=1
            )
            if on_step and key in results:
                self.entries[key] = results[key]
                keys.add(key)
        return keys
