"""The door of sharded models: replicas whose parameters FSDP2 spreads over ranks, exchanged shard by shard."""

from lightning_sparse.shards.shard_exchange import ShardExchange, shard_exchange

__all__ = ["ShardExchange", "shard_exchange"]
