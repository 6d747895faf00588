"""Looking for λ before a training: a few dense steps, and what every threshold would have sent of them."""

import os
import pickle
import tempfile
from dataclasses import asdict
from math import log10, sqrt
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import _TunerExitException
from typing_extensions import override

from lightning_sparse.callbacks.step_monitor import SPARSE, holders_of, mean_over_workers
from lightning_sparse.callbacks.threshold_curve import ThresholdCurve
from lightning_sparse.engine.holder import EngineHolder
from lightning_sparse.engine.recorder import GradientRecorder
from lightning_sparse.exchange.cost_model import Costs, speeds
from lightning_sparse.exchange.wire import value_bytes
from lightning_sparse.sparsifiers import HardThreshold
from lightning_sparse.sparsifiers.protocol import require_density, require_steps
from lightning_sparse.sparsifiers.replay import replayed_densities
from lightning_sparse.strategies.trial import run_trial

POINTS = 33
LOWEST, TENTH = 1e-3, 10.0
"""λ is looked for from so many times the gradients' root mean square, to where noise sends a tenth of the density."""
BUCKET_ELEMENTS = 25 * 2**20 // 4
"""Of one of DDP's buckets in float32, for which break-even is told."""


class ThresholdFinder(Callback):
    """Looks for the λ that sends a density, in a few dense steps before training, as ``LearningRateFinder`` does.

    The steps are undone: weights, optimizers, schedulers, random states and data begin anew. What they measure of a
    sample of coordinates is then replayed with error feedback for many λ at once, so that the whole curve of density
    against λ is known. It holds while gradients are like those of the first steps, which later they seldom are: see
    "Choosing a threshold" in the documentation for how far it was off, and ``density=`` for a λ that follows.

    With a fit that resumes a checkpoint it does nothing: λ is the checkpoint's.

    Args:
        density: the share of coordinates to be sent, in (0, 1); None is the strategy's, or 0.001.
        num_steps: exchanges to measure.
        update: whether the fit goes on with the λ found: constant where the strategy has a threshold, in place of
            calibration where it has a density. One worker alone has nothing to exchange, and goes on as it was.

    Attributes:
        curve: the `ThresholdCurve`, None before.

    Raises:
        ValueError: a density that is none, or less than one step; in ``fit``, data that can be read once only, or a
            density that is not the strategy's own.
    """

    def __init__(self, density: float | None = None, num_steps: int = 50, update: bool = True) -> None:
        if density is not None:
            require_density(density, "one in a thousand")
        if density == 1:
            raise ValueError("Invalid density=1. There is nothing to find: threshold=0 sends everything.")
        require_steps(num_steps)
        self.density = density
        self.num_steps = num_steps
        self.update = update
        self.curve: ThresholdCurve | None = None
        self._file: str | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if getattr(trainer, "fast_dev_run", False) or trainer.ckpt_path is not None:
            why = "fast_dev_run" if trainer.ckpt_path is None else "the training resumes, with the λ of its checkpoint"
            rank_zero_info(f"ThresholdFinder does nothing: {why}.")
            return
        if not isinstance(strategy, SPARSE) or strategy.state is None:
            rank_zero_info(
                f"ThresholdFinder is idle: {type(strategy).__name__} exchanges whole gradients. "
                "Look for a threshold with strategy='ddp_hardthreshold' and other sparse strategies."
            )
            return
        asked = getattr(strategy.sparsifier, "density", None)
        # What is held is the strategy's own density.
        if self.update and self.density is not None and asked not in (None, self.density):
            raise ValueError(
                f"ThresholdFinder(density={self.density:g}) would find a λ for that density, and the strategy would "
                f"hold λ to its own density={asked:g} (0.001 where it was given nothing). Give the strategy "
                f"density={self.density:g}, or a threshold, which the one found takes the place of; or leave the "
                "finder's density out."
            )
        then = "" if self._file is not None else " and training begins"
        rank_zero_info(
            f"ThresholdFinder trains for {self._num_batches(strategy)} dense steps; then they are undone{then}."
        )
        self.curve = self._find(trainer, strategy)
        if self.curve is None and self._file is None:
            rank_zero_warn(
                "ThresholdFinder found nothing: the training makes no exchange in "
                f"{self._num_batches(strategy)} optimizer steps. λ stays what it is."
            )
            return
        if self._file is not None:
            if trainer.is_global_zero and self.curve is not None:
                with open(self._file, "wb") as file:
                    pickle.dump(asdict(self.curve), file)
            self._end(trainer)
            return
        assert self.curve is not None
        self._use(self.curve, holders_of(strategy))

    def _end(self, trainer: Trainer) -> None:
        """Ends the fit, of which nothing is left to do."""
        if not isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
            raise _TunerExitException
        # Where workers were started by fork or spawn Lightning takes that for a failure.
        trainer.num_sanity_val_steps = 0
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step

    def _find(self, trainer: Trainer, strategy: Any) -> ThresholdCurve | None:
        holders = holders_of(strategy)
        if not isinstance(strategy.sparsifier, HardThreshold):
            name = type(strategy.sparsifier).__name__
            raise TypeError(
                f"ThresholdFinder looks for the λ of a HardThreshold, and the sparsifier is {name}. Use a strategy "
                "such as DDPHardThresholdStrategy."
            )
        num_elements = sum(one.numel() for one in trainer.lightning_module.parameters() if one.requires_grad)
        recorders = [GradientRecorder(num_elements, one.workers.rank) for one in holders]
        recordings = [one.recording(recorder) for one, recorder in zip(holders, recorders, strict=True)]
        run_trial(trainer, self._num_batches(strategy), strategy.restart, *recordings)
        return self._curve(strategy, holders, recorders, num_elements) if recorders[0].num_steps else None

    def _num_batches(self, strategy: Any) -> int:
        """Optimizer steps, so that there are as many exchanges as steps were asked for."""
        return self.num_steps * int(getattr(getattr(strategy, "_options", None), "every_n_steps", 1))

    def _curve(
        self, strategy: Any, holders: list[EngineHolder], recorders: list[GradientRecorder], num_elements: int
    ) -> ThresholdCurve:
        density = self.density or getattr(strategy.sparsifier, "density", None) or 0.001
        recorded = [one.recorded() for one in recorders]
        num_held = num_elements / holders[0].num_parts  # on average
        squares = [(steps.square().mean(0) @ weights).view(1) / num_held for steps, weights in recorded]
        root = sqrt(mean_over_workers(strategy, torch.stack(squares).mean(0)).item())
        if not root > 0:  # NaN, too: no finite step
            raise RuntimeError(
                f"ThresholdFinder measured no gradient in {recorders[0].num_steps} steps: all were zero or not finite."
            )
        ends = log10(LOWEST * root), log10(root / sqrt(density / TENTH))
        thresholds = torch.logspace(*ends, POINTS, dtype=torch.float64)
        densities = [
            replayed_densities(
                steps,
                thresholds,
                torch.Generator().manual_seed(rank),
                own=recorder.own_thresholds(strategy.sparsifier.layer_thresholds),
            ).double()
            @ weights.double()
            / num_held
            for rank, (recorder, (steps, weights)) in enumerate(zip(recorders, recorded, strict=True))
        ]
        options = strategy._options
        value = value_bytes(options.value_dtype)
        workers = holders[0].workers
        costs = Costs(workers.num_workers, min(num_elements, BUCKET_ELEMENTS), value, 4)
        rates = speeds(getattr(options, "link_gbit_s", None), on_gpu=strategy.root_device.type == "cuda")
        return ThresholdCurve(
            tuple(thresholds.tolist()),
            tuple(mean_over_workers(strategy, torch.stack(densities).mean(0)).tolist()),
            density,
            num_elements,
            len(recorded[0][0]),
            value + 2,
            4,
            costs.break_even_density(rates) if workers.num_workers > 1 else 1.0,
        )

    def _use(self, curve: ThresholdCurve, holders: list[EngineHolder]) -> None:
        try:
            threshold = curve.suggestion()
        except ValueError as error:
            rank_zero_warn(f"lightning_sparse: {error} λ stays what it is.")
            return
        is_used = self.update and holders[0].workers.num_workers > 1
        rank_zero_info(
            f"lightning_sparse: while gradients are like those of the first {curve.num_steps} steps, λ = "
            f"{threshold:.4g} sends {100 * curve.density:g} %{' and is used' if is_used else ''}."
        )
        for one in holders if is_used else []:
            one.set_threshold(threshold)


