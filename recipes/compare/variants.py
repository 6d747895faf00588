"""Variants of a comparison and the grid of values to choose from."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

DENSITY, TUNED = "{density}", "{tuned}"


class Grid(NamedTuple):
    """Values of an argument, from which each variant takes the best.

    Attributes:
        argument: its name on the command line, without dashes.
        values: the values as text.
        mode: ``"min"`` or ``"max"``: the best metric. NaN is never the best.
    """

    argument: str
    values: list[str]
    mode: str

    def best(self, metrics: dict[str, float]) -> str:
        """Return the value with the best metric."""
        sign = 1 if self.mode == "min" else -1
        return min(metrics, key=lambda value: math.inf if math.isnan(metrics[value]) else sign * metrics[value])


def parse_grid(text: object, mode: str) -> Grid:
    """Return the grid of ``NAME=VALUE,VALUE``.

    Raises:
        ValueError: the text has another form or repeats a value.
    """
    argument, _, values = text.removeprefix("--").partition("=") if isinstance(text, str) else ("", "", "")
    listed = values.split(",")
    if not (argument and all(listed) and len({*listed}) == len(listed)):
        raise ValueError(f"Invalid grid {text!r}. Must be NAME=VALUE,VALUE, as in model.learning_rate=0.01,0.1.")
    return Grid(argument, listed, mode)


@dataclass(frozen=True)
class Variant:
    """A row of the table.

    Attributes:
        label: the name, and the target density if there are several.
        name: the name without the density.
        arguments: command-line arguments; ``{tuned}`` stands for the tuned value.
        density: target density; None without a target.
        start: first value of ``{tuned}``; None if nothing is tuned.
    """

    label: str
    name: str
    arguments: tuple[str, ...]
    density: float | None = None
    start: float | None = None

    def with_tuned(self, value: str | None) -> list[str]:
        """Return the arguments with ``value`` in place of ``{tuned}``."""
        return [argument.replace(TUNED, value or "") for argument in self.arguments]


def parse_variant(text: str) -> tuple[str, str]:
    """Return label and arguments of ``LABEL: ARGUMENTS``.

    Raises:
        ValueError: the text has another form.
    """
    label, colon, variant_arguments = f"{text} ".partition(": ")
    if not (label and colon):
        raise ValueError(f"Invalid variant {text!r}. Must be 'LABEL: ARGUMENTS'; the arguments may be empty.")
    return label, variant_arguments.strip()


def expand_variants(listed: Mapping[str, object], densities: Sequence[float]) -> list[Variant]:
    """Return the variants, with a copy per density of those that use ``{density}`` or ``{tuned}``.

    Args:
        listed: arguments as text by label, or ``{"arguments": …, "tuned": start}`` for arguments with ``{tuned}``. The
            search for the first density begins at ``start``.
        densities: target densities, within (0, 1].

    Raises:
        ValueError: a density or a variant is invalid, or a variant needs a density and ``densities`` is empty.
    """
    if wrong := [density for density in densities if not (isinstance(density, (int, float)) and 0 < density <= 1)]:
        raise ValueError(f"Invalid densities {wrong}. Must be within (0, 1].")
    variants = []
    for name, given in listed.items():
        text, start = given, None
        if isinstance(given, Mapping):
            if (
                given.keys() != {"arguments", "tuned"}
                or not isinstance(given["tuned"], (int, float))
                or given["tuned"] <= 0
            ):
                raise ValueError(f"Variant {name!r} is {given!r}. Give 'arguments', and a number above 0 as 'tuned'.")
            text, start = given["arguments"], float(given["tuned"])
        if not isinstance(text, str):
            raise ValueError(f"Variant {name!r} is {given!r}. Give its arguments as text.")
        arguments = tuple(shlex.split(text))
        if (TUNED in text) != (start is not None):
            raise ValueError(f"Variant {name!r} must have both {TUNED} and its first value, as 'tuned: …', or neither.")
        if DENSITY not in text and start is None:
            variants.append(Variant(name, name, arguments))
            continue
        if not densities:
            raise ValueError(f"Variant {name!r} needs a density. Give --densities 0.01, or densities: [0.01] in YAML.")
        for density in densities:
            # The density of a hard threshold is about proportional to 1 / λ².
            first_value = None if start is None else start * math.sqrt(densities[0] / density)
            variant_arguments = tuple(argument.replace(DENSITY, f"{density:g}") for argument in arguments)
            label = f"{name}, {100 * density:g} %" if len(densities) > 1 else name
            variants.append(Variant(label, name, variant_arguments, density, first_value))
    return variants
