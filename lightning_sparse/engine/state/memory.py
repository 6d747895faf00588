"""Error-feedback memory: what earlier steps did not send, one residual per parameter, and how it was before."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_sparse.engine.state.memory_format import in_logical_order, in_memory_order, zero_residual
from lightning_sparse.exchange import let_go
from lightning_sparse.selection.bucket import Residual
from lightning_sparse.sparsifiers import LayerLayout

Residuals = dict[str, Tensor]
"""By parameter name, flat."""


class ResidualMemory:
    """The residuals e of this worker, keyed by parameter name and held in two flat tensors per bucket.

    DDP decides which parameters share a bucket and changes its mind after the first iteration. So the name is the key,
    and a bucket's flat residuals are put together again from their layers whenever the bucket's layout is new::

        iteration 0   [ conv1 | conv2 | fc ]          one bucket holds everything
                          │       │      │            views by name
        iteration 1   [ fc | conv2 ]  [ conv1 ]       copied layer by layer, once; the old tensors are freed

    A backward must be rolled back if no optimizer ever steps on its gradient
    (``lightning_sparse.gradients.pending_gradients``). So it reads one tensor and writes the other, and the *committed*
    residual stays as it was. A step swaps the two::

        backward      committed e ── + g, − out ──▶ pending e'
        step          pending e' is what is committed now, and the next backward writes where e was
        no step       e still is what is committed

    Layer by layer, since parameters of one bucket may have different optimizers; only where those disagree is anything
    copied. A further backward before the step goes on from e' in place.

    Args:
        parameters: by name; those whose memory format is not the usual one must be there.
        forgets: for a step that keeps nothing: one tensor of zeros, to which every bucket returns.

    Attributes:
        was_loaded: whether residuals came from elsewhere.
    """

    def __init__(self, parameters: Mapping[str, Tensor] | None = None, *, forgets: bool = False) -> None:
        self._parameters = dict(parameters or {})
        self._forgets = forgets
        self.was_loaded = False
        self._buckets: dict[int, _Bucket] = {}
        self._places: dict[str, tuple[_Bucket, int, int]] = {}
        self._loaded: dict[str, Tensor] = {}

    def bucket(self, index: int, layout: LayerLayout, gradient: Tensor) -> Residual:
        """Begins a backward of a bucket: returns its residual, each tensor of shape (layout.num_elements,).

        The second is the memory itself: what is written into it becomes what is pending once ``keep`` is called. A
        parameter seen for the first time has a residual of zeros.

        Args:
            index: the bucket's place in DDP's order.
            layout: its layers.
            gradient: a tensor of the bucket's dtype and device.
        """
        held = self._buckets.get(index)
        if held is None or held.layout != layout or held.committed.device != gradient.device:
            held = self._buckets[index] = self._lay_out(layout, gradient)
        return held.begin()

    def keep(self, index: int, unused: Iterable[str] = ()) -> None:
        """Ends a backward of a bucket: its new residuals are pending, but for layers that it did not reach."""
        self._buckets[index].keep(set(unused))

    def commit(self, names: set[str]) -> None:
        """Makes what is pending for these parameters the committed residual."""
        for bucket in self._held():
            committed = bucket.pending & names
            bucket.pending -= committed
            bucket.in_back_buffer |= committed

    def roll_back(self, names: set[str]) -> None:
        """Forgets what is pending for these parameters."""
        for bucket in self._held():
            bucket.pending -= names

    def abandon(self) -> None:
        """Forgets everything pending, also of a backward that was broken off in its middle."""
        for bucket in self._held():
            bucket.pending.clear()
            if self._forgets:
                bucket.committed.zero_()

    def layers(self) -> Residuals:
        """Returns every parameter's committed residual by name: flat, in the order of the parameter's indices.

        Where that is the order in memory too it is the memory itself, which later steps change.
        """
        placed = {name: bucket.committed_part(name, *span) for name, (bucket, *span) in self._places.items()}
        return self._in_logical_order(self._loaded | placed)

    def all_layers(self) -> Residuals:
        """Returns what ``layers`` does, with zeros for parameters that no backward has brought yet."""
        held = self.layers()
        missing = {name: one for name, one in self._parameters.items() if name not in held}
        return held | {name: zero_residual(one) for name, one in missing.items()}

    def state_dict(self) -> Residuals:
        """Returns what ``layers`` does as copies that later steps do not change."""
        return {name: residual.clone() for name, residual in self.layers().items()}

    def latest(self) -> Residuals:
        """Returns what ``state_dict`` will return if optimizers step on all that is pending now."""
        placed = {name: bucket.latest_part(name, *span) for name, (bucket, *span) in self._places.items()}
        return {name: one.clone() for name, one in self._in_logical_order(self._loaded | placed).items()}

    @property
    def forgets(self) -> bool:
        """Whether every step starts from zero (``error_feedback="none"``)."""
        return self._forgets

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replaces all residuals; they are laid out into buckets when those are next asked for.

        Args:
            state: what ``state_dict`` returned, here or in another run.
        """
        self.was_loaded = bool(state)
        self._buckets.clear()
        self._places.clear()
        self._loaded = {name: residual.detach().clone().flatten() for name, residual in state.items()}
        for name in self._loaded.keys() & self._parameters.keys():
            self._loaded[name] = in_memory_order(self._loaded[name], self._parameters[name])

    def _in_logical_order(self, residuals: Residuals) -> Residuals:
        known = self._parameters
        return {name: in_logical_order(one, known[name]) if name in known else one for name, one in residuals.items()}

    def _lay_out(self, layout: LayerLayout, gradient: Tensor) -> "_Bucket":
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        formers = {self._places[name][0] for name in layout.names if name in self._places}
        self._buckets = {place: one for place, one in self._buckets.items() if one not in formers}
        for former in formers:
            former.shrink()
        committed = torch.zeros(layout.num_elements, dtype=dtype, device=gradient.device)
        bucket = _Bucket(layout, committed, committed if self._forgets else torch.zeros_like(committed))
        for name, start, end in layout.spans():
            if name in self._loaded:
                loaded = self._loaded.pop(name)
                committed[start:end] = loaded
                let_go(loaded)
            elif name in self._places:
                former, *span = self._places[name]
                committed[start:end] = former.committed_part(name, *span)
                if name in former.pending:
                    bucket.back_buffer[start:end] = former.latest_part(name, *span)
                    bucket.pending.add(name)
            self._places[name] = (bucket, start, end)
        return bucket

    def _held(self) -> set["_Bucket"]:
        return {bucket for bucket, _, _ in self._places.values()}


