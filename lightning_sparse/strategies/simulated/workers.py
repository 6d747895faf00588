"""Exchange of gradients between n simulated workers, one engine and thread per worker."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.grouping import ParameterBucket, as_parameter, bucketed, flatten_as, require_strides
from lightning_sparse.engine.options import GradientOptions
from lightning_sparse.engine.residuals import ResidualMemory
from lightning_sparse.engine.warmup import warm_up_steps
from lightning_sparse.exchange.in_process import ThreadWorkers
from lightning_sparse.selection.bucket import FlatBucket, clip_norm
from lightning_sparse.sparsifiers.protocol import Sparsifier


class SimulatedWorker(Averager):
    """A worker: its residuals and its engine, which communicates with threads of this process."""

    kind = "gradients"

    def __init__(self, engine: Engine, parameters: Mapping[str, Tensor], local_clip_norm: float | None) -> None:
        super().__init__(engine, parameters)
        self._clip_norm = local_clip_norm
        self._parameters = dict(parameters)
        self._strides = {name: parameter.stride() for name, parameter in parameters.items()}
        self._buckets = bucketed(ParameterBucket, self._parameters, 0, lambda parameter: parameter.dtype)
        self.residuals = ResidualMemory(self._parameters)
        self.all_workers: Sequence[SimulatedWorker] = [self]

    def set_threshold(self, threshold: float) -> None:
        """Set λ of all workers from the next step on; see ``Averager.set_threshold``."""
        for worker in self.all_workers:
            Averager.set_threshold(worker, threshold)

    def own_metrics(self) -> dict[str, float]:
        """Return no metrics, because a thread does not wait for a network."""
        return {}

    def average(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Exchange gradients; the exchange counts only after ``commit``. Collective.

        Args:
            gradients: gradients of this worker; missing ones are not sent.

        Returns:
            Averages of the sent values by name on rank 0; an empty dict on other ranks.

        Raises:
            RuntimeError: a parameter's memory format has changed.
        """
        require_strides(list(self._parameters), list(self._parameters.values()), self._strides)
        buckets = [self._flat(bucket, gradients) for bucket in self._buckets]
        if self._clip_norm is not None:
            clip_norm(buckets, self._clip_norm)
        self._committed_numbers = self._engine.numbers()
        self._engine.begin()
        self._engine.add_all(buckets)
        self._engine.finish()
        for bucket in buckets:
            self.residuals.keep(bucket.index, self._parameters.keys() - gradients.keys())
        averages: dict[str, Tensor] = {}
        if not self.workers.reads_averages:
            return averages
        for bucket in buckets:
            average = bucket.average.to(bucket.gradient.dtype)
            for name, start, end in bucket.layout.spans():
                averages[name] = as_parameter(average[start:end], self._parameters[name])
        return averages

    def commit(self, reached: Collection[str]) -> None:
        """Keep the last exchange, because an optimizer has stepped on its averages.

        Args:
            reached: names of parameters for which any worker had a gradient.
        """
        self._committed_numbers = None
        self.residuals.commit(set(self._parameters))
        self._engine.end_step(counts=False)
        self._engine.calibrator.confirm(reached)

    def _flat(self, bucket: ParameterBucket, gradients: Mapping[str, Tensor]) -> FlatBucket:
        index, layout = bucket.index, bucket.layout
        parts = [
            flatten_as(parameter, gradients[name]) if name in gradients else parameter.new_zeros(parameter.numel())
            for name, parameter in zip(layout.names, bucket.parameters, strict=True)
        ]
        flat = torch.cat(parts)
        residual = self.residuals.begin_bucket(index, layout, flat)
        left_out = [(start, end) for name, start, end in layout.spans() if name not in gradients]
        return FlatBucket(index, layout, flat, residual, bucket is self._buckets[-1], left_out=left_out)


class SimulatedWorkers(ThreadWorkers):
    """All workers, ``each`` in rank order, one thread per worker."""

    def __init__(
        self,
        num_workers: int,
        sparsifier: Sparsifier,
        parameters: Mapping[str, Tensor],
        options: GradientOptions,
        *,
        per_layer_stats: bool,
    ) -> None:
        super().__init__(num_workers)
        engines = [
            Engine(sparsifier, options, workers=workers, per_layer_stats=per_layer_stats) for workers in self.workers
        ]
        self.each = [SimulatedWorker(engine, parameters, options.local_clip_norm) for engine in engines]
        for worker in self.each:
            worker.all_workers = self.each
        self._reached: set[str] | None = None
        warm_up_steps(engines[0], parameters, has_unused=True)  # all workers share the kernels

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def average(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return averages of the sent values by name from the gradients of each worker."""
        reached = set().union(*gradients)
        averages = self.run(lambda rank: self.each[rank].average(gradients[rank]))
        self._reached = reached
        return averages[0]  # type: ignore[no-any-return]

    def commit(self) -> None:
        """Keep the last exchange, because an optimizer has stepped on its averages."""
        if self._reached is not None:
            for worker in self.each:
                worker.commit(self._reached)
        self._reached = None
