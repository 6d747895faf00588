"""Who may step: of several averagers of the same weights, each would undo what the others do."""

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_owners = WeakTensorKeyDictionary()
"""Of each weight, a weak reference to the ``WeightOwnership`` that has it."""


class WeightOwnership:
    """An averager's right to step, until it is closed or another one takes any of its weights."""

    def __init__(self) -> None:
        self._why_not: str | None = None

    def take(self, weights: Iterable[Tensor]) -> None:
        """Takes weights that drift from now on; who had any of them must not step any more."""
        for weight in weights:
            before = _owners[weight]() if weight in _owners else None
            if before is not None and before is not self:
                before._why_not = (
                    "Another averager has been made for the same weights since, and the two would undo each other's "
                    "work. Make one averager for a model, and call step() of the newest."
                )
            _owners[weight] = weakref.ref(self)

    def close(self) -> None:
        """Gives it up for good."""
        self._why_not = "The averager was closed: what has drifted since would stay each worker's own. Make a new one."

    def require(self) -> None:
        """Raises RuntimeError where the averager must not step."""
        if self._why_not is not None:
            raise RuntimeError(self._why_not)
