"""λ by step, by epoch, or with the learning rate."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_sparse.sparsifiers import HardThreshold
from lightning_sparse.sparsifiers.protocol import is_number
from lightning_sparse.strategies.sparse_strategy import SparseStrategy

Factors = Mapping[int, float] | Callable[[int], float] | Literal["learning_rate"]


class ThresholdSchedule(Callback):
    """Multiplies the strategy's ``threshold`` by a factor that changes over the run.

    The theory asks for a constant λ; use a schedule to send more at the beginning, or if you know how gradients or
    drifts change. ``sparse/threshold`` shows each λ. The factor is a function of the step, so a resumed run has the
    same. The λ of ``layer_thresholds`` do not change. A strategy that holds a density and a sparsifier without λ are
    refused.

    Args:
        factors: ``{step: factor}``, where each factor holds from its step on, and 1 before the first step; or a
            function that returns the factor of a step. ``"learning_rate"`` is the learning rate of the first
            optimizer's first parameter group, divided by its initial value.
        interval: the unit of a step, counted from 0: ``"step"``, all optimizers' steps as in ``trainer.global_step``,
            or ``"epoch"``.
        linear: whether factors given by step change linearly from each to the next.

    Raises:
        ValueError: a factor below 0 or not finite, a step below 0, or an unknown interval.
        TypeError: factors that are none of these.

    Example:
        The first 200 steps send everything, and λ grows to the strategy's threshold at step 1,000:

        >>> schedule = ThresholdSchedule({0: 0.0, 200: 0.0, 1000: 1.0}, linear=True)
        >>> [schedule.factor(step) for step in (0, 200, 400, 600, 5000)]
        [0.0, 0.0, 0.25, 0.5, 1.0]
    """

    def __init__(self, factors: Factors, interval: Literal["step", "epoch"] = "step", linear: bool = False) -> None:
        if interval not in ("step", "epoch"):
            raise ValueError(f"Invalid {interval=}. Must be 'step' or 'epoch'.")
        if isinstance(factors, Mapping):
            wrong = [step for step in factors if isinstance(step, bool) or not isinstance(step, int) or step < 0]
            if wrong or not factors:
                raise ValueError(f"Invalid {factors=}. Give {{step: factor}}, with steps from 0 on.")
            for factor in factors.values():
                _require_factor(factor)
        elif factors != "learning_rate" and not callable(factors):
            raise TypeError(f"Invalid {factors=}. Give {{step: factor}}, a function of the step, or 'learning_rate'.")
        if not isinstance(linear, bool):
            raise ValueError(f"Invalid {linear=}. Must be True or False.")
        if linear and not isinstance(factors, Mapping):
            raise ValueError("linear=True needs factors by step. Give {step: factor}, or leave out linear.")
        self.factors = factors
        self.interval = interval
        self.linear = linear

    def factor(self, number: int) -> float:
        """Return the factor of a step or an epoch; not for ``"learning_rate"``."""
        if callable(self.factors):
            return _require_factor(self.factors(number))
        assert isinstance(self.factors, Mapping)
        before = max((step for step in self.factors if step <= number), default=None)
        after = min((step for step in self.factors if step > number), default=None)
        if before is None:
            return 1.0
        if after is None or not self.linear:
            return float(self.factors[before])
        share = (number - before) / (after - before)
        return (1 - share) * self.factors[before] + share * self.factors[after]

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
        averagers = strategy.averagers
        if averagers[0].workers.num_workers == 1:
            return  # a single worker sends nothing
        if self.factors == "learning_rate":
            optimizer = strategy.optimizers[0]
            rate, first_rate = optimizer.param_groups[0].get("lr"), optimizer.defaults.get("lr")
            if rate is None or first_rate is None:
                raise ValueError(
                    f"ThresholdSchedule('learning_rate') needs a learning rate, but {type(optimizer).__name__} has "
                    "lr=None. Set lr=…, or give factors by step or epoch."
                )
            factor = _require_factor(float(rate) / float(first_rate))
        else:
            factor = self.factor(trainer.global_step if self.interval == "step" else trainer.current_epoch)
        threshold = factor * strategy.sparsifier.threshold
        for averager in averagers:
            if averager.sparsifier.current_threshold != threshold:
                averager.set_threshold(threshold)


def _require_factor(factor: float) -> float:
    if not is_number(factor) or not isfinite(factor) or factor < 0:
        raise ValueError(f"Invalid {factor=} of λ. Must be a finite number of at least 0; 0 sends everything.")
    return float(factor)
