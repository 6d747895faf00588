"""Error-feedback memory: the residual of every parameter, committed and pending."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_sparse.engine.grouping import in_logical_order, in_memory_order, kept_dtype, real_numel
from lightning_sparse.exchange.buffers import let_go
from lightning_sparse.selection.bucket import Residual
from lightning_sparse.sparsifiers import LayerLayout


class ResidualMemory:
    """The residuals e of this worker, keyed by parameter name and held in two flat tensors per bucket.

    DDP rebuilds its buckets after the first iteration. A bucket with a new layout takes its residuals over by name::

        iteration 0   [ conv1 | conv2 | fc ]          one bucket holds everything
                          │       │      │            views by name
        iteration 1   [ fc | conv2 ]  [ conv1 ]       copied layer by layer, once; the old tensors are freed

    A backward must be rolled back if no optimizer ever steps on its gradient
    (``lightning_sparse.gradients.pending_gradients``). So it reads one tensor and writes the other, and the *committed*
    residual stays unchanged. A step swaps the two::

        backward      committed e ── + g, − out ──▶ pending e'
        step          e' is committed now, and the next backward writes to the memory of e
        no step       e is still committed

    Parameters of one bucket may have different optimizers; values are copied only where those disagree. A further
    backward before the step continues from e' in place.

    Args:
        parameters: by name; required for those with another memory format than the default.
        forgets: for a step that keeps nothing: one tensor of zeros, to which every bucket returns.

    Attributes:
        forgets: whether every step starts from zero (``error_feedback="none"``).
        was_loaded: whether residuals came from elsewhere.
    """

    def __init__(self, parameters: Mapping[str, Tensor] | None = None, *, forgets: bool = False) -> None:
        self._parameters = dict(parameters or {})
        self.forgets = forgets
        self.was_loaded = False
        self._buckets: dict[int, _Bucket] = {}
        self._places: dict[str, tuple[_Bucket, int, int]] = {}
        self._loaded: dict[str, Tensor] = {}

    def bucket(self, index: int, layout: LayerLayout, gradient: Tensor) -> Residual:
        """Begin a backward of a bucket: return its residual, each tensor of shape (layout.num_elements,).

        The second tensor is the memory itself: ``keep`` makes its values pending. A parameter seen for the first time
        has a residual of zeros. Dtype and device follow from the gradient.
        """
        held = self._buckets.get(index)
        if held is None or held.layout != layout or held.committed.device != gradient.device:
            held = self._buckets[index] = self._lay_out(layout, gradient)
        return held.begin()

    def keep(self, index: int, unused: Iterable[str] = ()) -> None:
        """End a backward of a bucket: its new residuals are pending, except for layers that it did not reach."""
        self._buckets[index].keep(set(unused))

    def commit(self, names: set[str]) -> None:
        """Make the pending residuals of these parameters the committed ones."""
        for bucket in self._held():
            committed = bucket.pending & names
            bucket.pending -= committed
            bucket.in_back_buffer |= committed

    def roll_back(self, names: set[str]) -> None:
        """Forget the pending residuals of these parameters."""
        for bucket in self._held():
            bucket.pending -= names

    def abandon(self) -> None:
        """Forget everything pending, also of a backward that was broken off in its middle."""
        for bucket in self._held():
            bucket.pending.clear()
            if self.forgets:
                bucket.committed.zero_()

    def layers(self) -> dict[str, Tensor]:
        """Return every parameter's committed residual by name: flat, in the order of the parameter's indices.

        If the parameter has that order in memory, the result shares the memory, which later steps change.
        """
        placed = {name: bucket.committed_part(name, start, end) for name, (bucket, start, end) in self._places.items()}
        return {
            name: in_logical_order(residual, self._parameters[name]) if name in self._parameters else residual
            for name, residual in (self._loaded | placed).items()
        }

    def all_layers(self) -> dict[str, Tensor]:
        """Return the result of ``layers``, with zeros for parameters that no backward has reached yet."""
        held = self.layers()
        for name, parameter in self._parameters.items():
            if name not in held:
                held[name] = torch.zeros(real_numel(parameter), dtype=kept_dtype(parameter), device=parameter.device)
        return held

    def state_dict(self) -> dict[str, Tensor]:
        """Return the result of ``layers`` as copies that later steps do not change."""
        return {name: residual.clone() for name, residual in self.layers().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all residuals by the result of ``state_dict``, here or in another run."""
        self.was_loaded = bool(state)
        self._buckets.clear()
        self._places.clear()
        self._loaded = {name: residual.detach().clone().flatten() for name, residual in state.items()}
        for name in self._loaded.keys() & self._parameters.keys():
            self._loaded[name] = in_memory_order(self._loaded[name], self._parameters[name])

    def _lay_out(self, layout: LayerLayout, gradient: Tensor) -> "_Bucket":
        formers = {self._places[name][0] for name in layout.names if name in self._places}
        self._buckets = {index: bucket for index, bucket in self._buckets.items() if bucket not in formers}
        for former in formers:
            former.shrink()
        committed = torch.zeros(layout.num_elements, dtype=kept_dtype(gradient), device=gradient.device)
        bucket = _Bucket(layout, committed, committed if self.forgets else torch.zeros_like(committed))
        for name, start, end in layout.spans():
            if name in self._loaded:
                loaded = self._loaded.pop(name)
                committed[start:end] = loaded
                let_go(loaded)
            elif name in self._places:
                former, *span = self._places[name]
                committed[start:end] = former.committed_part(name, *span)
                if name in former.pending:
                    bucket.back_buffer[start:end] = former.back_buffer[slice(*span)]
                    bucket.pending.add(name)
            self._places[name] = (bucket, start, end)
        return bucket

    def _held(self) -> set["_Bucket"]:
        return {bucket for bucket, _, _ in self._places.values()}


class _Bucket:
    """The two residuals of one bucket.

    ``committed`` holds the committed residual, except of layers that are ``in_back_buffer``. ``back_buffer`` holds
    these, and the pending residual of layers that are ``pending``.
    """

    def __init__(self, layout: LayerLayout, committed: Tensor, back_buffer: Tensor) -> None:
        self.layout = layout
        self.committed = committed
        self.back_buffer = back_buffer
        self.pending: set[str] = set()
        self.in_back_buffer: set[str] = set()

    def shrink(self) -> None:
        """Free the tensor that holds no values, before another bucket takes the layers over."""
        if self.committed is self.back_buffer or self.pending:
            return
        if self._swap() or not self.in_back_buffer:
            let_go(self.committed)
            let_go(self.back_buffer)
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
            return Residual(self.committed, self.committed)
        self._swap()  # the usual step: nothing is copied
        for name, start, end in self.layout.spans() if self.in_back_buffer else ():
            if name in self.in_back_buffer:
                self.committed[start:end] = self.back_buffer[start:end]
        self.in_back_buffer.clear()
        if not self.pending:
            return Residual(self.committed, self.back_buffer)
        for name, start, end in self.layout.spans():
            if name not in self.pending:
                self.back_buffer[start:end] = self.committed[start:end]
        return Residual(self.back_buffer, self.back_buffer)

    def keep(self, unused: set[str]) -> None:
        if self.committed is self.back_buffer:
            return
        # The backward neither added to unreached layers nor sent of them: they wait for no step and no rollback.
        idle = (unused & set(self.layout.names)) - self.pending
        self.in_back_buffer = idle
        self.pending = set(self.layout.names) - idle

    def committed_part(self, name: str, start: int, end: int) -> Tensor:
        return (self.back_buffer if name in self.in_back_buffer else self.committed)[start:end]
