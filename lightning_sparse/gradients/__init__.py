"""Averages gradients in DDP's communication hook, or per shard before an optimizer step."""
