"""Local training: every worker steps its own optimizer, and workers exchange how far their weights have drifted.

All workers share an anchor x. Every ``every_n_steps`` optimizer steps, on worker i::

    p_i = x − θ_i                    its drift: its own progress and its unsent values
    sent_i = p_i where |p_i| >= λ    e_i = p_i − sent_i
    x ← x − outer((1/n) Σ_j sent_j)  the same bits on all workers
    θ_i ← x − e_i                    unsent values stay in the worker's own weights

So after an exchange no worker's weight is λ or more from the anchor, and nothing is lost. A threshold on gradients
gives Adam rare large values, which it normalises away; here Adam sees its own worker's gradients as they come.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sparse.drift.anchor import drifting
from lightning_sparse.drift.drift_exchange import DriftExchange
from lightning_sparse.drift.observed_steps import LOST_STEP, ObservedSteps
from lightning_sparse.drift.options import DriftOptions
from lightning_sparse.drift.shared_weights import SharedWeights
from lightning_sparse.drift.untrained_tensors import ignored_names, named_tensors
from lightning_sparse.engine import Averager, Engine, warm_up_steps
from lightning_sparse.engine.grouping import as_real, kept_dtype, local, real_numel, require_one_device
from lightning_sparse.engine.snapshot import Snapshot
from lightning_sparse.exchange import (
    OwnGroup,
    SaveBarrier,
    Workers,
    current_device,
    parameter_settings,
    require_agreement,
)
from lightning_sparse.sparsifiers import Sparsifier, require_sparsifier


class SparseModelAverager(Averager):
    """Local training with a sparse exchange, for a module that is *not* wrapped in DistributedDataParallel.

    Call `step` after every optimizer step, on all workers alike, also if a worker's own step was skipped.

    Example::

        averager = SparseModelAverager(model, HardThreshold(density=0.01), DriftOptions(every_n_steps=8))
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            averager.step()
        with averager.averaged_weights():
            validate(model)

    Args:
        module: the model, on its device. All workers take rank 0's weights and buffers. Collective.
        sparsifier: selects the values of drifts to send, λ in the parameters' own units; copied.
        options: see `DriftOptions`.
        group: the process group; None is the default group.
        per_layer_stats: whether to report density and error of every layer.

    Attributes:
        num_steps: how often `step` was called.
        observed_steps: the steps of optimizers on the module's parameters.
        device: of the module's first parameter.
        own_group: the process group in which drifts are exchanged.
        exchange: holds the anchors; starts and ends the exchanges of drifts from them.
        shared: gives the module weights that all workers share.

    Raises:
        RuntimeError: workers disagree on the settings or the model (on every worker).
        ValueError: a module that DDP wraps, that is sharded or on several devices, or without parameters to train.
    """

    kind = "drifts"
    is_sharded = False
    _advice_for_others = "begin with the mean of all files' weights"

    def __init__(
        self,
        module: nn.Module,
        sparsifier: Sparsifier,
        options: DriftOptions | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        per_layer_stats: bool = False,
    ) -> None:
        self.options = checked(options)
        require_sparsifier(sparsifier)
        if not isinstance(module, nn.Module):
            raise TypeError(f"Expected a torch.nn.Module, got {module!r}.")
        if any(isinstance(part, nn.parallel.DistributedDataParallel) for part in module.modules()):
            raise ValueError("The module is wrapped in DistributedDataParallel, which averages gradients. Unwrap it.")
        if any(nn.parameter.is_lazy(tensor) for tensor in named_tensors(module).values()):
            raise ValueError("The module has parameters that are not initialised. Run a forward pass of it first.")
        if not self.is_sharded and any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise ValueError(
                "The module is sharded (fully_shard, or tensor parallelism). For replicas of shards use "
                "ShardModelAverager(module, mesh['replicate'], …), or LocalHSDPHardThresholdStrategy."
            )
        weights = drifting(dict(module.named_parameters()))
        if not weights:
            raise ValueError("The module has no parameter that requires a gradient: there is nothing to average.")
        require_one_device(weights)
        self.device = local(next(iter(weights.values()))).device
        with current_device(self.device):
            require_agreement(drift_settings(module, sparsifier, self.options, per_layer_stats), group)
            self._module = module
            self.own_group = OwnGroup(group)
            super().__init__(
                Engine(sparsifier, self.options, group=self.own_group.group, per_layer_stats=per_layer_stats), weights
            )
            self.save_barrier = SaveBarrier(self.workers)
            ignored, held = ignored_names(module), named_tensors(module)
            self.workers.broadcast([local(tensor) for name, tensor in held.items() if name not in ignored])
        empty = {name: local(weight).new_empty(0, dtype=kept_dtype(weight)) for name, weight in weights.items()}
        warm_up_steps(self._engine, empty)
        self.exchange = DriftExchange(module, self._engine, self.options, self.replica, may_change=not self.is_sharded)
        self.shared = SharedWeights(module, self.exchange, self.workers)
        self.num_steps = 0
        self.observed_steps = ObservedSteps([*module.parameters()] if self.is_sharded else module, self.shared)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The module's parameters by name."""
        return dict(self._module.named_parameters())

    @property
    def parameter_sizes(self) -> dict[str, int]:
        """By name, how many real numbers this worker exchanges of each parameter."""
        return {name: real_numel(local(parameter)) for name, parameter in self.exchange.anchored.items()}

    @property
    def is_exchanging(self) -> bool:
        """Whether an exchange has begun to change weights and has not ended, or was broken off."""
        return self.exchange.is_changing

    @property
    def largest_drift(self) -> float:
        """The largest distance of any worker's weight from the anchor, just before the last exchange."""
        return self.exchange.largest_drift

    def own_metrics(self) -> dict[str, float]:
        """Return the metrics that are logged with the last exchange beside `StepStats`."""
        return {"sparse/largest_drift": self.largest_drift} | super().own_metrics()

    def close(self) -> None:
        """End the averager's own groups. With ``overlap=True`` call `flush` before it, on all workers."""
        self.exchange.ownership.close()
        self.observed_steps.close()
        self._engine.exchange.close()
        self.save_barrier.close()
        self.own_group.close()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self) -> None:
        """Count an optimizer step, and exchange drifts after every ``every_n_steps`` of them. Collective.

        Raises:
            RuntimeError: the module has the mean of all workers' weights, and the step would be lost; or the averager
                was closed, or another has been made for the same weights.
        """
        self._prepare()
        self.exchange.ownership.require()
        if self.shared.is_shown:
            raise RuntimeError(LOST_STEP)
        self.observed_steps.averager_stepped()
        self.num_steps += 1
        self.exchange.land()
        if self.num_steps % self.options.every_n_steps == 0:
            self.exchange.depart()
            if not self.options.overlap:
                self.exchange.land()

    @torch.no_grad()
    def flush(self) -> None:
        """Apply values that still travel with ``overlap=True``. Collective."""
        self._prepare()
        self.exchange.land()

    def _prepare(self) -> None:
        """Do nothing; a sharded model frees its gathered parameters."""

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give all workers the mean of their weights inside the context, and their own after it. Collective.

        For validation, test, predict and saving. One dense exchange of weights and floating-point buffers. A nested
        context changes nothing.
        """
        if self.shared.is_shown:
            yield
            return
        self.shared.take_mean()
        try:
            yield
        finally:
            self.shared.give_back()

    # State.

    def snapshot(self, workers: Workers | None = None) -> Snapshot:
        """Return this worker's state; weights and buffers only if they differ from those at set-up.

        Collective with ``overlap=True``, and if ``workers`` are given, who agree on the changed tensors.
        """
        self.flush()
        snapshot = self._engine.snapshot()
        snapshot.shared, numbers = self.exchange.state()
        unsent = snapshot.shared.pop("kept")
        snapshot.numbers |= {"num_steps": self.num_steps} | numbers
        held = self.shared.weights() | self.exchange.untrained.changed(workers) | self.shared.own
        parameters = self.parameters
        names = [name for name in parameters if name in held]
        if workers is not None:  # a frozen shard may have changed on another rank of the replica only
            flags = self.replica.gather_numbers([name in held for name in parameters], self.device).any(0).tolist()
            names = [name for name, flag in zip(parameters, flags, strict=True) if flag]
        snapshot.own["weights"] = {name: as_real(held.get(name, local(parameters[name]))).reshape(-1) for name in names}
        if not self.options.keep_drift:
            snapshot.own["unsent"] = unsent
        snapshot.extra["buffers"] = {name: held[name] for name in held.keys() - parameters.keys()}
        return snapshot

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Replace all state by a snapshot of another run, as far as it fits the model. Not collective.

        The module keeps its current weights until ``shared.give_back`` gives it its own. They become the anchor if the
        snapshot has none.
        """
        self.reset()
        self._engine.restore(snapshot)
        self.num_steps = snapshot.numbers["num_steps"]
        self.exchange.take_in_as(snapshot.numbers["layout"])
        saved, unsent = snapshot.own.get("weights", {}), snapshot.own.get("unsent", {})
        kept = {} if self.options.keep_drift else {"kept": unsent}
        self.exchange.load(snapshot.shared | kept, snapshot.numbers["outer"])
        weights: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            held = local(parameter)
            if name in saved and saved[name].numel() == real_numel(held):
                weights[name] = torch.empty_like(held, memory_format=torch.contiguous_format)
                as_real(weights[name]).copy_(saved[name].view(as_real(held).shape))
            if self.options.keep_drift and name in unsent and unsent[name].numel() == real_numel(held):
                # Values that another run kept apart belong to the weights.
                weight = weights.setdefault(name, held.clone())
                as_real(weight).sub_(unsent[name].to(held.device).view(as_real(held).shape))
        self.shared.set_apart(weights | snapshot.extra.get("buffers", {}))

    def reset(self) -> None:
        """Return to the state before the first step, with the module's current weights as the anchor."""
        self._engine.reset()
        self.shared.own = {}
        self.exchange.restart()
        self.num_steps = 0

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the result of ``state_dict`` on the worker of the same rank; gives the module its weights.

        Drops values that travel with ``overlap=True``.

        Raises:
            RuntimeError: the state belongs to another rank or another number of workers, or is damaged.
        """
        super().load_state_dict(saved)
        self.shared.give_back()

    @property
    def progress(self) -> object:
        """How often `step` was called."""
        return self.num_steps

    def anchor(self) -> dict[str, Tensor]:
        """Return x by parameter name: views in the weights' shapes, complex ones as real; exchanges change them."""
        return self.exchange.anchors()


def checked(options: DriftOptions | None) -> DriftOptions:
    """Return options, or the default for None; raise TypeError for anything else."""
    if not isinstance(options, (DriftOptions, type(None))):
        raise TypeError(f"Expected DriftOptions(every_n_steps=…), for example, got {options!r}.")
    return DriftOptions() if options is None else options


def drift_settings(
    module: nn.Module, sparsifier: Sparsifier, options: DriftOptions, per_layer_stats: bool
) -> dict[str, Any]:
    """Return the settings that must be the same on all workers, as plain values."""
    own = sparsifier.settings() | options.settings() | {"per_layer_stats": per_layer_stats}
    return parameter_settings(module) | own
