"""Error-feedback memory: the residual of every parameter, committed and pending."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_sparse.engine.grouping import as_parameter, flatten_as, real_numel, residual_dtype
from lightning_sparse.exchange.buffers import record_current_stream
from lightning_sparse.selection.bucket import Residual
from lightning_sparse.sparsifiers.protocol import LayerLayout


class ResidualMemory:
    """The residuals e of this worker by parameter name, two flat tensors per bucket.

    DDP rebuilds its buckets after the first iteration. A bucket with a new layout copies its residuals by name::

        iteration 0   [ conv1 | conv2 | fc ]          one bucket holds everything
                          │       │      │            views by name
        iteration 1   [ fc | conv2 ]  [ conv1 ]       copied layer by layer, once; the old tensors are freed

    A backward must be rolled back if no optimizer steps on its gradient
    (``lightning_sparse.gradients.pending_gradients``). So it reads one tensor and writes the other, and the *committed*
    residual does not change. A step swaps the two::

        backward      committed e ── + g, − out ──▶ pending e'
        step          e' is committed now, and the next backward writes to the memory of e
        no step       e is still committed

    Parameters of one bucket may have different optimizers. Values are copied only if some of these optimizers step and
    others do not. Another backward before the step continues from e' in place.

    Args:
        parameters: parameters by name; required for parameters without the default memory format.
        in_place: whether steps cannot be rolled back, so that each bucket needs only one tensor.

    Attributes:
        was_loaded: whether the last ``load_state_dict`` held residuals.
    """

    def __init__(self, parameters: Mapping[str, Tensor] | None = None, *, in_place: bool = False) -> None:
        self._parameters = dict(parameters or {})
        self._in_place = in_place
        self.was_loaded = False
        self._buckets: dict[int, _ResidualPair] = {}
        self._places: dict[str, tuple[_ResidualPair, int, int]] = {}
        self._loaded: dict[str, Tensor] = {}

    def begin_bucket(self, index: int, layout: LayerLayout, gradient: Tensor) -> Residual:
        """Begin a bucket's backward and return its residual, tensors of shape (layout.num_elements,).

        The caller writes e' into ``after``, and ``keep`` makes it pending. New parameters have residuals of zeros. The
        gradient determines dtype and device.
        """
        bucket = self._buckets.get(index)
        if bucket is None or bucket.layout != layout or bucket.committed.device != gradient.device:
            bucket = self._buckets[index] = self._lay_out(layout, gradient)
        return bucket.begin()

    def keep(self, index: int, unused: Iterable[str] = ()) -> None:
        """End a bucket's backward: new residuals become pending, except in unused layers."""
        self._buckets[index].keep(set(unused))

    def commit(self, names: set[str]) -> None:
        """Commit the pending residuals of these parameters."""
        for bucket in self._current_buckets():
            committed = bucket.pending & names
            bucket.pending -= committed
            bucket.in_back_buffer |= committed

    def roll_back(self, names: set[str]) -> None:
        """Discard the pending residuals of these parameters."""
        for bucket in self._current_buckets():
            bucket.pending -= names

    def layers(self) -> dict[str, Tensor]:
        """Return committed residuals by name, flat and in the order of indices.

        They are zeros before a first backward. For a parameter with this memory order, the result is a view, which
        later steps change.
        """
        placed = {name: bucket.committed_part(name, start, end) for name, (bucket, start, end) in self._places.items()}
        layers = self._loaded | placed
        for name, parameter in self._parameters.items():
            if name in layers:
                layers[name] = as_parameter(layers[name], parameter).flatten()
            else:
                layers[name] = torch.zeros(
                    real_numel(parameter), dtype=residual_dtype(parameter), device=parameter.device
                )
        return layers

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the result of ``layers``."""
        return {name: residual.clone() for name, residual in self.layers().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all residuals by the result of ``state_dict``."""
        self.was_loaded = bool(state)
        self._buckets.clear()
        self._places.clear()
        self._loaded = {name: residual.detach().clone().flatten() for name, residual in state.items()}
        for name in self._loaded.keys() & self._parameters.keys():
            self._loaded[name] = flatten_as(self._parameters[name], self._loaded[name])

    def _lay_out(self, layout: LayerLayout, gradient: Tensor) -> "_ResidualPair":
        previous = {self._places[name][0] for name in layout.names if name in self._places}
        self._buckets = {index: bucket for index, bucket in self._buckets.items() if bucket not in previous}
        for former in previous:
            former.shrink()
        committed = torch.zeros(layout.num_elements, dtype=residual_dtype(gradient), device=gradient.device)
        bucket = _ResidualPair(layout, committed, committed if self._in_place else torch.zeros_like(committed))
        for name, start, end in layout.spans():
            if name in self._loaded:
                loaded = self._loaded.pop(name)
                committed[start:end] = loaded
                record_current_stream(loaded)
            elif name in self._places:
                former, *span = self._places[name]
                if not former.is_zero:
                    committed[start:end] = former.committed_part(name, *span)
                if name in former.pending:
                    if not former.is_zero:
                        bucket.back_buffer[start:end] = former.back_buffer[slice(*span)]
                    bucket.pending.add(name)
            self._places[name] = (bucket, start, end)
        return bucket

    def _current_buckets(self) -> set["_ResidualPair"]:
        return {bucket for bucket, _, _ in self._places.values()}


