"""The protocol of sparsifiers: a compensated bucket and its layout in, a selection out."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from itertools import accumulate
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.sparsifiers.checks import is_number

Granularity = Literal["layer", "model"]


@dataclass(frozen=True)
class LayerLayout:
    """Which layer (parameter tensor) occupies which elements of a flat bucket.

    Args:
        names: parameter names, in bucket order.
        sizes: numbers of elements, in bucket order; a size may be 0.

    Attributes:
        boundaries: the start of each layer, and the end of the last.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    boundaries: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise ValueError(f"Got {len(self.names)} names for {len(self.sizes)} sizes. Give one size per name.")
        object.__setattr__(self, "boundaries", tuple(accumulate(self.sizes, initial=0)))

    @property
    def num_elements(self) -> int:
        """The sum of the sizes."""
        return self.boundaries[-1]

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yield ``(name, start, end)`` of every layer, in bucket order."""
        return zip(self.names, self.boundaries[:-1], self.boundaries[1:], strict=True)


class Selection(NamedTuple):
    """The coordinates of one bucket that this worker sends.

    Attributes:
        indices: int64, shape (k,), unique positions in the bucket. If they do not ascend, the package sorts them.
        values: shape (k,), dtype of the compensated gradient: its values at these positions, or changed values to send.
    """

    indices: Tensor
    values: Tensor


def in_order(selection: Selection, num_elements: int, dtype: torch.dtype) -> Selection:
    """Return the selection with ascending indices, which the package needs. Waits for a GPU.

    Args:
        selection: of any order, such as ``compensated.abs().topk(k).indices``.
        num_elements: of its bucket.
        dtype: of its bucket.

    Raises:
        TypeError: indices that are not int64, values of another dtype than the bucket's, or indices and values that
            are not flat tensors of one length.
        ValueError: an index outside the bucket, or a repeated index.
    """
    if not isinstance(selection, tuple) or [isinstance(part, Tensor) for part in selection] != [True, True]:
        raise TypeError(f"A sparsifier selected {selection!r}. Return a Selection of indices and values.")
    indices, values = selection
    if (indices.dtype, values.dtype) != (torch.int64, dtype) or indices.dim() != 1 or values.shape != indices.shape:
        raise TypeError(
            f"A sparsifier selected indices of {indices.dtype}, shape {tuple(indices.shape)}, and values of "
            f"{values.dtype}, shape {tuple(values.shape)}. Return a Selection of indices and values, torch.int64 and "
            f"{dtype}, both of shape (k,)."
        )
    if not indices.numel():
        return Selection(indices, values)
    if bool((indices.diff() <= 0).any()):
        indices, order = indices.sort()
        values = values[order]
        twice = indices[1:][indices.diff() == 0]
        if twice.numel():
            raise ValueError(f"A sparsifier selected index {int(twice[0])} twice. Return each index once.")
    first, last = int(indices[0]), int(indices[-1])
    if first < 0 or last >= num_elements:
        wrong = first if first < 0 else last
        raise ValueError(f"A sparsifier selected index {wrong} of a bucket. Must be within 0 and {num_elements - 1}.")
    return Selection(indices, values)


class Sparsifier(ABC):
    """Chooses which coordinates of a compensated gradient are sent.

    The choice depends only on the bucket and on the arguments of earlier calls, such as `begin_step` and `observe`. A
    sparsifier does not communicate or change its input. Unselected values stay in the worker's residual.
    """

    needs_averages: bool = False
    """Whether the package calls `observe` with the averages of every step."""

    needs_survey: bool = False
    """Whether `survey` must see a whole step before `select` is called: no exchange begins before that."""

    def begin_step(self, step: int, rank: int) -> None:
        """Prepare for a step; do nothing unless overridden.

        Args:
            step: its number from 0, the same on all workers; a resumed run continues the count. It grows only after an
                optimizer stepped. All backwards before that, even dropped ones, have the same number.
            rank: of this worker.
        """
        return

    def survey(self, buckets: Sequence[Callable[[], Tensor]]) -> None:
        """Receive the buckets of a step before ``select``, if ``needs_survey``.

        Args:
            buckets: each returns p of a bucket during this call, shape (m,), with 0 where nothing may be sent.
        """
        return

    def begin_epoch(self, epoch: int, learning_rates: Sequence[float]) -> None:
        """Prepare for an epoch, perhaps more than once; do nothing unless overridden.

        Args:
            epoch: its number, the same on all workers.
            learning_rates: learning rates of all parameter groups of all optimizers, in order.
        """
        return

    def observe(self, layout: LayerLayout, average: Tensor) -> None:
        """Receive the average of a bucket, the same bits on all workers, if ``needs_averages``.

        Args:
            layout: the layers of the bucket.
            average: (1/n) Σ_i out_i, or the mean over the coordinate's senders; flat, shape (layout.num_elements,). Do
                not modify or keep it: its memory is the gradient's.
        """
        return

    def state_dict(self, next_step: int) -> dict[str, Any]:
        """Return the state for a checkpoint, without the settings; it is the same on every worker.

        ``torch.load(weights_only=True)`` must read it: Python's numbers, strings, lists, dicts, tensors.

        Args:
            next_step: the first step of a resumed run. Leave out observations of this and later steps.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`; ``{}`` starts anew."""
        return

    @abstractmethod
    def select(self, compensated: Tensor, layout: LayerLayout) -> Selection:
        """Return the coordinates to send.

        Every non-finite coordinate must be among them, so that all workers see a NaN or an infinity of one worker in
        the same step, and none hides in a residual.

        Args:
            compensated: p = e + g of one bucket; float32 or float64, shape (layout.num_elements,). Not modified.
            layout: the layers of the bucket.
        """

    @property
    def current_threshold(self) -> float | None:
        """The largest λ of layers without a threshold of their own, in gradient units; None without a λ."""
        return None

    def grid_step(self, most_steps: int) -> float | None:
        """Return ε, a power of two, if values may be sent as multiples of it; the same on all workers.

        Returns None without ε, or before it is known. Values are then sent unrounded.

        Args:
            most_steps: the largest magnitude that can be sent, in steps.
        """
        return None

    def why_no_grid(self, most_steps: int) -> str | None:
        """Return why values cannot be sent as up to ``most_steps`` steps, and what to do; None if they can."""
        return (
            f"with {type(self).__name__}, which has no step for small dtypes. Use 'bfloat16', or a sparsifier with a "
            "step: HardThreshold, StochasticRounding or ScaledIntegerRounding."
        )

    def settings(self) -> dict[str, object]:
        """Return all attributes without a leading ``_`` as plain values. They must be the same on all workers.

        Tensors are described by shape, dtype and content, other objects by their class, and sparsifiers and dataclasses
        also by their attributes.
        """
        return {"sparsifier": type(self).__name__} | {
            name: describe(value) for name, value in sorted(vars(self).items()) if not name.startswith("_")
        }


def require_marks(marks: object, compensated: Tensor) -> Tensor:
    """Return the result of ``MarkingSparsifier.mark`` if it is a mask of the bucket's shape; else raise TypeError."""
    if isinstance(marks, Tensor) and marks.dtype == torch.bool and marks.shape == compensated.shape:
        return marks
    found = f"{marks.dtype} of shape {tuple(marks.shape)}" if isinstance(marks, Tensor) else repr(marks)
    raise TypeError(f"A sparsifier marked {found}. Return a mask of torch.bool of shape {tuple(compensated.shape)}.")


class MarkingSparsifier(Sparsifier):
    """A sparsifier that selects by a mask, so that the host does not wait for a GPU's count."""

    @abstractmethod
    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Return the mask of selected coordinates: bool, the bucket's shape. Must not wait for the device."""

    def values(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Return the values to send where marked, in the bucket's shape. Must not wait for the device."""
        return compensated

    def select(self, compensated: Tensor, layout: LayerLayout) -> Selection:
        """Return the marked coordinates; see `Sparsifier.select`."""
        indices = require_marks(self.mark(compensated, layout), compensated).nonzero().squeeze(1)
        return Selection(indices, self.values(compensated, layout)[indices])


def require_sparsifier(value: object) -> None:
    """Raise TypeError unless this is an instance of a sparsifier."""
    if not isinstance(value, Sparsifier):
        raise TypeError(f"Expected a sparsifier such as HardThreshold(density=0.01), got {value!r}.")


def target_density(sparsifier: Sparsifier) -> float | None:
    """Return a sparsifier's target density, or None."""
    density: Any = getattr(sparsifier, "density", None)
    return float(density) if is_number(density) else None


def describe(value: object) -> object:
    """Return a plain description for comparing workers; other objects give only their class."""
    if isinstance(value, Real) and hasattr(value, "item"):
        value = value.item()  # of NumPy
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if isinstance(value, Tensor):
        digest = hashlib.sha256(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return f"tensor of shape {list(value.shape)}, {value.dtype}, content {digest.hexdigest()[:12]}"
    if isinstance(value, partial):
        return [describe(part) for part in (value.func, value.args, value.keywords)]
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Sparsifier):
        return value.settings()
    if is_dataclass(value) and not isinstance(value, type):
        return {"class": name} | {part.name: describe(getattr(value, part.name)) for part in fields(value)}
    return getattr(value, "__qualname__", name)
