"""The hard-threshold sparsifier, which sends values of at least a constant magnitude, and the dense sparsifier."""

import struct
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import inf
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.checks import is_number, require_density, require_word
from lightning_sparse.sparsifiers.protocol import Granularity, LayerLayout, MarkingSparsifier
from lightning_sparse.sparsifiers.rounding import power_of_two

DEFAULT_DENSITY = 0.001
MIN_STEPS = 8
"""λ is at least this many steps of a grid, so that sent values have the four significant bits of a float8."""
MAX_RATIO = 100
"""Values up to this multiple of the largest λ must be representable."""


class ThresholdRun(NamedTuple):
    """The elements from ``start`` up to ``end`` of a bucket share a threshold.

    Attributes:
        threshold: λ, rounded up to the residual's dtype.
        start: the first element.
        end: the element after the last.
        excess: κ λ: selected coordinates send p + κ λ sign(p), rounded to the residual's dtype.
    """

    threshold: float
    start: int
    end: int
    excess: float = 0.0


class HardThreshold(MarkingSparsifier):
    """Selects every coordinate whose magnitude reaches a threshold λ, and every non-finite one.

    Of all ways to send a given number of coordinates of fixed vectors, a constant λ leaves the smallest error (Sahu et
    al., NeurIPS 2021, arXiv:2108.00951, section 4). In training, the vectors depend on what was sent before. After
    every step, each unsent coordinate is below λ in magnitude. The number sent varies: if all gradients are large, all
    are sent.

    Give either a threshold or a density. With a density, the first exchange sends everything and measures the mean of
    ‖g‖², from which λ follows (``first_threshold``). λ is then adjusted so that the average density meets the target.

    Args:
        threshold: λ ≥ 0 in gradient units. 0 sends everything.
        density: the share of coordinates to be sent on average, in (0, 1], of all layers without a λ in
            ``layer_thresholds``; 1 is λ = 0. With neither, 0.001.
        layer_thresholds: λ for single layers: fnmatch patterns of parameter names, the first match wins. These λ
            stay constant; 0 sends a layer whole: ``{"*.bias": 0.0}``.
        granularity: scope of a density. ``"model"`` has one λ for all layers, so that some send much and others little.
            ``"layer"`` has a λ per layer after calibration, adjusted so that each layer sends its share on average, but
            at least about one coordinate per step.
        overshoot: κ, in [0, 1). A sent value is p + κ λ sign(p), so the residual restarts at −κ λ sign(p) instead of 0.
            Residuals stay below λ, and at equal density they lag behind the gradient by (1 − κ) / (1 + κ) times as many
            steps (docs/concepts/theory.md). 0 is the rule of the paper. For gradients only.

    Raises:
        ValueError: both threshold and density, a number outside its range, or an option that needs a density.

    Example:
        >>> sparsifier = HardThreshold(threshold=1.0)
        >>> layout = LayerLayout(names=("weight", "bias"), sizes=(3, 1))
        >>> sparsifier.select(torch.tensor([0.5, -1.0, float("nan"), 0.0]), layout).indices.tolist()
        [1, 2]
    """

    def __init__(
        self,
        *,
        threshold: float | None = None,
        density: float | None = None,
        layer_thresholds: dict[str, float] | None = None,
        granularity: Granularity = "model",
        overshoot: float = 0.0,
    ) -> None:
        require_word("granularity", granularity, get_args(Granularity))
        if threshold is not None and density is not None:
            raise ValueError(
                f"Got both {threshold=} and {density=}. Give one, and leave the other out (null in YAML): a threshold "
                "stays constant, and calibration turns a density into a threshold."
            )
        if granularity == "layer" and threshold is not None:
            raise ValueError(
                f"Got granularity='layer' and {threshold=}. A λ per layer needs a density. Give density=… instead of "
                "threshold=…, or leave granularity out."
            )
        if threshold is not None:
            _check_threshold("threshold", threshold)
        elif density is None:
            density = DEFAULT_DENSITY
        if density is not None:
            require_density(density, "about 0.1 %")
        if not isinstance(layer_thresholds, Mapping | None):
            raise TypeError(f"Invalid {layer_thresholds=}. Must be λ by pattern, such as {{'*.bias': 0.0}}, or None.")
        for pattern, value in (layer_thresholds or {}).items():
            if not isinstance(pattern, str):
                raise TypeError(f"Invalid {layer_thresholds=}. Must be λ by pattern of names, not by {pattern!r}.")
            _check_threshold(f"layer_thresholds[{pattern!r}]", value)
        if not is_number(overshoot) or not 0 <= overshoot < 1:
            raise ValueError(f"Invalid {overshoot=}. Must be within [0, 1); 0.5 sends 1.5 λ where p is λ.")
        if density == 1:
            threshold, density = 0.0, None  # no calibration
        # A checkpoint must not hold NumPy's numbers, which torch.load(weights_only=True) rejects.
        self.threshold = None if threshold is None else float(threshold)
        self.density = None if density is None else float(density)
        self.layer_thresholds = dict(layer_thresholds or {})
        self.granularity = granularity
        self.overshoot = float(overshoot)
        self._calibrated_layers: dict[str, float] = {}
        self._given: dict[str, float | None] = {}
        self._runs: dict[tuple[LayerLayout, torch.dtype, bool], tuple[ThresholdRun, ...]] = {}

    @property
    def current_threshold(self) -> float:
        """The largest λ of layers without ``layer_thresholds``, in gradient units; 0 during calibration."""
        return 0.0 if self.threshold is None else self.threshold

    def grid_step(self, most_steps: int) -> float | None:
        """Return the largest power of two up to an eighth of the smallest λ; see `Sparsifier.grid_step`.

        Returns None while λ is unknown, and if a λ is 0, because sent values then have no smallest magnitude. Also
        returns None if ``most_steps`` are too few for values far above the largest λ, whose remainders could grow.
        """
        known = [self.current_threshold, *self._calibrated_layers.values(), *self.layer_thresholds.values()]
        step = power_of_two(min(known) / MIN_STEPS) if min(known) > 0 else 0.0
        return step if 0 < step <= min(known) / MIN_STEPS and most_steps * step >= MAX_RATIO * max(known) else None

    def why_no_grid(self, most_steps: int) -> str | None:
        """See `Sparsifier.why_no_grid`."""
        known = [*([] if self.threshold is None else [self.threshold]), *self.layer_thresholds.values()]
        if most_steps < 2 * MIN_STEPS * MAX_RATIO:
            return (
                f"with a hard threshold. The dtype has {most_steps} positive values, and λ takes 8 to 16 of them. So "
                "larger values would be truncated, and residuals could grow. Use 'float8', which takes as many bytes. "
                "'int8' is for ScaledIntegerRounding and StochasticRounding."
            )
        if 0.0 in known:
            return (
                f"with {type(self).__name__} and a threshold of 0. This dtype sends multiples of a fraction of the "
                "threshold. Use 'bfloat16', or a threshold above 0."
            )
        if self.threshold is not None and self.grid_step(most_steps) is None:
            return (
                f"with thresholds from {min(known):g} to {max(known):g}. {most_steps} steps of an eighth of the "
                "smallest do not reach 100 times the largest, or a step is not a float32 number. Use 'bfloat16'."
            )
        return None

    def fix_threshold(self, threshold: float | None, of_layers: Mapping[str, float] | None = None) -> None:
        """Set λ of single layers and of all others, as calibration does; None forgets a calibrated λ.

        Raises:
            ValueError: a threshold that is negative, NaN or infinite.
        """
        if threshold is not None:
            _check_threshold("threshold", threshold)
        self.threshold = None if threshold is None else float(threshold)
        self._calibrated_layers = dict(of_layers or {})
        self._runs.clear()

    @property
    def calibrated_layers(self) -> Mapping[str, float]:
        """Calibrated λ by layer name, without ``layer_thresholds``."""
        return self._calibrated_layers

    def given_threshold(self, name: str) -> float | None:
        """Return λ in ``layer_thresholds`` of the layer with this parameter name, None if it has none."""
        if name not in self._given:
            given = (value for pattern, value in self.layer_thresholds.items() if fnmatchcase(name, pattern))
            self._given[name] = next(given, None)
        return self._given[name]

    def threshold_of(self, name: str) -> float:
        """Return λ of the layer with this parameter name, in gradient units."""
        given = self.given_threshold(name)
        return self._calibrated_layers.get(name, self.current_threshold) if given is None else given

    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Mark the coordinates for which not (abs(p) < λ); see `MarkingSparsifier.mark`."""
        below = torch.empty_like(compensated, dtype=torch.bool)
        for threshold, start, end, _ in self.runs(layout, compensated.dtype):
            # A comparison with NaN is false, so "not below" selects NaN as well.
            torch.lt(compensated[start:end].abs(), threshold, out=below[start:end])
        return below.logical_not_()

    def values(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Return p + κ λ sign(p) of every coordinate; see `MarkingSparsifier.values`."""
        if self.overshoot == 0:
            return compensated
        values = torch.empty_like(compensated)
        for _, start, end, excess in self.runs(layout, compensated.dtype):
            values[start:end] = exceed(compensated[start:end], excess)
        return values

    def runs(self, layout: LayerLayout, dtype: torch.dtype, *, by_layer: bool = False) -> tuple[ThresholdRun, ...]:
        """Return the runs of a bucket: neighbouring layers with the same λ are one run.

        Args:
            layout: the layers of the bucket.
            dtype: of the compensated gradient; λ is rounded up to it, so that comparisons are exact.
            by_layer: whether every layer is a run of its own.
        """
        key = (layout, dtype, by_layer)
        if key not in self._runs:
            runs: list[ThresholdRun] = []
            is_uniform = layout.names and not (by_layer or self._calibrated_layers or self.layer_thresholds)
            # A uniform λ needs no walk over many layers, which would take long if λ changes in every step.
            for name, start, end in [(layout.names[0], 0, layout.num_elements)] if is_uniform else layout.spans():
                threshold = _round_up(self.threshold_of(name) + 0.0, dtype)  # the bits of -0.0 are large
                if runs and runs[-1].threshold == threshold and not by_layer:
                    runs[-1] = runs[-1]._replace(end=end)
                else:
                    excess = self.overshoot * threshold if self.overshoot else 0.0  # λ may be infinite
                    runs.append(ThresholdRun(threshold, start, end, excess))
            self._runs[key] = tuple(runs)
        return self._runs[key]


