"""A word when something is off: on the first worker, once each, with the number seen, what to set and where to read."""

from collections.abc import Sequence
from math import isfinite, sqrt

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch import LightningModule
from torch.optim import Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from lightning_sparse.engine import StepStats
from lightning_sparse.engine.holder import EngineHolder
from lightning_sparse.engine.layer_control import share_of_layer
from lightning_sparse.sparsifiers import Dense, HardThreshold, Sparsifier
from lightning_sparse.strategies.trial import is_trial

FAR_OFF = 2.0
"""A density is off if it is so many times what was asked for, or so many times less."""
ENOUGH_STEPS = 200
"""After so many exchanges there is something to say of a density; and of nothing sent, if in so many on end."""
FEWEST_SENT = 5.0
"""A coordinate should be sent so often in a run (docs/choosing-a-threshold.md)."""
LONG_CALIBRATION = 0.02
"""A share of the run that is worth mentioning."""
_NORMALISING = (Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop)


class Advice:
    """Watches the numbers of exchanges; all workers have the same, so nothing is communicated.

    Args:
        averages: what is exchanged: ``"gradients"``, ``"gradients of shards"`` or ``"drifts"``.
    """

    def __init__(self, averages: str) -> None:
        self._averages = averages
        self._said: set[str] = set()
        self._sparsifier: Sparsifier | None = None
        self._watched: Sparsifier | None = None
        self._clear()

    def follow(self, holder: EngineHolder, *, holds_density: bool) -> None:
        """Watches another fit; what was seen and said before is forgotten.

        Args:
            holder: what exchanges. One worker alone is left in peace.
            holds_density: whether a λ that was asked for by a density is corrected.
        """
        self._clear()
        self._holds_density = holds_density
        self._is_alone = holder.workers.num_workers == 1
        if not self._is_alone:
            self._watched = holder.sparsifier
            holder.subscribe(self.add)

    def _clear(self) -> None:
        self._said.clear()
        self._sparsifier = self._watched = None
        self._holds_density = self._is_alone = False
        self._begin_counting()

    def _begin_counting(self) -> None:
        self._silent_since = 0.0
        self._num_exchanges = float("inf")
        self._calibrating = self._steps = self._silent = 0
        self._selected = self._elements = self._dense_elements = 0
        self._silent_layers: dict[str, float] = {}

    def begin(self, optimizers: Sequence[Optimizer], num_exchanges: float | None) -> None:
        """Says what can be known before the first step.

        Args:
            optimizers: of the training.
            num_exchanges: how many there will be; infinite where nobody knows, None for a run that is thrown away.
        """
        # What is thrown away may come before a training: nothing of it is counted.
        self._sparsifier = None if num_exchanges is None else self._watched
        self._begin_counting()
        if self._is_alone and num_exchanges is not None:
            self._say("alone", f"one worker has nobody to exchange with: {self._averages} pass through whole.")
        if self._sparsifier is None or num_exchanges is None:
            return
        self._num_exchanges = num_exchanges
        density = self._asked
        if density is not None and isfinite(num_exchanges) and num_exchanges * density < FEWEST_SENT:
            self._say(
                "short run",
                f"at a density of {density:g} in {num_exchanges:,.0f} exchanges a coordinate is sent "
                f"{num_exchanges * density:.2g} times on average. Below {FEWEST_SENT:g} training falls behind dense "
                f"training whatever the method: set density={min(1.0, FEWEST_SENT / max(num_exchanges, 1)):.1g} or "
                "train for longer. See docs/choosing-a-threshold.md.",
            )
        remedy = "Use strategy='local_hardthreshold'. See docs/local-training.md."
        if self._averages == "gradients of shards":
            remedy = "Use strategy='local_hsdp_hardthreshold'. See docs/big-models.md."
        normalising = next((one for one in optimizers if _normalises(one)), None)
        if self._averages != "drifts" and normalising is not None and not self._sends_all:
            self._say(
                "optimizer",
                f"{type(normalising).__name__} divides by the size of recent gradients, and a sparse "
                "exchange delivers gradients in rare large lumps: the two do not go well together. A small GPT at 1 % "
                f"came to a validation loss of 2.01 so, to 1.69 with a threshold on drifts, to 1.61 densely. {remedy}",
            )

    @property
    def _sends_all(self) -> bool:
        return isinstance(self._sparsifier, Dense) or getattr(self._sparsifier, "threshold", None) == 0

    @property
    def _asked(self) -> float | None:
        density = getattr(self._sparsifier, "density", None)
        return float(density) if isinstance(density, (int, float)) else None

    def add(self, stats: StepStats) -> None:
        """Adds the numbers of an exchange."""
        if self._sparsifier is None:
            return
        if stats.is_calibration:
            self._calibrating += 1
            return
        if self._steps == 0:
            self._say_calibrated()
        self._steps += 1
        self._selected += stats.selected
        self._elements += stats.num_workers * stats.num_elements
        self._dense_elements += stats.num_workers * stats.dense_elements
        self._silent = 0 if stats.selected else self._silent + 1
        if self._silent == 1:
            self._silent_since = stats.squared_error
        if self._steps == 1:
            self._silent_layers = dict.fromkeys(stats.layers, 0.0)
        for name in [*self._silent_layers] if stats.layers else []:
            if stats.layers[name].selected:
                del self._silent_layers[name]
            else:
                self._silent_layers[name] = sqrt(stats.layers[name].squared_error)
        if self._silent == ENOUGH_STEPS:
            self._say_nothing_sent(stats)
        elif self._steps >= ENOUGH_STEPS and not self._silent and "nothing" not in self._said:
            self._say_far_off(stats)
            self._say_dense(stats)

    def end(self) -> None:
        """Says what only the end of a fit shows."""
        if self._sparsifier is None:
            return
        if self._calibrating and not self._steps:
            self._warn(
                "calibration",
                f"training ended after {self._calibrating} exchanges, in the middle of calibration: everything was "
                "sent, as by plain DDP. Set a smaller calibration_steps, or threshold=… instead of a density",
            )
        sent = self._selected / max(self._elements, 1) * self._steps
        silent = {name: norm for name, norm in self._silent_layers.items() if norm > 0}
        if silent and sent >= FEWEST_SENT:
            listed = ", ".join(f"{name} (norm {norm:.3g})" for name, norm in list(silent.items())[:3])
            self._warn(
                "layers",
                f"{len(silent)} layers have sent nothing in {self._steps:,} exchanges, and all of their "
                f"{self._averages} wait in the residual: {listed}{', …' if len(silent) > 3 else ''}. Give them a λ of "
                "their own, layer_thresholds={'name': …}, or 0 to send them whole",
            )

    def _say_calibrated(self) -> None:
        share = self._calibrating / self._num_exchanges if self._num_exchanges else 0.0
        if share >= LONG_CALIBRATION:
            self._say(
                "calibrated",
                f"calibration took {self._calibrating} of {self._num_exchanges:,.0f} exchanges ({100 * share:.0f} %), "
                "in which everything was sent.",
            )

    def _say_nothing_sent(self, stats: StepStats) -> None:
        grown = stats.squared_error - self._silent_since
        if grown <= 1e-6 * stats.squared_error or not isinstance(self._sparsifier, HardThreshold):
            if self._averages == "drifts":
                return  # with a learning rate of 0 nothing moves
            told = "gradients are zero. Look for a loss that does not depend on the weights"
        else:
            # A residual that nothing leaves is a random walk.
            per_step = grown / (self._silent * stats.num_elements)
            density, now = self._asked or 0.001, self._sparsifier.current_threshold
            advised = min(sqrt(per_step / density), now / 2)
            told = f"λ = {now:.3g} is far above what residuals have come to (norm {stats.error_norm:.3g}). "
            if self._asked is not None and self._holds_density:
                told += "It is being lowered"
            else:
                told += f"For a density of {density:g}, say, set threshold={advised:.2g}, or density={density:g}"
        self._warn("nothing", f"nothing was sent in {ENOUGH_STEPS} exchanges: {told}")

    def _say_far_off(self, stats: StepStats) -> None:
        asked, seen = self._asked, self._selected / self._elements
        if asked is not None and getattr(self._sparsifier, "granularity", None) == "layer" and stats.layers:
            shares = [share_of_layer(asked, one.num_elements) * one.num_elements for one in stats.layers.values()]
            asked = sum(shares) / stats.num_elements  # small layers send more
        if asked is None or not isinstance(self._sparsifier, HardThreshold) or 1 / FAR_OFF < seen / asked < FAR_OFF:
            return
        now = self._sparsifier.current_threshold
        advised = f"set threshold={now * sqrt(seen / asked):.2g}, or leave density_control out, to have λ corrected"
        if self._holds_density:
            advised = "it is corrected until the average is what was asked for"
        self._warn(
            "density",
            f"in {self._steps:,} exchanges after calibration {100 * seen:.3g} % were sent, and {100 * asked:.3g} % "
            f"asked for. With λ = {now:.3g} now, {advised}",
        )

    def _say_dense(self, stats: StepStats) -> None:
        share = self._dense_elements / self._elements
        if share <= 0.5 or self._sends_all:
            return
        seen = self._selected / self._elements
        self._warn(
            "dense",
            f"{100 * share:.0f} % of what was exchanged travelled whole, since at a density of {100 * seen:.3g} % that "
            "costs less than coordinates and their places: nothing is saved. Ask for a smaller density, or use "
            "strategy='ddp'",
        )

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            rank_zero_info(f"lightning_sparse: {text}")

    def _warn(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            rank_zero_warn(f"lightning_sparse: {text}. See docs/choosing-a-threshold.md.")


def exchanges_of(module: LightningModule | None, every_n_steps: int = 1) -> float | None:
    """Returns how many exchanges a fit will make, as ``Advice.begin`` wants to know it when training starts."""
    if module is not None and (getattr(module.trainer, "fast_dev_run", False) or is_trial(module.trainer)):
        return None
    if module is None or not module.automatic_optimization:
        return float("inf")
    steps = float(module.trainer.estimated_stepping_batches)
    return steps / every_n_steps if steps > 0 else float("inf")  # -1 of data without a length


def _normalises(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, _NORMALISING) or "adam" in type(optimizer).__name__.lower()
