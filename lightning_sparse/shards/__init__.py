"""The door of sharded models: replicas whose parameters FSDP2 spreads over ranks, exchanged shard by shard."""

from lightning_sparse.shards.shard_averager import ShardModelAverager
from lightning_sparse.shards.shard_exchange import ShardExchange, shard_exchange

__all__ = ["ShardExchange", "ShardModelAverager", "shard_exchange"]
