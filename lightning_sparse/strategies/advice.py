"""Messages of rank 0 about likely problems: one line, once per process, with a remedy and a page to read."""

import re
from collections.abc import Callable, Sequence
from math import inf, sqrt
from typing import Any

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch import LightningModule
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch.optim import Optimizer

from lightning_sparse.engine import StepStats
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.density_control import share_of_layer
from lightning_sparse.engine.transport_options import TransportOptions
from lightning_sparse.sparsifiers import Dense, HardThreshold, Sparsifier
from lightning_sparse.sparsifiers.hard_threshold import DEFAULT_DENSITY

FAR_OFF = 2.0
"""A density is off if it differs from the density asked for by more than this factor."""
ENOUGH_STEPS = 200
"""Exchanges before a density is judged, and consecutive exchanges without a payload before a warning."""
FEWEST_SENT = 5.0
"""How often a run should send each coordinate (docs/choosing-a-threshold.md)."""
LONG_CALIBRATION = 0.02
"""The share of a run from which a calibration is worth a message."""
FEWEST_SECONDS = 1e-3
"""The time of a dense exchange at 1 Gbit/s, without latency, that a sparse exchange cannot shorten."""
NORMALISING = re.compile(
    "adam|adadelta|adafactor|adagrad|adopt|dion|kron|lamb|lar[cs]|lion|madgrad|muon|prodigy|psgd|rmsprop|rprop|shampoo|"
    "sign|soap|sophia",
    re.IGNORECASE,
)
"""Parts of the names of optimizers whose updates do not grow in proportion to the gradient.

LARS and LARC divide a layer's gradient by its norm, so a step is as long for one received coordinate as for all.
"""
_said: set[str] = set()
"""The kinds of messages that this process has said."""


