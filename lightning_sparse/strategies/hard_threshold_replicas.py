"""The strategies of sharded replicas for who names a threshold or a density, and no sparsifier."""

from typing import Any, Literal

from lightning_sparse.ddp.options import DensityControlMode
from lightning_sparse.drift.options import OuterOptimizer
from lightning_sparse.exchange import ExchangeMode
from lightning_sparse.exchange.wire import ValueDtype
from lightning_sparse.sparsifiers import HardThreshold
from lightning_sparse.sparsifiers.protocol import Granularity
from lightning_sparse.strategies.checkpoint import OnWorldSizeChange
from lightning_sparse.strategies.hsdp import ShardResiduals, SparseHSDPStrategy
from lightning_sparse.strategies.local_hsdp import SparseLocalHSDPStrategy
from lightning_sparse.strategies.shard_drift_checkpoint import ReplicaDrifts, ReplicaOptimizers


class HSDPHardThresholdStrategy(SparseHSDPStrategy):
    """FSDP2 inside a replica, and between replicas the coordinates that reach a constant threshold λ.

    Registered as ``Trainer(strategy="hsdp_hardthreshold")``; how a model is written for it says `SparseHSDPStrategy`.

    Args:
        threshold: λ ≥ 0 in gradient units; 0 sends everything.
        density: the share of coordinates to be sent on average, in (0, 1]; λ is calibrated to it. With neither, 0.001.
        calibration_steps: with a density, for how many steps at most (1 or more) everything is sent while gradients are
            measured.
        layer_thresholds: λ for single layers: fnmatch patterns of parameter names, the first match wins; 0 sends a
            layer whole.
        granularity: of what a density is held: of the ``"model"`` by one λ, or of each ``"layer"`` by a λ of its own.
        replicas: see `SparseHSDPStrategy`, as all that follows.
        tensor_parallel_size: see there.
        value_dtype: see there.
        exchange: see there.
        density_control: see there.
        link_gbit_s: see there.
        residual_checkpoint: see there.
        on_world_size_change: see there.
        **kwargs: ``save_distributed_checkpoint``, ``process_group_backend`` and ``timeout``; see there.

    Raises:
        ValueError: both threshold and density, or a number or a word that is not allowed.
        TypeError: a misspelt argument.
    """

    def __init__(
        self,
        *,
        threshold: float | None = None,
        density: float | None = None,
        calibration_steps: int = 50,
        layer_thresholds: dict[str, float] | None = None,
        granularity: Granularity = "model",
        replicas: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        value_dtype: ValueDtype = "float32",
        exchange: ExchangeMode = "auto",
        density_control: DensityControlMode | None = None,
        link_gbit_s: float | None = None,
        residual_checkpoint: ShardResiduals = "full",
        on_world_size_change: OnWorldSizeChange = "mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            HardThreshold(
                threshold=threshold,
                density=density,
                calibration_steps=calibration_steps,
                layer_thresholds=layer_thresholds,
                granularity=granularity,
            ),
            replicas=replicas,
            tensor_parallel_size=tensor_parallel_size,
            value_dtype=value_dtype,
            exchange=exchange,
            density_control=density_control,
            link_gbit_s=link_gbit_s,
            residual_checkpoint=residual_checkpoint,
            on_world_size_change=on_world_size_change,
            **kwargs,
        )


class LocalHSDPHardThresholdStrategy(SparseLocalHSDPStrategy):
    """FSDP2 inside a replica, and between replicas what has drifted by a constant threshold λ from what all share.

    Registered as ``Trainer(strategy="local_hsdp_hardthreshold")``; see `SparseLocalHSDPStrategy`.

    Args:
        threshold: λ ≥ 0 in parameter units; 0 sends everything.
        density: the share of coordinates to be sent in an exchange on average, in (0, 1]. λ is calibrated to it and
            then corrected slowly. With neither, 0.01.
        calibration_steps: with a density, in how many exchanges at most (1 or more) everything is sent while drifts are
            measured.
        layer_thresholds: λ for single layers: fnmatch patterns of parameter names, the first match wins; 0 sends a
            layer whole.
        granularity: of what a density is held: of the ``"model"`` by one λ, or of each ``"layer"`` by a λ of its own.
        replicas: see `SparseLocalHSDPStrategy`, as all that follows.
        tensor_parallel_size: see there.
        every_n_steps: see there.
        keep_drift: see there.
        drift_decay: see there.
        outer_optimizer: see there.
        overlap: see there.
        value_dtype: see there.
        exchange: see there.
        link_gbit_s: see there.
        drift_checkpoint: see there.
        optimizer_checkpoint: see there.
        **kwargs: ``save_distributed_checkpoint``, ``process_group_backend`` and ``timeout``; see there.

    Raises:
        ValueError: both threshold and density, or a number or a word that is not allowed.
        TypeError: a misspelt argument.
    """

    def __init__(
        self,
        *,
        threshold: float | None = None,
        density: float | None = None,
        calibration_steps: int = 50,
        layer_thresholds: dict[str, float] | None = None,
        granularity: Granularity = "model",
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
        if threshold is None and density is None:
            density = 0.01
        super().__init__(
            HardThreshold(
                threshold=threshold,
                density=density,
                calibration_steps=calibration_steps,
                layer_thresholds=layer_thresholds,
                granularity=granularity,
            ),
            replicas=replicas,
            tensor_parallel_size=tensor_parallel_size,
            every_n_steps=every_n_steps,
            keep_drift=keep_drift,
            drift_decay=drift_decay,
            outer_optimizer=outer_optimizer,
            overlap=overlap,
            value_dtype=value_dtype,
            exchange=exchange,
            link_gbit_s=link_gbit_s,
            drift_checkpoint=drift_checkpoint,
            optimizer_checkpoint=optimizer_checkpoint,
            **kwargs,
        )
