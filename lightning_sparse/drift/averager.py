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
from lightning_sparse.drift.drift_exchange import DriftExchange
from lightning_sparse.drift.observed_steps import LOST_STEP, ObservedSteps
from lightning_sparse.drift.options import DriftOptions
from lightning_sparse.drift.outer_state import is_of_kind, kind_of, load_outer, outer_by_name
from lightning_sparse.drift.shared_weights import SharedWeights
from lightning_sparse.drift.untrained_tensors import ignored_names
from lightning_sparse.engine import Averager, Engine, warm_up_steps
from lightning_sparse.engine.averager import BROKEN_OFF
from lightning_sparse.engine.grouping import as_real, kept_dtype, local, require_one_device
from lightning_sparse.engine.parameter_bucket import sizes_by_name
from lightning_sparse.engine.state.snapshot import Snapshot
from lightning_sparse.exchange import (
    OwnGroup,
    SaveBarrier,
    Workers,
    current_device,
    parameter_settings,
    require_agreement,
)
from lightning_sparse.sparsifiers import Sparsifier

OUTER = "outer."
"""What the kinds of the outer optimizer's tensors begin with."""


class SparseModelAverager(Averager):
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
        if not isinstance(options, (DriftOptions, type(None))):
            raise TypeError(f"Expected DriftOptions(every_n_steps=…), for example, got {options!r}.")
        self.options = DriftOptions() if options is None else options
        if any(isinstance(one, nn.parallel.DistributedDataParallel) for one in module.modules()):
            raise ValueError("The module is wrapped in DistributedDataParallel, which averages gradients. Unwrap it.")
        if any(nn.parameter.is_lazy(one) for one in (*module.parameters(), *module.buffers())):
            raise ValueError("The module has parameters that are not initialised. Run a forward pass of it first.")
        if not self.is_sharded and any(isinstance(one, DTensor) for one in module.parameters()):
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
                Engine(sparsifier, self.options, group=self.own_group.group, per_layer_stats=per_layer_stats), weights
            )
            self.save_barrier = SaveBarrier(self.workers)
            ignored = ignored_names(module)
            held = [*module.named_parameters(), *module.named_buffers()]
            self.workers.broadcast([local(one) for name, one in held if name not in ignored])
        held_here = {name: local(one) for name, one in weights.items()}
        warm_up_steps(self._engine, {name: one.new_empty(0, dtype=kept_dtype(one)) for name, one in held_here.items()})
        self._exchange = DriftExchange(module, self._engine, self.options, may_change=not self.is_sharded)
        self.shared = SharedWeights(module, self._exchange, self.workers)
        self.num_steps = 0
        self.observed_steps = ObservedSteps(module, self.shared, may_change=not self.is_sharded)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The module's parameters by name."""
        return dict(self._module.named_parameters())

    @property
    def parameter_sizes(self) -> dict[str, int]:
        """By name, how many real numbers this worker exchanges of each parameter."""
        return sizes_by_name(self._exchange.buckets)

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
        self._exchange.ownership.close()
        self.observed_steps.close()
        self._engine.close()
        self.save_barrier.close()
        self.own_group.close()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self) -> None:
        """Counts an optimizer step, and exchanges drifts after every ``every_n_steps`` of them. Collective.

        Raises:
            RuntimeError: the module has the mean of all workers' weights, and the step would be lost; or the averager
                was closed, or another has been made for the same weights.
        """
        self._exchange.ownership.require()
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

    # State.

    def snapshot(self, workers: Workers | None = None) -> Snapshot:
        """Return this worker's state; weights and buffers only where they differ from those at set-up.

        Args:
            workers: for a checkpoint that all workers share: the group in which they agree on what has changed.
                Collective if given, and with ``overlap=True``.
        """
        self.flush()
        snapshot = self._engine.snapshot()
        tensors, numbers = outer_by_name(self._exchange.outer, self._exchange.buckets)
        snapshot.numbers |= {"num_steps": self.num_steps, "layout": self._exchange.layout}
        snapshot.numbers["outer"] = {"kind": kind_of(self._exchange.outer), "numbers": numbers}
        snapshot.shared = {"anchor": self._exchange.views(lambda bucket: bucket.anchor)}
        snapshot.shared |= {OUTER + key: parts for key, parts in tensors.items()}
        held = self.shared.weights() | self._exchange.untrained.changed(workers) | self.shared.own
        parameters = self.parameters
        names = [name for name in parameters if name in held]
        if workers is not None:  # a frozen shard may have changed on another rank of the replica only
            flags = self.replica.gather_numbers([name in held for name in parameters], self.device).any(0).tolist()
            names = [name for name, flag in zip(parameters, flags, strict=True) if flag]
        snapshot.own["weights"] = {name: as_real(held.get(name, local(parameters[name]))).reshape(-1) for name in names}
        if not self.options.keep_drift:
            snapshot.own["unsent"] = self._exchange.views(lambda bucket: bucket.kept)
        snapshot.extra["buffers"] = {name: held[name] for name in held.keys() - parameters.keys()}
        return snapshot

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Replace all state by a snapshot of another run, as far as it fits the model. Not collective.

        The module keeps the weights that it has, until ``shared.give_back`` gives it its own. Without an anchor in the
        snapshot these weights are the anchor.
        """
        self.reset()
        self._engine.restore(snapshot)
        self.num_steps = snapshot.numbers["num_steps"]
        self._exchange.take_in_as(snapshot.numbers["layout"])
        self._exchange.copy_by_name(snapshot.shared.get("anchor", {}), lambda bucket: bucket.anchor)
        outer = snapshot.numbers["outer"]
        if is_of_kind(self._exchange.outer, outer["kind"]) and self._exchange.outer is not None:
            tensors = {key[len(OUTER) :]: parts for key, parts in snapshot.shared.items() if key.startswith(OUTER)}
            load_outer(self._exchange.outer, self._exchange.buckets, tensors, outer["numbers"])
        unsent = snapshot.own.get("unsent", {})
        weights = {
            name: _shaped(flat, local(self.parameters[name]))
            for name, flat in snapshot.own.get("weights", {}).items()
            if name in self.parameters and flat.numel() == as_real(local(self.parameters[name])).numel()
        }
        if self.options.keep_drift:  # values that another run kept apart belong to the weights
            for name, held in self.shared.weights().items():
                if name in unsent and unsent[name].numel() == as_real(held).numel():
                    weights[name] = weights.get(name, held).to(held.device, copy=True)
                    as_real(weights[name]).sub_(unsent[name].to(held.device).view(as_real(held).shape))
        else:
            self._exchange.copy_by_name(unsent, lambda bucket: bucket.kept)
        self.shared.set_apart(weights | snapshot.extra.get("buffers", {}))

    def reset(self) -> None:
        """Return to the state before the first step, with the module's current weights as the anchor."""
        self._engine.reset()
        self.shared.forget_own()
        self._exchange.restart()
        self.num_steps = 0

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned on the worker of the same rank; gives the module its weights.

        Values that are under way with ``overlap=True`` are dropped.

        Raises:
            RuntimeError: the state belongs to another rank or another number of workers, or is damaged.
        """
        super().load_state_dict(saved)
        self.shared.give_back()

    @property
    def progress(self) -> object:
        """How often `step` was called."""
        return self.num_steps

    def obstacles(self) -> list[str]:
        """Return why no weights can be saved at this moment."""
        return [BROKEN_OFF] if self._exchange.is_changing else []

    def anchor(self) -> dict[str, Tensor]:
        """Returns x by parameter name: the weights' shapes, views of what later exchanges change."""
        return self._exchange.anchor()


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """Return a copy of flat real numbers with shape, dtype and device of a tensor."""
    shaped = torch.empty_like(like, memory_format=torch.contiguous_format)
    as_real(shaped).copy_(flat.view(as_real(shaped).shape))
    return shaped


def drift_settings(
    module: nn.Module, sparsifier: Sparsifier, options: DriftOptions, per_layer_stats: bool
) -> dict[str, Any]:
    """Returns what must be the same on all workers, as plain values."""
    versions = {"lightning_sparse": __version__, "torch": str(torch.__version__)}
    own = sparsifier.settings() | options.settings() | {"per_layer_stats": per_layer_stats}
    return parameter_settings(module) | own | versions
