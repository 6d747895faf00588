"""λ that changes by step."""

from collections.abc import Mapping
from itertools import pairwise
from math import isfinite
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_sparse.sparsifiers import Dense, HardThreshold
from lightning_sparse.sparsifiers.protocol import is_number
from lightning_sparse.strategies.sparse_strategy import SparseStrategy


class ThresholdSchedule(Callback):
    """Multiplies the strategy's ``threshold`` by a factor that changes linearly from each given step to the next.

    The theory asks for a constant λ; use a schedule to send more at the beginning, or if you know how gradients or
    drifts change. ``sparse/threshold`` shows each λ. The factor is a function of the step, so a resumed run has the
    same. The λ of ``layer_thresholds`` do not change.

    Args:
        factors: ``{step: factor}`` by ``trainer.global_step``, the number of all optimizers' steps. The first factor
            also holds before its step, and the last one after it.

    Raises:
        TypeError: factors that are no mapping.
        ValueError: no factor, one below 0 or not finite, or a step that is no whole number from 0 on. From ``fit``: a
            strategy with a density or without a hard threshold.

    Example:
        The first 200 steps send everything, and λ grows to the strategy's threshold at step 1,000:

        >>> schedule = ThresholdSchedule({200: 0.0, 1000: 1.0})
        >>> [schedule.factor(step) for step in (0, 200, 400, 600, 5000)]
        [0.0, 0.0, 0.25, 0.5, 1.0]
    """

    def __init__(self, factors: Mapping[int, float]) -> None:
        if not isinstance(factors, Mapping):
            raise TypeError(f"Invalid {factors=}. Must be {{step: factor}}, such as {{200: 0.0, 1000: 1.0}}.")
        if not factors or any(isinstance(step, bool) or not isinstance(step, int) or step < 0 for step in factors):
            raise ValueError(f"Invalid {factors=}. Must be {{step: factor}}, with whole steps from 0 on.")
        for factor in factors.values():
            if not is_number(factor) or not isfinite(factor) or factor < 0:
                raise ValueError(f"Invalid {factor=} of λ. Must be a finite number of at least 0; 0 sends everything.")
        self.factors = dict(sorted(factors.items()))

    def factor(self, step: int) -> float:
        """Return the factor of a step."""
        for (before, first), (after, last) in pairwise(self.factors.items()):
            if step <= after:
                share = max(0, step - before) / (after - before)
                return (1 - share) * first + share * last
        return float(list(self.factors.values())[-1])

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        sparsifier = getattr(strategy, "sparsifier", None)
        if not isinstance(strategy, SparseStrategy) or not isinstance(sparsifier, HardThreshold):
            what = type(strategy if sparsifier is None else sparsifier).__name__
            raise ValueError(f"ThresholdSchedule changes the λ of a hard threshold, but {what} has none.")
        if sparsifier.density is not None:
            raise ValueError(
                f"ThresholdSchedule was given with density={sparsifier.density:g}, which already determines λ. Give "
                "the strategy threshold=… instead, or remove the schedule."
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        threshold = self.factor(trainer.global_step) * strategy.sparsifier.threshold
        for averager in strategy.averagers:
            # A single real worker is not sparsified.
            if not isinstance(averager.sparsifier, Dense) and averager.sparsifier.current_threshold != threshold:
                averager.set_threshold(threshold)
