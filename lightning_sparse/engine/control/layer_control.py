"""Holds every layer at its density after calibration, by a λ per layer."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from lightning_sparse.engine.control.density_control import DensityControl, pace_of
from lightning_sparse.engine.step_stats import LayerStats

MOST_FOR_ONE = 0.5
"""The largest share that a small layer is held to because its density is less than one coordinate."""


def share_of_layer(density: float, num_elements: int) -> float:
    """Returns the share of a layer with this many elements that is sent on average.

    Example:
        >>> [share_of_layer(0.01, size) for size in (1, 10, 1000)]
        [0.5, 0.1, 0.01]
    """
    return max(density, min(MOST_FOR_ONE, 1 / num_elements))


@dataclass
class _Layer:
    control: DensityControl
    squared_error: float


class LayerControl:
    """Adjusts λ of every layer from densities that all workers saw, to the same values on all of them.

    Each layer has its own ``DensityControl``. A layer of fewer than 1 / density elements is held to one coordinate per
    step, and to at most half of its coordinates: if it were to be sent whole, it could never make up for a step that
    sent less, and λ would fall for ever. λ stays if a layer sent nothing and its residual did not change: the layer was
    not used.

    Args:
        density: the share of each layer to send on average, in (0, 1].
        keeps_rest: whether unsent values stay in the residual. If not, λ also falls while a layer is not used: the
            numbers of a layer that sent nothing are the same whether its gradient was zero or below λ.
    """

    def __init__(self, density: float, *, keeps_rest: bool = True) -> None:
        self.density = density
        self._keeps_rest = keeps_rest
        self._layers: dict[str, _Layer] = {}

    def corrected(
        self,
        layers: Mapping[str, LayerStats],
        threshold_of: Callable[[str], float],
        names: Collection[str] | None = None,
    ) -> dict[str, float]:
        """Returns λ of every layer for the next step.

        Args:
            layers: the numbers of this step by layer.
            threshold_of: returns λ of a layer in this step.
            names: the layers for which this step counts; all others keep their λ. None means all layers.
        """
        return {
            name: self._of(name, stats, threshold_of(name)) if names is None or name in names else threshold_of(name)
            for name, stats in layers.items()
            if stats.num_elements
        }

    def _of(self, name: str, stats: LayerStats, threshold: float) -> float:
        asked = share_of_layer(self.density, stats.num_elements)
        layer = self._layers.get(name)
        if layer is None or layer.control.density != asked:  # the checkpoint's layer had another size
            layer = self._layers[name] = self._new(asked)
        has_moved = stats.selected or stats.squared_error != layer.squared_error
        layer.squared_error = stats.squared_error
        if not has_moved and self._keeps_rest:
            return threshold
        is_all = self._keeps_rest and stats.keeps_nothing
        return layer.control.corrected(threshold, stats.density, is_all=is_all)

    def _new(self, asked: float, squared_error: float = -1.0) -> _Layer:
        # The pace follows from the common density: λ of a layer that sends one coordinate every second step would jump.
        return _Layer(DensityControl(asked, pace_of(self.density)), squared_error)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Returns the controller state of every layer."""
        return {
            name: layer.control.state_dict() | {"density": layer.control.density, "squared_error": layer.squared_error}
            for name, layer in self._layers.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continues from what ``state_dict`` returned."""
        self._layers.clear()
        for name, saved in state.items():
            self._layers[name] = self._new(saved["density"], saved["squared_error"])
            self._layers[name].control.load_state_dict(dict(saved))
