"""The numbers of exchanges, logged through the LightningModule once an optimizer has stepped.

What a batch has logged Lightning repeats in the rows of later batches, until it is logged anew. With an exchange every
eighth step that would be eight rows, and whoever adds up bytes would count them eightfold. So the numbers are taken
back once they have been in a row: each exchange is in one row at most, and in one if every step has a row. What was in
none when an epoch ended Lightning forgets: it is logged again with the next step, unless that has an exchange itself.
"""

from collections import deque
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator

from lightning_sparse.engine import Averager, StepStats
from lightning_sparse.engine.step_stats import of_exchanges
from lightning_sparse.selection.numbers import STEP_NUMBERS

MOST_UNLOGGED = 256


class StepLog:
    """Exchanges that no step has logged yet; only a loop that logs nothing lets them become many."""

    def __init__(self) -> None:
        self._steps: deque[StepStats] = deque(maxlen=MOST_UNLOGGED)
        self._of_batch: list[StepStats] = []
        self._newest: list[StepStats] = []
        self._lost: list[StepStats] = []
        self._entries: dict[str, Any] = {}  # what Lightning keeps of numbers that were logged here, by its key
        self._shown: set[str] = set()  # keys of those that are in the next row
        self._row: int | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: StepStats) -> None:
        """Adds the numbers of an exchange."""
        self._steps.append(step)

    def begin_batch(self, module: LightningModule | None) -> None:
        """Takes back what has been in a row of the loggers by now."""
        assert module is not None
        trainer = module.trainer
        self._of_batch.clear()
        batch = trainer.fit_loop.epoch_loop._batches_that_stepped
        results: Any = trainer._results or {}
        entries = [self._entries[key] for key in self._shown if self._entries[key] is results.get(key)]
        held = [one for one in entries if not one.has_reset]
        if self._row is not None and batch > self._row:
            for one in held:
                one.reset()
            self._shown.clear()
        elif self._shown and not held:
            self._lost = self._newest
            self._shown.clear()
        self._row = batch if trainer._logger_connector.should_update_logs else None

    def write(self, module: LightningModule | None, averager: Averager | None) -> None:
        """Logs the numbers of the exchanges since the last step, if there are any and Lightning lets us here.

        Args:
            module: through which to log.
            averager: has metrics of its own to log with them.
        """
        if not (self._steps or self._lost) or module is None:
            return
        if module.trainer.barebones:
            self._steps.clear()  # nobody logs: Lightning would warn of a call that the user never made
            return
        allowed = _FxValidator.functions.get(module._current_fx_name or "")
        if allowed is None:
            return  # the next step logs these too
        on_step = True in allowed["allowed_on_step"]
        steps = list(self._steps or self._lost)
        self._lost = []
        if on_step:  # several optimizers may step in a batch, and what is logged last is what is in the row
            self._of_batch += steps
            steps = self._of_batch
            self._take_back(module)
        self._newest = list(steps)
        own = {} if averager is None else averager.own_metrics()
        for name, value in (step_metrics(steps) | own).items():
            self._log(module, name, float(value), on_step)
        self._steps.clear()

    def _take_back(self, module: LightningModule) -> None:
        """Takes back what another hook has logged in this batch: its numbers are among those that follow."""
        for key in [key for key in self._shown if not key.startswith(f"{module._current_fx_name}.")]:
            self._entries[key].reset()
            self._shown.remove(key)

    def _log(self, module: LightningModule, name: str, value: float, on_step: bool) -> None:
        """Logs a number, the first time in a fit through the module, and then straight to where Lightning keeps it.

        ``log`` makes out anew each time what was asked for, and moves what it keeps to the device that it is on: a
        quarter of a millisecond for each number. Nothing of that can differ from one step of ours to the next.
        """
        trainer, fx = module.trainer, module._current_fx_name
        results, key = trainer._results, f"{fx}.{name}"
        assert results is not None
        # Of a number Lightning makes a tensor on the device, and waits for that. What is synced must be there.
        tensor = torch.tensor(value, device="cpu", dtype=torch.float64)
        if not on_step:
            tensor = tensor.to(module.device, torch.float32)
        is_ours = key in self._entries and self._entries[key] is results.get(key)
        has_own = getattr(module.log, "__func__", None) is not _LOG  # it is to see every number
        if on_step and is_ours and not has_own:
            results.update_metrics(key, tensor, 1)
        else:
            # The same numbers on every worker already: no sync_dist, no collective, but at the end of an epoch, where
            # Lightning warns without. batch_size only stops it from searching the batch for one. enable_graph, of which
            # the tensor has none, differs from the default: Lightning refuses to mix in a user's metric of this name.
            module.log(
                name,
                tensor,
                enable_graph=True,
                on_step=on_step,
                on_epoch=not on_step,
                sync_dist=not on_step,
                batch_size=1,
            )
        if on_step and key in results:
            self._entries[key] = results[key]
            self._shown.add(key)


_LOG = LightningModule.log


def step_metrics(steps: list[StepStats]) -> dict[str, float]:
    """Returns the metrics of a batch, which may have several exchanges.

    Density covers all exchanges together, payload bytes are summed, error norm and threshold are those of the last.
    """
    stats = of_exchanges(steps)
    logged = [number.logged for number in STEP_NUMBERS if number.logged]
    values = {f"sparse/{name}": getattr(stats, name) for name in logged}
    return {name: float(value) for name, value in values.items() if value is not None}
