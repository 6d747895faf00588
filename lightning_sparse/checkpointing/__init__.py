"""Checkpoints of all strategies: one format, in one file or in a folder that all ranks write."""
