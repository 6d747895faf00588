"""Sparsifiers, one module each: pure tensors, no communication and no Lightning."""

from lightning_sparse.sparsifiers.accordion import Accordion
from lightning_sparse.sparsifiers.gaussian_k import GaussianK
from lightning_sparse.sparsifiers.hard_threshold import Dense, HardThreshold, ThresholdRun, exceed
from lightning_sparse.sparsifiers.protocol import (
    LayerLayout,
    MarkingSparsifier,
    Selection,
    Sparsifier,
    WholeStep,
    in_order,
    require_sparsifier,
)
from lightning_sparse.sparsifiers.random_k import RandomK
from lightning_sparse.sparsifiers.rounding import ScaledIntegerRounding, StochasticRounding
from lightning_sparse.sparsifiers.top_k import TopK

__all__ = [
    "Accordion",
    "Dense",
    "GaussianK",
    "HardThreshold",
    "LayerLayout",
    "MarkingSparsifier",
    "RandomK",
    "ScaledIntegerRounding",
    "Selection",
    "Sparsifier",
    "StochasticRounding",
    "ThresholdRun",
    "TopK",
    "WholeStep",
    "exceed",
    "in_order",
    "require_sparsifier",
]
