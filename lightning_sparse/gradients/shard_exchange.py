"""Replicas of a sharded model that exchange the gradients of their shards sparsely, once per optimizer step.

FSDP2 shards the parameters of a replica over its ranks, and leaves on each rank the mean gradient of its shard over the
replica's data. The ranks that hold the same shard are the workers of a sparse exchange, with a group for every shard::

    replica 0    rank 0: shard 0 ──┐   rank 1: shard 1 ──┐      inside: torch's own reduce-scatter and all-gather
    replica 1    rank 2: shard 0 ──┘   rank 3: shard 1 ──┘      between: the engine, on each shard

λ is one for the whole model, or for a whole layer, and follows from the sums of all shards' numbers.

A gradient becomes part of training when `ShardExchange.average_gradients` takes it, between backward and an optimizer's
step. Gradients that are dropped before that have never been in a residual.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import compress

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_sparse.engine import Averager, Engine, FlatBucket, warm_up_steps
from lightning_sparse.engine.grouping import ParameterBucket, as_real, bucketed, local, real_numel
from lightning_sparse.engine.sharding import Sharding, reshard
from lightning_sparse.engine.snapshot import Snapshot
from lightning_sparse.exchange import ExchangeMode, OwnGroup, Workers, current_device, parameter_settings
from lightning_sparse.exchange.wire import ValueDtype
from lightning_sparse.gradients.options import ExchangeOptions
from lightning_sparse.gradients.steps_on_averages import StepsOnAverages
from lightning_sparse.selection.bucket import Residual
from lightning_sparse.sparsifiers import Dense, Sparsifier, require_sparsifier


@dataclass
class ShardBucket(ParameterBucket):
    """This rank's shards of some parameters, and unsent values of their gradients.

    Attributes:
        residual: e, shape (layout.num_elements,): float32, or float64 where gradients are.
    """

    residual: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.residual = self.zeros()

    def bring(self, gradients: Mapping[str, Tensor], *, is_last: bool, notes: Tensor) -> FlatBucket:
        """Return the bucket for a step, with a copy of the gradients; nothing of other parameters is sent."""
        first = local(self.parameters[0])
        flat = torch.empty(self.layout.num_elements, dtype=first.dtype.to_real(), device=first.device)
        parts = dict(zip(self.layout.names, self.shaped_parts(flat), strict=True))
        if gradients:
            torch._foreach_copy_([parts[name] for name in gradients], [*gradients.values()])
        if unused := [part for name, part in parts.items() if name not in gradients]:
            torch._foreach_zero_(unused)
        left_out = [(start, end) for name, start, end in self.layout.spans() if name not in gradients and end > start]
        residual = Residual(self.residual, self.residual)
        return FlatBucket(self.index, self.layout, flat, residual, is_last, left_out=left_out, notes=notes)

    def give_back(self, average: Tensor, used_by_any: Collection[bool]) -> list[Tensor]:
        """Make the average the gradient of every parameter that any replica used; return these parameters.

        The average is flat, shape (layout.num_elements,), and ``used_by_any`` has an entry for each parameter.
        """
        used = list(compress(self.parameters, used_by_any))
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if used:
            gradients = [as_real(local(parameter.grad)) for parameter in used if parameter.grad is not None]
            torch._foreach_copy_(gradients, list(compress(self.shaped_parts(average), used_by_any)))
        return used


class ShardExchange(Averager):
    """Averages the gradients of one rank's shards over the replicas. Made by `shard_exchange`.

    Attributes:
        replica: the ranks that hold this rank's replica.
        device: this rank's.
        own_group: the process group in which gradients are exchanged.
        steps: observes optimizers of these parameters.
    """

    kind = "gradients"
    is_exchanging = False
    _advice_for_others = "begin with residuals of zero"

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        sparsifier: Sparsifier,
        options: ExchangeOptions,
        *,
        per_layer_stats: bool = False,
    ) -> None:
        require_sparsifier(sparsifier)
        options.require(sparsifier)
        reshard(module)
        settings = parameter_settings(module) | sparsifier.settings() | vars(options)
        sharding = Sharding(module, mesh, settings | {"per_layer_stats": per_layer_stats})
        named, self.device, self.replica = sharding.named, sharding.device, sharding.replica
        if sharding.is_alone:
            sparsifier, options = Dense(), replace(options, value_dtype="float32")
        with current_device(self.device):
            self.own_group = OwnGroup(sharding.group)
            engine = Engine(sparsifier, options, group=self.own_group.group, per_layer_stats=per_layer_stats)
            super().__init__(engine, named)
            buffers = [buffer for buffer in module.buffers() if not buffer.is_meta]
            self.workers.broadcast([*map(local, named.values()), *map(local, buffers)])
            self._engine.of_whole_model = sharding.of_all_shards
        self._is_closed = False
        self.place = sharding.place
        self._parameters = named
        self._steps = StepsOnAverages(module, named.values())
        self._buckets: list[ShardBucket] = []
        self._taken: set[str] = set()
        self._marks: dict[int, tuple[list[bool], Tensor]] = {}
        self._loaded: dict[str, Tensor] = {}
        self._take_in_new()
        trained = {name: as_real(local(named[name])).new_empty(0) for name in self._taken}
        warm_up_steps(self._engine, trained, has_unused=True)

    def close(self) -> None:
        """End groups of the exchange's own; groups that other exchanges of these ranks use end with the world."""
        self._is_closed = True
        self._steps.close()
        self._engine.exchange.close()
        self.own_group.close()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Replace gradients by their sparse average over the replicas. Collective: all ranks of all replicas.

        Call it once per optimizer step: after the last backward, before gradients are clipped and the optimizer steps.
        A gradient is None on all ranks of a replica or on none. If it is None on some replicas only, it becomes the
        average; if it is None on all, it stays None.

        Args:
            parameters: those whose gradients are exchanged, such as one optimizer's; None for all of the module.

        Raises:
            RuntimeError: the exchange was closed.
        """
        if self._is_closed:
            raise RuntimeError("The exchange was closed: gradients would stay each replica's own. Make a new one.")
        chosen = set(map(id, self._parameters.values() if parameters is None else parameters))
        self._steps.require_new(parameter for parameter in self._parameters.values() if id(parameter) in chosen)
        self.is_exchanging = True
        self._take_in_new()
        self._engine.begin()
        flight: list[FlatBucket] = []

        def departing() -> Iterator[FlatBucket]:
            for bucket in self._buckets:
                gradients = {
                    name: as_real(local(parameter.grad))
                    for name, parameter in zip(bucket.layout.names, bucket.parameters, strict=True)
                    if parameter.grad is not None and id(parameter) in chosen
                }
                is_last = bucket is self._buckets[-1]
                flight.append(bucket.bring(gradients, is_last=is_last, notes=self._marks_of(bucket, gradients)))
                yield flight[-1]

        self._engine.add_all(departing())
        notes = self._engine.finish() if flight else []
        for bucket, flat, marks in zip(self._buckets, flight, notes, strict=True):
            self._steps.averaged(bucket.give_back(flat.average, marks.any(0).tolist()))
        if flight:
            self._engine.account()
        self.is_exchanging = False

    def _marks_of(self, bucket: ShardBucket, used: Collection[str]) -> Tensor:
        """Return marks of the parameters of a bucket that this replica used, on the device; they hardly ever change."""
        marks = [name in used for name in bucket.layout.names]
        if bucket.index not in self._marks or self._marks[bucket.index][0] != marks:
            self._marks[bucket.index] = marks, torch.tensor(marks, dtype=torch.float64).to(bucket.residual.device)
        return self._marks[bucket.index][1]

    def _take_in_new(self) -> None:
        """Lay out parameters that require a gradient by now. The same on all ranks."""
        new = {name: held for name, held in self._parameters.items() if held.requires_grad and name not in self._taken}
        for bucket in bucketed(ShardBucket, new, len(self._buckets), lambda parameter: parameter.dtype):
            self._buckets.append(bucket)
            self._fill(bucket)
        self._taken |= new.keys()

    def _fill(self, bucket: ShardBucket) -> None:
        for name, part in bucket.by_name(bucket.residual).items():
            if name in self._loaded and self._loaded[name].numel() == part.numel():
                part.copy_(self._loaded.pop(name))

    # What is saved.

    @property
    def parameter_sizes(self) -> dict[str, int]:
        """By name, how many real numbers this rank exchanges of each parameter."""
        return {name: real_numel(local(held)) for name, held in self._parameters.items() if name in self._taken}

    def snapshot(self, workers: Workers | None = None) -> Snapshot:
        """Return this rank's state; residuals only of parameters that required a gradient so far. Not collective."""
        snapshot = self._engine.snapshot()
        snapshot.own["residual"] = {}
        for bucket in self._buckets:
            snapshot.own["residual"] |= bucket.by_name(bucket.residual)
        return snapshot

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Replace all state by a snapshot of another run, as far as it fits the model. Not collective."""
        self.reset()
        self._engine.restore(snapshot)
        self._loaded = dict(snapshot.own.get("residual", {}))
        for bucket in self._buckets:
            self._fill(bucket)

    @torch.no_grad()
    def reset(self) -> None:
        """Return to the state before the first step: no residuals, no history, a new calibration."""
        self._loaded = {}
        for bucket in self._buckets:
            bucket.residual.zero_()
        self._engine.reset()
        self.is_exchanging = False


def shard_exchange(
    module: nn.Module,
    mesh: DeviceMesh,
    sparsifier: Sparsifier,
    *,
    value_dtype: ValueDtype = "float32",
    exchange: ExchangeMode = "auto",
    link_gbit_s: float | None = None,
    per_layer_stats: bool = False,
) -> ShardExchange:
    """Make replicas of a model that ``fully_shard`` shards exchange gradients sparsely. Collective: all ranks.

    For the Lightning Trainer use `HSDPHardThresholdStrategy`; this is for plain PyTorch. All replicas take the weights
    and buffers of the first.

    Example::

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        exchange = shard_exchange(model, mesh["replicate"], HardThreshold(density=0.01))
        for batch in loader:
            loss_of(model, batch).backward()
            exchange.average_gradients()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    Args:
        module: the model, sharded over the ranks of a replica and no further.
        mesh: the dimension of replicas, one rank each, of a mesh of all ranks.
        sparsifier: selects coordinates; copied. λ is one for the whole model, or for a whole layer; a number of
            coordinates, as of `TopK`, is each shard's own.
        value_dtype: dtype in which values travel, as in `SparseDDPStrategy`.
        exchange: the route between replicas, as in `SparseDDPStrategy`.
        link_gbit_s: rate of a rank's link between replicas, in Gbit/s and one direction, as in `SparseDDPStrategy`.
        per_layer_stats: whether to report density and error of every layer.

    Raises:
        TypeError: not a sparsifier.
        ValueError: an invalid option, a mesh of several dimensions, or a module that is not sharded as it must be.
        RuntimeError: ranks disagree on the settings, or the mesh does not divide them into replicas (on every rank).
    """
    options = ExchangeOptions(value_dtype=value_dtype, exchange=exchange, link_gbit_s=link_gbit_s)
    return ShardExchange(module, mesh, sparsifier, options, per_layer_stats=per_layer_stats)
