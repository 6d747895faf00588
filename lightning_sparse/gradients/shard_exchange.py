"""Replicas of a sharded model that exchange the gradients of their shards sparsely, once an optimizer step.

FSDP2 shards the parameters of a replica over its ranks, and leaves on each the mean gradient of its shard over the
replica's data. Between replicas nothing is exchanged by FSDP2 itself: the ranks that hold the same shard are workers of
a sparse exchange, one group of them for every shard. ::

    replica 0    rank 0: shard 0 ──┐   rank 1: shard 1 ──┐      reduce-scatter and all-gather inside: torch's own
    replica 1    rank 2: shard 0 ──┘   rank 3: shard 1 ──┘      between: the engine, on each shard

λ is one for the whole model, or for a whole layer: the numbers of all shards are added up before it follows from them.

When a gradient becomes part of training: when `ShardExchange.average_gradients` takes it, which is between backward
and an optimizer's step. Gradients that are dropped before that have never been in a residual.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_sparse._version import __version__
from lightning_sparse.engine import Averager, Engine, FlatBucket, warm_up_steps
from lightning_sparse.engine.grouping import as_real, bucketed, local, real_numel
from lightning_sparse.engine.sharding import Sharding, reshard
from lightning_sparse.engine.snapshot import Snapshot
from lightning_sparse.exchange import (
    ExchangeMode,
    OwnGroup,
    Workers,
    current_device,
    parameter_settings,
)
from lightning_sparse.exchange.wire import ValueDtype, require_wire
from lightning_sparse.gradients.options import DensityControlMode, ExchangeOptions, require_density_control
from lightning_sparse.gradients.shard_bucket import ShardBucket
from lightning_sparse.gradients.steps_on_averages import StepsOnAverages
from lightning_sparse.sparsifiers import Dense, Sparsifier


class ShardExchange(Averager):
    """Averages the gradients of one rank's shards over the replicas. Made by `shard_exchange`.

    Attributes:
        replica: the ranks that hold this rank's replica.
        device: this rank's.
        own_group: the process group in which gradients are exchanged.
    """

    kind = "gradients"
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
        if not isinstance(sparsifier, Sparsifier):
            raise TypeError(f"Expected a sparsifier such as HardThreshold(density=0.01), got {sparsifier!r}.")
        require_density_control(sparsifier, options.density_control)
        require_wire(sparsifier, options.value_dtype)
        reshard(module)
        settings = parameter_settings(module) | sparsifier.settings() | vars(options)
        versions = {"lightning_sparse": __version__, "torch": str(torch.__version__)}
        sharding = Sharding(module, mesh, settings | {"per_layer_stats": per_layer_stats} | versions)
        named, self.device, self.replica = sharding.named, sharding.device, sharding.replica
        if sharding.is_alone:
            sparsifier, options = Dense(), replace(options, value_dtype="float32")
        with current_device(self.device):
            self.own_group = OwnGroup(sharding.group)
            super().__init__(
                Engine(sparsifier, options, group=self.own_group.group, per_layer_stats=per_layer_stats), named
            )
            buffers = [one for one in module.buffers() if not one.is_meta]
            self.workers.broadcast([*map(local, named.values()), *map(local, buffers)])
            self._engine.of_whole_model = sharding.of_all_shards
        self._is_exchanging = self._is_closed = False
        self._ids = {id(one) for one in named.values()}
        self.place = sharding.place
        self._parameters = named
        self._steps = StepsOnAverages(module, named.values(), self.holds_any_of)
        self._buckets: list[ShardBucket] = []
        self._taken: set[str] = set()
        self._marks: dict[int, tuple[list[bool], Tensor]] = {}
        self._loaded: dict[str, Tensor] = {}
        self._take_in_new()
        trained = {name: as_real(local(named[name])).new_empty(0) for name in self._taken}
        warm_up_steps(self._engine, trained, has_unused=True)

    def close(self) -> None:
        """Ends groups of the exchange's own; those that others of these ranks use, too, end with the world."""
        self._is_closed = True
        self._steps.close()
        self._engine.close()
        self.own_group.close()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Replaces gradients by their sparse average over the replicas. Collective: all ranks of all replicas.

        Call it once an optimizer step: after the last backward, before gradients are clipped and the optimizer steps.
        A gradient is None on all ranks of a replica or on none; where it is None on some replicas and not on others it
        becomes the average, and where it is None on all it stays None.

        Args:
            parameters: those whose gradients are exchanged, such as one optimizer's; None for all of the module.

        Raises:
            RuntimeError: the exchange was closed.
        """
        if self._is_closed:
            raise RuntimeError("The exchange was closed: gradients would stay each replica's own. Make a new one.")
        chosen = None if parameters is None else {id(one) for one in parameters}
        self._steps.require_new(one for one in self._parameters.values() if chosen is None or id(one) in chosen)
        self._is_exchanging = True
        self._take_in_new()
        self._engine.begin()
        flight: list[FlatBucket] = []

        def departing() -> Iterator[FlatBucket]:
            for bucket in self._buckets:
                used = {
                    name
                    for name, parameter in zip(bucket.layout.names, bucket.parameters, strict=True)
                    if parameter.grad is not None and (chosen is None or id(parameter) in chosen)
                }
                is_last = bucket is self._buckets[-1]
                flight.append(bucket.bring(used, is_last=is_last, notes=self._marks_of(bucket, used)))
                yield flight[-1]

        self._engine.add_all(departing())
        notes = self._engine.finish() if flight else []
        reached: list[Tensor] = []
        for bucket, one, marks in zip(self._buckets, flight, notes, strict=True):
            counts = marks.sum(0).tolist()
            names = {name for name, count in zip(bucket.layout.names, counts, strict=True) if count}
            bucket.give_back(one.average, names)
            reached += [
                parameter
                for name, parameter in zip(bucket.layout.names, bucket.parameters, strict=True)
                if name in names
            ]
        if flight:
            self._engine.account()
        self._steps.averaged(reached)
        self._is_exchanging = False

    def holds_any_of(self, param_groups: Iterable[Mapping[str, Any]]) -> bool:
        """Returns whether an optimizer with these groups steps on parameters of the module."""
        return any(id(one) in self._ids for group in param_groups for one in group["params"])

    def _marks_of(self, bucket: ShardBucket, used: set[str]) -> Tensor:
        """Which parameters of a bucket this replica used, on the device: hardly ever other than in the step before."""
        marks = [name in used for name in bucket.layout.names]
        if bucket.index not in self._marks or self._marks[bucket.index][0] != marks:
            self._marks[bucket.index] = marks, torch.tensor(marks, dtype=torch.float64).to(bucket.residual.device)
        return self._marks[bucket.index][1]

    def _take_in_new(self) -> None:
        """Lays out parameters that require a gradient by now. The same on all ranks."""
        new = {name: one for name, one in self._parameters.items() if one.requires_grad and name not in self._taken}
        if new:
            added = bucketed(ShardBucket, new, len(self._buckets), lambda parameter: parameter.dtype)
            self._buckets += added
            self._taken |= new.keys()
            self._fill(added)

    def _fill(self, buckets: Iterable[ShardBucket]) -> None:
        for bucket in buckets:
            for name, part in bucket.by_name(bucket.residual).items():
                if name in self._loaded and self._loaded[name].numel() == part.numel():
                    part.copy_(self._loaded.pop(name))

    # What is saved.

    @property
    def parameter_sizes(self) -> dict[str, int]:
        """By name, how many real numbers this rank exchanges of each parameter."""
        return {name: real_numel(local(held)) for name, held in self._parameters.items() if name in self._taken}

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The module's parameters by name, as it has them when they are sharded."""
        return self._parameters

    def snapshot(self, workers: Workers | None = None) -> Snapshot:
        """Return this rank's state; residuals only of parameters that required a gradient so far. Not collective."""
        snapshot = self._engine.snapshot()
        snapshot.own["residual"] = {
            name: part for bucket in self._buckets for name, part in bucket.by_name(bucket.residual).items()
        }
        return snapshot

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Replace all state by a snapshot of another run, as far as it fits the model. Not collective."""
        self.reset()
        self._engine.restore(snapshot)
        self._loaded = dict(snapshot.own.get("residual", {}))
        self._fill(self._buckets)

    @torch.no_grad()
    def reset(self) -> None:
        """Return to the state before the first step: no residuals, no history, a new calibration."""
        self._loaded = {}
        for bucket in self._buckets:
            bucket.residual.zero_()
        self._engine.reset()
        self._is_exchanging = False

    @property
    def is_exchanging(self) -> bool:
        """Whether an exchange has begun and has not ended or was broken off, so that residuals are of no use."""
        return self._is_exchanging


def shard_exchange(
    module: nn.Module,
    mesh: DeviceMesh,
    sparsifier: Sparsifier,
    *,
    value_dtype: ValueDtype = "float32",
    exchange: ExchangeMode = "auto",
    density_control: DensityControlMode | None = None,
    link_gbit_s: float | None = None,
    per_layer_stats: bool = False,
) -> ShardExchange:
    """Has replicas of a model that ``fully_shard`` shards exchange gradients sparsely. Collective: all ranks.

    For the Lightning Trainer use `HSDPHardThresholdStrategy`; this is for plain PyTorch. All replicas take the first
    one's weights and buffers.

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
        sparsifier: chooses what is sent; copied. λ is one for the whole model, or for a whole layer; a number of
            coordinates, as of `TopK`, is each shard's own.
        value_dtype: what a value travels in, as in `SparseDDPStrategy`.
        exchange: the route between replicas, as in `SparseDDPStrategy`.
        density_control: as in `register_comm_hook`.
        link_gbit_s: the rate of a rank's link between replicas, in Gbit/s and one direction; None is that of
            `SparseDDPStrategy`.
        per_layer_stats: whether to report density and error of every layer.

    Raises:
        TypeError: not a sparsifier.
        ValueError: an invalid option, a mesh of several dimensions, or a module that is not sharded as it must be.
        RuntimeError: ranks disagree on the settings, or the mesh does not divide them into replicas (on every rank).
    """
    options = ExchangeOptions(
        value_dtype=value_dtype, exchange=exchange, density_control=density_control, link_gbit_s=link_gbit_s
    )
    return ShardExchange(module, mesh, sparsifier, options, per_layer_stats=per_layer_stats)
