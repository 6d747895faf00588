"""Lightning strategy for replicas of shards that step optimizers of their own, and exchange drifts sparsely."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from lightning_sparse.drift import DriftOptions
from lightning_sparse.drift.options import OuterOptimizer
from lightning_sparse.engine.weak_call import weakly
from lightning_sparse.exchange import ExchangeMode, require_agreement
from lightning_sparse.exchange.wire import ValueDtype, require_wire
from lightning_sparse.shards import ShardModelAverager
from lightning_sparse.sparsifiers import Sparsifier
from lightning_sparse.strategies.advice import exchanges_of
from lightning_sparse.strategies.content import KEY
from lightning_sparse.strategies.local_training import LocalTraining
from lightning_sparse.strategies.replica_strategy import ReplicaStrategy
from lightning_sparse.strategies.saved_together import stateless_as_before
from lightning_sparse.strategies.shard_checkpoint import why_broken
from lightning_sparse.strategies.shard_drift_checkpoint import (
    Parts,
    ReplicaCheckpointOptions,
    ReplicaDrifts,
    ReplicaOptimizers,
    collect,
    restore,
)


class SparseLocalHSDPStrategy(LocalTraining, ReplicaStrategy):
    """FSDP2 inside a replica, and between replicas local training with a sparse exchange of drifts.

    For models that are too big for DDP, and Adam or its like: every replica steps its own optimizer, and every
    ``every_n_steps`` optimizer steps the drift of its weights from what all replicas share is exchanged. See
    `ShardModelAverager`; a model is written as for `SparseHSDPStrategy`.

    Validation, test, predict, checkpoints and what is left after ``fit`` are the mean of the replicas' weights.

    Logs what `SparseLocalStrategy` logs, of all shards together; ``sparse/payload_bytes`` are those of a replica.

    Args:
        sparsifier: what to send, such as ``HardThreshold(density=0.01)``. λ is one for the whole model, or for
            a whole layer; a number of coordinates, as of `TopK`, is each shard's own.
        replicas: how many; ``"auto"`` is one a node.
        tensor_parallel_size: ranks that share the tensors of a layer, inside a replica.
        every_n_steps: optimizer steps (of all optimizers together) from one exchange to the next.
        keep_drift: as in `SparseLocalStrategy`, for a replica; as all that follows up to ``link_gbit_s``.
        drift_decay: see there.
        outer_optimizer: see there.
        overlap: see there.
        value_dtype: see there.
        exchange: see there.
        link_gbit_s: the rate of a rank's link between replicas, in Gbit/s and one direction. Ranks of a node that share
            one link have a share of it each. None is that of `SparseDDPStrategy`.
        drift_checkpoint: what checkpoints hold of drifts. ``"full"``: every replica's weights, sharded as they are, for
            a resume that equals a run without a stop; ``"mean"``: their mean, which is in the file anyway.
        optimizer_checkpoint: what they hold of optimizers. ``"full"``: every replica's; ``"first"``: the first's.
        **kwargs: of Lightning's ``ModelParallelStrategy``: ``save_distributed_checkpoint`` (True writes a folder to
            which every rank contributes, False one file with all that is asked for, for which the first rank needs the
            memory), ``process_group_backend`` and ``timeout``.

    Attributes:
        state: the `ShardModelAverager` of the running or last ``fit``, None before; also called ``averager``.

    Raises:
        ValueError: an invalid option.
        TypeError: a misspelt argument, or something that is not a sparsifier.
    """

    state: ShardModelAverager | None

    def __init__(
        self,
        sparsifier: Sparsifier,
        *,
        replicas: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        every_n_steps: int = 1,
        keep_drift: bool = True,
        drift_decay: float = 1.0,
        outer_optimizer: OuterOptimizer | None = None,
        overlap: bool = False,
        value_dtype: ValueDtype = "float32",
        exchange: ExchangeMode = "auto",
        link_gbit_s: float | None = None,
        drift_checkpoint: ReplicaDrifts = "full",
        optimizer_checkpoint: ReplicaOptimizers = "full",
        **kwargs: Any,
    ) -> None:
        if not isinstance(sparsifier, Sparsifier):
            raise TypeError(
                f"Expected a sparsifier such as HardThreshold(threshold=0.001), got {sparsifier!r}. "
                "For a threshold alone use LocalHSDPHardThresholdStrategy(threshold=0.001)."
            )
        self._options = DriftOptions(
            every_n_steps, keep_drift, drift_decay, outer_optimizer, overlap, value_dtype, exchange, link_gbit_s
        )
        require_wire(sparsifier, value_dtype)
        super().__init__(
            sparsifier,
            replicas,
            tensor_parallel_size,
            "drifts",
            **kwargs,
        )
        self._checkpoint_options = ReplicaCheckpointOptions(
            drift_checkpoint, optimizer_checkpoint, not self._save_distributed_checkpoint
        )
        self._why_not: str | None = None

    @property
    @override
    def averager(self) -> ShardModelAverager | None:
        return self.state

    @override
    def _make_state(self) -> ShardModelAverager:
        assert self.model is not None
        self._has_ended = False
        require_agreement(asdict(self._checkpoint_options))
        state = ShardModelAverager(
            self.model,
            self.device_mesh["replicate"],
            self.sparsifier,
            self._options,
            per_layer_stats=self._per_layer_stats,
        )
        self._advice.follow(state, holds_density=True)
        state.observed_steps.on_step = weakly(self._after_observed_step)
        return state

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._advice.begin(self.optimizers, exchanges_of(self.lightning_module, self._options.every_n_steps))

    # What is saved.

    @override
    def _module_state(self) -> dict[str, Any]:
        self._why_not = None
        if self.state is None or self._has_ended:
            return super()._module_state()
        shared = self.state.shared
        weights: dict[str, Tensor] = {}
        if not shared.is_shown:  # as they are while validation looks at the mean
            self._why_not = why_broken(self.state, "with the anchor's weights and without drifts")
            weights = shared.mean(self.state.workers) if self._why_not is None else shared.anchor()
        with shared.shown(weights):
            state = super()._module_state()
            return {name: one.clone() if isinstance(one, Tensor) else one for name, one in state.items()}

    @override
    def _add_own(self, checkpoint: dict[str, Any], path: Path) -> None:
        if self.state is None:
            return
        with self._nothing_counts(), stateless_as_before(self.optimizers):
            checkpoint[KEY] = collect(self._parts, path, self._checkpoint_options, self._why_not)
        if self.state.workers.rank != 0 and self._save_distributed_checkpoint:
            checkpoint["optimizer_states"] = []  # the first replica's are in the place that any strategy reads

    @override
    def _restore(self, checkpoint: dict[str, Any], path: Path) -> None:
        restore(self._parts, checkpoint.get(KEY), path)

    @property
    def _parts(self) -> Parts:
        assert self.state is not None
        assert self.model is not None
        return Parts(self.state, self.model, self.optimizers)
