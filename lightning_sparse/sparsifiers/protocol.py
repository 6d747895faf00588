"""The protocol between a sparsifier and the rest: a compensated bucket and its layout in, a selection out."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class LayerLayout:
    """Which layer (parameter tensor) occupies which elements of a flat bucket.

    Args:
        names: the layers' parameter names, in the order in which they lie in the bucket.
        sizes: their numbers of elements, in the same order; a size may be 0.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    boundaries: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise ValueError(f"Got {len(self.names)} names for {len(self.sizes)} sizes. Give one size per name.")
        boundaries = [0]
        for size in self.sizes:
            boundaries.append(boundaries[-1] + size)
        object.__setattr__(self, "boundaries", tuple(boundaries))

    @property
    def num_elements(self) -> int:
        """Elements of the bucket: the sum of the sizes."""
        return self.boundaries[-1]

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yields ``(name, start, end)`` of every layer, in bucket order."""
        return zip(self.names, self.boundaries[:-1], self.boundaries[1:], strict=True)


class Selection(NamedTuple):
    """The coordinates of one bucket that this worker sends.

    Attributes:
        indices: int64, shape (k,), strictly ascending positions in the bucket.
        values: shape (k,), dtype of the compensated gradient: its values there, before any rounding.
    """

    indices: Tensor
    values: Tensor


class Sparsifier(ABC):
    """Chooses which coordinates of a compensated gradient are sent.

    A sparsifier is a function of the bucket that it is shown: it does not communicate, does not change its input and
    does not know which worker it runs on. What it leaves unselected stays in the worker's residual.
    """

    @abstractmethod
    def select(self, compensated: Tensor, layout: LayerLayout) -> Selection:
        """Returns the coordinates to send.

        Every non-finite coordinate must be among them, so that a NaN or an infinity that arises on one worker is seen
        by all workers in the same step and never hides in a residual.

        Args:
            compensated: p = e + g of one bucket; float32 or float64, shape (layout.num_elements,). Not modified.
            layout: the layers of the bucket.
        """

    @property
    def current_threshold(self) -> float | None:
        """The λ in force for layers without one of their own, in gradient units; None if the sparsifier has none."""
        return None

    def settings(self) -> dict[str, object]:
        """Everything that must be the same on all workers, as plain values."""
        return {"sparsifier": type(self).__name__} | {
            name: value for name, value in sorted(vars(self).items()) if not name.startswith("_")
        }
