"""Strategies with a threshold or a density instead of a sparsifier."""

from typing import Any, ClassVar

from lightning_sparse.sparsifiers.hard_threshold import HardThreshold
from lightning_sparse.strategies.ddp import SparseDDPStrategy
from lightning_sparse.strategies.hsdp import SparseHSDPStrategy, SparseLocalHSDPStrategy
from lightning_sparse.strategies.local import LocalTraining, SparseLocalStrategy
from lightning_sparse.strategies.sparse_strategy import SparseStrategy


class HardThresholdStrategy(SparseStrategy):
    """Takes the options of `HardThreshold` instead of a sparsifier.

    Args:
        threshold: λ ≥ 0, in units of gradients or, for local training, of parameters; 0 sends everything.
        density: target share of coordinates to send on average, in (0, 1]. The first exchange sends everything and
            calibrates λ, which is adjusted afterwards. Without threshold and density, it is 0.001, or 0.01 for local
            training.

    Raises:
        ValueError: both threshold and density are given, or an option has a value that is not allowed.
        TypeError: an argument is unknown or has no name.
    """

    _options_class: ClassVar[type] = HardThreshold

    def __init__(
        self, *unnamed: Any, threshold: float | None = None, density: float | None = None, **kwargs: Any
    ) -> None:
        if unnamed:
            value = unnamed[0]
            raise TypeError(f"Got {value!r} without a name. Write threshold={value!r} or density={value!r}.")
        if threshold is None and density is None and isinstance(self, LocalTraining):
            density = 0.01
        super().__init__(self._make_options(HardThreshold, kwargs, threshold=threshold, density=density), **kwargs)


class DDPHardThresholdStrategy(HardThresholdStrategy, SparseDDPStrategy):
    """DDP that sends coordinates whose residual plus gradient reaches λ. For SGD.

    With Adam and the like, use `LocalHardThresholdStrategy`. The default density, 0.001, suits runs of 5,000 steps or
    more. The method is that of Sahu et al., *Rethinking gradient sparsification as total error minimization* (NeurIPS
    2021, arXiv:2108.00951). Registered as ``Trainer(strategy="ddp_hardthreshold")``.
    """


class LocalHardThresholdStrategy(HardThresholdStrategy, SparseLocalStrategy):
    """Local training that sends weight changes of at least λ.

    λ is constant or adjusted to a density, in the units of the parameters. After an exchange, each worker's weights are
    less than λ from the anchor. Registered as ``Trainer(strategy="local_hardthreshold")``.
    """


class HSDPHardThresholdStrategy(HardThresholdStrategy, SparseHSDPStrategy):
    """FSDP2 inside replicas, and a hard threshold λ on gradients between replicas.

    Registered as ``Trainer(strategy="hsdp_hardthreshold")``. `SparseHSDPStrategy` describes how to write a model.
    """


class LocalHSDPHardThresholdStrategy(HardThresholdStrategy, SparseLocalHSDPStrategy):
    """FSDP2 inside replicas, and local training with a hard threshold λ between replicas.

    Registered as ``Trainer(strategy="local_hsdp_hardthreshold")``. `SparseHSDPStrategy` describes how to write a model.
    """
