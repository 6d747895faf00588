"""Local training of replicas of a sharded model, which exchange drifts of their weights.

A replica acts as one worker of `SparseModelAverager`. Inside a replica, FSDP2 averages gradients and the optimizer
steps on shards. Between replicas, the ranks that hold the same shard exchange its drift from the anchor.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_sparse.drift.averager import SparseModelAverager
from lightning_sparse.engine.options import DriftOptions, checked, settings_of
from lightning_sparse.engine.sharding import Resharded, Sharding, reshard
from lightning_sparse.sparsifiers.protocol import Sparsifier, require_sparsifier


class ShardModelAverager(SparseModelAverager):
    """Local training of sharded replicas, with a sparse exchange of their drifts.

    Call ``step`` after every optimizer step, on all ranks. A replica acts as one worker of `SparseModelAverager`.
    Statistics refer to the whole model.

    Example::

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options = DriftOptions(every_n_steps=8)
        averager = ShardModelAverager(model, mesh["replicate"], HardThreshold(density=0.01), options)
        # then as with SparseModelAverager

    Args:
        module: the model, sharded only over the ranks of a replica with ``fully_shard``. All replicas receive the first
            replica's weights and buffers. Collective: all ranks.
        mesh: the dimension of replicas, one rank per replica, of a mesh of all ranks.
        sparsifier: selects the values of drifts to send, with λ equal in all shards and in the parameters' own units;
            copied. A number of coordinates, as in `TopK`, is per shard.
        options: see `DriftOptions`.
        per_layer_stats: whether to report density and error of every layer.

    Attributes:
        replica: the ranks that hold this rank's replica.

    Raises:
        ValueError: the mesh has several dimensions, or the module's sharding is not supported.
        RuntimeError: settings differ between ranks, or the mesh does not divide ranks into replicas (on every rank).
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        sparsifier: Sparsifier,
        options: DriftOptions | None = None,
        *,
        per_layer_stats: bool = False,
    ) -> None:
        options = checked(options, DriftOptions)
        require_sparsifier(sparsifier)
        sharding = Sharding(module, mesh, settings_of(sparsifier, options, per_layer_stats))
        self.replica = sharding.replica
        super().__init__(Resharded(module), sparsifier, options, group=sharding.group, per_layer_stats=per_layer_stats)
        self._engine.combine_shards = sharding.combine_shards
        self._whole, self.place = module, sharding.place

    def _prepare(self) -> None:
        reshard(self._whole)  # also without an exchange, so that later steps do not depend on saves
