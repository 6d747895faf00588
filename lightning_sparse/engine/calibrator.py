"""Sets λ of a hard threshold during training from the target density."""

from collections.abc import Collection, Mapping
from math import inf
from typing import Any

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn

from lightning_sparse.engine.density_control import DensityControl, first_threshold, pace_of, share_of_layer
from lightning_sparse.engine.options import ExchangeOptions
from lightning_sparse.engine.step_stats import LayerStats, StepStats
from lightning_sparse.sparsifiers.hard_threshold import Dense, HardThreshold
from lightning_sparse.sparsifiers.protocol import Sparsifier

LATE = 50
"""Calibration is late after this many exchanges."""


class Calibrator:
    """Finds λ of a ``HardThreshold`` for a density, and keeps the density.

    Exchanges send everything until one has a norm that is finite and not 0, as the first usually has. λ follows from
    this norm. Does nothing for other sparsifiers.

    Args:
        sparsifier: the sparsifier whose λ the calibrator sets.
        options: the options of the exchange.
        logs: whether to log the calibrated λ and to warn about a late calibration.
    """

    def __init__(self, sparsifier: Sparsifier, options: ExchangeOptions, *, logs: bool) -> None:
        self._sparsifier: HardThreshold | None = None
        if isinstance(sparsifier, HardThreshold) and not isinstance(sparsifier, Dense):
            self._sparsifier = sparsifier
        self._given: float | None = None
        if self._sparsifier is not None and self._sparsifier.density is None:
            self._given = self._sparsifier.threshold
        self._name = type(sparsifier).__name__
        self._logs = logs
        self._options = options
        self.begin()

    def begin(self) -> None:
        """Return to the given λ, or start a new calibration."""
        self._controls: dict[str, DensityControl] = {}  # by layer, "" is the model
        self._unconfirmed: StepStats | None = None
        self._unmeasured = 0
        if self._sparsifier is not None:
            self._sparsifier.fix_threshold(self._given)

    @property
    def is_running(self) -> bool:
        """Whether λ is unknown, so that the next step must measure ‖g‖²."""
        return self._sparsifier is not None and self._sparsifier.threshold is None

    @property
    def needs_layers(self) -> bool:
        """Whether ``observe`` needs the statistics of every layer."""
        sparsifier = self._sparsifier
        if sparsifier is None or sparsifier.density is None:
            return False
        return sparsifier.granularity == "layer" or bool(sparsifier.layer_thresholds)

    def set_threshold(self, threshold: float) -> None:
        """Set λ and end calibration. With a density, λ is adjusted from this value."""
        if self._sparsifier is None:
            raise TypeError(f"{self._name} has no λ to set. Use HardThreshold.")
        self._sparsifier.fix_threshold(threshold)
        self._unconfirmed = None

    def observe(self, stats: StepStats, *, counts: bool = True) -> None:
        """Calibrate or adjust λ with the statistics of a step.

        With ``counts=False``, the step adjusts λ only if you call ``confirm`` before the next step.
        """
        sparsifier = self._sparsifier
        if sparsifier is None or sparsifier.density is None:
            return
        if not self.is_running:
            if counts:
                self._correct(stats, None)
            else:
                self._unconfirmed = stats
        elif 0 < stats.squared_gradient_norm < inf:
            shape = stats.num_elements, sparsifier.density, sparsifier.overshoot
            threshold = first_threshold(stats.squared_gradient_norm, *shape)
            sparsifier.fix_threshold(threshold)
            if self._logs:
                rank_zero_info(
                    f"lightning_sparse: calibrated the threshold to {threshold:.6g}, for a density of "
                    f"{sparsifier.density:g} of {stats.num_elements:,} coordinates."
                )
        else:
            self._unmeasured += 1
            if self._logs and self._unmeasured == LATE:
                rank_zero_warn(
                    f"lightning_sparse: {LATE} exchanges sent everything: λ is unknown, because ‖g‖² was 0 or not "
                    "finite. Check the loss, or set threshold=…"
                )

    def confirm(self, names: Collection[str]) -> None:
        """Adjust λ with the stored step after an optimizer stepped on ``names``.

        With a single λ, later calls in a step do nothing. With one λ per layer, each call adjusts those of ``names``.
        """
        if self._unconfirmed is None or not names:
            return
        self._correct(self._unconfirmed, names)
        if self._sparsifier is not None and self._sparsifier.granularity == "model":
            self._unconfirmed = None  # a step adjusts a single λ only once

    def _correct(self, stats: StepStats, names: Collection[str] | None) -> None:
        """Adjust the model's λ, or λ of layers in ``names`` (None: all)."""
        sparsifier = self._sparsifier
        # NaN and infinity are sent at any λ, so λ does not depend on steps that contain them.
        if sparsifier is None or sparsifier.density is None or not sparsifier.threshold or stats.non_finite:
            return
        # Not layers with a given λ: they may send so much that no other λ reaches the density.
        measured = stats.layers.items() if self.needs_layers else ()
        layers = {name: layer for name, layer in measured if sparsifier.given_threshold(name) is None}
        if sparsifier.granularity == "model":
            adjusted = _together(layers.values()) if sparsifier.layer_thresholds else stats
            if adjusted.num_elements:
                sparsifier.fix_threshold(self._corrected("", sparsifier.threshold, adjusted, sparsifier.density))
            return
        thresholds: dict[str, float] = {}
        for name, layer in layers.items():
            if layer.num_elements:
                thresholds[name] = sparsifier.threshold_of(name)
                if names is None or name in names:
                    share = share_of_layer(sparsifier.density, layer.num_elements)
                    thresholds[name] = self._corrected(name, thresholds[name], layer, share)
        if thresholds:
            sparsifier.fix_threshold(max(thresholds.values()), thresholds)

    def _corrected(self, name: str, threshold: float, stats: LayerStats, density: float) -> float:
        assert self._sparsifier is not None
        assert self._sparsifier.density is not None
        control = self._controls.get(name)
        if control is None or control.density != density:  # the checkpoint's layer had another size
            control = self._controls[name] = DensityControl(density)
        # Not the pace of a layer's target: λ of a layer that sends a coordinate in every second step would jump.
        return control.corrected(
            threshold,
            stats,
            pace_of(self._sparsifier.density),
            is_float8=self._options.value_dtype == "float8",
            overshoot=self._sparsifier.overshoot,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return λ, None if it is unknown, and the controllers."""
        return {
            "threshold": None if self._sparsifier is None else self._sparsifier.threshold,
            "layer_thresholds": {} if self._sparsifier is None else dict(self._sparsifier.calibrated_layers),
            "controls": {name: dict(vars(control)) for name, control in self._controls.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the state of a calibrator whose sparsifier has the same settings."""
        self._unconfirmed = None
        if self._sparsifier is not None and saved["threshold"] is not None:
            self._sparsifier.fix_threshold(saved["threshold"], saved["layer_thresholds"])
            self._controls = {name: DensityControl(**control) for name, control in saved["controls"].items()}


def _together(layers: Collection[LayerStats]) -> LayerStats:
    """Return the statistics of several layers as one; of no layer, if there are none."""
    return LayerStats(
        num_workers=max((layer.num_workers for layer in layers), default=1),
        num_elements=sum(layer.num_elements for layer in layers),
        selected=sum(layer.selected for layer in layers),
        squared_error=sum(layer.squared_error for layer in layers),
    )
