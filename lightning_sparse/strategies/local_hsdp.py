"""Lightning strategy for replicas of shards that step optimizers of their own, and exchange drifts sparsely."""

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from typing_extensions import override

from lightning_sparse.shards import ShardModelAverager
from lightning_sparse.strategies.local_training import LocalTraining
from lightning_sparse.strategies.replica_strategy import ReplicaStrategy, stateless_as_before


class SparseLocalHSDPStrategy(ReplicaStrategy, LocalTraining):
    """FSDP2 inside a replica, and between replicas local training with a sparse exchange of drifts.

    For models that are too big for DDP, and Adam or its like: every replica steps its own optimizer, and every
    ``every_n_steps`` optimizer steps the drift of its weights from what all replicas share is exchanged. See
    `ShardModelAverager`; write a model as for `SparseHSDPStrategy`.

    Validation, test, predict, checkpoints and what is left after ``fit`` are the mean of the replicas' weights.

    Logs what `SparseLocalStrategy` logs, of all shards together; ``sparse/payload_bytes`` are those of a replica. λ is
    one for the whole model, or for a whole layer; a number of coordinates, as of `TopK`, is each shard's own.

    Attributes:
        state: the `ShardModelAverager` of the running or last ``fit``, None before; also called ``averager``.

    Raises:
        ValueError: an invalid option.
        TypeError: a misspelt argument, or something that is not a sparsifier.
    """

    state: ShardModelAverager | None
    _by_threshold = "LocalHSDPHardThresholdStrategy"

    @override
    def _make_state(self) -> None:
        assert self.model is not None
        averager = ShardModelAverager(
            self.model,
            self.device_mesh["replicate"],
            self.sparsifier,
            self._options,
            per_layer_stats=self._per_layer_stats,
        )
        self._follow_drifts(averager)

    # Checkpoints.

    @override
    def _module_state(self) -> dict[str, Any]:
        self._why_not = None
        if self.state is None or self._has_ended:
            return super()._module_state()
        shared = self.state.shared
        weights: dict[str, Tensor] = {}
        if not shared.is_shown:  # as they are while validation looks at the mean
            self._why_not = self._why_broken("anchor's")
            weights = shared.mean(self.state.workers) if self._why_not is None else shared.anchor()
        with shared.shown(weights):
            state = super()._module_state()
            return {name: entry.clone() if isinstance(entry, Tensor) else entry for name, entry in state.items()}

    @override
    def _own_optimizers(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        assert self.state is not None
        assert self.model is not None
        states = {}
        if self._checkpoint_options.optimizer_checkpoint == "full":
            with self._nothing_counts(), stateless_as_before(self.optimizers):
                for at, optimizer in enumerate(self.optimizers):
                    states[str(at)] = get_optimizer_state_dict(self.model, optimizer)
        if self.state.workers.rank != 0 and self._save_distributed_checkpoint:
            checkpoint["optimizer_states"] = []  # rank 0's replica writes those that any strategy reads
        return states
