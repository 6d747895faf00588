"""The time of a complete training step with each exchange method."""