def find_threshold(
    trainer: Trainer,
    model: LightningModule,
    train_dataloaders: Any = None,
    datamodule: LightningDataModule | None = None,
    *,
    density: float | None = None,
    num_steps: int = 50,
) -> ThresholdCurve:
    """Returns what every λ would send, as ``Tuner.lr_find`` does for learning rates; leaves the model as it was.

    Args:
        trainer: with a strategy of a hard threshold. Its own threshold or density does not matter.
        model: to measure.
        train_dataloaders: as for ``trainer.fit``.
        datamodule: likewise.
        density: the share to look for, in (0, 1); None is the strategy's, or 0.001.
        num_steps: optimizer steps to measure.

    Raises:
        RuntimeError: the trainer's strategy has no threshold to look for, or nothing could be measured.

    Example::

        curve = find_threshold(trainer, model, density=0.001)
        curve.plot().savefig("curve.png")
        trainer = Trainer(strategy=DDPHardThresholdStrategy(threshold=curve.suggestion()), …)
    """
    finder = ThresholdFinder(density, num_steps, update=False)
    held: Any = trainer  # whose annotations do not know of callbacks
    before = held.callbacks
    descriptor, finder._file = tempfile.mkstemp()  # workers that are started by fork or spawn have no other way back
    os.close(descriptor)
    try:
        held.callbacks = [finder, *before]
        trainer.fit(model, train_dataloaders, datamodule=datamodule)
        if finder.curve is None and os.path.getsize(finder._file):
            with open(finder._file, "rb") as file:
                finder.curve = ThresholdCurve(**pickle.load(file))
    finally:
        held.callbacks = before
        os.unlink(finder._file)
    if finder.curve is None:
        raise RuntimeError(
            f"Found no threshold with strategy={type(trainer.strategy).__name__}: what it said above is why."
        )
    return finder.curve
