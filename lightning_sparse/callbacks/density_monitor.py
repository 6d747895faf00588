"""Density, layer by layer and over the run: histogram, picture and a table at the end of fit."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_sparse.callbacks.step_monitor import (
    StepMonitor,
    log_scalars,
    logging_step,
    tensorboard_loggers,
)
from lightning_sparse.engine.step_stats import StepStats
from lightning_sparse.metrics import AverageDensity


class DensityMonitor(StepMonitor):
    """Shows how much was sent: on average, per layer and over time.

    - ``sparse/average_density``: Σ selected / Σ elements of the run so far, logged every step, for any logger.
    - Per layer, every ``log_every_n_steps`` of the Trainer, of the newest exchange: a histogram in TensorBoard
      (``sparse/layer_density``), a scalar a layer (``sparse/layer_density/<name>``) in any other logger.
    - One image in TensorBoard, layers × steps, of log10 density; updated at the end of every epoch. Needs matplotlib.
    - A table on the first worker at the end of ``fit``: average density, bytes sent, times fewer than dense.

    It works without a logger too (the table remains), costs no collective, and continues its averages when a
    checkpoint is resumed. The image begins anew.

    Args:
        per_layer: whether to follow single layers. Two numbers a layer then travel with each step.
        image_columns: the width of the image in columns, at least 2. A longer run is averaged into so many columns.

    Raises:
        ValueError: too few columns.
    """

    def __init__(self, per_layer: bool = True, image_columns: int = 200) -> None:
        super().__init__()
        if image_columns < 2:
            raise ValueError(f"Invalid {image_columns=}. Must be at least 2.")
        self.per_layer = per_layer
        self.average_density = AverageDensity()
        self._wants_layer_stats = per_layer
        self._history = _LayerHistory(image_columns)
        self._totals = {"steps": 0, "payload_bytes": 0, "dense_bytes": 0}

    @override
    def take_in(self, steps: list[StepStats]) -> None:
        for step in steps:
            self.average_density.update(step)
            self._history.add(step)
            self._totals["steps"] += 1
            self._totals["payload_bytes"] += step.payload_bytes
            self._totals["dense_bytes"] += step.dense_bytes

    @override
    def log_totals(self, pl_module: LightningModule) -> None:
        pl_module.log("sparse/average_density", self.average_density.compute().float(), on_step=True, batch_size=1)

    @override
    def log_layers(self, trainer: Trainer, newest: StepStats) -> None:
        densities = {name: layer.density for name, layer in newest.layers.items()}
        if not densities:
            return
        for logger in tensorboard_loggers(trainer):
            values = torch.tensor(list(densities.values()))
            logger.experiment.add_histogram("sparse/layer_density", values, logging_step(trainer))
        scalars = {f"sparse/layer_density/{name}": density for name, density in densities.items()}
        log_scalars(trainer, scalars, tensorboard=False)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in tensorboard_loggers(trainer) if self._history.columns else []:
            try:
                figure = self._history.figure()
            except ModuleNotFoundError:
                rank_zero_warn("DensityMonitor draws no image: it needs matplotlib. Run `pip install matplotlib`.")
                return
            logger.experiment.add_figure("sparse/log10_layer_density", figure, trainer.global_step)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._totals["steps"] and trainer.is_global_zero:
            print(self.table())

    def table(self) -> str:
        """Returns the table of the run so far as text."""
        steps, sent, dense = (self._totals[name] for name in ("steps", "payload_bytes", "dense_bytes"))
        rows = [
            ("steps exchanged", f"{steps:,}"),
            ("average density", f"{100 * self.average_density.compute().item():.4g} %"),
            ("bytes sent per worker", _readable_bytes(sent)),
            ("the same, dense", _readable_bytes(dense)),
            ("times fewer", f"{dense / sent:.1f}" if sent else "-"),
        ]
        rows += [
            (f"density of {name} ({size:,} elements)", f"{100 * density:.4g} %")
            for name, size, density in self._history.densest(3)
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(["Sparse gradient exchange", *(f"  {name:<{width}}  {value}" for name, value in rows)])

    @override
    def state_dict(self) -> dict[str, Any]:
        density = {"selected": self.average_density.selected.item(), "elements": self.average_density.elements.item()}
        return {**self._totals, **density}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._totals = {name: int(state_dict[name]) for name in self._totals}
        self._has_numbers = self._totals["steps"] > 0
        self.average_density.selected.fill_(state_dict["selected"])
        self.average_density.elements.fill_(state_dict["elements"])


class _LayerHistory:
    """Per-layer density over the run in a bounded number of columns: when they are full, neighbours are averaged."""

    def __init__(self, max_columns: int) -> None:
        self.max_columns = max_columns
        self.columns: list[dict[str, float]] = []
        self.steps_per_column = 1
        self._pending: list[dict[str, float]] = []
        self._sizes: dict[str, int] = {}

    def add(self, stats: StepStats) -> None:
        if not stats.layers:
            return
        self._sizes = {name: layer.num_elements for name, layer in stats.layers.items()}
        self._pending.append({name: layer.density for name, layer in stats.layers.items()})
        if len(self._pending) < self.steps_per_column:
            return
        self.columns.append(_mean(self._pending))
        self._pending.clear()
        if len(self.columns) >= self.max_columns:
            self.columns = [_mean(self.columns[start : start + 2]) for start in range(0, len(self.columns), 2)]
            self.steps_per_column *= 2

    def densest(self, count: int) -> list[tuple[str, int, float]]:
        """The layers of highest average density: name, number of elements, density."""
        average = _mean(self.columns) if self.columns else {}
        ranked = sorted(average.items(), key=lambda item: -item[1])
        return [(name, self._sizes[name], density) for name, density in ranked[:count]]

    def figure(self) -> Any:
        """Draws layers × steps in log10 of density; white where nothing was sent."""
        from matplotlib.figure import Figure

        # DDP's buckets hold the layers in reverse: turned round, the picture reads from the model's input down.
        names = list(self.columns[-1])[::-1]
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
        axes.set_xlabel("step")
        axes.set_yticks([row + 0.5 for row in range(len(names))], names, fontsize=6)
        figure.colorbar(image, label="log10 density")
        return figure


def _mean(columns: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(column.get(name, 0.0) for column in columns) / len(columns) for name in columns[-1]}


def _readable_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"
