"""Holds the average volume at the density that the user asked for, after calibration."""

from math import exp, log

from torch import finfo, float32

RECENT_STEPS = 10
"""The running density is averaged over about this many steps. This and the next two hold at a pace of 1."""
HORIZON = 100
"""The controller makes up for a surplus or deficit since calibration in about this many steps."""
GAIN = 0.04
"""λ changes by this share of the ratio, in logarithms. Density goes about with 1/λ², so gain and average make a loop of
damping ratio 1 / sqrt(8 · GAIN · RECENT_STEPS) = 0.56."""
UNHURRIED, FASTEST = 0.01, 5.0
"""Up to this density the pace is 1. Above it, it grows in proportion, up to this many times: a coordinate is sent about
every 1 / density steps, and after so many a change of λ has had its effect. With an exchange every 30 steps there may
be 40 of them in a whole training. Faster still, λ swings where all coordinates move about equally far, as Adam's do."""
FURTHEST = log(16.0)
"""A running density that is further off than this factor counts as this far off."""
FAR_TOO_MUCH, CATCHING_UP = 2.0, 0.2
"""While both the running and the present density exceed what was asked for by more than this factor, λ grows by this
share of the excess as well: calibrated on the first steps of a warm-up it is soon a hundred times too small, and what
is sent meanwhile would have to be saved for a thousand steps. At a pace of 1 λ grows by 95 % a step at most, and falls
by 11 %; at the fastest it is three times as large, and falls by 43 %."""
MOST_OWED = log(4.0)
"""The density aimed at is never further from that asked for than this factor."""
SMALLEST, LARGEST = finfo(float32).tiny, finfo(float32).max
"""λ stays between these: what is compared with it has no others."""


def pace_of(density: float) -> float:
    """Returns how many times faster λ changes than at densities of 1 % and less.

    Example:
        >>> [pace_of(density) for density in (0.001, 0.01, 0.03, 0.3)]
        [1.0, 1.0, 3.0, 5.0]
    """
    return min(FASTEST, max(1.0, density / UNHURRIED))


class DensityControl:
    """Adjusts λ slowly from densities that all workers saw, to the same value on all of them.

    A proportional controller that aims at the density asked for, and makes up for a surplus or deficit so far::

        owed   = Σ (asked − seen)                          in steps at the density asked for
        aim    = asked · exp(owed · pace / HORIZON)        within a factor of four
        λ      ← λ · (recent / aim) ^ (GAIN · pace) · max(1, min(recent, seen) / (2 · asked)) ^ CATCHING_UP

    Args:
        density: the share of coordinates to send on average, in (0, 1].
        pace: how many times faster λ changes than at small densities; see ``pace_of``.
    """

    def __init__(self, density: float, pace: float) -> None:
        self.density = density
        self._pace = pace
        self._recent = 1.0
        self._owed = 0.0

    def corrected(self, threshold: float, density: float, *, is_all: bool = False) -> float:
        """Returns λ for the next step.

        Args:
            threshold: λ of this step.
            density: the density of this step, in 0…1.
            is_all: whether all values but zeros were sent. A smaller λ would have sent no more, so λ does not fall, and
                the controller does not make up for this step.
        """
        seen = density / self.density
        if is_all and seen < 1:
            self._recent += (seen - self._recent) * self._pace / RECENT_STEPS
            return threshold
        most = MOST_OWED * HORIZON / self._pace
        self._owed = min(most, self._owed + 1 - seen)  # bounded: a long deficit is not sent at once
        self._recent += (seen - self._recent) * self._pace / RECENT_STEPS
        aim = max(-MOST_OWED, min(MOST_OWED, self._owed * self._pace / HORIZON))
        off = log(self._recent) - aim if self._recent > 0 else -FURTHEST
        excess = log(max(1.0, min(self._recent, seen) / FAR_TOO_MUCH))
        gain = GAIN * self._pace
        change = gain * max(-FURTHEST, min(FURTHEST, off)) + CATCHING_UP * min(FURTHEST, excess)
        return max(SMALLEST, min(LARGEST, threshold * exp(change)))

    def state_dict(self) -> dict[str, float]:
        """Returns the running density and the deficit, both relative to the density asked for."""
        return {"recent": self._recent, "owed": self._owed}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues from what ``state_dict`` returned."""
        self._recent, self._owed = state["recent"], state["owed"]
