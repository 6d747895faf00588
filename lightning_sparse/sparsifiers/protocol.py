"""The protocol between a sparsifier and the rest: a compensated bucket and its layout in, a selection out."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

Granularity = Literal["layer", "model"]


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
        """The sum of the sizes."""
        return self.boundaries[-1]

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yields ``(name, start, end)`` of every layer, in bucket order."""
        return zip(self.names, self.boundaries[:-1], self.boundaries[1:], strict=True)


class Selection(NamedTuple):
    """The coordinates of one bucket that this worker sends.

    Attributes:
        indices: int64, shape (k,), positions in the bucket, each once; best ascending, else they are sorted.
        values: shape (k,), dtype of the compensated gradient: its values there, or what is to be sent in their place.
    """

    indices: Tensor
    values: Tensor


class WholeStep(NamedTuple):
    """All that one worker has to send in a step, before anything of it is selected.

    Attributes:
        buckets: each forms p of a bucket whenever it is called, shape (m,), with 0 where nothing may be sent.
        num_elements: of all buckets together.
        dtype: of what they return, float32 or float64.
    """

    buckets: Sequence[Callable[[], Tensor]]
    num_elements: int
    dtype: torch.dtype


def in_order(selection: Selection, num_elements: int) -> Selection:
    """Returns a selection with ascending indices, as the rest of the package needs them. Waits for a GPU.

    Args:
        selection: of a sparsifier that may not keep to the order, such as ``compensated.abs().topk(k).indices``.
        num_elements: of its bucket.

    Raises:
        TypeError: indices that are not int64, or indices and values that are no flat tensors of one length.
        ValueError: an index outside the bucket, or one that is there twice.
    """
    if not isinstance(selection, tuple) or len(selection) != 2:
        raise TypeError(f"A sparsifier selected {selection!r}. Return a Selection of indices and values.")
    indices, values = selection
    if indices.dtype != torch.int64 or indices.dim() != 1 or values.shape != indices.shape:
        raise TypeError(
            f"A sparsifier selected indices of {indices.dtype}, shape {tuple(indices.shape)}, and values of shape "
            f"{tuple(values.shape)}. Return a Selection of int64 indices and of values, both of shape (k,)."
        )
    if not indices.numel():
        return selection
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

    A sparsifier is a function of the bucket that it is shown and of what it was told of the step: it does not
    communicate and does not change its input. What it leaves unselected stays in the worker's residual.
    """

    needs_averages: bool = False
    """Whether `observe` is shown the averages of every step."""

    needs_survey: bool = False
    """Whether `survey` must see a whole step before `select` is asked: no exchange begins before that."""

    def begin_step(self, step: int, rank: int) -> None:
        """Is told of a step before it begins; does nothing unless a subclass needs to know.

        Args:
            step: its number from 0, the same on all workers. A resumed run goes on counting. Counted are steps after
                which an optimizer stepped: of several backwards before that, and of those that are dropped, the next
                has the same number.
            rank: of this worker.
        """
        return

    def survey(self, step: "WholeStep") -> None:
        """Is shown all that a step has to send, where ``needs_survey``."""
        return

    def begin_epoch(self, epoch: int, learning_rates: Sequence[float]) -> None:
        """Is told of an epoch before its first step, perhaps more than once; does nothing unless overridden.

        Args:
            epoch: its number, the same on all workers.
            learning_rates: of all parameter groups of all optimizers, in order.
        """
        return

    def observe(self, layout: LayerLayout, average: Tensor) -> None:
        """Is shown what all workers' selections of a bucket come to, where ``needs_averages``: the same bits on all.

        Args:
            layout: the layers of the bucket.
            average: (1/n) Σ_i out_i, flat, shape (layout.num_elements,). Not modified, nor kept: its memory is the
                gradient's.
        """
        return

    def state_dict(self, next_step: int) -> dict[str, Any]:
        """Returns what a resumed run must know beside the settings, the same on every worker.

        A dict of what ``torch.load(weights_only=True)`` reads: numbers of Python, strings, lists, dicts, tensors.

        Args:
            next_step: the number of the next step for a run that resumes: what was observed in a step of this number or
                a higher one does not count.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned; from ``{}`` it begins anew."""
        return

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

    def grid_step(self, most_steps: int) -> float | None:
        """Returns ε of which values may travel as multiples: a power of two, the same on all workers.

        None where there is none, or not yet: values then travel as they are.

        Args:
            most_steps: the largest magnitude that would travel, in steps.
        """
        return None

    def require_grid(self, value_dtype: str, most_steps: int) -> None:
        """Raises ValueError where values cannot travel as multiples of a step, at most so many in magnitude."""
        raise ValueError(
            f"Got value_dtype={value_dtype!r} with {type(self).__name__}, which has no step of which values could "
            "travel as multiples. Use value_dtype='bfloat16', or a sparsifier that has one: HardThreshold, "
            "StochasticRounding, ScaledIntegerRounding."
        )

    def settings(self) -> dict[str, object]:
        """Everything that must be the same on all workers, as plain values: all attributes without a leading ``_``.

        What is no plain value is described: a tensor by shape, dtype and content, any other object by its class and,
        if it is a sparsifier or a dataclass, by what it holds.
        """
        own = {"needs_survey": True} if self.needs_survey else {}
        return {"sparsifier": type(self).__name__, **own} | {
            name: _described(value) for name, value in sorted(vars(self).items()) if not name.startswith("_")
        }


class MarkingSparsifier(Sparsifier):
    """A sparsifier that marks what it selects, so that on a GPU nobody waits for how much that is."""

    @abstractmethod
    def mark(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Returns where `select` finds something: bool, the bucket's shape. Nothing may wait for the device.

        Args:
            compensated: as in `select`.
            layout: likewise.
        """

    def values(self, compensated: Tensor, layout: LayerLayout) -> Tensor:
        """Returns what is sent of the coordinates that are marked: the bucket's shape. Nothing may wait for the device.

        Args:
            compensated: as in `select`.
            layout: likewise.
        """
        return compensated

    def select(self, compensated: Tensor, layout: LayerLayout) -> Selection:
        """Returns the coordinates that are marked; see `Sparsifier.select`."""
        indices = self.mark(compensated, layout).nonzero().squeeze(1)
        return Selection(indices, self.values(compensated, layout)[indices])


def is_number(value: object) -> bool:
    """Whether this is a real number, also one of numpy's."""
    return isinstance(value, Real) and not isinstance(value, bool)


def require_density(density: float, example: str, name: str = "density") -> None:
    """Raises ValueError where this is no share of coordinates to send."""
    if not is_number(density) or not 0 < density <= 1:
        raise ValueError(f"Invalid {name}={density!r}. Must be within (0, 1]; for example 0.001 sends {example}.")


def require_granularity(granularity: Granularity) -> None:
    """Raises ValueError where this is no word for what a density is of."""
    if granularity not in get_args(Granularity):
        raise ValueError(f"Invalid {granularity=}. Must be one of {', '.join(map(repr, get_args(Granularity)))}.")


def _described(value: object) -> object:
    """Returns something that is equal on all workers exactly if the value is, as far as that can be told."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    if isinstance(value, Tensor):
        digest = hashlib.sha256(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return f"tensor of shape {list(value.shape)}, {value.dtype}, content {digest.hexdigest()[:12]}"
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Sparsifier):
        return value.settings()
    if is_dataclass(value) and not isinstance(value, type):
        return {"class": name} | {part.name: _described(getattr(value, part.name)) for part in fields(value)}
    return getattr(value, "__qualname__", name)
