"""Shows density per layer and over the run as a histogram, an image and a table."""

from collections.abc import Sequence
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_sparse.callbacks.step_monitor import StepMonitor, log_scalars, logging_step, tensorboard_loggers
from lightning_sparse.callbacks.step_times import StepTimes
from lightning_sparse.engine.step_stats import StepStats
from lightning_sparse.sparsifiers.checks import require_count
from lightning_sparse.sparsifiers.protocol import target_density
from lightning_sparse.strategies.advice import shortened
from lightning_sparse.strategies.simulated.strategy import SimulatedWorkersStrategy
from lightning_sparse.strategies.sparse_strategy import SparseStrategy

LAYER_COLUMNS = 62
"""The width of a layer's name and size in the table, which has 80 columns."""
IMAGE_INTERVAL = 100
"""Shortest time between two images within a run, as a multiple of the time for drawing one."""
TOTALS = ("steps", "selected", "elements", "payload_bytes", "dense_bytes", "dense_steps")
"""Numbers that are summed over all exchanges, and over those of the calibration."""


class DensityMonitor(StepMonitor):
    """Shows the density on average, per layer and over time.

    - ``sparse/average_density``: Σ selected / Σ elements of the run so far, in every logger.
    - Per layer, every ``log_every_n_steps`` of the Trainer, of the newest exchange: a histogram in TensorBoard
      (``sparse/layer_density``), a scalar per layer (``sparse/layer_density/<name>``) in any other logger.
    - One image in TensorBoard, layers × exchanges, of log10 density. Updated at the end of ``fit``, and after an epoch
      unless the last image is younger than 100 times its drawing time. Needs matplotlib.
    - ``sparse/median_step_ms`` and ``sparse/median_wait_ms``, the median time of a step and of its wait for the
      exchange, at the end of ``fit``.
    - A table of at most 80 columns on rank 0 at the end of ``fit``, unless it is the only worker. It shows the target
      density and the density reached, λ, the sent bytes and those of a dense exchange, and the median times.

    It also works without a logger (the table remains) and issues no collectives. After a resume, it continues its
    averages and starts a new image.

    Args:
        per_layer: whether to follow single layers; each step then sends two more numbers per layer.
        image_columns: the width of the image in columns, at least 2; in a longer run, a column is a mean of steps.

    Raises:
        ValueError: too few columns, or ``per_layer`` is not True or False.
    """

    def __init__(self, per_layer: bool = True, image_columns: int = 200) -> None:
        require_count("image_columns", image_columns, least=2)
        super().__init__(per_layer, "sparse/average_density")
        self._history = _LayerHistory(image_columns)
        self._target_density: float | None = None
        self._averages, self._sender = "gradient", "worker"
        self._times = StepTimes()
        self._next_image, self._drawn_step = 0.0, 0
        self._layer_names: list[str] = []

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._history = _LayerHistory(self._history.max_columns)
        self._next_image, self._drawn_step = 0.0, trainer.global_step
        strategy = trainer.strategy
        if not isinstance(strategy, SparseStrategy):
            return
        self._layer_names = list(strategy.state.parameters)
        self._target_density = target_density(strategy.sparsifier)
        self._averages = strategy.state.kind.removesuffix("s")
        self._sender = "worker" if strategy.state.replica.num_workers == 1 else "replica"
        self._times = StepTimes(getattr(strategy._options, "every_n_steps", 1))
        if not isinstance(strategy, SimulatedWorkersStrategy):
            self._times.follow(strategy.state)

    @override
    def add_exchange(self, step: StepStats) -> None:
        if self.per_layer:
            self._history.add(step)
        dense_steps = step.dense_elements / step.num_elements if step.num_elements else 0  # can be a fraction
        elements = step.num_workers * step.num_elements
        numbers = (1, step.selected, elements, step.payload_bytes, step.dense_bytes, dense_steps)
        for name, value in zip(TOTALS, numbers, strict=True):
            self._totals[name] += value
            self._totals[f"calibration_{name}"] += value * step.is_calibration

    @override
    def total(self) -> float:
        return self._totals["selected"] / max(1, self._totals["elements"])

    @override
    def log_layers(self, trainer: Trainer, newest: StepStats) -> None:
        scalars = {f"sparse/layer_density/{name}": layer.density for name, layer in newest.layers.items()}
        for logger in tensorboard_loggers(trainer):
            values = torch.tensor(list(scalars.values()))
            # TensorBoard's default bins start at 1e-12; with them a histogram would take several times the bytes.
            logger.experiment.add_histogram("sparse/layer_density", values, logging_step(trainer), bins=64)
        log_scalars(trainer, scalars, tensorboard=False)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        begin = perf_counter()
        if begin >= self._next_image:
            self._draw(trainer)
            self._next_image = begin + IMAGE_INTERVAL * (perf_counter() - begin)

    def _draw(self, trainer: Trainer) -> None:
        """Update the image if there are newer steps."""
        if self._drawn_step == trainer.global_step:
            return
        self._drawn_step = trainer.global_step
        for logger in tensorboard_loggers(trainer) if self._history.columns else []:
            try:
                figure = self._history.figure(self._layer_names)
            except ModuleNotFoundError:
                rank_zero_warn("DensityMonitor needs matplotlib for its image. Run `pip install matplotlib`.")
                return
            logger.experiment.add_figure("sparse/log10_layer_density", figure, trainer.global_step)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._times.pause()

    on_validation_end = on_train_epoch_start

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._add_new()
        self._draw(trainer)
        if self._newest is not None and self._newest.num_workers > 1 and trainer.is_global_zero:
            log_scalars(trainer, self._times.scalars())
            print(self.table())

    def table(self) -> str:
        """Return the table of the run so far as text."""
        total = self._totals
        calibration = total["calibration_steps"]
        later = {name: total[name] - total[f"calibration_{name}"] for name in TOTALS}
        rows = [("steps exchanged", f"{total['steps']:,.0f}")]
        if total["dense_steps"]:
            rows.append(("  sent densely", f"{total['dense_steps']:,.4g}"))
        if self._target_density is not None:
            rows.append(("target density", f"{100 * self._target_density:.4g} %"))
        rows.append(("average density", f"{100 * self.total():.4g} %"))
        if calibration and later["steps"]:
            rows.append(("density after calibration", f"{100 * later['selected'] / later['elements']:.4g} %"))
        if self._newest is not None and self._newest.threshold is not None and not self._newest.is_calibration:
            rows.append(("threshold λ at the end", f"{self._newest.threshold:.4g}"))
        sent, dense = total["payload_bytes"], total["dense_bytes"]
        rows += [
            (f"bytes sent per {self._sender}", _readable_bytes(sent)),
            ("bytes if dense", _readable_bytes(dense)),
            ("times fewer", f"{dense / sent:.1f}" if sent else "-"),
        ]
        if calibration and later["payload_bytes"]:
            rows.append(("times fewer after calibration", f"{later['dense_bytes'] / later['payload_bytes']:.1f}"))
        rows += self._times.rows()
        if layers := self._history.densest(3):
            rows.append((f"densest layers (parameters){', since the resume' * self._has_resumed}", ""))
        for name, size, density in layers:
            elements = f" ({size:,})"
            rows.append((f"  {shortened(name, LAYER_COLUMNS - 2 - len(elements))}{elements}", f"{100 * density:.4g} %"))
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {value}".rstrip() for name, value in rows]
        return "\n".join([f"Sparse {self._averages} exchange", *lines])


