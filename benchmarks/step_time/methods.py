"""What the names of methods say: sparsifier, density and steps between exchanges."""

from lightning_sparse import HardThreshold, TopK

HARD_THRESHOLD, OVERSHOOT = "hard_threshold_", "overshoot_"
DRIFT, FLOAT8 = "drift_", "_float8"


def parse_drift(method: str) -> tuple[bool, float, int]:
    """Return whether a method is local training, the density of its exchanges and the steps between them.

    ``drift_0.001_every_8`` sends as much as ``drift_0.001``, in an eighth of the exchanges. ``_float8`` at the end is
    the dtype of values.
    """
    if not method.startswith(DRIFT):
        return False, 0.0, 1
    density, _, every = method.removeprefix(DRIFT).removesuffix(FLOAT8).partition("_every_")
    return True, float(density) * int(every or 1), int(every or 1)


def target_density(method: str) -> float | None:
    """Return the density in a method's name, or None if the method needs no tuning."""
    is_drift, density, _ = parse_drift(method)
    if is_drift:
        return density
    is_threshold = method.startswith((HARD_THRESHOLD, OVERSHOOT))
    density = float(method.rpartition("_")[2]) if is_threshold else 1.0
    return density if density < 1 else None


def make_sparsifier(method: str) -> HardThreshold | TopK | None:
    """Return the sparsifier of a sparse method, with λ = 0 before tuning, or None."""
    if method.startswith((HARD_THRESHOLD, OVERSHOOT)):
        return HardThreshold(threshold=0.0, overshoot=0.75 if method.startswith(OVERSHOOT) else 0.0)
    return TopK(float(method.removeprefix("top_k_"))) if method.startswith("top_k_") else None
