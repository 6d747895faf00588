"""n workers' exchange of gradients in one process: the engine of each, in a thread of its own."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.ddp.clipping import clip_gradient
from lightning_sparse.ddp.notices import warn_of_drawn_numbers
from lightning_sparse.engine import Engine, EngineHolder, FlatBucket, rehearse_steps
from lightning_sparse.engine.memory import ResidualMemory
from lightning_sparse.engine.memory_format import as_parameter, in_memory_order, require_strides
from lightning_sparse.engine.snapshot import Snapshot
from lightning_sparse.exchange import Crew, ExchangeMode, Workers
from lightning_sparse.exchange.wire import ValueDtype
from lightning_sparse.sparsifiers import LayerLayout, Sparsifier


class SimulatedWorker(EngineHolder):
    """One of the workers: its engine and its residuals.

    Args:
        workers: its place among the others.
        sparsifier: chooses what is sent; copied.
        parameters: what is trained, by name.
        local_clip_norm: see ``ExchangeOptions``.
        per_layer_stats: whether `StepStats` holds numbers of every layer.
        exchange: of the ``Engine``, as the two that follow.
        value_dtype: see there.
        holds_density: see there.

    Attributes:
        residuals: what was not sent so far.
    """

    kind = "gradients"
    is_exchanging = False  # threads have ended their exchange before anybody saves

    def __init__(
        self,
        workers: Workers,
        sparsifier: Sparsifier,
        parameters: Mapping[str, Tensor],
        *,
        local_clip_norm: float | None,
        exchange: ExchangeMode,
        value_dtype: ValueDtype,
        holds_density: bool,
        per_layer_stats: bool,
    ) -> None:
        super().__init__(
            Engine(
                sparsifier,
                workers=workers,
                exchange=exchange,
                value_dtype=value_dtype,
                holds_density=holds_density,
                per_layer_stats=per_layer_stats,
            ),
            parameters,
        )
        self._clip_norm = local_clip_norm
        self._parameters = dict(parameters)
        self._strides = {name: one.stride() for name, one in self._parameters.items()}
        by_dtype: dict[torch.dtype, list[str]] = {}  # in a bucket is one, as in DDP's
        for name, one in self._parameters.items():
            by_dtype.setdefault(one.dtype, []).append(name)
        sizes = self.parameter_sizes
        self._layouts = [LayerLayout(tuple(names), tuple(sizes[name] for name in names)) for names in by_dtype.values()]
        self.residuals = ResidualMemory(self._parameters)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters by name."""
        return self._parameters

    @property
    def parameter_sizes(self) -> dict[str, int]:
        """Elements of every parameter's residual, by name."""
        return {name: one.numel() for name, one in self._parameters.items()}

    def own_metrics(self) -> dict[str, float]:
        """Returns nothing: a thread's wait is for the other threads."""
        return {}

    def rehearse(self) -> None:
        """Has the kernels built that steps will need; those of other workers are the same."""
        rehearse_steps(self._engine, self._parameters, has_unused=True)

    def average(self, gradients: Mapping[str, Tensor], reached: Collection[str]) -> dict[str, Tensor]:
        """Returns the average of what all workers send, as ``SimulatedWorkers.average`` does. Collective.

        Args:
            gradients: of this worker.
            reached: names of which any worker has a gradient.

        Raises:
            RuntimeError: a parameter's memory format is not what it was.
        """
        require_strides(list(self._parameters), list(self._parameters.values()), self._strides)
        buckets = [self._bucket(index, layout, gradients) for index, layout in enumerate(self._layouts)]
        if self._clip_norm is not None:
            clip_gradient([one.gradient for one in buckets], self._clip_norm)
        self._engine.begin()
        self._engine.add_all(buckets)
        self._engine.finish()
        for one in buckets:
            self.residuals.keep(one.index, self._parameters.keys() - gradients.keys())
        self.residuals.settle(set(self._parameters))
        self._engine.account(counts=False)
        self._engine.calibrator.confirm(reached)
        averages = {}
        for one in buckets:
            average = one.average.to(one.gradient.dtype)
            for name, start, end in one.layout.spans():
                averages[name] = as_parameter(average[start:end], self._parameters[name])
        return averages

    def _bucket(self, index: int, layout: LayerLayout, gradients: Mapping[str, Tensor]) -> FlatBucket:
        known = [(name, self._parameters[name]) for name in layout.names]
        parts = [
            in_memory_order(gradients[name].flatten(), one) if name in gradients else one.new_zeros(one.numel())
            for name, one in known
        ]
        flat = torch.cat(parts)
        residual = self.residuals.bucket(index, layout, flat)
        left_out = [(start, end) for name, start, end in layout.spans() if name not in gradients]
        is_last = index == len(self._layouts) - 1
        return FlatBucket(index, layout, flat, residual, is_last, left_out=left_out)

    def snapshot(self, workers: Workers | None = None) -> Snapshot:
        """Return this worker's state. Not collective."""
        snapshot = self._engine.snapshot()
        snapshot.numbers |= {"layout": [], "learning_rates": {}}
        snapshot.own["residual"] = self.residuals.layers()
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Replace all state by a snapshot, from here or of workers that are processes."""
        self.reset()
        self._engine.restore(snapshot)
        self.residuals.load_state_dict(snapshot.own.get("residual", {}))

    def reset(self) -> None:
        """Return to the state before the first step."""
        self.residuals.load_state_dict({})
        self._engine.reset()


class SimulatedWorkers:
    """All workers, and the threads in which they average.

    Args:
        num_workers: n.
        sparsifier: chooses what is sent; each worker has a copy.
        parameters: what is trained, by name.
        **options: of ``SimulatedWorker``.
    """

    def __init__(
        self, num_workers: int, sparsifier: Sparsifier, parameters: Mapping[str, Tensor], **options: Any
    ) -> None:
        self._crew = Crew(num_workers)
        self._has_warned = num_workers == 1
        self.each = [SimulatedWorker(one, sparsifier, parameters, **options) for one in self._crew.workers]
        self.each[0].rehearse()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def average(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the average of what all workers send of their gradients, by name, of the gradients' shapes.

        Args:
            gradients: of each worker; of a parameter that is missing it sends nothing, and keeps what it has not sent.
        """
        drawn_before = torch.get_rng_state()
        reached = set().union(*gradients)
        averages: list[dict[str, Tensor]] = self._crew.run(
            lambda rank: self.each[rank].average(gradients[rank], reached)
        )
        if not (self._has_warned or torch.equal(torch.get_rng_state(), drawn_before)):
            self._has_warned = True
            warn_of_drawn_numbers()
        return averages[0]

    def reset(self) -> None:
        """Returns all to before the first step."""
        for one in self.each:
            one.reset()

    def close(self) -> None:
        """Ends the threads."""
        self._crew.close()
