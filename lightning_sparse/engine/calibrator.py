"""Sets λ of a hard threshold during training from the target density."""

from collections.abc import Collection, Mapping
from math import isinf
from typing import Any

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn

from lightning_sparse.engine.density_control import DensityControl, LayerControl, is_all_sent, pace_of
from lightning_sparse.engine.step_stats import StepStats
from lightning_sparse.sparsifiers import Dense, HardThreshold, Sparsifier
from lightning_sparse.sparsifiers.threshold_rules import ThresholdCalibration

LATE = 3
"""Calibration is late after this many times the steps it should take."""


class Calibrator:
    """Finds λ of a ``HardThreshold`` for a density, and keeps the density.

    Does nothing for other sparsifiers.

    Args:
        sparsifier: the sparsifier whose λ the calibrator sets.
        speaks: whether to log the calibrated λ and to warn about a late calibration.
        keeps_rest: whether unsent values stay in the residual. If not, the residual is always zero, so the calibrator
            ignores it.
    """

    def __init__(self, sparsifier: Sparsifier, *, speaks: bool, keeps_rest: bool) -> None:
        self._sparsifier: HardThreshold | None = None
        if isinstance(sparsifier, HardThreshold) and not isinstance(sparsifier, Dense):
            self._sparsifier = sparsifier
        self._name = type(sparsifier).__name__
        self._speaks = speaks
        self._keeps_rest = keeps_rest
        self.begin()

    def begin(self) -> None:
        """Discard a calibrated λ and start a new calibration."""
        self._running: ThresholdCalibration | None = None
        self._control: DensityControl | None = None
        self._layer_control: LayerControl | None = None
        self._open: tuple[StepStats, StepStats | None] | None = None
        self._observed_steps = 0
        if self._sparsifier is not None and self._sparsifier.density is not None:
            density, overshoot = self._sparsifier.density, self._sparsifier.overshoot
            self._sparsifier.forget_calibration()
            if self._sparsifier.granularity == "layer":
                self._layer_control = LayerControl(density, keeps_rest=self._keeps_rest, overshoot=overshoot)
            else:
                self._control = DensityControl(density, pace_of(density))
            self._running = ThresholdCalibration(density, self._sparsifier.calibration_steps, overshoot=overshoot)

    @property
    def is_running(self) -> bool:
        """Whether calibration runs, so that every step must measure ‖g‖²."""
        return self._running is not None

    @property
    def needs_layers(self) -> bool:
        """Whether ``observe`` needs the statistics of every layer."""
        return self._layer_control is not None

    def set_threshold(self, threshold: float) -> None:
        """Set λ and end calibration. With a density, λ is adjusted from this value."""
        if self._sparsifier is None:
            raise TypeError(f"{self._name} has no λ to set. Use HardThreshold.")
        self._sparsifier.fix_threshold(threshold)
        self._running = self._open = None

    def observe(self, stats: StepStats, before: StepStats | None, *, counts: bool = True) -> None:
        """Calibrate or adjust λ with the statistics of a step.

        λ does not change if nothing was sent and no residual has changed since the previous step (a learning rate of
        0). With ``counts=False``, the step adjusts λ only if you call ``confirm`` before the next step.
        """
        if self._sparsifier is None:
            return
        if self._running is None:
            if counts:
                self._correct(stats, before, None)
            else:
                self._open = stats, before
            return
        self._running.observe(stats.squared_gradient_norm)
        self._observed_steps += 1
        if not self._running.is_complete and self._observed_steps == LATE * self._running.steps:
            self._report_late_calibration(stats, self._running)
        if self._running.is_complete:
            calibration, self._running = self._running, None
            threshold = calibration.threshold(stats.num_elements)
            self._sparsifier.fix_threshold(threshold)
            if self._speaks:
                rank_zero_info(
                    f"lightning_sparse: calibrated the threshold to {threshold:.6g} over {calibration.measured_steps} "
                    f"steps, for a density of {calibration.density:g} of {stats.num_elements:,} elements."
                )

    def _report_late_calibration(self, stats: StepStats, calibration: ThresholdCalibration) -> None:
        if isinf(stats.squared_gradient_norm) and not stats.non_finite:
            raise RuntimeError(
                f"No threshold can be calibrated: gradients are finite, but ‖g‖² overflowed in {self._observed_steps} "
                "steps. Scale the loss down, or give threshold=… instead of density=…"
            )
        if self._speaks:
            rank_zero_warn(
                f"lightning_sparse: no threshold after {self._observed_steps} steps, so everything is sent. "
                f"Calibration needs {calibration.steps} steps with a finite ‖g‖², at least one above 0. It observed "
                f"{calibration.measured_steps}, and the last ‖g‖² is {stats.squared_gradient_norm:g}. Look for "
                "gradients that are zero, not finite or too small to square, or give threshold=… instead of density=…"
            )

    def confirm(self, names: Collection[str]) -> None:
        """Adjust λ with the stored step, because an optimizer has stepped on these layers.

        With one λ per layer, λ is adjusted once per layer. A single λ is adjusted once per step.
        """
        if self._open is None or not names:
            return
        self._correct(*self._open, names)
        if self._layer_control is None:
            self._open = None  # a step adjusts a single λ only once

    def _correct(self, stats: StepStats, before: StepStats | None, names: Collection[str] | None) -> None:
        sparsifier = self._sparsifier
        # NaN and infinity are sent at any λ, so λ does not depend on steps that contain them.
        if sparsifier is None or not sparsifier.threshold or stats.non_finite:
            return
        has_moved = stats.selected or before is None or stats.squared_error != before.squared_error
        if self._control is not None and (has_moved or not self._keeps_rest):
            excess = sparsifier.overshoot * sparsifier.threshold
            is_all = self._keeps_rest and is_all_sent(stats, self._control.density, excess)
            sparsifier.fix_threshold(self._control.corrected(sparsifier.threshold, stats.density, is_all=is_all))
        if self._layer_control is not None:
            controlled = {name: layer for name, layer in stats.layers.items() if not sparsifier.is_given(name)}
            sparsifier.fix_layers(self._layer_control.corrected(controlled, sparsifier.threshold_of, names))

    def state_dict(self) -> dict[str, Any]:
        """Return λ, the running calibration and the controller, or None for missing ones."""
        state: dict[str, Any] = {
            "threshold": None if self._sparsifier is None else self._sparsifier.threshold,
            "calibration": None if self._running is None else self._running.state_dict(),
            "control": None if self._control is None else self._control.state_dict(),
        }
        if self._layer_control is not None and self._sparsifier is not None:
            thresholds = dict(self._sparsifier.of_layers)
            state["layers"] = {"thresholds": thresholds, "controls": self._layer_control.state_dict()}
        return state

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the state of a calibrator whose sparsifier has the same settings."""
        self._open = None
        if self._sparsifier is not None and saved["threshold"] is not None:
            self._sparsifier.fix_threshold(saved["threshold"])
            self._running = None
            if self._control is not None and saved["control"] is not None:
                self._control.load_state_dict(saved["control"])
            if self._layer_control is not None and saved.get("layers") is not None:
                self._sparsifier.fix_layers(saved["layers"]["thresholds"])
                self._layer_control.load_state_dict(saved["layers"]["controls"])
        elif self._running is not None and saved["calibration"] is not None:
            self._running.load_state_dict(saved["calibration"])