class Advice:
    """Watches the exchanges of a fit. All workers see the same numbers, so it communicates nothing.

    Args:
        averages: ``"gradients"``, ``"gradients of shards"`` or ``"drifts"``.
        averager: makes the exchanges; those of a single worker are not watched.
        options: of the exchange.
    """

    def __init__(self, averages: str, averager: Averager, options: TransportOptions) -> None:
        self._averages, self._options = averages, options
        self._num_workers, self._num_elements = averager.workers.num_workers, averager.num_elements
        self._sparsifier = averager.sparsifier
        self._is_watching = False
        if self._num_workers > 1:
            averager.subscribe(self.add)

    def begin(self, optimizers: Sequence[Optimizer], num_exchanges: float | None) -> None:
        """Say what is known before the first step, and count from zero.

        Args:
            optimizers: of the training.
            num_exchanges: how many there will be; infinite if unknown, None for a run whose steps are discarded.
        """
        # A discarded run may precede a training: its numbers do not count.
        self._is_watching = self._num_workers > 1 and num_exchanges is not None
        self._num_exchanges = inf if num_exchanges is None else num_exchanges
        self._calibrating = self._steps = self._silent = 0
        self._was_silent, self._silent_since = False, 0.0
        self._selected = self._elements = self._dense_elements = 0
        self._silent_layers: dict[str, float] = {}
        if self._num_workers == 1 and num_exchanges is not None:
            text = f"one worker has nobody to exchange with: {self._averages} pass through whole."
            self._say("alone", text, "troubleshooting")
        if not self._is_watching or self._sends_all:
            return
        density = asked_density(self._sparsifier)
        times_sent = self._num_exchanges * (density or inf)
        # The latency of messages is left out: a sparse exchange has it too.
        dense_seconds = 8e-9 * 4 * self._num_elements * 2 * (self._num_workers - 1) / self._num_workers
        if dense_seconds < FEWEST_SECONDS:
            self._say(
                "small model",
                f"the model trains {self._num_elements:,} elements: a sparse exchange saves under 1 ms at 1 Gbit/s. "
                "Prefer a dense one.",
                "performance",
            )
        elif times_sent < FEWEST_SENT:
            self._say(
                "short run",
                f"density={density:.3g} sends a coordinate only {times_sent:.2g} times in "
                f"{_count(self._num_exchanges)} exchanges. "
                f"Set density={min(1.0, FEWEST_SENT / max(self._num_exchanges, 1)):.1g}.",
            )
        normalising = [name for optimizer in optimizers for name in _normalising(optimizer)]
        if self._averages != "drifts" and normalising:
            is_sharded = self._averages == "gradients of shards"
            self._say(
                "optimizer",
                f"{shortened(normalising[-1], 20)} normalises gradients, so sparse ones train worse. Use "
                f"'local_{'hsdp_' if is_sharded else ''}hardthreshold'.",
                "big-models" if is_sharded else "local-training",
            )

    @property
    def _sends_all(self) -> bool:
        return isinstance(self._sparsifier, Dense) or getattr(self._sparsifier, "threshold", None) == 0

    def add(self, stats: StepStats) -> None:
        """Add the numbers of an exchange."""
        if not self._is_watching:
            return
        if stats.is_calibration:
            self._calibrating += 1
            return
        if self._steps == 0:
            self._say_calibrated()
            self._silent_layers = dict.fromkeys(stats.layers, 0.0)
        self._steps += 1
        self._selected += stats.selected
        self._elements += stats.num_workers * stats.num_elements
        self._dense_elements += stats.num_workers * stats.dense_elements
        for name in [*self._silent_layers] if stats.layers else []:
            self._silent_layers[name] = sqrt(stats.layers[name].squared_error)
            if stats.layers[name].selected:
                del self._silent_layers[name]
        self._silent = 0 if stats.selected else self._silent + 1
        if self._silent == 1:
            self._silent_since = stats.squared_error
        if self._silent == ENOUGH_STEPS:
            self._was_silent = True
            self._say_nothing_sent(stats)
        elif self._steps >= ENOUGH_STEPS and not self._silent and not self._was_silent:
            self._say_far_off(stats)
            self._say_dense()

    def end(self) -> None:
        """Say what only the end of a fit shows."""
        if not self._is_watching:
            return
        if self._calibrating and not self._steps:
            self._warn(
                "calibration",
                f"training ended in calibration: all {_count(self._calibrating)} exchanges sent everything. "
                "Set a smaller calibration_steps.",
            )
        sent = self._selected / max(self._elements, 1) * self._steps
        silent = {name: norm for name, norm in self._silent_layers.items() if norm > 0}
        if silent and sent >= FEWEST_SENT:
            largest = shortened(max(silent, key=lambda name: silent[name]), 24)
            self._warn(
                "layers",
                f"{len(silent):,} layers sent nothing in {_count(self._steps)} exchanges, such as {largest}. "
                "Set layer_thresholds.",
            )

    def _say_calibrated(self) -> None:
        share = self._calibrating / self._num_exchanges if self._num_exchanges else 0.0
        if share >= LONG_CALIBRATION:
            self._say(
                "calibrated",
                f"calibration took {_count(self._calibrating)} of {_count(self._num_exchanges)} exchanges "
                f"({100 * share:.0f} %) and sent everything in them.",
            )

    def _say_nothing_sent(self, stats: StepStats) -> None:
        grown = stats.squared_error - self._silent_since
        has_grown = grown > 1e-6 * stats.squared_error
        if not isinstance(self._sparsifier, HardThreshold) or (self._options.keeps_rest and not has_grown):
            if self._averages == "drifts":
                return  # with a learning rate of 0 nothing moves
            told = "gradients are zero. Check that the loss depends on the weights."
        else:
            now, fitting = self._sparsifier.current_threshold, inf
            if has_grown:  # a residual from which nothing is sent is a random walk
                fitting = sqrt(grown / (self._silent * stats.num_elements) / DEFAULT_DENSITY)
            remedy = f"Set threshold={min(fitting, now / 2):.2g} or density={DEFAULT_DENSITY}."
            if asked_density(self._sparsifier) is not None:
                remedy = "It is being lowered."
            told = f"λ={now:.3g} is too high{'' if has_grown else ' or gradients are 0'}. {remedy}"
        self._warn("nothing", f"nothing was sent in {ENOUGH_STEPS} exchanges: {told}")

    def _say_far_off(self, stats: StepStats) -> None:
        asked, seen = asked_density(self._sparsifier), self._selected / self._elements
        if asked is None or not isinstance(self._sparsifier, HardThreshold):
            return
        if self._sparsifier.granularity == "layer" and stats.layers:  # small layers send more
            sizes = [layer.num_elements for layer in stats.layers.values()]
            asked = sum(share_of_layer(asked, size) * size for size in sizes) / stats.num_elements
        if 1 / FAR_OFF < seen / asked < FAR_OFF:
            return
        seen, asked = 100 * seen, 100 * asked
        self._warn("density", f"density is {seen:.3g} % after calibration, not {asked:.3g} %. λ is being corrected.")

    def _say_dense(self) -> None:
        share = self._dense_elements / self._elements
        if share > 0.5 and not self._sends_all:
            seen = 100 * self._selected / self._elements
            self._warn(
                "dense",
                f"{100 * share:.0f} % of elements went out densely at a density of {seen:.3g} %: nothing is saved. "
                "Set a lower density.",
            )

    def _warn(self, kind: str, text: str) -> None:
        self._say(kind, text, tell=rank_zero_warn)

    def _say(
        self, kind: str, text: str, page: str = "choosing-a-threshold", tell: Callable[[str], None] = rank_zero_info
    ) -> None:
        if kind not in _said:
            _said.add(kind)
            tell(f"lightning_sparse: {text} See docs/{page}.md.")


def asked_density(sparsifier: Sparsifier) -> float | None:
    """Return the density that a sparsifier was asked for; None if there is none."""
    density = getattr(sparsifier, "density", None)
    return float(density) if isinstance(density, (int, float)) else None


def exchanges_of(module: LightningModule, every_n_steps: int) -> float | None:
    """Return how many exchanges a fit will make, for ``Advice.begin``."""
    trainer: Any = module.trainer
    # The steps of Lightning's search for a learning rate are thrown away.
    if trainer.fast_dev_run or any(isinstance(callback, _LRCallback) for callback in trainer.callbacks):
        return None
    if not module.automatic_optimization:
        return inf
    steps = float(trainer.estimated_stepping_batches)
    return steps / every_n_steps if steps > 0 else inf  # data without a length has -1


def shortened(name: str, most: int) -> str:
    """Return a name without its middle if it is longer than ``most`` characters.

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
    """Return the class names of this optimizer and of those inside it that normalise gradients."""
    found = [optimizer]
    for outer in found:  # the loop extends the list
        found += [inner for inner in vars(outer).values() if isinstance(inner, Optimizer) and inner not in found]
    return [type(optimizer).__name__ for optimizer in found if _normalises(optimizer)]


def _normalises(optimizer: Optimizer) -> bool:
    # A pair of betas: moments of the gradient and of its square, or, with Lion, a sign. AggMo of SGD has three.
    has_moments = any(len(group.get("betas") or ()) == 2 for group in optimizer.param_groups)
    return has_moments or any(NORMALISING.search(base.__name__) for base in type(optimizer).__mro__)
