"""n workers' exchange of gradients in one process: the engine of each, in a thread of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.ddp.clipping import clip_gradient
from lightning_sparse.engine import Engine, EngineHolder, FlatBucket
from lightning_sparse.engine.memory import ResidualMemory
from lightning_sparse.exchange import Crew, ExchangeMode, Workers
from lightning_sparse.exchange.payload import ValueDtype
from lightning_sparse.sparsifiers import LayerLayout, Sparsifier


class SimulatedWorker(EngineHolder):
    """One of the workers: its engine and its residuals.

    Args:
        workers: its place among the others.
        sparsifier: chooses what is sent; copied.
        parameters: what is trained, by name.
        local_clip_norm: see :class:`~lightning_sparse.ddp.options.ExchangeOptions`.
        per_layer_stats: whether :class:`StepStats` holds numbers of every layer.
        exchange: of the :class:`Engine`, as the two that follow.
        value_dtype: see there.
        holds_density: see there.

    Attributes:
        residuals: what was not sent so far.
    """

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
            )
        )
        self._clip_norm = local_clip_norm
        self._parameters = dict(parameters)
        self._layout = LayerLayout(tuple(parameters), tuple(one.numel() for one in parameters.values()))
        self.residuals = ResidualMemory()

    @property
    def parameter_sizes(self) -> dict[str, int]:
        """Elements of every parameter's residual, by name."""
        return dict(zip(self._layout.names, self._layout.sizes, strict=True))

    def average(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the average of what all workers send, as :meth:`SimulatedWorkers.average` does. Collective."""
        flat = torch.cat(
            [
                gradients[name].flatten() if name in gradients else one.new_zeros(one.numel())
                for name, one in self._parameters.items()
            ]
        )
        bucket = FlatBucket(0, self._layout, flat, self.residuals.bucket(0, self._layout, flat), is_last=True)
        if self._clip_norm is not None:
            clip_gradient([flat], self._clip_norm)
        self._engine.begin()
        self._engine.survey([bucket])
        self._engine.add(bucket)
        self._engine.finish()
        self.residuals.keep(0)
        self.residuals.settle(set(self._layout.names))
        self._engine.account()
        parts = torch.split(bucket.average.to(flat.dtype), list(self._layout.sizes))
        return {name: part.view(one.shape) for part, (name, one) in zip(parts, self._parameters.items(), strict=True)}

    def reset(self) -> None:
        """Returns to before the first step."""
        self.residuals.load_state_dict({})
        self._engine.reset()

    def shared_state(self) -> dict[str, Any]:
        """Returns what is the same on every worker, as a hook's state does; see :class:`SparseState`."""
        rest: dict[str, Any] = {"layout": [], "learning_rates": {}}
        return self._engine.shared_state() | self._engine.sparsifier_state(self._engine.next_step) | rest

    def load_shared_state(self, saved: Mapping[str, Any], *, same_world_size: bool) -> None:
        """Continues from what :meth:`shared_state` returned, here or of workers that are processes."""
        # What an exchange has seen of buckets is of DDP's buckets, and here is one.
        self._engine.load_shared_state(saved, same_world_size=same_world_size and not saved["layout"])


class SimulatedWorkers:
    """All workers, and the threads in which they average.

    Args:
        num_workers: n.
        sparsifier: chooses what is sent; each worker has a copy.
        parameters: what is trained, by name.
        **options: of :class:`SimulatedWorker`.
    """

    def __init__(
        self, num_workers: int, sparsifier: Sparsifier, parameters: Mapping[str, Tensor], **options: Any
    ) -> None:
        self._crew = Crew(num_workers)
        self.each = [SimulatedWorker(one, sparsifier, parameters, **options) for one in self._crew.workers]

    def average(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the average of what all workers send of their gradients, by name, of the gradients' shapes.

        Args:
            gradients: of each worker; of a parameter that is missing it sends what its residual holds of it.
        """
        averages: list[dict[str, Tensor]] = self._crew.run(lambda rank: self.each[rank].average(gradients[rank]))
        return averages[0]

    def close(self) -> None:
        """Ends the threads."""
        self._crew.close()
