"""Sparse exchange of gradients between replicas of a sharded model.

FSDP2 shards the parameters of a replica over its ranks. After backward, each rank has the mean gradient of its shard
over the replica's data. Ranks with the same shard are the workers of a sparse exchange, with a group for every shard::

    replica 0    rank 0: shard 0 ──┐   rank 1: shard 1 ──┐      inside: torch's own reduce-scatter and all-gather
    replica 1    rank 2: shard 0 ──┘   rank 3: shard 1 ──┘      between: the engine, on each shard

λ is equal in all shards, per model or per layer, and depends on statistics summed over all shards.

Gradients enter the residual in ``average_gradients``, between backward and an optimizer's step. Gradients that you drop
before this call do not change the residual.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import compress

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.grouping import ParameterBucket, as_real, bucketed, local, real_numel
from lightning_sparse.engine.options import ExchangeOptions, checked, settings_of
from lightning_sparse.engine.residuals import ResidualMemory
from lightning_sparse.engine.sharding import Sharding
from lightning_sparse.engine.snapshot import Snapshot
from lightning_sparse.engine.warmup import warm_up_steps
from lightning_sparse.exchange.buffers import numbers_on_device
from lightning_sparse.exchange.groups import OwnGroup
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.gradients.step_observer import GradientStepObserver
from lightning_sparse.selection.bucket import FlatBucket
from lightning_sparse.sparsifiers.protocol import Sparsifier, require_sparsifier


class ShardGradientAverager(Averager):
    """Averages gradients of a sharded model over its replicas. Collective: all ranks.

    Use it with plain PyTorch and ``fully_shard``. For the Lightning Trainer, use `HSDPHardThresholdStrategy`. All
    replicas receive the weights and buffers of the first.

    Example::

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        averager = ShardGradientAverager(model, HardThreshold(density=0.01), group=mesh["replicate"])
        for batch in loader:
            loss_of(model, batch).backward()
            averager.average_gradients()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    Args:
        module: the model, sharded only over the ranks of a replica.
        sparsifier: selects coordinates; copied. λ is equal in all shards, per model or per layer; a number of
            coordinates, as in `TopK`, is per shard.
        options: see `ExchangeOptions`.
        group: the dimension of replicas, one rank per replica, of a mesh of all ranks.
        per_layer_stats: whether to report density and error of every layer.

    Attributes:
        replica: the ranks that hold this rank's replica.
        device: the device of this rank.
        own_group: the process group in which gradients are exchanged.
        step_observer: observes optimizer steps on these parameters.

    Raises:
        TypeError: the sparsifier, the options or the mesh have a wrong type.
        ValueError: the sparsifier does not support an option, the mesh has several dimensions, or the sharding is not
            supported.
        RuntimeError: settings differ between ranks, or the mesh does not divide ranks into replicas (on every rank).
    """

    kind = "gradients"
    step_observer: GradientStepObserver
    _advice_for_others = "begin with residuals of zero"

    def __init__(
        self,
        module: nn.Module,
        sparsifier: Sparsifier,
        options: ExchangeOptions | None = None,
        *,
        group: DeviceMesh,
        per_layer_stats: bool = False,
    ) -> None:
        options = checked(options, ExchangeOptions)
        require_sparsifier(sparsifier)
        options.validate(sparsifier)
        sharding = Sharding(module, group, settings_of(sparsifier, options, per_layer_stats))
        named, self.device, self.replica = sharding.named, sharding.device, sharding.replica
        with torch.accelerator.device_index(self.device.index):
            self.own_group = OwnGroup(sharding.group)
            engine = Engine(sparsifier, options, group=self.own_group.group, per_layer_stats=per_layer_stats)
            super().__init__(engine, named)
            buffers = [buffer for buffer in module.buffers() if not buffer.is_meta]
            self.workers.broadcast([*map(local, named.values()), *map(local, buffers)])
            self._engine.combine_shards = sharding.combine_shards
        self._is_closed = False
        self.place = sharding.place
        self._parameters = named
        self.step_observer = GradientStepObserver(module, named.values())
        self._buckets: list[ParameterBucket] = []
        self._taken: set[str] = set()
        self.residuals = ResidualMemory(in_place=True)
        self._bucket_new()
        warm_up_steps(self._engine, {name: named[name] for name in self._taken}, has_unused=True)

    def close(self) -> None:
        """Destroy the process groups of this exchange, except those that other exchanges share."""
        self._is_closed = True
        self.step_observer.close()
        self.own_group.close()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Replace gradients by their sparse average over the replicas. Collective: all ranks.

        Call it once per optimizer step: after the last backward, before you clip gradients and the optimizer steps. A
        gradient must be None on all ranks of a replica or on none. If it is None only on some replicas, it becomes the
        average. If it is None on all replicas, it stays None.

        Args:
            parameters: the parameters to exchange, such as those of one optimizer; None for all of the module.

        Raises:
            RuntimeError: the exchange was closed, the last one was interrupted, or only parameters that are not
                exchanged have gradients.
        """
        if self._is_closed:
            raise RuntimeError("The exchange was closed, so gradients would differ between replicas. Make a new one.")
        if all(parameter.grad is None for parameter in self._parameters.values()):
            self.step_observer.require_exchanged()
        self.require_finished()
        chosen = set(map(id, self._parameters.values() if parameters is None else parameters))
        self._bucket_new()
        self.is_exchanging = True
        self._engine.begin()

        def filled() -> Iterator[FlatBucket]:
            for bucket in self._buckets:
                gradients = {
                    name: as_real(local(parameter.grad))
                    for name, parameter in zip(bucket.layout.names, bucket.parameters, strict=True)
                    if parameter.grad is not None and id(parameter) in chosen
                }
                is_last = bucket is self._buckets[-1]
                notes = numbers_on_device(tuple(name in gradients for name in bucket.layout.names), self.device)
                yield _bucket_of_copies(bucket, gradients, self.residuals, is_last=is_last, notes=notes)

        exchanged = self._engine.add_all(filled())
        notes = self._engine.finish()
        for bucket, flat, marks in zip(self._buckets, exchanged, notes, strict=True):
            self.step_observer.averaged(_write_gradients(bucket, flat.average, marks.any(0).tolist()))
        self._engine.end_step()
        self.is_exchanging = False

    def _bucket_new(self) -> None:
        """Make buckets for parameters that newly require a gradient, equally on all ranks."""
        new = {name: p for name, p in self._parameters.items() if p.requires_grad and name not in self._taken}
        self._buckets += bucketed(ParameterBucket, new, len(self._buckets), lambda parameter: parameter.dtype)
        self._taken |= new.keys()

    # Saved state.

    @property
    def parameter_sizes(self) -> dict[str, int]:
        """The real numbers that this rank exchanges per parameter."""
        return {name: real_numel(local(p)) for name, p in self._parameters.items() if name in self._taken}

    def snapshot(self, workers: Workers | None = None) -> Snapshot:
        """Return this rank's state, with residuals of all bucketed parameters. Not collective."""
        for bucket in self._buckets:
            self.residuals.begin_bucket(bucket.index, bucket.layout, local(bucket.parameters[0]))  # new ones are zero
        return super().snapshot(workers)


