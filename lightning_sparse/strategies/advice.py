"""Messages of rank 0 about likely problems, once per process, with a remedy and a page."""

import re
from collections.abc import Callable, Sequence
from math import inf, sqrt
from typing import Any

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch import LightningModule
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch.optim import Optimizer

from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.step_stats import StepStats
from lightning_sparse.exchange.exchange import ExchangeMode
from lightning_sparse.sparsifiers.hard_threshold import DEFAULT_DENSITY, Dense, HardThreshold
from lightning_sparse.sparsifiers.protocol import target_density

EXCHANGES_BEFORE_WARNING = 200
"""Exchanges before the check of dense elements; also consecutive empty exchanges before a warning."""
MIN_SENT = 5.0
"""The minimum number of times that a run should send each coordinate (docs/guides/choosing-a-threshold.md)."""
MIN_SECONDS = 1e-3
"""The time of a dense exchange at 1 Gbit/s, without latency, below which a sparse exchange saves almost nothing."""
NORMALISING = re.compile(
    "adam|adadelta|adafactor|adagrad|adopt|dion|kron|lamb|lar[cs]|lion|madgrad|muon|prodigy|psgd|rmsprop|rprop|shampoo|"
    "sign|soap|sophia",
    re.IGNORECASE,
)
"""Parts of the names of optimizers whose updates are not proportional to the gradient.

LARS and LARC divide a layer's gradient by its norm, so a step with one received coordinate is as long as with all.
"""
_reported: set[str] = set()
"""The kinds of messages that this process has reported."""


class Advice:
    """Reports likely problems of a fit from its statistics, without communication.

    Args:
        averager: the averager of the fit; exchanges of a single worker are ignored.
        is_sharded: whether the strategy is for sharded replicas.
        exchange: the route that the user chose.
    """

    def __init__(self, averager: Averager, *, is_sharded: bool, exchange: ExchangeMode) -> None:
        self._kind, self._is_sharded = averager.kind, is_sharded
        self._num_workers = averager.workers.num_workers
        self._num_elements = averager.replica.num_workers * sum(averager.parameter_sizes.values())
        self._sparsifier = averager.sparsifier
        self._exchange, self._is_watching = exchange, False
        if self._num_workers > 1:
            averager.subscribe(self.add)

    def begin(self, optimizers: Sequence[Optimizer], num_exchanges: float | None) -> None:
        """Reset all counts, and report problems that are known before the first step.

        Args:
            optimizers: the optimizers of the training.
            num_exchanges: the planned number of exchanges; infinite if unknown, None if the run's steps are discarded.
        """
        # A discarded run may precede training, and its numbers do not count.
        self._is_watching = num_exchanges is not None
        self._steps = self._silent = 0
        self._silent_since = 0.0
        self._selected = self._elements = self._dense_elements = 0
        self._silent_layers: dict[str, float] = {}
        if num_exchanges is None:
            return
        if self._num_workers == 1 and isinstance(self._sparsifier, Dense):  # not a simulated worker
            alone, remedy = ("replica", " Set replicas or num_nodes to 2.") if self._is_sharded else ("worker", "")
            text = f"a single {alone} exchanges nothing: its {self._kind} are not sparsified.{remedy}"
            self._report("alone", text, "troubleshooting")
        if self._num_workers == 1 or self._sends_all:
            return
        density = target_density(self._sparsifier)
        times_sent = num_exchanges * (density or inf)
        # Ignores the latency of messages, which a sparse exchange has too.
        dense_seconds = 8e-9 * 4 * self._num_elements * 2 * (self._num_workers - 1) / self._num_workers
        if dense_seconds < MIN_SECONDS:
            self._report(
                "small model",
                f"the model trains {self._num_elements:,} parameters: a sparse exchange saves < 1 ms at 1 Gbit/s. "
                "Prefer a dense one.",
                "evidence/performance",
            )
        if times_sent < MIN_SENT:
            self._report(
                "short run",
                f"steps × density is only {times_sent:.2g} ({_count(num_exchanges)} × {density:.3g}). "
                f"Set density={min(1.0, 1.05 * MIN_SENT / max(num_exchanges, 1)):.2g}.",
            )
        normalising = [name for optimizer in optimizers for name in _normalising(optimizer)]
        if self._kind != "drifts" and normalising:
            self._report(
                "optimizer",
                f"{shortened(normalising[-1], 20)} normalises gradients, so sparse ones train worse. Use "
                f"'local_{'hsdp_' if self._is_sharded else ''}hardthreshold'.",
                "guides/big-models" if self._is_sharded else "guides/local-training",
            )

    @property
    def _sends_all(self) -> bool:
        return isinstance(self._sparsifier, Dense) or getattr(self._sparsifier, "threshold", None) == 0

    def add(self, stats: StepStats) -> None:
        """Add the statistics of an exchange."""
        if not self._is_watching or stats.is_calibration:
            return
        layers = self._silent_layers if self._steps else stats.layers
        self._steps += 1
        self._selected += stats.selected
        self._elements += stats.num_workers * stats.num_elements
        self._dense_elements += stats.num_workers * stats.dense_elements
        silent = [name for name in layers if not stats.layers[name].selected]
        self._silent_layers = {name: stats.layers[name].squared_error for name in silent}
        self._silent = 0 if stats.selected else self._silent + 1
        if self._silent == 1:
            self._silent_since = stats.squared_error
        if self._silent == EXCHANGES_BEFORE_WARNING:
            self._report_nothing_sent(stats)
        elif self._steps >= EXCHANGES_BEFORE_WARNING:
            self._report_dense()

    def end(self) -> None:
        """Report problems that are known only at the end of a fit."""
        if not self._is_watching:
            return
        sent = self._selected / max(self._elements, 1) * self._steps
        silent = {name: error for name, error in self._silent_layers.items() if error > 0}
        if silent and sent >= MIN_SENT:
            largest = shortened(max(silent, key=lambda name: silent[name]), 24)
            self._warn(
                "layers",
                f"{len(silent):,} layers sent nothing in {_count(self._steps)} exchanges, such as {largest}. "
                "Set layer_thresholds.",
            )

    def _report_nothing_sent(self, stats: StepStats) -> None:
        grown = stats.squared_error - self._silent_since
        if not isinstance(self._sparsifier, HardThreshold) or grown <= 1e-6 * stats.squared_error:
            if self._kind == "drifts":
                return  # weights do not change with a learning rate of 0
            cause = "gradients are zero. Check that the loss depends on the weights."
        else:
            now = self._sparsifier.current_threshold
            # Assumes that a residual without sent values is a random walk.
            fitting = sqrt(grown / (self._silent * stats.num_elements) / DEFAULT_DENSITY)
            remedy = f"Set threshold={min(fitting, now / 2):.2g} or density={DEFAULT_DENSITY}."
            if target_density(self._sparsifier) is not None:
                remedy = "λ is being lowered."
            cause = f"λ={now:.3g} is too high. {remedy}"
        self._warn("nothing", f"nothing was sent in {EXCHANGES_BEFORE_WARNING} exchanges: {cause}")

    def _report_dense(self) -> None:
        share = self._dense_elements / self._elements
        if share > 0.5 and not (self._sends_all or self._exchange == "dense"):
            seen = 100 * self._selected / self._elements
            self._warn(
                "dense",
                f"{100 * share:.0f} % of coordinates were sent densely at a density of {seen:.3g} %: nothing is saved. "
                "Set a lower density.",
            )

    def _warn(self, kind: str, text: str) -> None:
        self._report(kind, text, tell=rank_zero_warn)

    def _report(
        self,
        kind: str,
        text: str,
        page: str = "guides/choosing-a-threshold",
        tell: Callable[[str], None] = rank_zero_info,
    ) -> None:
        if kind not in _reported:
            _reported.add(kind)
            tell(f"lightning_sparse: {text} See docs/{page}.md.")


