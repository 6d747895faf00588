"""The door of local training: every worker steps its own optimizer, and drifts from a shared anchor are exchanged."""

from lightning_sparse.drift.averager import SparseModelAverager
from lightning_sparse.drift.options import DriftOptions

__all__ = ["DriftOptions", "SparseModelAverager"]
