"""Averages gradients in DDP's communication hook, or per shard before an optimizer step."""

from lightning_sparse.gradients.comm_hook import register_comm_hook
from lightning_sparse.gradients.sparse_state import SparseState

__all__ = ["SparseState", "register_comm_hook"]
