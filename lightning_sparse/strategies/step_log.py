"""The numbers of exchanges, logged through the LightningModule once an optimizer has stepped."""

from collections import deque
from collections.abc import Mapping

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator

from lightning_sparse.engine import StepStats

MOST_UNLOGGED = 256


class StepLog:
    """Exchanges that no step has logged yet; only a loop that logs nothing lets them become many."""

    def __init__(self) -> None:
        self._steps: deque[StepStats] = deque(maxlen=MOST_UNLOGGED)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: StepStats) -> None:
        """Adds the numbers of an exchange."""
        self._steps.append(step)

    def clear(self) -> None:
        """Forgets them."""
        self._steps.clear()

    def write(self, module: LightningModule | None, more: Mapping[str, float] | None = None) -> None:
        """Logs the numbers of the exchanges since the last step, if there are any and Lightning lets us here.

        Args:
            module: through which to log.
            more: what to log with them.
        """
        if not self._steps or module is None:
            return
        if module.trainer.barebones:
            self._steps.clear()  # nobody logs: Lightning would warn of a call that the user never made
            return
        allowed = _FxValidator.functions.get(module._current_fx_name or "")
        if allowed is None:
            return  # the next step logs these too
        on_step = True in allowed["allowed_on_step"]
        # The same numbers on every worker already: no sync_dist, no collective, but at the end of an epoch, where
        # Lightning warns without. batch_size only stops it from searching the batch for one.
        for name, value in (step_metrics(list(self._steps)) | dict(more or {})).items():
            module.log(
                name,
                value,
                prog_bar=name == "sparse/density",
                on_step=on_step,
                on_epoch=not on_step,
                sync_dist=not on_step,
                batch_size=1,
            )
        self._steps.clear()


def step_metrics(steps: list[StepStats]) -> dict[str, float]:
    """Returns what is logged for one optimizer step, whose gradient may have been exchanged more than once.

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
