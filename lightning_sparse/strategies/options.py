"""Options that several strategies take: declared and documented once, and shown by every class that takes them."""

from typing import Any

from lightning_sparse.checkpointing.content import (
    CheckpointOptions,
    DriftCheckpoint,
    OnWorldSizeChange,
    OptimizerCheckpoint,
    ResidualCheckpoint,
)
from lightning_sparse.drift.options import DriftOptions, OuterOptimizer
from lightning_sparse.exchange import ExchangeMode
from lightning_sparse.exchange.wire import ValueDtype
from lightning_sparse.gradients.options import DensityControlMode, ExchangeOptions, require_density_control
from lightning_sparse.sparsifiers import HardThreshold, Sparsifier
from lightning_sparse.sparsifiers.protocol import Granularity
from lightning_sparse.strategies.inherited_options import WithInheritedOptions


class AveragesGradients(WithInheritedOptions):
    """Averages gradients sparsely.

    Args:
        sparsifier: selects coordinates, such as ``HardThreshold(density=0.001)`` or ``TopK(density=0.001)``.
        value_dtype: dtype in which values travel; the residual keeps rounding errors and sends them later. With its
            index a coordinate takes 6 bytes in ``"float32"``, 4 in ``"bfloat16"`` or ``"float16"`` and 3 in
            ``"float8"``, which is scaled to λ and needs a threshold above 0 in every layer or a sparsifier that rounds.
            ``"int8"`` needs a sparsifier that rounds.
        exchange: route of the selected values. ``"gather"``: all-gather of every worker's values;
            ``"reduce_scatter"``: each value goes to the worker that sums its part of the bucket, and the sums go to
            all; ``"dense"``: all-reduce of the masked bucket; ``"hierarchical"``: dense inside a node, sparse between
            nodes; ``"auto"``: for each bucket the cheapest of the first three, judged by the step before.
        density_control: what happens to a λ that was calibrated to a density. ``"hold"`` (the meaning of None):
            corrected slowly, so that the average volume meets the density; ``"calibrate"``: constant.
        link_gbit_s: rate of a worker's link between nodes, above 0, in Gbit/s and one direction, by which
            ``exchange="auto"`` chooses. Ranks of a node that share a link have a share of it each. None assumes
            10 Gbit/s on CPUs, and on GPUs NVLink inside a node and 100 Gbit/s between nodes. Over Gloo, small payloads
            wait for each other up to the bytes that the link carries in 1 ms, or 64 kB if None.
        residual_checkpoint: residuals in checkpoints. ``"full"``: every worker's, n times the model in float32, for a
            resume that equals an uninterrupted run; ``"mean"``: their mean, the model once, which keeps the pending
            update (not for sharded replicas); ``"none"``: no residuals.
        on_world_size_change: residuals after a resume with another number of workers or replicas. ``"mean"``: the
            mean of the old on each, which keeps the pending update; ``"reset"``: zero; ``"error"``: a RuntimeError.
    """

    def __init__(
        self,
        sparsifier: Sparsifier,
        *,
        value_dtype: ValueDtype = "float32",
        exchange: ExchangeMode = "auto",
        density_control: DensityControlMode | None = None,
        link_gbit_s: float | None = None,
        residual_checkpoint: ResidualCheckpoint = "full",
        on_world_size_change: OnWorldSizeChange = "mean",
        **kwargs: Any,
    ) -> None:
        self._checkpoint_options = CheckpointOptions(
            residual_checkpoint, on_world_size_change, is_sharded=self._is_sharded
        )
        self._options = ExchangeOptions(
            value_dtype=value_dtype, exchange=exchange, density_control=density_control, link_gbit_s=link_gbit_s
        )
        require_density_control(sparsifier, density_control)
        super().__init__(sparsifier, **kwargs)


