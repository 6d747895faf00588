"""What can be asked of whoever holds an engine, whatever it averages."""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from lightning.fabric.utilities import rank_zero_warn

from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.step_stats import StepStats
from lightning_sparse.exchange import Workers
from lightning_sparse.sparsifiers import HardThreshold, Sparsifier


class EngineHolder:
    """The base of what brings buckets to an engine.

    Args:
        engine: the holder's own.
        names: of all parameters that are averaged.
    """

    def __init__(self, engine: Engine, names: Collection[str]) -> None:
        self._engine = engine
        if isinstance(engine.sparsifier, HardThreshold):
            _warn_of_patterns(engine.sparsifier.layer_thresholds, names)

    @property
    def workers(self) -> Workers:
        """The workers that take part."""
        return self._engine.workers

    @property
    def sparsifier(self) -> Sparsifier:
        """The holder's own sparsifier; a calibrated λ is in it once calibration has ended."""
        return self._engine.sparsifier

    @property
    def last_step(self) -> StepStats | None:
        """The numbers of the last exchange, None before the first."""
        return self._engine.last_step

    def begin_epoch(self, epoch: int, learning_rates: Sequence[float]) -> None:
        """Tells the sparsifier that an epoch begins; ACCORDION needs to know. With a Trainer the strategy does it.

        Args:
            epoch: its number from 0, the same on all workers; again with the same is harmless.
            learning_rates: of all parameter groups of all optimizers.
        """
        self._engine.begin_epoch(epoch, learning_rates)

    @property
    def epoch(self) -> int | None:
        """The last that the sparsifier was told of; None where it does not know of any."""
        return self._engine.epoch

    def subscribe(self, receiver: Callable[[StepStats], None]) -> None:
        """Calls the receiver with the numbers of every exchange from now on, when it is over.

        It may run inside backward, on every worker: it must be quick and must not communicate.
        """
        self._engine.subscribe(receiver)

    def _place(self) -> dict[str, int]:
        return {"world_size": self.workers.num_workers, "rank": self.workers.rank}

    def _require_own(self, saved: Mapping[str, Any], advice: str) -> None:
        """Raises RuntimeError where a state was saved by another worker.

        Args:
            saved: what :meth:`_place` returned when it was saved, among others.
            advice: what else to do with states of other workers.
        """
        here = self._place()
        if {name: saved[name] for name in here} != here:
            raise RuntimeError(
                f"This state is of rank {saved['rank']} of {saved['world_size']} workers, and this is rank "
                f"{here['rank']} of {here['world_size']}. Load the file of the same rank, or {advice}."
            )


def _warn_of_patterns(patterns: Collection[str], names: Collection[str]) -> None:
    """Warns of patterns that match no name: what was meant by them does not happen."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            like = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or sorted(names)[:3]
            rank_zero_warn(
                f"lightning_sparse: layer_thresholds[{pattern!r}] matches no parameter and does nothing. Names are "
                f"{', '.join(map(repr, like))}, …; a pattern may hold *, as in '*.bias'."
            )
