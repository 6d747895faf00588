"""Local training: workers run their own optimizers and exchange drifts of their weights.

All workers share an anchor x. Every ``every_n_steps`` optimizer steps, on worker i::

    p_i = x − θ_i                    the drift: local progress and unsent values
    sent_i = p_i where |p_i| >= λ    e_i = p_i − sent_i
    x ← x − outer((1/m) Σ_j sent_j)  the same bits on all workers; m: the coordinate's senders, or n
    θ_i ← x − e_i                    unsent values stay in the worker's own weights

After an exchange, every weight is less than λ from the anchor, and no value is lost. A threshold on gradients gives
Adam rare large values, which it normalises away. In local training, Adam gets its worker's complete gradients.

If FSDP2 shards the model, a replica acts as one worker. Inside a replica, FSDP2 averages gradients and the optimizer
steps on shards. Between replicas, the ranks that hold the same shard exchange its drift.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_sparse.drift.drift_exchange import DriftExchange, trained_parameters
from lightning_sparse.drift.shared_weights import SharedWeights
from lightning_sparse.drift.step_observer import LOST_STEP, DriftStepObserver
from lightning_sparse.drift.untrained_tensors import named_tensors
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.grouping import as_real, local, real_numel, require_one_device, residual_dtype
from lightning_sparse.engine.options import DriftOptions, checked, settings_of
from lightning_sparse.engine.sharding import Resharded, Sharding, reshard
from lightning_sparse.engine.snapshot import Snapshot
from lightning_sparse.engine.warmup import warm_up_steps
from lightning_sparse.exchange.agreement import ignored_names, parameter_settings, require_agreement
from lightning_sparse.exchange.groups import OwnGroup
from lightning_sparse.exchange.save_barrier import SaveBarrier
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.sparsifiers.protocol import Sparsifier, require_sparsifier


class SparseModelAverager(Averager):
    """Local training with a sparse exchange of drifts.

    The module must *not* be wrapped in DistributedDataParallel. Call `step` after every optimizer step, on all workers,
    even if a worker skipped its own step. With several optimizers, call it once after all have stepped: it changes all
    weights, which a backward of another loss may still need.

    Example::

        averager = SparseModelAverager(model, HardThreshold(density=0.01), DriftOptions(every_n_steps=8))
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            averager.step()
        with averager.averaged_weights():
            validate(model)

    With a sharded model, call `step` on all ranks. Statistics refer to the whole model::

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        averager = SparseModelAverager(model, HardThreshold(density=0.01), group=mesh["replicate"])

    Args:
        module: the model, on its device. All workers receive rank 0's weights and buffers. Collective.
        sparsifier: selects the values of drifts to send, λ in the parameters' own units and equal in all shards;
            copied. A number of coordinates, as in `TopK`, is per shard.
        options: see `DriftOptions`.
        group: the process group; None is the default group. For a model that ``fully_shard`` shards, the dimension of
            replicas, one rank per replica, of a mesh of all ranks.
        per_layer_stats: whether to report density and error of every layer.

    Attributes:
        replica: the ranks that hold this rank's replica.
        num_steps: the number of calls of `step`.
        step_observer: observes optimizer steps on the module's parameters.
        device: the device of the module's first parameter.
        own_group: the process group in which drifts are exchanged.
        drift_exchange: holds the anchors and exchanges drifts.
        shared: copies weights that all workers share into the module.

    Raises:
        TypeError: the module, the sparsifier or the options have a wrong type.
        RuntimeError: settings or the model differ between workers, or the mesh does not divide ranks into replicas (on
            every worker).
        ValueError: the module is wrapped in DDP, sharded without a mesh of replicas, on several devices, not
            initialised, or has no parameters to train; or the options do not support the sparsifier.
    """

    kind = "drifts"
    step_observer: DriftStepObserver
    _advice_for_others = "begin with the mean of all files' weights"

    def __init__(
        self,
        module: nn.Module,
        sparsifier: Sparsifier,
        options: DriftOptions | None = None,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        per_layer_stats: bool = False,
    ) -> None:
        self.options = checked(options, DriftOptions)
        require_sparsifier(sparsifier)
        if not isinstance(module, nn.Module):
            raise TypeError(f"Invalid {module=}. Must be a torch.nn.Module.")
        if not isinstance(group, dist.ProcessGroup | DeviceMesh | None):
            raise TypeError(
                f"Invalid {group=}. Must be a process group with this rank, or mesh['replicate'] for shards."
            )
        if any(isinstance(part, nn.parallel.DistributedDataParallel) for part in module.modules()):
            raise ValueError("The module is wrapped in DistributedDataParallel, which averages gradients. Unwrap it.")
        if any(nn.parameter.is_lazy(tensor) for tensor in named_tensors(module).values()):
            raise ValueError("The module has parameters that are not initialised. Run a forward pass first.")
        settings, sharding, self._sharded = settings_of(sparsifier, self.options, per_layer_stats), None, None
        if isinstance(group, DeviceMesh):
            sharding, self._sharded = Sharding(module, group, settings), module
            module, group, self.replica = Resharded(module), sharding.group, sharding.replica
        elif any(isinstance(weight, DTensor) for weight in module.parameters()):
            raise ValueError(
                "The module is sharded (fully_shard, or tensor parallelism). For replicas of shards use "
                "SparseModelAverager(…, group=mesh['replicate']), or LocalHSDPHardThresholdStrategy."
            )
        weights = trained_parameters(dict(module.named_parameters()))
        if not weights:
            raise ValueError("The module has no parameter that requires a gradient: there is nothing to average.")
        require_one_device(weights)
        self.device = local(next(iter(weights.values()))).device
        with torch.accelerator.device_index(self.device.index):
            require_agreement(parameter_settings(module) | settings, group)
            self._module = module
            self.own_group = OwnGroup(group)
            engine = Engine(sparsifier, self.options, group=self.own_group.group, per_layer_stats=per_layer_stats)
            super().__init__(engine, weights)
            if sharding is not None:
                engine.combine_shards, self.place = sharding.combine_shards, sharding.place
            self.save_barrier = SaveBarrier(self.workers)
            ignored, tensors = ignored_names(module), named_tensors(module)
            self.workers.broadcast([local(tensor) for name, tensor in tensors.items() if name not in ignored])
        empty = {name: local(weight).new_empty(0, dtype=residual_dtype(weight)) for name, weight in weights.items()}
        warm_up_steps(self._engine, empty)
        self.drift_exchange = DriftExchange(module, self._engine, self.options, self.replica)
        self._parameters = self.drift_exchange.anchored  # later also unfrozen ones
        self.shared = SharedWeights(module, self.drift_exchange, self.workers)
        self.num_steps = 0
        self.step_observer = DriftStepObserver(module.parameters(), self.shared)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The module's parameters by name."""
        return dict(self._module.named_parameters())

    def own_metrics(self) -> dict[str, float]:
        """Return metrics that are logged in addition to `StepStats`."""
        return {"sparse/largest_drift": self.drift_exchange.largest_drift} | super().own_metrics()

    def close(self) -> None:
        """Destroy the averager's groups."""
        self.drift_exchange.why_closed = (
            "The averager was closed, so later drifts would not be exchanged. Make a new averager."
        )
        self.step_observer.close()
        self.save_barrier.close()
        self.own_group.close()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self) -> None:
        """Count an optimizer step, and exchange drifts every ``every_n_steps`` steps. Collective.

        Raises:
            RuntimeError: the module has the mean weights, the averager was closed, a newer averager has the same
                weights, the last exchange was interrupted, or a trained parameter was replaced.
        """
        if self._sharded is not None:
            reshard(self._sharded)  # also without an exchange, so that later steps do not depend on saves
        if self.drift_exchange.why_closed is not None:
            raise RuntimeError(self.drift_exchange.why_closed)
        if self.shared.is_loaded:
            raise RuntimeError(LOST_STEP)
        self.require_finished()
        self.step_observer.averager_stepped()
        self.num_steps += 1
        if self.num_steps % self.options.every_n_steps == 0:
            self.is_exchanging = True
            self.drift_exchange.run()
            self.is_exchanging = False

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Set all workers' weights to their mean inside the context. Collective.

        Use it for validation, test, predict and saving. It costs a dense exchange of weights and of differing
        buffers. After it, all workers have their own weights again. A nested context has no effect.
        """
        was_loaded = self.shared.is_loaded
        with torch.accelerator.device_index(self.device.index):
            self.shared.load_mean()
        try:
            yield
        finally:
            if not was_loaded:
                self.shared.restore_own()

    # State.

    def snapshot(self, workers: Workers | None = None) -> Snapshot:
        """Return this worker's state, with frozen tensors only if they have changed.

        Collective with ``workers``, which agree on the changed tensors.
        """
        snapshot = self._engine.snapshot()
        snapshot.shared, numbers = self.drift_exchange.state()
        unsent = snapshot.shared.pop("unsent", {})
        snapshot.numbers |= {"num_steps": self.num_steps} | numbers
        saved = self.shared.weights() | self.drift_exchange.untrained.changed(workers) | self.shared.own
        parameters = self.parameters
        names = [name for name in parameters if name in saved]
        if workers is not None:  # a frozen shard may have changed only on another rank of the replica
            flags = self.replica.gather_numbers([name in saved for name in parameters], self.device).any(0).tolist()
            names = [name for name, flag in zip(parameters, flags, strict=True) if flag]
        flat = {name: as_real(saved.get(name, local(parameters[name]))).reshape(-1) for name in names}
        snapshot.own["weights"] = flat
        if unsent:
            snapshot.own["unsent"] = unsent
        snapshot.extra["buffers"] = {name: saved[name] for name in saved.keys() - parameters.keys()}
        return snapshot

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Continue from those parts of a snapshot that fit the model, after ``reset``. Not collective.

        The module keeps its current weights until ``shared.restore_own`` loads the saved ones. Without an anchor
        in the snapshot, the current weights become the anchor.
        """
        self._engine.restore(snapshot)
        self.num_steps = snapshot.numbers["num_steps"]
        self.drift_exchange.anchor_layout(snapshot.numbers["layout"])
        saved, unsent = snapshot.own.get("weights", {}), snapshot.own.get("unsent", {})
        tensors = snapshot.shared if self.options.keep_drift else snapshot.shared | {"unsent": unsent}
        self.drift_exchange.load(tensors, snapshot.numbers["outer"])
        weights: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            part = local(parameter)
            if name in saved and saved[name].numel() == real_numel(part):
                weights[name] = torch.empty_like(part, memory_format=torch.contiguous_format)
                as_real(weights[name]).copy_(saved[name].view(as_real(part).shape))
            if self.options.keep_drift and name in unsent and unsent[name].numel() == real_numel(part):
                # Move unsent values of a run without keep_drift into the weights.
                weight = weights.setdefault(name, part.clone())
                as_real(weight).sub_(unsent[name].to(part.device).view(as_real(part).shape))
        self.shared.store_own(weights | snapshot.extra.get("buffers", {}))

    def reset(self) -> None:
        """Return to the state before the first step; the anchor is the current weights."""
        self._engine.reset()
        self.epoch = None
        self.shared.own = {}
        self.drift_exchange.restart(was_interrupted=self.is_exchanging)
        self.is_exchanging = False
        self.num_steps = 0

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from ``state_dict`` of the worker of the same rank, including its weights.

        Raises:
            RuntimeError: the rank or the number of workers differs, or the state is of another kind.
        """
        super().load_state_dict(saved)
        self.shared.restore_own()

    @property
    def progress(self) -> object:
        """The number of calls of `step`."""
        return self.num_steps

    def obstacles(self) -> list[str]:
        """Return reasons why a checkpoint cannot hold this worker's tensors now."""
        return ["the shared weights were changed"] * self.shared.was_written_to + super().obstacles()

    def anchor(self) -> dict[str, Tensor]:
        """Return views of x by name with the weights' shapes, complex ones as real."""
        return self.drift_exchange.anchors()
