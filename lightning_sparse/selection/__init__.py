"""Selects the coordinates of a flat bucket to send and keeps the rest, for all sparsifiers and devices."""
