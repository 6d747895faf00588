"""Every worker steps its own optimizer; what is exchanged is how far its weights have drifted from what all share.

All workers share an anchor x. Every ``every_n_steps`` optimizer steps, on worker i::

    p_i = x − θ_i                    its drift: what it did on its own, and what it has not sent yet
    sent_i = p_i where |p_i| >= λ    e_i = p_i − sent_i
    x ← x − outer((1/n) Σ_j sent_j)  the same bits on all workers
    θ_i ← x − e_i                    nobody waits for what it has not sent

So after an exchange no worker's weight is λ or more from the anchor, and nothing is lost: what was not sent is in the
worker's own weights. A threshold on gradients hands Adam rare large lumps, which it normalises away; here Adam sees its
own worker's gradients as they come.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sparse._version import __version__
from lightning_sparse.drift.anchor import drifting
from lightning_sparse.drift.bystanders import ignored_names
from lightning_sparse.drift.drift_exchange import DriftExchange
from lightning_sparse.drift.observed_steps import LOST_STEP, ObservedSteps
from lightning_sparse.drift.options import DriftOptions
from lightning_sparse.drift.shared_weights import SharedWeights
from lightning_sparse.engine import Engine, EngineHolder, warm_up_steps
from lightning_sparse.engine.grouping import as_real, kept_dtype, local, require_one_device
from lightning_sparse.engine.saved_state import sealed
from lightning_sparse.exchange import Meeting, OwnGroup, Workers, current_device, parameter_settings, require_agreement
from lightning_sparse.sparsifiers import Sparsifier


class SparseModelAverager(EngineHolder):
    """Local training with a sparse exchange, for a module that is *not* wrapped in DistributedDataParallel.

    Call `step` after every optimizer step, on all workers alike, also where a worker's own step was skipped.

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
        module: the model, on its device. All workers take the first one's weights and buffers. Collective.
        sparsifier: chooses what is sent of drifts, λ in the parameters' own units; copied.
        options: see `DriftOptions`.
        group: the process group; None is the default group.
        per_layer_stats: whether to report density and error of every layer.

    Attributes:
        num_steps: how often `step` was called.
        observed_steps: the steps of optimizers on the module's parameters.
        device: of the module's first parameter.
        own_group: the process group in which drifts are exchanged.
        shared: what gives the module weights that all workers share.

    Raises:
        RuntimeError: workers disagree on the settings or the model (on every worker).
        ValueError: a module that DDP wraps, that is sharded or on several devices, or without parameters to train.
    """

    _takes_shards = False

    def __init__(
        self,
        module: nn.Module,
        sparsifier: Sparsifier,
        options: DriftOptions | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        per_layer_stats: bool = False,
    ) -> None:
        if not isinstance(options, (DriftOptions, type(None))):
            raise TypeError(f"Expected DriftOptions(every_n_steps=…), for example, got {options!r}.")
        self.options = DriftOptions() if options is None else options
        if any(isinstance(one, nn.parallel.DistributedDataParallel) for one in module.modules()):
            raise ValueError("The module is wrapped in DistributedDataParallel, which averages gradients. Unwrap it.")
        if any(nn.parameter.is_lazy(one) for one in (*module.parameters(), *module.buffers())):
            raise ValueError("The module has parameters that are not initialised. Run a forward pass of it first.")
        if not self._takes_shards and any(isinstance(one, DTensor) for one in module.parameters()):
            raise ValueError(
                "The module is sharded (fully_shard, or tensor parallelism). For replicas of shards use "
                "ShardModelAverager(module, mesh['replicate'], …), or LocalHSDPHardThresholdStrategy."
            )
        weights = drifting(list(module.named_parameters()))
        if not weights:
            raise ValueError("The module has no parameter that requires a gradient: there is nothing to average.")
        require_one_device(weights)
        self.device = local(next(iter(weights.values()))).device
        with current_device(self.device):
            require_agreement(drift_settings(module, sparsifier, self.options, per_layer_stats), group)
            self._module = module
            self.own_group = OwnGroup(group)
            super().__init__(
                Engine(
                    sparsifier,
                    group=self.own_group.group,
                    exchange=self.options.exchange,
                    link_gbit_s=self.options.link_gbit_s,
                    value_dtype=self.options.value_dtype,
                    per_layer_stats=per_layer_stats,
                    holds_density=True,
                ),
                weights,
            )
            self.meeting = Meeting(self.workers)
            ignored = ignored_names(module)
            held = [*module.named_parameters(), *module.named_buffers()]
            self.workers.broadcast([local(one) for name, one in held if name not in ignored])
        held_here = {name: local(one) for name, one in weights.items()}
        warm_up_steps(self._engine, {name: one.new_empty(0, dtype=kept_dtype(one)) for name, one in held_here.items()})
        self._exchange = DriftExchange(module, self._engine, self.options, may_change=not self._takes_shards)
        self.shared = SharedWeights(module, self._exchange, self.workers)
        self.num_steps = 0
        self.observed_steps = ObservedSteps(module, self.shared, may_change=not self._takes_shards)

    @property
    def parameter_sizes(self) -> dict[str, int]:
        """By name, how many real numbers this worker exchanges of each parameter."""
        return {
            name: size
            for bucket in self._exchange.buckets
            for name, size in zip(bucket.layout.names, bucket.layout.sizes, strict=True)
        }

    @property
    def is_exchanging(self) -> bool:
        """Whether an exchange has begun to change weights and has not ended, or was broken off."""
        return self._exchange.is_changing

    @property
    def is_sent_off(self) -> bool:
        """Whether something travels that has not been applied."""
        return self._exchange.is_sent_off

    @property
    def largest_drift(self) -> float:
        """The largest distance of any worker's weight from the anchor, just before the last exchange."""
        return self._exchange.largest_drift

    def own_metrics(self) -> dict[str, float]:
        """Returns what is logged with the last exchange beside `StepStats`."""
        return {"sparse/largest_drift": self.largest_drift} | super().own_metrics()

    def close(self) -> None:
        """Ends groups of the averager's own. With ``overlap=True`` call `flush` before it, on all workers."""
        self._exchange.charge.close()
        self.observed_steps.close()
        self._engine.close()
        self.meeting.close()
        self.own_group.close()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self) -> None:
        """Counts an optimizer step, and exchanges drifts after every ``every_n_steps`` of them. Collective.

        Raises:
            RuntimeError: the module has the mean of all workers' weights, and the step would be lost; or the averager
                was closed, or another has been made for the same weights.
        """
        self._exchange.charge.require()
        if self.shared.is_shown:
            raise RuntimeError(LOST_STEP)
        self.observed_steps.averager_stepped()
        self.num_steps += 1
        self._exchange.land()
        if self.num_steps % self.options.every_n_steps:
            return
        self._exchange.depart()
        if not self.options.overlap:
            self._exchange.land()

    @torch.no_grad()
    def flush(self) -> None:
        """Applies what is still travelling with ``overlap=True``. Collective."""
        self._exchange.land()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Within it all workers have the same weights, the mean of theirs; after it their own again. Collective.

        For validation, test, predict and what is saved. One dense exchange of weights and floating-point buffers.
        Within another such block it changes nothing.
        """
        if self.shared.is_shown:
            yield
            return
        self.shared.take_mean()
        try:
            yield
        finally:
            self.shared.give_back()

    # What is saved.

    def own_state(self, workers: Workers | None = None) -> dict[str, Any]:
        """Returns copies of what this worker alone has: its weights, and what it keeps apart of its drift.

        Args:
            workers: for a file that all have in common: with what any of them has changed. Collective if given.
        """
        tensors = self._own(workers)
        return {"weights": {name: one.cpu().clone() for name, one in tensors.items()}} | self.kept_state()

    def _own(self, workers: Workers | None) -> dict[str, Tensor]:
        self.flush()
        return self.shared.weights() | self._exchange.bystanders.changed(workers) | self.shared.own

    def kept_state(self) -> dict[str, Any]:
        """Returns copies of what this worker keeps apart of its drift, empty where drifts are in its weights."""
        return {} if self.options.keep_drift else {"kept": self._exchange.by_name(lambda bucket: bucket.kept)}

    @torch.no_grad()
    def load_own_state(self, state: Mapping[str, Any], *, is_apart: bool = False) -> None:
        """Continues from what `own_state` returned, as far as the module still has it.

        Args:
            state: of this worker.
            is_apart: leaves the module the weights that it has, and its own to ``SharedWeights.give_back``.
        """
        weights, kept = state.get("weights", {}), state.get("kept", {})
        if self.options.keep_drift:  # what another run kept apart belongs into the weights
            weights = {**weights, **self._less(kept, weights)}
        self.shared.set_apart(weights)
        if not is_apart:
            self.shared.give_back()
        if not self.options.keep_drift:
            self._exchange.copy_by_name(kept, lambda bucket: bucket.kept)

    def _less(self, kept: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns by name weights, the module's where none are given, less what is kept of each, flat."""
        found = {}
        for name, held in self.shared.weights().items():
            if name in kept and kept[name].numel() == as_real(held).numel():
                found[name] = weights.get(name, held).to(held.device, copy=True).view(held.shape)
                as_real(found[name]).sub_(kept[name].to(held.device).view(as_real(held).shape))
        return found

    def shared_state(self) -> dict[str, Any]:
        """Returns what is the same on every worker, in plain containers and copies."""
        return self._numbers() | self._exchange.state_dict()

    def _numbers(self) -> dict[str, Any]:
        engine = self._engine.shared_state() | self._sparsifier_state(self._engine.next_step)
        return engine | {"num_steps": self.num_steps}

    @torch.no_grad()
    def load_shared_state(self, saved: Mapping[str, Any], *, same_world_size: bool) -> None:
        """Continues from what `shared_state` returned in another run.

        Args:
            saved: the other run's.
            same_world_size: whether it had as many workers. If not, the anchor is what the module's weights are now.
        """
        self._engine.load_shared_state(saved, same_world_size=same_world_size)
        self.num_steps = saved["num_steps"]
        self._exchange.load_state_dict(saved, with_anchor=same_world_size)

    def restart(self) -> None:
        """Returns to before the first step, with the module's weights of now as the anchor. Not collective."""
        self._engine.reset()
        self.shared.forget_own()
        self._exchange.restart()
        self.num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns all that this worker needs to go on exactly, for loops without a Trainer: save one file a worker.

        Plain containers and copies, which ``torch.load(weights_only=True)`` reads. Collective with ``overlap=True``.
        """
        own = self.own_state()
        return sealed(self._place() | {"shared": self.shared_state(), "own": own})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned on the worker of the same rank; gives the module its weights.

        What travels with ``overlap=True`` is dropped.

        Raises:
            RuntimeError: it is of another rank or of another number of workers, or is damaged.
        """
        self._require_own(saved, "begin with the mean of all files' weights", "shared", "own")
        self.restart()
        self.load_shared_state(saved["shared"], same_world_size=True)
        self.load_own_state(saved["own"])

    def anchor(self) -> dict[str, Tensor]:
        """Returns x by parameter name: the weights' shapes, views of what later exchanges change."""
        return self._exchange.anchor()


def drift_settings(
    module: nn.Module, sparsifier: Sparsifier, options: DriftOptions, per_layer_stats: bool
) -> dict[str, Any]:
    """Returns what must be the same on all workers, as plain values."""
    versions = {"lightning_sparse": __version__, "torch": str(torch.__version__)}
    own = sparsifier.settings() | options.settings() | {"per_layer_stats": per_layer_stats}
    return parameter_settings(module) | own | versions