def _bucket_of_copies(
    bucket: ParameterBucket, gradients: Mapping[str, Tensor], residuals: ResidualMemory, *, is_last: bool, notes: Tensor
) -> FlatBucket:
    """Return a bucket with copies of the gradients of this rank's shards; leaves other parameters out."""
    first = local(bucket.parameters[0])
    residual = residuals.begin_bucket(bucket.index, bucket.layout, first)
    flat = torch.empty(bucket.layout.num_elements, dtype=first.dtype.to_real(), device=first.device)
    parts = dict(zip(bucket.layout.names, bucket.shaped_parts(flat), strict=True))
    if gradients:
        torch._foreach_copy_([parts[name] for name in gradients], [*gradients.values()])
    if unused := [part for name, part in parts.items() if name not in gradients]:
        torch._foreach_zero_(unused)
    left_out = [(start, end) for name, start, end in bucket.layout.spans() if name not in gradients and end > start]
    return FlatBucket(bucket.index, bucket.layout, flat, residual, is_last, left_out=left_out, notes=notes)


def _write_gradients(bucket: ParameterBucket, average: Tensor, used_by_any: Collection[bool]) -> list[Tensor]:
    """Write averages to gradients of parameters that any replica used; return these parameters.

    The average is flat, shape (layout.num_elements,), and ``used_by_any`` has an entry for each parameter.
    """
    used = list(compress(bucket.parameters, used_by_any))
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if used:
        gradients = [as_real(local(parameter.grad)) for parameter in used if parameter.grad is not None]
        torch._foreach_copy_(gradients, list(compress(bucket.shaped_parts(average), used_by_any)))
    return used
