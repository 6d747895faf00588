"""Exchanges drifts, and moves anchor and weights by the average."""

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any
from weakref import WeakSet

import torch
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.drift.anchor import AnchorBucket, DriftBucket, load_outer, outer_state
from lightning_sparse.drift.fingerprints import fingerprints
from lightning_sparse.drift.untrained_tensors import UntrainedTensors, tensors_that_differ
from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.grouping import bucketed, local, residual_dtype
from lightning_sparse.engine.options import DriftOptions
from lightning_sparse.engine.snapshot import Tensors
from lightning_sparse.exchange.agreement import ignored_names
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.selection.bucket import Residual

_exchanges: WeakSet["DriftExchange"] = WeakSet()
"""All exchanges of this process. Of those with the same weights, only the newest may run."""


class DriftExchange:
    """The anchors of a module's parameters, and the exchange of drifts from the anchors.

    A parameter is anchored at its value when it first requires a gradient. ``replica`` are the ranks among which the
    module is sharded.

    Attributes:
        buckets: the anchored parameters.
        anchored: the anchored parameters by name.
        outer: moves the anchors; None subtracts the average.
        untrained: the module's other tensors.
        why_closed: the reason why no more drifts may be exchanged; None if they may.
        largest_drift: the largest distance of any worker's weight from the anchor before the last exchange.
    """

    def __init__(self, module: nn.Module, engine: Engine, options: DriftOptions, replica: Workers) -> None:
        self.options = options
        self.buckets: list[AnchorBucket] = []
        self.anchored: dict[str, Tensor] = {}
        self.outer: torch.optim.Optimizer | None = None
        self.untrained = UntrainedTensors(module)
        self.why_closed: str | None = None
        _exchanges.add(self)
        self.largest_drift = 0.0
        self._module, self._engine, self._replica = module, engine, replica
        self._compared: dict[str, Tensor] = {}
        self.anchor_new()
        self._num_compared = len(self.untrained.compared(only_buffers=True))

    def run(self) -> None:
        """Exchange selected values of drifts, and move anchor and weights by the average. Collective.

        Raises:
            RuntimeError: an anchored parameter was replaced, renamed or removed.
        """
        self.anchor_new()
        self._engine.begin()
        exchanged = self._engine.add_all(self._formed())
        notes = self._engine.finish()
        largest = float(torch.cat([note[:, 0] for note in notes]).max())  # NaN if any is NaN
        self.largest_drift = float(self._replica.gather_numbers([largest], self.buckets[0].anchor.device).max())
        self._engine.workers.average([*tensors_that_differ(self._compared, notes[-1][:, 2:]).values()])
        fewest, most = notes[-1][:, 1].aminmax()
        if fewest == most:  # a new buffer may be on one worker only, and messages must have equal sizes
            self._num_compared = int(most)
        self._move_anchor(exchanged)
        for drift in exchanged:
            bucket = drift.anchored
            if drift.weights is None:
                is_kept = self.options.keep_drift
                bucket.write(torch.sub(bucket.anchor, bucket.unsent, out=bucket.drift) if is_kept else bucket.anchor)
            elif not drift.has_moved:
                bucket.subtract(drift.average)
        gradient_bytes = sum(bucket.gradient_bytes for bucket in self.buckets)
        self._engine.end_step(dense_bytes=self.options.every_n_steps * gradient_bytes)

    def _formed(self) -> Iterator[DriftBucket]:
        # Only under these conditions can compiled functions keep unsent values in the weights.
        keeps_in_weights = self.options.keep_drift and self.outer is None
        for bucket in self.buckets:
            is_last = bucket is self.buckets[-1]
            # Notes: the largest drift; in the last bucket also number and fingerprints of buffers.
            notes = torch.zeros(1, dtype=torch.float64, device=bucket.anchor.device)
            if is_last:
                buffers = self.untrained.compared(only_buffers=True)
                self._compared = dict(islice(buffers.items(), self._num_compared))
                prints = fingerprints([*self._compared.values()]).to(notes.device)
                notes = torch.cat([notes, notes.new_full((1,), len(buffers)), prints])
            drift = DriftBucket(
                bucket.index,
                bucket.layout,
                bucket.drift,
                Residual(bucket.anchor, bucket.anchor),
                is_last,
                notes=notes,
                weights=bucket.weights() if keeps_in_weights else None,
                anchored=bucket,
                decay=0.0 if self.options.keep_drift else self.options.drift_decay,
            )
            if drift.weights is None:
                drift.form()
            yield drift

    def _move_anchor(self, exchanged: list[DriftBucket]) -> None:
        for drift in exchanged:
            if self.outer is not None:
                averages = drift.anchored.by_name(drift.average)
                for name, part in drift.anchored.parts.items():
                    part.grad = averages[name]
            elif drift.weights is None:
                drift.anchored.anchor.sub_(drift.average)
        if self.outer is not None:
            self.outer.step()
            self.outer.zero_grad()

    def restart(self, *, was_interrupted: bool) -> None:
        """Make the current weights the anchor, and discard all history. Not collective."""
        if was_interrupted:
            for bucket in self.buckets:
                bucket.drift = torch.zeros_like(bucket.drift)  # collectives may still write to the old tensors
        for bucket in self.buckets:
            bucket.read(bucket.anchor)
            if not self.options.keep_drift:
                bucket.unsent.zero_()
        if self.outer is not None:
            self.outer.state.clear()

    def anchors(self) -> dict[str, Tensor]:
        """Return views of x by name with the weights' shapes, complex ones as real."""
        return {
            name: part
            for bucket in self.buckets
            for name, part in zip(bucket.layout.names, bucket.shaped_parts(bucket.anchor), strict=True)
        }

    def _views(self) -> Tensors:
        """Return flat parts of all buckets' tensors by kind and name, in the order of indices."""
        views: Tensors = {kind: {} for kind in (["anchor"] if self.options.keep_drift else ["anchor", "unsent"])}
        for kind, by_name in views.items():
            for bucket in self.buckets:
                by_name |= bucket.by_name(getattr(bucket, kind))
        return views

    def _parts(self) -> dict[str, Tensor]:
        return {name: part for bucket in self.buckets for name, part in bucket.parts.items()}

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Return tensors by kind and name, and plain values of layout and outer optimizer."""
        tensors, outer = outer_state(self.outer, self._parts())
        layout = [list(bucket.layout.names) for bucket in self.buckets]
        return self._views() | tensors, {"layout": layout, "outer": outer}

    def load(self, tensors: Tensors, outer: Mapping[str, Any]) -> None:
        """Load those results of ``state`` that fit the buckets."""
        for kind, parts in self._views().items():
            for name, saved in tensors.get(kind, {}).items():
                if name in parts and saved.numel() == parts[name].numel():
                    parts[name].copy_(saved)
        load_outer(self.outer, self._parts(), tensors, outer)

    # Unfrozen parameters.

    def anchor_layout(self, layout: list[list[str]]) -> None:
        """Anchor parameters in the buckets of a saved layout. Not collective."""
        named: dict[str, Tensor] = dict(self._module.named_parameters())
        for names in layout:
            known = {name: named[name] for name in names if name in named and name not in self.anchored}
            self._anchor_parameters(known, is_shared=True)

    def anchor_new(self) -> None:
        """Anchor parameters that newly require a gradient. Collective, the same on all workers.

        Raises:
            RuntimeError: an anchored parameter was replaced, renamed or removed.
        """
        ignored = ignored_names(self._module)
        parameters = self._module.named_parameters()
        named: dict[str, Tensor] = {name: parameter for name, parameter in parameters if name not in ignored}
        gone = [name for name, parameter in self.anchored.items() if named.get(name) is not parameter]
        if gone:
            raise RuntimeError(
                f"The model's parameters have changed after set-up: {gone[0]!r} was replaced, renamed or removed. "
                "Change layers, shard and prune before fit, or before you make the averager; then resume from a "
                "checkpoint."
            )
        new = trained_parameters(named, excluded=self.anchored)
        if self.anchored and new:
            shown = ", ".join(sorted(new)[:3]) + (", …" if len(new) > 3 else "")
            rank_zero_info(
                f"lightning_sparse: {len(new)} parameters were added or unfrozen ({shown}). All workers start with the "
                "mean of the new parameters."
            )
        self._anchor_parameters(new)
        self.untrained.register_new()

    def _anchor_parameters(self, parameters: dict[str, Tensor], *, is_shared: bool = False) -> None:
        """Average parameters over the workers, unless ``is_shared``, and anchor them."""
        if not parameters:
            return
        if self.anchored and not is_shared:
            self._engine.workers.average([local(parameter) for parameter in parameters.values()])
        self.anchored |= parameters
        own = set(map(id, self.anchored.values()))  # torch refuses to move a sharded module with weak references
        for other in _exchanges:
            if other is not self and not own.isdisjoint(map(id, other.anchored.values())):
                other.why_closed = (
                    "A newer averager has the same weights, and the two would undo each other's work. Make only one "
                    "averager for a model, or call step() of the newest."
                )
        new = bucketed(AnchorBucket, parameters, len(self.buckets), residual_dtype)
        self.buckets += new
        if self.options.outer_optimizer is not None:
            anchors = [part for bucket in new for part in bucket.parts.values()]
            if self.outer is None:
                self.outer = self.options.outer_optimizer(anchors)
                if not isinstance(self.outer, Optimizer) or isinstance(self.outer, torch.optim.LBFGS):
                    raise ValueError(
                        f"Invalid outer_optimizer: it returned {type(self.outer).__name__}. Must return a "
                        "torch.optim.Optimizer whose step needs no closure."
                    )
            else:
                self.outer.add_param_group({"params": anchors})


def trained_parameters(named: Mapping[str, Tensor], *, excluded: Collection[str] = ()) -> dict[str, Tensor]:
    """Return nonempty parameters that require a gradient, except the given names."""
    return {
        name: parameter
        for name, parameter in named.items()
        if parameter.requires_grad and parameter.numel() and name not in excluded
    }
