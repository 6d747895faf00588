"""The numbers of exchanges, logged through the LightningModule once an optimizer has stepped.

What a batch has logged Lightning repeats in the rows of later batches, until it is logged anew. With an exchange every
eighth step that would be eight rows, and whoever adds up bytes would count them eightfold. So the numbers are taken
back once they have been in a row: each exchange is in one row at most, and in one if every step has a row. What was in
none when an epoch ended Lightning forgets: it is logged again with the next step, unless that has an exchange itself.
"""

from collections import deque
from collections.abc import Mapping

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator

from lightning_sparse.engine import StepStats

MOST_UNLOGGED = 256


class StepLog:
    """Exchanges that no step has logged yet; only a loop that logs nothing lets them become many."""

    def __init__(self) -> None:
        self._steps: deque[StepStats] = deque(maxlen=MOST_UNLOGGED)
        self._of_batch: list[StepStats] = []
        self._newest: list[StepStats] = []
        self._lost: list[StepStats] = []
        self._names: set[str] = set()
        self._row: int | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: StepStats) -> None:
        """Adds the numbers of an exchange."""
        self._steps.append(step)

    def clear(self) -> None:
        """Forgets them."""
        self._steps.clear()
        self._of_batch.clear()
        self._newest.clear()
        self._lost.clear()
        self._names.clear()
        self._row = None

    def begin_batch(self, module: LightningModule | None) -> None:
        """Takes back what has been in a row of the loggers by now."""
        assert module is not None
        trainer = module.trainer
        self._of_batch.clear()
        batch = trainer.fit_loop.epoch_loop._batches_that_stepped
        held = [one for one in (trainer._results or {}).values() if one.meta.name in self._names and not one.has_reset]
        if self._row is not None and batch > self._row:
            for one in held:
                one.reset()
            self._names.clear()
        elif self._names and not held:
            self._lost = self._newest
            self._names.clear()
        self._row = batch if trainer._logger_connector.should_update_logs else None

    def write(self, module: LightningModule | None, more: Mapping[str, float] | None = None) -> None:
        """Logs the numbers of the exchanges since the last step, if there are any and Lightning lets us here.

        Args:
            module: through which to log.
            more: what to log with them.
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
        # The same numbers on every worker already: no sync_dist, no collective, but at the end of an epoch, where
        # Lightning warns without. batch_size only stops it from searching the batch for one.
        self._newest = list(steps)
        for name, value in (step_metrics(steps) | dict(more or {})).items():
            self._names.add(name)
            # Of a number Lightning makes a tensor on the device, and waits for that. What is synced must be there.
            tensor = torch.tensor(float(value), device="cpu" if on_step else module.device)
            if on_step and _log_again(module, name, tensor):
                continue
            module.log(
                name,
                tensor,
                prog_bar=name == "sparse/density",
                on_step=on_step,
                on_epoch=not on_step,
                sync_dist=not on_step,
                batch_size=1,
            )
        self._steps.clear()


def _log_again(module: LightningModule, name: str, value: torch.Tensor) -> bool:
    """Gives Lightning a new value of what it has logged before; returns whether it could.

    ``log`` makes out anew each time what was asked for, and moves what it keeps to the device that it is on: a quarter
    of a millisecond for each number. Nothing of that can differ from one step of ours to the next.
    """
    trainer, fx = module.trainer, module._current_fx_name
    results, connector = trainer._results, trainer._logger_connector
    key = f"{fx}.{name}"
    is_own = type(module).log is not LightningModule.log  # then it is to see every value
    if is_own or fx is None or not results or key not in results or results.dataloader_idx is not None:
        return False
    if connector.should_reset_tensors(fx):
        return False
    results.update_metrics(key, value, 1)
    connector._current_fx = fx
    return True


def step_metrics(steps: list[StepStats]) -> dict[str, float]:
    """Returns what is logged for one batch, in which there may have been more than one exchange.

    Density is over all exchanges together, payload bytes are their sum, error norm and threshold those of the last.
    """
    last = steps[-1]
    elements = sum(step.num_workers * step.num_elements for step in steps)
    metrics = {
        "sparse/density": sum(step.selected for step in steps) / max(elements, 1),
        "sparse/error_norm": last.error_norm,
        "sparse/payload_bytes": float(sum(step.payload_bytes for step in steps)),
    }
    if last.threshold is not None:
        metrics["sparse/threshold"] = last.threshold
    return metrics