class _ResidualPair:
    """The two residuals of one bucket.

    ``committed`` holds the committed residuals, except those of the layers in ``in_back_buffer``, which
    ``back_buffer`` holds. ``back_buffer`` also holds the pending residuals of the layers in ``pending``.
    """

    def __init__(self, layout: LayerLayout, committed: Tensor, back_buffer: Tensor) -> None:
        self.layout = layout
        self.committed = committed
        self.back_buffer = back_buffer
        self.pending: set[str] = set()
        self.in_back_buffer: set[str] = set()

    @property
    def is_zero(self) -> bool:
        """Whether nothing has been written to either tensor since both were allocated as zeros."""
        return self.committed._version == self.back_buffer._version == 0

    def shrink(self) -> None:
        """Free the unused tensor before another bucket copies the layers."""
        if self.committed is self.back_buffer or self.pending:
            return
        if self._swap() or not self.in_back_buffer:
            record_current_stream(self.committed)
            record_current_stream(self.back_buffer)
            self.back_buffer = self.back_buffer.new_empty(0)

    def _swap(self) -> bool:
        """Swap the tensors if the back buffer holds all layers; return whether it did."""
        is_all = len(self.in_back_buffer) == len(self.layout.names)
        if is_all:
            self.committed, self.back_buffer = self.back_buffer, self.committed
            self.in_back_buffer.clear()
        return is_all

    def begin(self) -> Residual:
        if self.committed is self.back_buffer:
            return Residual(self.committed, self.committed, self.is_zero)
        self._swap()  # the usual step: nothing is copied
        for name, start, end in self.layout.spans() if self.in_back_buffer else ():
            if name in self.in_back_buffer:
                self.committed[start:end] = self.back_buffer[start:end]
        self.in_back_buffer.clear()
        if not self.pending:
            return Residual(self.committed, self.back_buffer, self.is_zero)
        for name, start, end in self.layout.spans():
            if name not in self.pending:
                self.back_buffer[start:end] = self.committed[start:end]
        return Residual(self.back_buffer, self.back_buffer, self.is_zero)

    def keep(self, unused: set[str]) -> None:
        if self.committed is self.back_buffer:
            return
        # The backward neither changed nor sent values of unused layers, so these need no step or rollback.
        idle = (unused & set(self.layout.names)) - self.pending
        self.in_back_buffer = idle
        self.pending = set(self.layout.names) - idle

    def committed_part(self, name: str, start: int, end: int) -> Tensor:
        return (self.back_buffer if name in self.in_back_buffer else self.committed)[start:end]