class AveragesDrifts(WithInheritedOptions):
    """Averages the drift of each worker's weights sparsely.

    Args:
        sparsifier: selects coordinates, such as ``HardThreshold(density=0.01)`` or ``TopK(density=0.01)``.
        every_n_steps: optimizer steps (of all optimizers together) from one exchange to the next, at least 1.
        keep_drift: True leaves each worker where it is but for the sent values. False takes every worker back to the
            anchor after each exchange and keeps unsent values apart (SparseLoCo).
        drift_decay: factor on unsent values before the next drift is added, in (0, 1]; below 1 only with
            ``keep_drift=False``.
        outer_optimizer: makes the optimizer that moves the anchor, with the average drift as its gradient; None
            subtracts the average. DiLoCo: ``partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``.
        overlap: True overlaps the exchange with the next step and applies its result one step late.
        value_dtype: dtype in which values travel; unsent values keep rounding errors. With its index a coordinate takes
            6 bytes in ``"float32"``, 4 in ``"bfloat16"`` or ``"float16"`` and 3 in ``"float8"``, which is scaled to λ
            and needs a threshold above 0 in every layer or a sparsifier that rounds. ``"int8"`` needs a sparsifier that
            rounds.
        exchange: route of the selected values. ``"gather"``: all-gather of every worker's values;
            ``"reduce_scatter"``: each value goes to the worker that sums its part of the bucket, and the sums go to
            all; ``"dense"``: all-reduce of the masked bucket; ``"hierarchical"``: dense inside a node, sparse between
            nodes; ``"auto"``: for each bucket the cheapest of the first three, judged by the exchange before.
        link_gbit_s: rate of a worker's link between nodes, above 0, in Gbit/s and one direction, by which
            ``exchange="auto"`` chooses. Ranks of a node that share a link have a share of it each. None assumes
            10 Gbit/s on CPUs, and on GPUs NVLink inside a node and 100 Gbit/s between nodes.
        drift_checkpoint: weights in checkpoints. ``"full"``: every worker's, n times the model, for a resume that
            equals an uninterrupted run; ``"mean"``: their mean, which the checkpoint holds anyway.
        optimizer_checkpoint: optimizers in checkpoints. ``"full"``: every worker's; ``"mean"``: the mean of their
            tensors (not for sharded replicas); ``"first"``: rank 0's.
    """

    def __init__(
        self,
        sparsifier: Sparsifier,
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
        self._checkpoint_options = CheckpointOptions(
            drift_checkpoint=drift_checkpoint, optimizer_checkpoint=optimizer_checkpoint, is_sharded=self._is_sharded
        )
        self._options = DriftOptions(
            every_n_steps,
            keep_drift,
            drift_decay,
            outer_optimizer,
            overlap,
            value_dtype=value_dtype,
            exchange=exchange,
            link_gbit_s=link_gbit_s,
        )
        super().__init__(sparsifier, **kwargs)


class ByThreshold(WithInheritedOptions):
    """Takes the options of `HardThreshold` in place of a sparsifier.

    Args:
        threshold: λ ≥ 0, in units of gradients or, for local training, of parameters; 0 sends everything.
        density: share of coordinates to send on average, in (0, 1]; λ is calibrated to it. With neither, 0.001, or 0.01
            for local training.
        calibration_steps: with a density, the largest number of exchanges (1 or more) that send everything while the
            calibration measures norms: usually about 3, but all of them with ``density_control="calibrate"``.
        layer_thresholds: λ for single layers: fnmatch patterns of parameter names, the first match wins; 0 sends a
            layer whole: ``{"*.bias": 0.0}``.
        granularity: scope of a density: of the ``"model"`` by one λ, or of each ``"layer"`` by a λ of its own.
    """

    _default_density: float | None = None

    def __init__(
        self,
        *,
        threshold: float | None = None,
        density: float | None = None,
        calibration_steps: int = 50,
        layer_thresholds: dict[str, float] | None = None,
        granularity: Granularity = "model",
        **kwargs: Any,
    ) -> None:
        if threshold is None and density is None:
            density = self._default_density
        sparsifier = HardThreshold(
            threshold=threshold,
            density=density,
            calibration_steps=calibration_steps,
            layer_thresholds=layer_thresholds,
            granularity=granularity,
        )
        super().__init__(sparsifier, **kwargs)
