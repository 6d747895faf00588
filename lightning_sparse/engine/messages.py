"""What is said of settings that do not fit what is there."""

import difflib
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn


def say_other_sparsifier(settings: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Says that a run resumes with other settings of its sparsifier, and in what they differ."""
    names = [name for name in {**before, **settings} if settings.get(name) != before.get(name)]
    now, then = (", ".join(f"{name}={one.get(name, '(default)')}" for name in names) for one in (settings, before))
    rank_zero_info(
        f"lightning_sparse: the sparsifier is not the one of the checkpoint: {now} instead of {then}. That of now is "
        "used; with a density, calibration begins anew."
    )


def warn_of_forgotten(norm: float | None) -> None:
    """Warns that saved residuals are lost, as this run keeps none."""
    if norm:
        rank_zero_warn(
            f"lightning_sparse: the saved residuals (norm {norm:.3g}) are lost: error_feedback='none' keeps none. "
            "Resume with error_feedback='gradient' to keep them."
        )


def say_new_layers(new: Collection[str], gone: Collection[str]) -> None:
    """Says which parameters of a model were added, replaced or removed during training."""
    kinds = {
        "replaced": sorted(name for name in new if name in gone),
        "added or unfrozen": sorted(name for name in new if name not in gone),
        "removed": sorted(name for name in gone if name not in new),
    }
    changes = [
        f"{len(names)} parameters were {kind} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for kind, names in kinds.items()
        if names
    ]
    if changes:
        begin = " All workers begin with the mean of the new ones." if new else ""
        rank_zero_info(f"lightning_sparse: {', '.join(changes)}.{begin}")


def warn_of_patterns(patterns: Collection[str], names: Collection[str]) -> None:
    """Warns of patterns that match no name: what was meant by them does not happen."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            like = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or sorted(names)[:3]
            rank_zero_warn(
                f"lightning_sparse: layer_thresholds[{pattern!r}] matches no parameter and does nothing. Names are "
                f"{', '.join(map(repr, like))}, …; a pattern may hold *, as in '*.bias'."
            )