class _LayerHistory:
    """Per-layer density in at most ``max_columns`` columns; averages neighbours when full."""

    def __init__(self, max_columns: int) -> None:
        self.max_columns = max_columns
        self.columns: list[dict[str, float]] = []
        self.steps_per_column = 1
        self._pending: list[dict[str, float]] = []
        self._sizes: dict[str, int] = {}

    def add(self, stats: StepStats) -> None:
        self._sizes |= {name: layer.num_elements for name, layer in stats.layers.items()}
        self._pending.append({name: layer.density for name, layer in stats.layers.items()})
        if len(self._pending) < self.steps_per_column:
            return
        self.columns.append(_mean(self._pending))
        self._pending.clear()
        if len(self.columns) >= self.max_columns:
            self.columns = [_mean(self.columns[start : start + 2]) for start in range(0, len(self.columns), 2)]
            self.steps_per_column *= 2

    def densest(self, count: int) -> list[tuple[str, int, float]]:
        """Return name, number of elements and density of the layers with the highest average density."""
        average = _mean(self.columns) if self.columns else {}
        ranked = sorted(average.items(), key=lambda item: -item[1])
        return [(name, self._sizes[name], density) for name, density in ranked[:count]]

    def figure(self, layer_names: Sequence[str]) -> Any:
        """Draw layers × exchanges in log10 of density, in the given order; white without sent values."""
        from matplotlib.figure import Figure

        names = [name for name in layer_names if name in self.columns[-1]]
        densities = torch.tensor([[column.get(name, 0.0) for column in self.columns] for name in names])
        figure = Figure(figsize=(10, max(2.5, 0.16 * len(names) + 1)), layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(
            densities.log10().masked_fill(densities == 0, float("nan")).numpy(),
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            vmax=0,
            extent=(0, len(self.columns) * self.steps_per_column, len(names), 0),
        )
        axes.set_xlabel("exchange")
        axes.set_yticks([row + 0.5 for row in range(len(names))], names, fontsize=6)
        figure.colorbar(image, label="log10 density")
        return figure


def _mean(columns: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: fmean([column[name] for column in columns if name in column]) for name in columns[-1]}


def _readable_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"
