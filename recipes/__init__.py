"""Complete trainings that reproduce published results, run by ``python -m recipes fit --config <recipe>.yaml``."""

from recipes.missing_data import MissingDataError

__all__ = ["MissingDataError"]
