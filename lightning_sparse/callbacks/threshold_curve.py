"""What every λ would send: the result of a search for a threshold."""

from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from typing import Any


@dataclass(frozen=True)
class ThresholdCurve:
    """The density that each λ comes to while gradients are like those that were measured.

    Attributes:
        thresholds: λ > 0, ascending, in the units of what is averaged.
        densities: of each, in 0…1, the mean over all workers.
        density: that was asked for.
        num_elements: d, of all exchanged parameters.
        num_steps: steps that were measured.
        payload_element_bytes: bytes of a coordinate that is sent: its value and its place.
        dense_element_bytes: bytes of an element of the gradient.
        break_even: the density above which buckets travel whole, since that costs less.

    Example:
        >>> curve = ThresholdCurve((0.1, 1.0, 10.0), (1.0, 0.1, 0.001), 0.01, 1000, 50, 6, 4, 0.2)
        >>> round(curve.suggestion(), 3), round(curve.density_at(1.0), 3)
        (3.162, 0.1)
    """

    thresholds: tuple[float, ...]
    densities: tuple[float, ...]
    density: float
    num_elements: int
    num_steps: int
    payload_element_bytes: float
    dense_element_bytes: float
    break_even: float

    def suggestion(self, density: float | None = None) -> float:
        """Returns λ for a density: between the points of the curve in logarithms.

        Args:
            density: in (0, 1); None is that which was asked for.

        Raises:
            ValueError: a density that no λ of the curve comes to, as where most gradients are zero.
        """
        density = self.density if density is None else density
        pairs = [(d, t) for t, d in zip(self.thresholds, self.densities, strict=True) if d > 0]
        largest, smallest = (pairs[0][0], pairs[-1][0]) if pairs else (0.0, 0.0)
        if not smallest <= density <= largest:
            raise ValueError(
                f"No threshold was found for a density of {density:g}: those tried send {smallest:.3g} to "
                f"{largest:.3g}. Coordinates whose gradient is zero are never sent; 0 sends all of them."
            )
        return _between([(log(d), log(t)) for d, t in reversed(pairs)], log(density))

    def density_at(self, threshold: float) -> float:
        """Returns the density of a λ within the curve, in 0…1; beyond its ends, that of the nearest end."""
        pairs = [(log(t), log(d)) for t, d in zip(self.thresholds, self.densities, strict=True) if d > 0]
        if not pairs:
            return 0.0
        return _between(pairs, min(max(log(max(threshold, 1e-300)), pairs[0][0]), pairs[-1][0]))

    def payload_bytes(self, density: float) -> float:
        """Returns about how many bytes a worker sends in a step at a density; the gradient's above break-even."""
        dense = self.dense_element_bytes * self.num_elements
        return dense if density > self.break_even else density * self.num_elements * self.payload_element_bytes

    def plot(self) -> Any:
        """Draws density and bytes a step against λ, with the suggestion and break-even marked; needs matplotlib.

        Returns:
            The ``matplotlib.figure.Figure``; ``.savefig("curve.png")`` writes it.
        """
        from matplotlib.figure import Figure

        shown = [(t, d) for t, d in zip(self.thresholds, self.densities, strict=True) if d > 0]
        thresholds = [t for t, _ in shown]
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xscale="log", yscale="log", xlabel="threshold λ", ylabel="density")
        axes.plot(thresholds, [d for _, d in shown], color="C0", label="density")
        if 0 < self.break_even < 1:
            axes.axhline(self.break_even, color="C3", linestyle=":", label="break-even: above it, all is sent whole")
        with suppress(ValueError):
            axes.plot([self.suggestion()], [self.density], "o", color="C1", label=f"λ = {self.suggestion():.3g}")
        bytes_axes = axes.twinx()
        bytes_axes.set(yscale="log", ylabel="bytes a step and worker")
        sent = [self.payload_bytes(density) for _, density in shown]
        bytes_axes.plot(thresholds, sent, color="C2", linestyle="--", label="bytes")
        lines = [*axes.get_lines(), *bytes_axes.get_lines()]
        axes.legend(lines, [str(line.get_label()) for line in lines])
        return figure


def _between(points: list[tuple[float, float]], at: float) -> float:
    """Returns e to the height of a line through points of ascending abscissa."""
    for (left, low), (right, high) in pairwise(points):
        if left <= at <= right:
            share = (at - left) / (right - left) if right > left else 0.0
            return exp(low + share * (high - low))
    return exp(points[0][1] if at <= points[0][0] else points[-1][1])