def exchanges_of(module: LightningModule, every_n_steps: int) -> float | None:
    """Return the planned number of exchanges of a fit, for ``Advice.begin``."""
    trainer: Any = module.trainer
    # Lightning's learning rate finder discards its steps.
    if trainer.fast_dev_run or any(isinstance(callback, _LRCallback) for callback in trainer.callbacks):
        return None
    if not module.automatic_optimization:
        return inf
    steps = float(trainer.estimated_stepping_batches)
    return steps / every_n_steps if steps > 0 else inf  # data without a length has -1


def shortened(name: str, most: int) -> str:
    """Return a name of at most ``most`` characters, without its middle if necessary.

    Example:
        >>> shortened("base_model.model.layers.31.lora_A.weight", 26)
        'base…yers.31.lora_A.weight'
    """
    head = most // 6
    return name if len(name) <= most else f"{name[:head]}…{name[head + 1 - most :]}"


def _count(number: float) -> str:
    """Return a number in at most eleven characters."""
    return f"{round(number):,.6g}"


def _normalising(optimizer: Optimizer) -> list[str]:
    """Return class names of this and all wrapped optimizers that normalise gradients."""
    found = [optimizer]
    for outer in found:  # the loop extends the list
        found += [inner for inner in vars(outer).values() if isinstance(inner, Optimizer) and inner not in found]
    return [type(optimizer).__name__ for optimizer in found if _normalises(optimizer)]


def _normalises(optimizer: Optimizer) -> bool:
    # Two betas are moments of the gradient and of its square, or belong to Lion's sign. AggMo of SGD has three.
    has_moments = any(len(group.get("betas") or ()) == 2 for group in optimizer.param_groups)
    return has_moments or any(NORMALISING.search(base.__name__) for base in type(optimizer).__mro__)
