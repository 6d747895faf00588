"""Local training of replicas of a sharded model, which exchange how far their weights have drifted.

A replica of FSDP2 takes the place of a worker in `SparseModelAverager`. Inside a replica, FSDP2 averages gradients and
the optimizer steps on shards. Between replicas, the ranks that hold the same shard exchange its drift from the anchor.
"""

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_sparse.drift import DriftOptions, SparseModelAverager
from lightning_sparse.drift.averager import checked, drift_settings
from lightning_sparse.engine.sharding import Resharded, Sharding, reshard
from lightning_sparse.sparsifiers import Dense, Sparsifier, require_sparsifier


class ShardModelAverager(SparseModelAverager):
    """Local training of replicas that ``fully_shard`` shards, with a sparse exchange of their drifts.

    Call ``step`` after every optimizer step, on all ranks alike. A replica takes the place of a worker of
    `SparseModelAverager`; numbers are those of the whole model.

    Example::

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options = DriftOptions(every_n_steps=8)
        averager = ShardModelAverager(model, mesh["replicate"], HardThreshold(density=0.01), options)
        # then as with SparseModelAverager

    Args:
        module: the model, sharded over the ranks of a replica and no further. All replicas take the first replica's
            weights and buffers. Collective: all ranks.
        mesh: the dimension of replicas, one rank each, of a mesh of all ranks.
        sparsifier: selects the values of drifts to send, with one λ for the whole model in the parameters' own units;
            copied. A number of coordinates, as of `TopK`, is each shard's own.
        options: see `DriftOptions`.
        per_layer_stats: whether to report density and error of every layer.

    Attributes:
        replica: the ranks that hold this rank's replica.

    Raises:
        ValueError: a mesh of several dimensions, or a module that is not sharded as it must be.
        RuntimeError: ranks disagree on the settings, or the mesh does not divide them into replicas (on every rank).
    """

    is_sharded = True

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        sparsifier: Sparsifier,
        options: DriftOptions | None = None,
        *,
        per_layer_stats: bool = False,
    ) -> None:
        options = checked(options)
        require_sparsifier(sparsifier)
        reshard(module)
        sharding = Sharding(module, mesh, drift_settings(module, sparsifier, options, per_layer_stats))
        self.replica = sharding.replica
        if sharding.is_alone:
            sparsifier, options = Dense(), replace(options, value_dtype="float32")
        super().__init__(Resharded(module), sparsifier, options, group=sharding.group, per_layer_stats=per_layer_stats)
        self._engine.of_whole_model = sharding.of_all_shards
        self._whole, self.place = module, sharding.place

    def _prepare(self) -> None:
        reshard(self._whole)
