"""Shows the residual of error feedback, in total and per layer."""

from math import sqrt
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_sparse.callbacks.metrics import TotalError
from lightning_sparse.callbacks.step_monitor import StepMonitor, log_scalars
from lightning_sparse.engine.step_stats import StepStats


class ErrorMonitor(StepMonitor):
    """Shows the error norm of residuals after each step and the total error, optionally per layer.

    - ``sparse/total_error``: Σ_t (1/n) Σ_i ‖e_{i,t}‖² of the run so far (gradient units squared), logged every step.
      ``sparse/error_norm`` itself is logged by the strategy.
    - Per layer, every ``log_every_n_steps`` of the Trainer, of the newest exchange: ``sparse/layer_error_norm/<name>``
      in every logger.
    - A line on rank 0 at the end of ``fit``: last and largest error norm, total error.

    It works with any logger or none, issues no collectives, and continues its total after a resume.

    Args:
        per_layer: whether to follow single layers; each step then sends two more numbers per layer.
    """

    def __init__(self, per_layer: bool = False) -> None:
        self.total_error = TotalError()
        super().__init__(per_layer, "sparse/total_error", self.total_error)
        self._last_error_norm = self._largest_error_norm = 0.0

    @override
    def take_in(self, step: StepStats) -> None:
        self.total_error.update(step)
        self._last_error_norm = step.error_norm
        self._largest_error_norm = max(self._largest_error_norm, step.error_norm)

    @override
    def log_layers(self, trainer: Trainer, newest: StepStats) -> None:
        norms = {f"sparse/layer_error_norm/{name}": sqrt(layer.squared_error) for name, layer in newest.layers.items()}
        log_scalars(trainer, norms)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._largest_error_norm and trainer.is_global_zero:
            print(
                f"Sparse error feedback: error norm {self._last_error_norm:.4g} at the end, "
                f"{self._largest_error_norm:.4g} at most; total error {self.total_error.compute().item():.4g}"
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "total_error": self.total_error.compute().item(),
            "last_error_norm": self._last_error_norm,
            "largest_error_norm": self._largest_error_norm,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total_error.squared_error.fill_(state_dict["total_error"])
        self._last_error_norm = state_dict["last_error_norm"]
        self._largest_error_norm = state_dict["largest_error_norm"]
        self._has_numbers = True
