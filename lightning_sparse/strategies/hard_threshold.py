"""The strategies of workers for who names a threshold or a density, and no sparsifier."""

from typing import Any

from lightning_sparse.ddp.options import DensityControlMode, ErrorFeedback
from lightning_sparse.drift.options import OuterOptimizer
from lightning_sparse.exchange import ExchangeMode
from lightning_sparse.exchange.wire import ValueDtype
from lightning_sparse.sparsifiers import HardThreshold
from lightning_sparse.sparsifiers.protocol import Granularity
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
        calibration_steps: with a density, for how many steps at most (1 or more) everything is sent while gradients are
            measured: about 3, but all of them with ``density_control="calibrate"``.
        layer_thresholds: λ for single layers: fnmatch patterns of parameter names, the first match wins; 0 sends a
            layer whole: ``{"*.bias": 0.0}``.
        granularity: of what a density is held: of the ``"model"`` by one λ, or of each ``"layer"`` by a λ of its own.
        error_feedback: what residuals are kept in. ``"gradient"``: units of the gradient; ``"learning_rate"``: rescaled
            as learning rates change (the paper's Algorithm 1); ``"none"`` throws away what is not sent.
        local_clip_norm: above 0, in gradient units: clips each worker's whole gradient to this norm *before* it is sent
            (Lightning's ``gradient_clip_val`` acts on the average). Nothing is sent before backward has ended then.
            None does not clip.
        value_dtype: what a value travels in; what rounding leaves is kept and sent later. With its index a coordinate
            takes 6 bytes in ``"float32"``, 4 in ``"bfloat16"`` or ``"float16"``, 3 in ``"float8"``.
            ``"float8"`` is scaled to λ, which must then be above 0 in every layer.
        exchange: the route that selected values take. ``"gather"``: every worker's to all others;
            ``"reduce_scatter"``: each to the worker that sums its part of the bucket, and the sums to all;
            ``"dense"``: a masked whole gradient in an all-reduce; ``"hierarchical"``: dense inside a node, sparse
            between nodes; ``"auto"``: for each bucket the cheapest of the first three, judged by the step before.
        density_control: what becomes of λ once it is calibrated to a density. ``"hold"``, which None stands for: it is
            corrected slowly, so that the average volume meets the density; ``"calibrate"``: it stays constant.
        link_gbit_s: the rate of a worker's link between nodes, above 0, in Gbit/s and one direction, by which
            ``exchange="auto"`` judges. None takes it for 10 on CPUs; on GPUs for NVLink inside a node and for 100
            between nodes.
        residual_checkpoint: what checkpoints hold of residuals. ``"full"``: every worker's, n times the model in
            float32, for a resume that equals a run without a stop; ``"mean"``: their mean, the model once, which keeps
            the pending update; ``"none"``: nothing.
        on_world_size_change: what residuals become when a run resumes with another number of workers. ``"mean"``: the
            mean of the old on each; ``"reset"``: zero; ``"error"``: a RuntimeError.
        **kwargs: every argument of Lightning's ``DDPStrategy`` and of ``DistributedDataParallel``, such as
            ``find_unused_parameters``, ``bucket_cap_mb`` or ``timeout``; see `SparseDDPStrategy`.

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
            HardThreshold(
                threshold=threshold,
                density=density,
                calibration_steps=calibration_steps,
                layer_thresholds=layer_thresholds,
                granularity=granularity,
            ),
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
        calibration_steps: with a density, in how many exchanges at most (1 or more) everything is sent while drifts are
            measured: about 3.
        layer_thresholds: λ for single layers: fnmatch patterns of parameter names, the first match wins; 0 sends a
            layer whole.
        granularity: of what a density is held: of the ``"model"`` by one λ, or of each ``"layer"`` by a λ of its own.
        every_n_steps: optimizer steps (of all optimizers together) from one exchange to the next, at least 1.
        keep_drift: True leaves each worker where it is but for what was sent. False takes every worker back to
            the anchor after each exchange and keeps apart what was not sent (SparseLoCo).
        drift_decay: by what is multiplied what was not sent before the next drift is added, in (0, 1]; below 1 only
            with ``keep_drift=False``.
        outer_optimizer: makes the optimizer that moves the anchor by the average drift, as if that were its gradient;
            None subtracts it. DiLoCo: ``partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``.
        overlap: whether what was sent travels while the next step is computed, and is applied one step late.
        value_dtype: what a value travels in; what rounding leaves is kept and sent later. With its index a coordinate
            takes 6 bytes in ``"float32"``, 4 in ``"bfloat16"`` or ``"float16"``, 3 in ``"float8"``.
            ``"float8"`` is scaled to λ, which must then be above 0 in every layer.
        exchange: the route that selected values take. ``"gather"``: every worker's to all others;
            ``"reduce_scatter"``: each to the worker that sums its part of the bucket, and the sums to all;
            ``"dense"``: a masked whole drift in an all-reduce; ``"hierarchical"``: dense inside a node, sparse
            between nodes; ``"auto"``: for each bucket the cheapest of the first three, judged by the exchange before.
        link_gbit_s: the rate of a worker's link between nodes, above 0, in Gbit/s and one direction, by which
            ``exchange="auto"`` judges. None takes it for 10 on CPUs; on GPUs for NVLink inside a node and for 100
            between nodes.
        drift_checkpoint: what checkpoints hold of drifts. ``"full"``: every worker's weights, n times the model, for a
            resume that equals a run without a stop; ``"mean"``: their mean, which is in the file anyway.
        optimizer_checkpoint: what they hold of optimizers, which differ between workers. ``"full"``: every worker's;
            ``"mean"``: the mean of their tensors; ``"first"``: the first worker's.
        **kwargs: ``process_group_backend``, ``timeout``, ``start_method``, … of Lightning's ``DDPStrategy``. What
            concerns DDP's own exchange is refused.

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
            HardThreshold(
                threshold=threshold,
                density=density,
                calibration_steps=calibration_steps,
                layer_thresholds=layer_thresholds,
                granularity=granularity,
            ),
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
