"""The anchor, which all workers share, and its outer optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.engine.grouping import ParameterBucket, as_real, local
from lightning_sparse.engine.snapshot import Tensors
from lightning_sparse.kernels.native import Parts
from lightning_sparse.selection.bucket import FlatBucket, Residual

PREFIX = "outer."
"""Prefix of the outer optimizer's kinds of tensors in a ``Snapshot``."""


@dataclass
class AnchorBucket(ParameterBucket):
    """Parameters and their flat tensors, all of shape (layout.num_elements,).

    Attributes:
        anchor: x, the same bits on all workers: float64 for double precision, else float32.
        parts: flat views of x by name, the parameters of the outer optimizer.
        drift: x − θ, and after the exchange the average.
    """

    anchor: Tensor = field(init=False)
    parts: dict[str, Tensor] = field(init=False)
    drift: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.anchor, self.drift = self.zeros(), self.zeros()
        self.parts = self.by_name(self.anchor)
        self.read(self.anchor)

    @cached_property
    def unsent(self) -> Tensor:
        """Unsent values, for exchanges that do not keep them in the weights."""
        return self.zeros()

    @cached_property
    def gradient_bytes(self) -> int:
        """The bytes of the parameters' gradients."""
        return sum(theta.nbytes for theta in self._thetas())

    def weights(self) -> Parts | None:
        """Return the parameters for compiled functions; None if these do not support them."""
        thetas = self._thetas()
        is_supported = all(
            theta.dtype == torch.float32 and theta.is_contiguous() and theta.device.type == "cpu" for theta in thetas
        )
        return Parts(thetas) if is_supported else None

    def read(self, out: Tensor) -> Tensor:
        """Copy the parameters into a flat tensor, in the order of indices."""
        torch._foreach_copy_(self.shaped_parts(out), self._thetas())
        return out

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Copy a flat tensor into the parameters."""
        torch._foreach_copy_(self._thetas(), self.shaped_parts(values))

    @torch.no_grad()
    def subtract(self, average: Tensor) -> None:
        """Subtract an average, which may be in ``drift``, from the anchor and the parameters."""
        self.anchor.sub_(average)
        torch._foreach_sub_(self._thetas(), self.shaped_parts(average))

    def _thetas(self) -> list[Tensor]:
        return [as_real(local(parameter)) for parameter in self.parameters]


@dataclass
class DriftBucket(FlatBucket):
    """The drift of an anchored bucket. ``form`` computes it, unless compiled functions do so while they select.

    Attributes:
        anchored: the bucket of its parameters and anchor.
        decay: factor on unsent values of the previous exchange; 0 if the weights contain them.
    """

    anchored: AnchorBucket = field(kw_only=True)
    decay: float = field(kw_only=True)

    @override
    def form(self) -> None:
        self.weights = None
        torch.sub(self.anchored.anchor, self.anchored.read(self.gradient), out=self.gradient)
        unsent = self.anchored.unsent.mul_(self.decay) if self.decay else self.anchored.unsent.zero_()
        self.residual = Residual(unsent, unsent)
        assert self.notes is not None
        self.notes[0] = _largest(self.gradient)

    @override
    def compensated(self) -> Tensor:
        if self.weights is None:
            return super().compensated()
        return torch.sub(self.anchored.anchor, self.anchored.read(torch.empty_like(self.anchored.anchor)))


def _largest(values: Tensor) -> Tensor:
    """Return max |v|, fifteen times faster than torch's infinity norm."""
    if not values.numel():
        return values.new_zeros((), dtype=torch.float64)
    lowest, highest = torch.aminmax(values)
    return torch.maximum(highest, -lowest).double()


def outer_state(outer: Optimizer | None, parts: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, Any]]:
    """Return an outer optimizer's tensors, and its kind and numbers.

    Tensors of the shape of their part of the anchor are under ``PREFIX`` + key, by name, and share memory. Copies of
    all other state are under ``"numbers"``, by name and key.
    """
    tensors: Tensors = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        for key, value in ({} if outer is None else outer.state.get(part, {})).items():
            if isinstance(value, Tensor) and value.shape == part.shape:
                tensors.setdefault(PREFIX + key, {})[name] = value
            else:
                numbers.setdefault(name, {})[key] = value.cpu().clone() if isinstance(value, Tensor) else value
    return tensors, {"kind": _kind_of(outer), "numbers": numbers}


def load_outer(
    outer: Optimizer | None,
    parts: Mapping[str, Tensor],
    tensors: Mapping[str, Mapping[str, Tensor]],
    saved: Mapping[str, Any],
) -> None:
    """Replace the outer optimizer's state by the results of ``outer_state``.

    Ignores tensors without ``PREFIX``; parts of another size start without state. Warns, and changes nothing, if the
    state is of another kind of optimizer.
    """
    now = _kind_of(outer)
    if saved["kind"] is not None and saved["kind"] != now:
        rank_zero_warn(
            f"lightning_sparse: the checkpoint's outer optimizer is {saved['kind']}, the current one is "
            f"{'none' if now is None else now + ', which starts without state'}: the saved state is not loaded."
        )
        return
    if outer is None:
        return
    outer.state.clear()
    for name, part in parts.items():
        of_part = {
            kind: by_name[name] for kind, by_name in tensors.items() if kind.startswith(PREFIX) and name in by_name
        }
        if any(value.numel() != part.numel() for value in of_part.values()):
            continue
        # torch keeps the number of steps on the CPU, except with these options.
        device = part.device if any(outer.defaults.get(option) for option in ("fused", "capturable")) else "cpu"
        state = {
            key: value.to(device, copy=True) if isinstance(value, Tensor) else value
            for key, value in saved["numbers"].get(name, {}).items()
        }
        state |= {kind.removeprefix(PREFIX): torch.empty_like(part).copy_(value) for kind, value in of_part.items()}
        if state:
            outer.state[part] = state


def _kind_of(outer: Optimizer | None) -> str | None:
    return None if outer is None else type(outer).__qualname__
