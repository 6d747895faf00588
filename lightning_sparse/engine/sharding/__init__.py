"""Models that FSDP2 shards: requirements, ranks of a replica, and numbers of all shards together."""
