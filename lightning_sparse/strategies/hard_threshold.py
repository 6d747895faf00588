"""The strategies for who names a threshold or a density, and no sparsifier."""

from typing import Any

from lightning_sparse.ddp.options import DensityControlMode, ErrorFeedback
from lightning_sparse.drift.options import OuterOptimizer
from lightning_sparse.exchange import ExchangeMode
from lightning_sparse.exchange.wire import ValueDtype
from lightning_sparse.sparsifiers import HardThreshold
from lightning_sparse.strategies.checkpoint import OnWorldSizeChange, ResidualCheckpoint
from lightning_sparse.strategies.ddp import SparseDDPStrategy
from lightning_sparse.strategies.drift_checkpoint import DriftCheckpoint, OptimizerCheckpoint
from lightning_sparse.strategies.local import SparseLocalStrategy


class DDPHardThresholdStrategy(SparseDDPStrategy):
    """DDP that sends the coordinates whose error-compensated magnitude reaches a constant threshold λ.

    The hard-threshold sparsifier with error feedback of Sahu et al., *Rethinking gradient sparsification as total
    error minimization* (NeurIPS 2021, arXiv:2108.00951). Registered as ``Trainer(strategy="ddp_hardthreshold")``.

    Args:
        threshold: λ ≥ 0 in gradient units; 0 sends everything.
        density: the share of coordinates to be sent on average, in (0, 1]; λ is calibrated to it. With neither, 0.001.
        calibration_steps: steps for which everything is sent while the gradients are measured.
        layer_thresholds: λ for single layers: fnmatch patterns of parameter names, the first match wins.
        error_feedback: see :class:`SparseDDPStrategy`.
        local_clip_norm: see :class:`SparseDDPStrategy`.
        value_dtype: see :class:`SparseDDPStrategy`.
        exchange: see :class:`SparseDDPStrategy`.
        density_control: see :class:`SparseDDPStrategy`.
        link_gbit_s: see :class:`SparseDDPStrategy`.
        residual_checkpoint: see :class:`SparseDDPStrategy`.
        on_world_size_change: see :class:`SparseDDPStrategy`.
        **kwargs: see :class:`SparseDDPStrategy`.

    Raises:
        ValueError: both threshold and density, or a number or a word that is not allowed.
        TypeError: a misspelt argument.
    """

    def __init__(
        self,
        threshold: float | None = None,
        density: float | None = None,
        calibration_steps: int = 50,
        layer_thresholds: dict[str, float] | None = None,
        *,
        error_feedback: ErrorFeedback = "gradient",
        local_clip_norm: float | None = None,
        value_dtype: ValueDtype = "float32",
        exchange: ExchangeMode = "auto",
        density_control: DensityControlMode | None = None,
        link_gbit_s: float | None = None,
        residual_checkpoint: ResidualCheckpoint = "full",
        on_world_size_change: OnWorldSizeChange = "mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            HardThreshold(threshold, density, calibration_steps, layer_thresholds),
            error_feedback=error_feedback,
            local_clip_norm=local_clip_norm,
            value_dtype=value_dtype,
            exchange=exchange,
            density_control=density_control,
            link_gbit_s=link_gbit_s,
            residual_checkpoint=residual_checkpoint,
            on_world_size_change=on_world_size_change,
            **kwargs,
        )


class LocalHardThresholdStrategy(SparseLocalStrategy):
    """Local training that sends what has drifted by a constant threshold λ from the weights that all share.

    After an exchange no worker's weight is λ or more from the anchor: λ is in the parameters' own units and bounds how
    far replicas part. Registered as ``Trainer(strategy="local_hardthreshold")``.

    Args:
        threshold: λ ≥ 0 in parameter units; 0 sends everything.
        density: the share of coordinates to be sent in an exchange on average, in (0, 1]. λ is calibrated to it and
            then corrected slowly. With neither, 0.01.
        calibration_steps: exchanges in which everything is sent while drifts are measured.
        layer_thresholds: λ for single layers: fnmatch patterns of parameter names, the first match wins.
        every_n_steps: see :class:`SparseLocalStrategy`.
        keep_drift: see :class:`SparseLocalStrategy`.
        drift_decay: see :class:`SparseLocalStrategy`.
        outer_optimizer: see :class:`SparseLocalStrategy`.
        overlap: see :class:`SparseLocalStrategy`.
        value_dtype: see :class:`SparseLocalStrategy`.
        exchange: see :class:`SparseLocalStrategy`.
        link_gbit_s: see :class:`SparseLocalStrategy`.
        drift_checkpoint: see :class:`SparseLocalStrategy`.
        optimizer_checkpoint: see :class:`SparseLocalStrategy`.
        **kwargs: see :class:`SparseLocalStrategy`.

    Raises:
        ValueError: both threshold and density, or a number or a word that is not allowed.
        TypeError: a misspelt argument.
    """

    def __init__(
        self,
        threshold: float | None = None,
        density: float | None = None,
        calibration_steps: int = 50,
        layer_thresholds: dict[str, float] | None = None,
        *,
        every_n_steps: int = 1,
        keep_drift: bool = True,
        drift_decay: float = 1.0,
        outer_optimizer: OuterOptimizer | None = None,
        overlap: bool = False,
        value_dtype: ValueDtype = "float32",
        exchange: ExchangeMode = "auto",
        link_gbit_s: float | None = None,
        drift_checkpoint: DriftCheckpoint = "full",
        optimizer_checkpoint: OptimizerCheckpoint = "full",
        **kwargs: Any,
    ) -> None:
        if threshold is None and density is None:
            density = 0.01
        super().__init__(
            HardThreshold(threshold, density, calibration_steps, layer_thresholds),
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
