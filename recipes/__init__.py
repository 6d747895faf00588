"""Trainings that reproduce published results: ``python -m recipes fit --config <recipe>.yaml``."""

from recipes.missing_data import MissingDataError

__all__ = ["MissingDataError"]
