"""Logistic regression with 20 workers, whose minimum is known: suboptimality, error norms and the theory's bounds."""
