"""Replicas of a sharded model that step optimizers of their own, and exchange how far their weights have drifted.

As local training (`SparseModelAverager`), with a replica of FSDP2 in the place of a worker: gradients are averaged over
the ranks of a replica, by FSDP2, and its optimizer steps on their shards. Between replicas the ranks that hold the same
shard exchange the drift of that shard from the anchor that all replicas have.
"""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_sparse.drift import DriftOptions, SparseModelAverager
from lightning_sparse.drift.averager import drift_settings
from lightning_sparse.engine.sharding.resharded import Resharded, reshard
from lightning_sparse.engine.sharding.sharding import Sharding
from lightning_sparse.sparsifiers import Dense, Sparsifier


class ShardModelAverager(SparseModelAverager):
    """Local training of replicas that ``fully_shard`` shards, with a sparse exchange of their drifts.

    Call `step` after every optimizer step, on all ranks alike. All that `SparseModelAverager` has goes for a replica
    here; numbers are those of the whole model.

    Example::

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options = DriftOptions(every_n_steps=8)
        averager = ShardModelAverager(model, mesh["replicate"], HardThreshold(density=0.01), options)
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            averager.step()
        with averager.averaged_weights():
            validate(model)

    Args:
        module: the model, sharded over the ranks of a replica and no further. All replicas take the first one's weights
            and buffers. Collective: all ranks.
        mesh: the dimension of replicas, one rank each, of a mesh of all ranks.
        sparsifier: chooses what is sent of drifts, λ in the parameters' own units and one for the whole model; copied.
            A number of coordinates, as of `TopK`, is each shard's own.
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
        if not isinstance(options, (DriftOptions, type(None))):
            raise TypeError(f"Expected DriftOptions(every_n_steps=…), for example, got {options!r}.")
        options = DriftOptions() if options is None else options
        if not isinstance(sparsifier, Sparsifier):
            raise TypeError(f"Expected a sparsifier such as HardThreshold(density=0.01), got {sparsifier!r}.")
        reshard(module)
        sharding = Sharding(module, mesh, drift_settings(module, sparsifier, options, per_layer_stats))
        self.replica = sharding.replica
        if sharding.is_alone:
            sparsifier, options = Dense(), replace(options, value_dtype="float32")
        super().__init__(Resharded(module), sparsifier, options, group=sharding.group, per_layer_stats=per_layer_stats)
        sharding.add_up(self._engine)
        replica, device = self.replica, self.device  # without self: no reference cycle
        self._exchange.of_whole_model = lambda number: float(replica.gather_numbers([number], device).max())
        self._whole, self._place_in_world = module, sharding.place

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self) -> None:
        """Counts an optimizer step; exchanges drifts after every ``every_n_steps`` of them. Collective: all ranks."""
        reshard(self._whole)
        super().step()

    @torch.no_grad()
    def flush(self) -> None:
        """Applies what is still travelling with ``overlap=True``. Collective: all ranks."""
        reshard(self._whole)
        super().flush()

    def _place(self) -> dict[str, int]:
        return dict(self._place_in_world)