class _Bucket:
    """The two residuals of one bucket, and of which layers which of them holds.

    Args:
        layout: its layers.
        committed: what is committed, but for layers that are ``in_back_buffer``.
        back_buffer: what is pending for the layers that are ``pending``, and committed for those that are
            ``in_back_buffer``.
    """

    def __init__(self, layout: LayerLayout, committed: Tensor, back_buffer: Tensor) -> None:
        self.layout = layout
        self.committed = committed
        self.back_buffer = back_buffer
        self.pending: set[str] = set()
        self.in_back_buffer: set[str] = set()

    def shrink(self) -> None:
        """Gives back the tensor that holds nothing of worth, before another bucket takes the layers over."""
        if (
            self.committed is self.back_buffer
            or self.pending
            or len(self.in_back_buffer) not in (0, len(self.layout.names))
        ):
            return
        if self.in_back_buffer:
            self.committed, self.back_buffer = self.back_buffer, self.committed
            self.in_back_buffer.clear()
        let_go(self.committed)
        let_go(self.back_buffer)
        self.back_buffer = self.back_buffer.new_empty(0)

    def begin(self) -> Residual:
        if self.committed is self.back_buffer:
            return Residual(self.committed, self.committed)
        if len(self.in_back_buffer) == len(self.layout.names):  # the usual step: nothing is copied
            self.committed, self.back_buffer = self.back_buffer, self.committed
            self.in_back_buffer.clear()
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
        # Nothing was added to or sent of what was not reached: there is nothing to be rolled back, nor to wait for.
        idle = (unused & set(self.layout.names)) - self.pending
        self.in_back_buffer = idle
        self.pending = set(self.layout.names) - idle

    def committed_part(self, name: str, start: int, end: int) -> Tensor:
        return (self.back_buffer if name in self.in_back_buffer else self.committed)[start:end]

    def latest_part(self, name: str, start: int, end: int) -> Tensor:
        return (self.back_buffer if name in self.in_back_buffer or name in self.pending else self.committed)[start:end]
