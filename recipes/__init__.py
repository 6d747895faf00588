"""Complete trainings that reproduce published results, run by ``python -m recipes fit --config <recipe>.yaml``."""


class MissingDataError(FileNotFoundError):
    """A recipe's data set is not there and could not be fetched; the message says what to put where."""
