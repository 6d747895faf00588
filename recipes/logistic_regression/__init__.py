"""Logistic regression with a known minimum: suboptimality, error norms and the theory's bounds."""
