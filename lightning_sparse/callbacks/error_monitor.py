"""Shows the residual of error feedback, in total and per layer."""

from collections.abc import Sequence
from functools import partial
from math import sqrt
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_sparse.callbacks.step_monitor import StepMonitor, log_scalars, logging_step, tensorboard_loggers
from lightning_sparse.engine.step_stats import StepStats
from lightning_sparse.selection.bucket import FlatBucket
from lightning_sparse.sparsifiers.checks import require_count
from lightning_sparse.strategies.sparse_strategy import SparseStrategy


class ErrorMonitor(StepMonitor):
    """Shows the error norm of residuals after each step and the total error, optionally per layer.

    - ``sparse/total_error``: Σ_t (1/n) Σ_i ‖e_{i,t}‖² of the run so far (gradient units squared).
      ``sparse/error_norm`` itself is logged by the strategy.
    - Per layer, every ``log_every_n_steps`` of the Trainer, of the newest exchange: ``sparse/layer_error_norm/<name>``
      in every logger.
    - Histograms in TensorBoard, if asked for, of rank 0's values per layer before the selection:
      ``sparse/compensated/<name>`` of p = e + g, ``sparse/residual/<name>`` of e and ``sparse/gradient/<name>`` of g
      (``sparse/drift/<name>`` with local training, whose unsent values are part of the drift unless
      ``keep_drift=False``). Shi et al. (arXiv:1911.08772) find bell shapes with Top-k.
    - A line on rank 0 at the end of ``fit``: last and largest error norm, total error.

    It works with any logger or none, issues no collectives, and continues its total after a resume.

    Args:
        per_layer: whether to follow single layers; each step then sends two more numbers per layer.
        histograms_every_n_steps: steps between histograms, which show the next exchange. None for no histograms. Other
            steps cost nothing.

    Raises:
        ValueError: ``per_layer`` is not True or False, or the number of steps is not at least 1.
    """

    def __init__(self, per_layer: bool = False, histograms_every_n_steps: int | None = None) -> None:
        if histograms_every_n_steps is not None:
            require_count("histograms_every_n_steps", histograms_every_n_steps)
        super().__init__(per_layer, "sparse/total_error")
        self._every = histograms_every_n_steps

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if self._every is not None and trainer.is_global_zero and not tensorboard_loggers(trainer):
            rank_zero_info("ErrorMonitor: histograms_every_n_steps has no effect without a TensorBoardLogger. Add one.")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        strategy, is_due = trainer.strategy, self._every is not None and logging_step(trainer) % self._every == 0
        if is_due and tensorboard_loggers(trainer) and isinstance(strategy, SparseStrategy):
            averaged = strategy.state.kind.removesuffix("s")
            is_part_of_drift = getattr(strategy._options, "keep_drift", False)
            kinds = (averaged,) if is_part_of_drift else ("compensated", "residual", averaged)
            strategy.state.watch_next(partial(_add_histograms, trainer, kinds))

    @override
    def add_exchange(self, step: StepStats) -> None:
        self._totals["squared_error"] += step.squared_error
        self._totals["last_error_norm"] = step.error_norm
        self._totals["largest_error_norm"] = max(self._totals["largest_error_norm"], step.error_norm)

    @override
    def total(self) -> float:
        return self._totals["squared_error"]

    @override
    def log_layers(self, trainer: Trainer, newest: StepStats) -> None:
        norms = {f"sparse/layer_error_norm/{name}": sqrt(layer.squared_error) for name, layer in newest.layers.items()}
        log_scalars(trainer, norms)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._add_new()
        last, largest = self._totals["last_error_norm"], self._totals["largest_error_norm"]
        if largest and trainer.is_global_zero and not self._is_idle:
            print(
                f"Sparse error feedback: error norm {last:.4g} at the end, {largest:.4g} at most; "
                f"total error {self.total():.4g}"
            )


def _add_histograms(trainer: Trainer, kinds: Sequence[str], bucket: FlatBucket) -> None:
    residual = bucket.residual.before
    compensated = bucket.compensated()
    averaged = compensated if len(kinds) == 1 else compensated - residual  # a drift contains its residual
    values = {"compensated": compensated, "residual": residual, kinds[-1]: averaged}
    for name, start, end in bucket.layout.spans():
        for kind in kinds if (start, end) not in bucket.left_out else ():
            part = values[kind][start:end]
            finite = part[part.isfinite()]
            for logger in tensorboard_loggers(trainer) if finite.numel() else []:
                logger.experiment.add_histogram(f"sparse/{kind}/{name}", finite, logging_step(trainer))
