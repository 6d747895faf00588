"""Lightning strategies, and their registration by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_sparse.sparsifiers import Accordion, Dense, GaussianK, RandomK, Sparsifier, TopK
from lightning_sparse.strategies.ddp import SparseDDPStrategy
from lightning_sparse.strategies.hard_threshold import (
    DDPHardThresholdStrategy,
    HSDPHardThresholdStrategy,
    LocalHardThresholdStrategy,
    LocalHSDPHardThresholdStrategy,
)
from lightning_sparse.strategies.hsdp import SparseHSDPStrategy, SparseLocalHSDPStrategy
from lightning_sparse.strategies.local import SparseLocalStrategy

__all__ = [
    "DDPHardThresholdStrategy",
    "HSDPHardThresholdStrategy",
    "LocalHSDPHardThresholdStrategy",
    "LocalHardThresholdStrategy",
    "SparseDDPStrategy",
    "SparseHSDPStrategy",
    "SparseLocalHSDPStrategy",
    "SparseLocalStrategy",
    "register_strategies",
]

_SPARSIFIERS: dict[str, Callable[[], Sparsifier]] = {
    "accordion": Accordion,
    "dense": Dense,
    "gaussiank": GaussianK,
    "modeltopk": partial(TopK, granularity="model"),
    "randomk": RandomK,
    "topk": TopK,
}
_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_UNUSED_PARAMETERS: dict[str, dict[str, bool]] = {
    "": {},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
}


def _make(strategy: Callable[..., Strategy], sparsifier: Callable[[], Sparsifier], **kwargs: Any) -> Strategy:
    return strategy(sparsifier(), **kwargs)


def register_strategies() -> None:
    """Register all strategies by name, in the twelve forms of ``ddp``, once."""
    if "ddp_hardthreshold" in StrategyRegistry:
        return
    families: dict[str, Callable[..., Strategy]] = {
        "ddp_hardthreshold": DDPHardThresholdStrategy,
        "local_hardthreshold": LocalHardThresholdStrategy,
    }
    for name, sparsifier in _SPARSIFIERS.items():
        families[f"ddp_{name}"] = partial(_make, SparseDDPStrategy, sparsifier)
        families[f"local_{name}"] = partial(_make, SparseLocalStrategy, sparsifier)
    for family, strategy in families.items():
        kind = "Local training, sparse" if family.startswith("local") else "Sparse DDP"
        for suffix, start_method in _START_METHODS.items():
            description = f"{kind}: {family.partition('_')[2]}, start method {start_method}"
            for ending, unused in _UNUSED_PARAMETERS.items():
                name = family + suffix + ending
                StrategyRegistry.register(name, strategy, description, start_method=start_method, **unused)
    for name, strategy, kind in (
        ("hsdp_hardthreshold", HSDPHardThresholdStrategy, "sparse"),
        ("local_hsdp_hardthreshold", LocalHSDPHardThresholdStrategy, "local training, sparse"),
    ):
        description = f"FSDP2 in a replica, {kind} between replicas: hardthreshold, start method popen"
        StrategyRegistry.register(name, strategy, description)
