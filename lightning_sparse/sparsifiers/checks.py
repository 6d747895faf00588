"""Checks of arguments, for the whole package and the recipes."""

from collections.abc import Sequence
from numbers import Real
from typing import Any


def is_number(value: object) -> bool:
    """Return whether this is a real number of Python or NumPy."""
    return isinstance(value, Real) and not isinstance(value, bool)


def require_flag(name: str, value: object) -> None:
    """Raise ValueError unless this is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"Invalid {name}={value!r}. Must be True or False.")


def require_count(name: str, value: object, least: int = 1, instead: str = "") -> None:
    """Raise ValueError unless this is an int, at least ``least``. ``instead`` ends the message.

    Checkpoints hold counts and must not hold NumPy's.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"Invalid {name}={value!r}. Must be a whole number of at least {least}{instead}.")


def require_density(density: float, example: str, name: str = "density") -> None:
    """Raise ValueError unless this is a density in (0, 1]."""
    if not is_number(density) or not 0 < density <= 1:
        raise ValueError(f"Invalid {name}={density!r}. Must be within (0, 1]; for example 0.001 sends {example}.")


def require_link(link_gbit_s: object) -> None:
    """Raise ValueError unless this is a usable rate in Gbit/s."""
    if not (is_number(link_gbit_s) and 1e-6 <= link_gbit_s <= 1e6):  # type: ignore[operator]
        raise ValueError(
            f"Invalid {link_gbit_s=}. Must be a worker's link in Gbit/s, within 1e-6 and 1e6, for example 10."
        )


def require_word(name: str, value: Any, allowed: Sequence[str | None]) -> None:
    """Raise ValueError unless an option's value is one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"Invalid {name}={value!r}. Must be one of {', '.join(map(repr, allowed))}.")
