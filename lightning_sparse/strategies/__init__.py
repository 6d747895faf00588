"""Lightning strategies, and their registration by name."""

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_sparse.sparsifiers.accordion import Accordion
from lightning_sparse.sparsifiers.gaussian_k import GaussianK
from lightning_sparse.sparsifiers.hard_threshold import Dense
from lightning_sparse.sparsifiers.protocol import Sparsifier
from lightning_sparse.sparsifiers.random_k import RandomK
from lightning_sparse.sparsifiers.top_k import TopK
from lightning_sparse.strategies.ddp import SparseDDPStrategy
from lightning_sparse.strategies.hard_threshold import (
    DDPHardThresholdStrategy,
    HSDPHardThresholdStrategy,
    LocalHardThresholdStrategy,
    LocalHSDPHardThresholdStrategy,
)
from lightning_sparse.strategies.local import SparseLocalStrategy

_SPARSIFIERS: dict[str, Sparsifier] = {  # every averager copies its sparsifier
    "accordion": Accordion(),
    "dense": Dense(),
    "gaussiank": GaussianK(),
    "modeltopk": TopK(granularity="model"),
    "randomk": RandomK(),
    "topk": TopK(),
}


def register_strategies() -> None:
    """Register ``ddp_*`` and ``local_*`` in all forms of Lightning's ``ddp`` names, and both ``hsdp`` names."""
    if "ddp_hardthreshold" in StrategyRegistry:
        return
    of_ddp = {name: entry for name, entry in StrategyRegistry.items() if entry["strategy"] is DDPStrategy}
    for name, entry in of_ddp.items():
        form, options = name.removeprefix("ddp"), entry["init_params"]
        StrategyRegistry.register(f"ddp_hardthreshold{form}", DDPHardThresholdStrategy, **options)
        StrategyRegistry.register(f"local_hardthreshold{form}", LocalHardThresholdStrategy, **options)
        for family, sparsifier in _SPARSIFIERS.items():
            StrategyRegistry.register(f"ddp_{family}{form}", SparseDDPStrategy, sparsifier=sparsifier, **options)
            StrategyRegistry.register(f"local_{family}{form}", SparseLocalStrategy, sparsifier=sparsifier, **options)
    StrategyRegistry.register("hsdp_hardthreshold", HSDPHardThresholdStrategy)
    StrategyRegistry.register("local_hsdp_hardthreshold", LocalHSDPHardThresholdStrategy)
