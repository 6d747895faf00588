"""What is compared: labels, arguments, densities, and values of an argument of which each takes the best."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

DENSITY, TUNED = "{density}", "{tuned}"


class Grid(NamedTuple):
    """Values of an argument, of which each variant takes the best.

    Attributes:
        argument: its name on the command line, without dashes.
        values: as they are written there.
        mode: ``"min"`` or ``"max"``: what is best of a metric. NaN never is.
    """

    argument: str
    values: list[str]
    mode: str

    def best(self, metrics: dict[str, float]) -> str:
        """Returns the value with the best metric."""
        sign = 1 if self.mode == "min" else -1
        return min(metrics, key=lambda value: math.inf if math.isnan(metrics[value]) else sign * metrics[value])


def parsed_grid(text: object, mode: str) -> Grid:
    """Returns the grid of ``NAME=VALUE,VALUE``.

    Raises:
        ValueError: it is none.
    """
    argument, _, values = text.removeprefix("--").partition("=") if isinstance(text, str) else ("", "", "")
    listed = values.split(",")
    if not (argument and all(listed) and len({*listed}) == len(listed)):
        raise ValueError(f"Invalid grid {text!r}. Must be an argument and values: model.learning_rate=0.01,0.1.")
    return Grid(argument, listed, mode)


@dataclass(frozen=True)
class Variant:
    """One line of the table.

    Attributes:
        label: with the density that was asked for, where there are several.
        name: without it.
        arguments: of the command line; ``{tuned}`` stands for what is found.
        density: that was asked for; None where nothing was.
        start: where the search for ``{tuned}`` begins; None where there is none.
    """

    label: str
    name: str
    arguments: tuple[str, ...]
    density: float | None = None
    start: float | None = None

    def with_tuned(self, value: str | None) -> list[str]:
        """Returns the arguments with what was found in its place."""
        return [argument.replace(TUNED, value or "") for argument in self.arguments]


def labelled(text: str) -> tuple[str, str]:
    """Returns label and arguments of ``LABEL: ARGUMENTS``.

    Raises:
        ValueError: it is something else.
    """
    label, colon, own = f"{text} ".partition(": ")
    if not (label and colon):
        raise ValueError(f"Invalid variant {text!r}. Must be 'LABEL: ARGUMENTS'; the arguments may be none.")
    return label, own.strip()


def expanded(listed: Mapping[str, object], densities: Sequence[float]) -> list[Variant]:
    """Returns a variant for each density, of those that ask for one.

    Args:
        listed: by label the arguments as text, or ``{"arguments": …, "tuned": start}`` where ``{tuned}`` is among them:
            with the start the first density is tried.
        densities: shares of coordinates.

    Raises:
        ValueError: a variant asks for a density or is to be tuned, and there is none to take.
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
                raise ValueError(f"Variant {name!r} is {given!r}. Give arguments, and as tuned a number above 0.")
            text, start = given["arguments"], float(given["tuned"])
        if not isinstance(text, str):
            raise ValueError(f"Variant {name!r} is {given!r}. Give its arguments as text.")
        arguments = tuple(shlex.split(text))
        if (TUNED in text) != (start is not None):
            raise ValueError(f"Variant {name!r}: {TUNED} and a number to start from, as tuned: …, go together.")
        if DENSITY not in text and start is None:
            variants.append(Variant(name, name, arguments))
            continue
        if not densities:
            raise ValueError(f"Variant {name!r} asks for a density, and none is given: --densities 0.01.")
        for density in densities:
            # The density of a hard threshold goes about with 1 / λ².
            begin = None if start is None else start * math.sqrt(densities[0] / density)
            own = tuple(argument.replace(DENSITY, f"{density:g}") for argument in arguments)
            label = f"{name}, {100 * density:g} %" if len(densities) > 1 else name
            variants.append(Variant(label, name, own, density, begin))
    return variants
