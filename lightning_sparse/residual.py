"""Error-feedback memory: what earlier steps did not send, one residual per parameter."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sparse.sparsifiers import LayerLayout


class ResidualMemory:
    """The residuals e of this worker, keyed by parameter name and held in one flat tensor per bucket.

    DDP decides which parameters share a bucket and changes its mind after the first iteration. So the name is the key,
    and a bucket's flat residual is put together again from its layers whenever the bucket's layout is new::

        iteration 0   [ conv1 | conv2 | fc ]          one bucket holds everything
                          │       │      │            views by name
        iteration 1   [ fc | conv2 ]  [ conv1 ]       copied layer by layer, once; the old tensor is freed

    A residual is float32, or float64 where the gradient is.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[LayerLayout, Tensor]] = {}
        self._layers: dict[str, Tensor] = {}

    def bucket(self, index: int, layout: LayerLayout, gradient: Tensor) -> Tensor:
        """Returns the flat residual of a bucket: shape (layout.num_elements,), on the gradient's device.

        The tensor is the memory itself: what is written into it is kept. A parameter seen for the first time has a
        residual of zeros.

        Args:
            index: the bucket's place in DDP's order.
            layout: its layers.
            gradient: a tensor of the bucket's dtype and device.
        """
        known_layout, flat = self._buckets.get(index, (None, None))
        if flat is not None and known_layout == layout and flat.device == gradient.device:
            return flat
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        flat = torch.zeros(layout.num_elements, dtype=dtype, device=gradient.device)
        for name, start, end in layout.spans():
            if name in self._layers:
                flat[start:end] = self._layers[name]
            self._layers[name] = flat[start:end]
        self._buckets[index] = (layout, flat)
        return flat

    def layers(self) -> dict[str, Tensor]:
        """Returns every parameter's residual by name, flat: the memory itself, which the next step changes."""
        return dict(self._layers)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns every parameter's residual by name, flat, as copies that later steps do not change."""
        return {name: residual.clone() for name, residual in self._layers.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replaces all residuals; they are laid out into buckets when those are next asked for."""
        self._buckets.clear()
        self._layers = {name: residual.detach().clone().flatten() for name, residual in state.items()}


def compensate(residual: Tensor, gradient: Tensor, loss_scale: Tensor | None = None) -> Tensor:
    """Returns the compensated gradient p = e + g / S, formed in the residual's memory.

    Args:
        residual: e, float32 or float64, shape (m,). Becomes p.
        gradient: g of the same bucket in any floating dtype, shape (m,). Not modified.
        loss_scale: S, one element on the same device; None is 1.
    """
    return residual.add_(gradient if loss_scale is None else gradient.to(residual.dtype) / loss_scale)


def keep_rest(compensated: Tensor, indices: Tensor, sent: Tensor) -> Tensor:
    """Returns the residual e' = p − out, formed in the compensated gradient's memory.

    Where a non-finite value was sent the residual restarts from 0: infinity minus infinity is no number to keep.

    Args:
        compensated: p, shape (m,). Becomes e'.
        indices: int64, shape (k,), unique: the selected coordinates.
        sent: out at those places, shape (k,), the compensated gradient's dtype.
    """
    rest = compensated.index_select(0, indices) - sent
    compensated[indices] = torch.where(rest.isfinite(), rest, torch.zeros_like(rest))
    return compensated


def take_back(residual: Tensor, indices: Tensor, sent: Tensor) -> Tensor:
    """Returns the residual as if nothing had been sent, formed in place: the finite sent values are added back."""
    residual[indices] += torch.where(sent.isfinite(), sent, torch.zeros_like(sent))
    return residual


def rescale(residual: Tensor, layout: LayerLayout, factors: Mapping[str, float]) -> Tensor:
    """Multiplies the residual of each layer by its factor, in place; a layer without one keeps its residual.

    Args:
        residual: e of a bucket, shape (layout.num_elements,).
        layout: its layers.
        factors: a factor per parameter name, for example lr_{t-1} / lr_t (Algorithm 1 of Sahu et al., NeurIPS 2021,
            keeps its residual in units of the learning rate).
    """
    values = [factors.get(name, 1.0) for name in layout.names]
    if values and all(value == values[0] for value in values):
        return residual if values[0] == 1.0 else residual.mul_(values[0])
    for value, (_, start, end) in zip(values, layout.spans(), strict=True):
        if value != 1.0:
            residual[start:end].mul_(value)
    return residual