class Dense(HardThreshold):
    """Selects every coordinate: the hard threshold at λ = 0, which is plain DDP up to the order of additions."""

    def __init__(self) -> None:
        super().__init__(threshold=0.0)


def exceed(compensated: Tensor, excess: float) -> Tensor:
    """Return p + excess · sign(p), with the same bits as in ``kernels/native.c`` and ``kernels/values.py``."""
    return torch.where(compensated > 0, compensated + excess, compensated - excess)


def _check_threshold(name: str, value: float) -> None:
    if not (is_number(value) and 0 <= value <= sys.float_info.max):
        raise ValueError(
            f"Invalid {name}={value!r}. Must be a finite number of at least 0, in gradient units (with local training: "
            "in units of the parameters). 0 sends everything."
        )


def _round_up(threshold: float, dtype: torch.dtype) -> float:
    """Return the smallest number of this dtype that is not below λ.

    PyTorch rounds a Python scalar to the nearest number of the tensor's dtype before it compares. Rounded down it would
    select values below λ; for p of this dtype, abs(p) >= λ and abs(p) >= round_up(λ) are the same.
    """
    if dtype != torch.float32:
        return threshold
    try:
        bits = struct.pack("=f", threshold)  # rounds to nearest, ten times as fast as a tensor
    except OverflowError:
        return inf
    (rounded,) = struct.unpack("=f", bits)
    if rounded < threshold:  # the bits of positive numbers are in the order of the numbers
        (rounded,) = struct.unpack("=f", struct.pack("=I", struct.unpack("=I", bits)[0] + 1))
    return float(rounded)
