"""Measuring, before a training, whether sparse exchange pays here."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import nan
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_sparse.callbacks.communication_profile import CommunicationProfile
from lightning_sparse.callbacks.step_monitor import mean_over_workers
from lightning_sparse.engine import StepStats
from lightning_sparse.engine.grouping import local
from lightning_sparse.engine.recorder import GradientRecorder
from lightning_sparse.exchange.wire import value_bytes
from lightning_sparse.sparsifiers import HardThreshold
from lightning_sparse.sparsifiers.protocol import require_density, require_steps
from lightning_sparse.sparsifiers.replay import first_densities
from lightning_sparse.strategies import SparseDDPStrategy, SparseLocalStrategy
from lightning_sparse.strategies.local_training import LocalTraining
from lightning_sparse.strategies.replica_strategy import ReplicaStrategy
from lightning_sparse.strategies.trial import Trial, run_trial

MEASURED = (SparseDDPStrategy, SparseLocalStrategy, ReplicaStrategy)
UNTIMED_EXCHANGES = 3
"""Before those that are timed: the first steps build what later ones use again."""


class CommunicationProfiler(Callback):
    """Says in a sentence what exchange costs a step here, and what sparse exchange gains; then training begins.

    At the beginning of a fit it trains three times for some steps: densely, sparsely at a density, and without any
    exchange (of replicas: none between them). All of that is undone: weights, optimizers, random states and data begin
    anew, as if there had been nothing. Densely means that everything is sent, on the dense route, which takes what
    plain DDP takes up to 5 %. In the sparse steps λ is such that, from residuals of 0, the density is sent on average.
    Needs a hard threshold, and at least two workers; a worker that waits for another counts the wait as exchange.

    Args:
        num_steps: exchanges that are timed in each way, at least 2; three more come before them.
        density: the share of coordinates to send; None is the strategy's, or 0.001.

    Attributes:
        profile: the `CommunicationProfile`, None before, and where there was nothing to measure.

    Raises:
        ValueError: less than two steps, or a density that is none.
    """

    def __init__(self, num_steps: int = 20, density: float | None = None) -> None:
        require_steps(num_steps)
        if num_steps == 1:
            raise ValueError("Invalid num_steps=1. Must be at least 2: of one step nobody knows how much steps vary.")
        if density is not None:
            require_density(density, "one in a thousand")
        self.num_steps = num_steps
        self.density = density
        self.profile: CommunicationProfile | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        why = None
        if getattr(trainer, "fast_dev_run", False):
            why = "fast_dev_run"
        elif not isinstance(strategy, MEASURED) or strategy.state is None:
            why = f"it measures the exchange of workers or of replicas, not that of {type(strategy).__name__}"
        elif strategy.state.workers.num_workers == 1:
            why = "one worker exchanges with nobody"
        elif not isinstance(strategy.sparsifier, HardThreshold):
            why = f"it measures at a threshold, and the sparsifier is {type(strategy.sparsifier).__name__}"
        if why is not None:
            rank_zero_info(f"CommunicationProfiler does nothing: {why}.")
            return
        rank_zero_info(
            "CommunicationProfiler trains for some steps, three times; then they are undone and training begins."
        )
        with _threshold_as_it_was(strategy):
            self.profile = self._measure(trainer, strategy)
        if self.profile is not None:
            rank_zero_info(f"lightning_sparse: {self.profile}")

    def _measure(self, trainer: Trainer, strategy: Any) -> CommunicationProfile | None:
        every = int(getattr(strategy._options, "every_n_steps", 1))
        # Of shards: those of a rank.
        num_elements = sum(local(one).numel() for one in trainer.lightning_module.parameters() if one.requires_grad)
        density = self.density or strategy.sparsifier.density or 0.001
        recorder = GradientRecorder(num_elements, strategy.global_rank)

        spreads: list[float] = []

        def seconds(*during: Any) -> float:
            clock = _Clock(UNTIMED_EXCHANGES * every)
            run_trial(trainer, every * (UNTIMED_EXCHANGES + self.num_steps), strategy.restart, *during, trial=clock)
            seconds, spread = clock.seconds(strategy, every)
            spreads.append(spread)
            return seconds

        dense = seconds(strategy.state.recording(recorder))
        if recorder.num_steps <= UNTIMED_EXCHANGES + 1:
            rank_zero_warn(
                f"CommunicationProfiler measured nothing: the training makes {recorder.num_steps} exchanges, and the "
                f"first {UNTIMED_EXCHANGES} are not timed. It needs two more."
            )
            return None
        threshold = self._threshold(recorder, density, strategy)
        if threshold is None:
            return None
        sent: list[StepStats] = []
        sparse = seconds(_with_threshold(strategy.state, threshold), strategy.state.telling(sent.append))
        compute = seconds(_without_exchange(strategy))
        timed = sent[UNTIMED_EXCHANGES:]
        return CommunicationProfile(
            compute_seconds=compute,
            dense_seconds=dense,
            sparse_seconds=sparse,
            density=sum(one.density for one in timed) / max(len(timed), 1),
            num_elements=num_elements,
            num_workers=strategy.state.workers.num_workers,
            payload_element_bytes=value_bytes(strategy._options.value_dtype) + 2,
            exchanges_per_step=1 / every,
            spread_seconds=max(spreads),
            asked_density=density,
            on_gpu=strategy.root_device.type == "cuda",
        )

    def _threshold(self, recorder: GradientRecorder, density: float, strategy: Any) -> float | None:
        """Returns λ that sends a density of the steps that were recorded, the same on all workers; None without any."""
        recorded, weights = recorder.recorded()
        is_enough = len(recorded) > UNTIMED_EXCHANGES
        own = recorded.abs().sum(0).max().view(1) if is_enough else torch.full((1,), nan)
        largest = mean_over_workers(strategy, own).item()
        if not largest > 0:  # NaN, too
            rank_zero_warn("CommunicationProfiler measured nothing: too few gradients are finite and other than zero.")
            return None
        thresholds = torch.logspace(-6, 0, 121, dtype=torch.float64) * largest
        densities = mean_over_workers(strategy, first_densities(recorded, thresholds, weights, UNTIMED_EXCHANGES))
        return float(thresholds[(densities - density).abs().argmin()])


class _Clock(Trial):
    """Notes when optimizer steps begin.

    Args:
        untimed: optimizer steps at the beginning that do not count.
    """

    def __init__(self, untimed: int) -> None:
        self._untimed = untimed
        self._begins: list[tuple[int, float]] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._note(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(trainer)

    def _note(self, trainer: Trainer) -> None:
        if not self._begins or trainer.global_step > self._begins[-1][0]:
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize(trainer.strategy.root_device)
            self._begins.append((trainer.global_step, perf_counter()))

    def seconds(self, strategy: Any, every: int) -> tuple[float, float]:
        """Returns median and interquartile range of a step, of the slowest worker.

        With an exchange every so many steps, of as many on end.
        """
        begins = [one for one in self._begins if one[0] - self._begins[0][0] >= self._untimed][::every]
        steps = [(t - s) / (b - a) for (a, s), (b, t) in pairwise(begins)]
        lower, _, upper = quantiles(steps, n=4) if len(steps) > 1 else (nan, nan, nan)
        own = torch.tensor([median(steps) if steps else nan, upper - lower], device=strategy.root_device)
        seconds, spread = strategy.reduce(own, reduce_op="max").tolist()
        return seconds, spread


@contextmanager
def _threshold_as_it_was(strategy: Any) -> Iterator[None]:
    """Trials begin with the λ that the strategy was made with; a `ThresholdFinder` may have found another before."""
    before = strategy.state.sparsifier.threshold
    yield
    if before is not None and strategy.state.sparsifier.threshold != before:
        strategy.state.set_threshold(before)


@contextmanager
def _with_threshold(holder: Any, threshold: float) -> Iterator[None]:
    before = holder.sparsifier.threshold
    holder.set_threshold(threshold)
    try:
        yield
    finally:
        if before is not None:
            holder.set_threshold(before)


@contextmanager
def _without_exchange(strategy: Any) -> Iterator[None]:
    """Within it workers, or replicas, train each for themselves: DDP's hook hands back what it is given."""
    state = strategy.state
    if isinstance(strategy, LocalTraining):
        name = "step"
    else:
        name = "average_gradients" if isinstance(strategy, ReplicaStrategy) else "receive"
    vars(state)[name] = _hand_back if name == "receive" else _do_nothing
    try:
        yield
    finally:
        del vars(state)[name]


def _do_nothing(*_: Any) -> Any:
    pass


def _hand_back(bucket: Any) -> torch.futures.Future[Tensor]:
    gradient = bucket.buffer()
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=None if gradient.device.type == "cpu" else [gradient.device]
    )
    future.set_result(gradient)
    return future
