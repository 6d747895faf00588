"""Local training: workers run their own optimizers and exchange drifts from an anchor."""
