"""Reads the scalars of a training from its TensorBoard files."""

import sys
from dataclasses import dataclass
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@dataclass(frozen=True)
class Run:
    """The TensorBoard scalars of a training: steps and values by name."""

    steps: dict[str, list[int]]
    values: dict[str, list[float]]

    @property
    def num_elements(self) -> int:
        """d, the number of elements of the gradient, of 4 bytes each."""
        return round(self.values["gradient_bytes"][0] / 4)


def read(folder: Path) -> Run:
    """Return the scalars of the only TensorBoard run below a folder."""
    found = sorted({file.parent for file in folder.rglob("events.out.tfevents.*")})  # a resumed run has several files
    if len(found) != 1:
        names = ", ".join(run.name for run in found) or "none"
        sys.exit(f"{folder} holds {len(found)} runs ({names}). It must hold one run: remove the others or train again.")
    events = EventAccumulator(str(found[0]), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    return Run(
        steps={name: [point.step for point in points] for name, points in scalars.items()},
        values={name: [point.value for point in points] for name, points in scalars.items()},
    )
