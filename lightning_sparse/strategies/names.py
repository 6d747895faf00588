"""The names under which Trainer finds the strategies."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_sparse.sparsifiers import Accordion, Dense, GaussianK, RandomK, Sparsifier, TopK
from lightning_sparse.strategies.ddp import SparseDDPStrategy
from lightning_sparse.strategies.hard_threshold import (
    DDPHardThresholdStrategy,
    HSDPHardThresholdStrategy,
    LocalHardThresholdStrategy,
    LocalHSDPHardThresholdStrategy,
)
from lightning_sparse.strategies.local import SparseLocalStrategy

_SPARSIFIERS: dict[str, Callable[[], Sparsifier]] = {
    "accordion": Accordion,
    "dense": Dense,
    "gaussiank": GaussianK,
    "modeltopk": partial(TopK, granularity="model"),
    "randomk": RandomK,
    "topk": TopK,
}


def _sparse_ddp(sparsifier_class: Callable[[], Sparsifier], **kwargs: Any) -> SparseDDPStrategy:
    return SparseDDPStrategy(sparsifier_class(), **kwargs)


def _sparse_local(sparsifier_class: Callable[[], Sparsifier], **kwargs: Any) -> SparseLocalStrategy:
    return SparseLocalStrategy(sparsifier_class(), **kwargs)


def register_strategies() -> None:
    """Registers every name with Lightning, in the twelve forms that it has for ``ddp``; again is harmless."""
    families: dict[str, tuple[Callable[..., DDPStrategy], dict[str, Any]]] = {
        "ddp_hardthreshold": (DDPHardThresholdStrategy, {}),
        "local_hardthreshold": (LocalHardThresholdStrategy, {}),
    }
    for name, sparsifier_class in _SPARSIFIERS.items():
        families[f"ddp_{name}"] = (_sparse_ddp, {"sparsifier_class": sparsifier_class})
        families[f"local_{name}"] = (_sparse_local, {"sparsifier_class": sparsifier_class})
    for name, of_replicas, what in (
        ("hsdp_hardthreshold", HSDPHardThresholdStrategy, "sparse"),
        ("local_hsdp_hardthreshold", LocalHSDPHardThresholdStrategy, "local training, sparse"),
    ):
        if name not in StrategyRegistry:
            description = f"FSDP2 in a replica, {what} between replicas: hardthreshold, start method popen"
            StrategyRegistry.register(name, of_replicas, description)
    start_methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    for family, (strategy, arguments) in families.items():
        for suffix, start_method in start_methods.items():
            for ending, unused in (
                ("", {}),
                ("_find_unused_parameters_true", {"find_unused_parameters": True}),
                ("_find_unused_parameters_false", {"find_unused_parameters": False}),
            ):
                name = family + suffix + ending
                if name not in StrategyRegistry:
                    kind = "Local training, sparse" if name.startswith("local") else "Sparse DDP"
                    description = f"{kind}: {family.partition('_')[2]}, start method {start_method}"
                    StrategyRegistry.register(
                        name, strategy, description, start_method=start_method, **arguments, **unused
                    )
