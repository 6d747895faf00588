"""Callbacks and metrics, one per file."""
