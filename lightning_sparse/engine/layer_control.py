"""Keeping every layer's own volume at the density that was asked for, once λ has been calibrated."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from lightning_sparse.engine.density_control import DensityControl, pace_of
from lightning_sparse.engine.step_stats import LayerStats

MOST_FOR_ONE = 0.5
"""The largest share of a layer that is asked for because a smaller one would be less than a coordinate."""


def share_of_layer(density: float, num_elements: int) -> float:
    """Returns the share to which a layer of so many elements is held.

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
    """Corrects λ of every layer slowly and alike on all workers, from densities that all of them saw.

    Each layer has a ``DensityControl`` of its own. A layer of fewer than 1 / density elements is held to one coordinate
    a step, and to half of them at most: of one that is to be sent whole λ would fall for ever, as what was sent too
    little could never be made up for. λ stays in a step in which a layer sent nothing and nothing in it moved: it was
    not used.

    Args:
        density: the share of each layer to be sent on average, in (0, 1].
        keeps_rest: whether unsent values stay in the residual. If not, λ also falls while a layer is not used: a layer
            that sent nothing looks the same whether its gradient was zero or below λ.
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
            layers: the numbers of this step.
            threshold_of: λ of a layer in this step.
            names: of the layers for which this step counts; all others keep their λ. None is all.
        """
        return {
            name: self._of(name, stats, threshold_of(name)) if names is None or name in names else threshold_of(name)
            for name, stats in layers.items()
            if stats.num_elements
        }

    def _of(self, name: str, stats: LayerStats, threshold: float) -> float:
        asked = share_of_layer(self.density, stats.num_elements)
        layer = self._layers.get(name)
        if layer is None or layer.control.density != asked:  # it had another size when it was saved
            layer = self._layers[name] = self._new(asked)
        has_moved = stats.selected or stats.squared_error != layer.squared_error
        layer.squared_error = stats.squared_error
        if not has_moved and self._keeps_rest:
            return threshold
        is_all = self._keeps_rest and stats.keeps_nothing
        return layer.control.corrected(threshold, stats.density, is_all=is_all)

    def _new(self, asked: float, squared_error: float = -1.0) -> _Layer:
        # At the pace of all: single coordinates that are to be sent in every second step would make λ jump.
        return _Layer(DensityControl(asked, pace_of(self.density)), squared_error)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Returns by layer what is known of the steps so far."""
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
