"""Steps of which values can travel as multiples."""

from math import frexp, ldexp

SMALLEST_STEP, LARGEST_STEP = 2.0**-126, 2.0**100
"""Within these 1 / ε and what is made of ε are float32 numbers, too."""


def power_of_two(largest: float) -> float:
    """Returns the largest power of two that is no larger than this positive number, within what a step may be."""
    _, exponent = frexp(largest)
    return min(max(ldexp(1.0, exponent - 1), SMALLEST_STEP), LARGEST_STEP)
