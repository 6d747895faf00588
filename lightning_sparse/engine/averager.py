"""The base class of all averagers."""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from operator import index
from typing import Any, ClassVar

from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor

from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.grouping import local, real_numel
from lightning_sparse.engine.optimizer_steps import ParameterStepObserver
from lightning_sparse.engine.residuals import ResidualMemory
from lightning_sparse.engine.snapshot import Snapshot, copied
from lightning_sparse.engine.step_stats import StepStats
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.selection.bucket import FlatBucket
from lightning_sparse.sparsifiers.hard_threshold import HardThreshold


class Averager:
    """The base class of all averagers, which pass buckets to an engine.

    Args:
        engine: the engine of this averager alone.
        names: the names of all averaged parameters.

    Attributes:
        kind: the averaged tensors: ``"gradients"`` or ``"drifts"``.
        workers: the workers that exchange values.
        sparsifier: that of the engine.
        residuals: unsent values, only of averagers of gradients.
        is_exchanging: whether an exchange is running or was interrupted.
        epoch: the epoch of the last ``begin_epoch``; None if unknown.
        replica: the ranks among which a model is sharded; only this rank if it is not sharded.
        place: this rank and the number of ranks, as ``state_dict`` saves them.
        step_observer: observes optimizer steps on these parameters; None for DDP's buckets and simulated workers.
    """

    kind: ClassVar[str]
    residuals: ResidualMemory
    is_exchanging = False
    may_have_unsent = True
    """Whether any worker can have unsent values; the same on all workers."""
    epoch: int | None = None
    replica = Workers(None, 0, 1)
    step_observer: ParameterStepObserver | None = None
    _advice_for_others = "begin without it"
    _parameters: Mapping[str, Tensor]
    _committed_numbers: Mapping[str, Any] | None = None
    """The numbers before an exchange on which no optimizer has stepped yet; None if the current ones are committed."""

    def __init__(self, engine: Engine, names: Collection[str]) -> None:
        self._engine = engine
        self.workers, self.sparsifier = engine.workers, engine.sparsifier
        self.place = {"world_size": self.workers.num_workers, "rank": self.workers.rank}
        if isinstance(engine.sparsifier, HardThreshold):
            warn_of_patterns(engine.sparsifier.layer_thresholds, names)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters by name; distributed tensors if they are sharded."""
        return self._parameters

    @property
    def parameter_sizes(self) -> dict[str, int]:
        """The real numbers that this worker exchanges per parameter, two for a complex element."""
        return {name: real_numel(local(parameter)) for name, parameter in self._parameters.items()}

    @property
    def last_step(self) -> StepStats | None:
        """The statistics of the last exchange, None before the first."""
        return self._engine.last_step

    @property
    def wait_seconds(self) -> float:
        """Seconds that the end of the last exchange took; on a GPU, with the wait for queued backward work."""
        return self._engine.wait_seconds

    def own_metrics(self) -> dict[str, float]:
        """Return further metrics to log with the last exchange."""
        return {"sparse/exchange_wait_ms": 1e3 * self.wait_seconds}

    def begin_epoch(self, epoch: int, learning_rates: Sequence[float]) -> None:
        """Begin an epoch in the sparsifier; a Trainer's strategy calls this.

        Args:
            epoch: the number of the epoch from 0, the same on all workers; you may repeat a call.
            learning_rates: the learning rates of all parameter groups of all optimizers.

        Raises:
            TypeError: the epoch is not an integer, or the learning rates are not a list of numbers.
        """
        try:
            number = index(epoch)
            rates = [float(rate) for rate in learning_rates]  # a scheduler may change a tensor in place
        except (TypeError, ValueError):
            raise TypeError(
                f"Got begin_epoch({epoch!r}, {learning_rates!r}). Give the number of the epoch, and the learning rates "
                "of all parameter groups in a list."
            ) from None
        self.epoch = number
        self.sparsifier.begin_epoch(number, rates)

    def subscribe(self, receiver: Callable[[StepStats], None]) -> None:
        """Call the receiver with the statistics of each later exchange when it ends.

        The receiver may run inside backward, on every worker. It must be fast and must not communicate.
        """
        if not callable(receiver):
            raise TypeError(f"Invalid {receiver=}. Must be a function of StepStats.")
        self._engine.subscribers.append(receiver)

    def watch_next(self, receiver: Callable[[FlatBucket], None]) -> None:
        """Call the receiver with every bucket of the next exchange, before its values are selected.

        The receiver sees this worker's values and must not change or keep them. It may run inside backward.
        """
        self._engine.watch_next = receiver

    def set_threshold(self, threshold: float) -> None:
        """Set λ from the next step on; ends a calibration. Pass the same value on all workers.

        Args:
            threshold: λ ≥ 0, in the units of the averaged tensors. 0 sends everything until you set another λ. With a
                target density, any λ above 0 is then adjusted.

        Raises:
            TypeError: the sparsifier is not a hard threshold.
            ValueError: the threshold is negative, NaN or infinite.
        """
        calibrator = self._engine.given_calibrator
        calibrator.set_threshold(threshold)
        if self._committed_numbers is not None:
            self._committed_numbers = {**self._committed_numbers, **calibrator.state_dict()}

    # State.

    def snapshot(self, workers: Workers | None = None) -> Snapshot:
        """Return the state from which this worker continues exactly, as of the last optimizer step.

        Args:
            workers: if given, averagers of drifts agree in this group on the saved tensors, a collective call.
        """
        snapshot = self._engine.snapshot(self._committed_numbers)
        # Sorted, because bucket layouts may differ between workers in the first step.
        snapshot.own["unsent"] = dict(sorted(self.residuals.layers().items()))
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from those parts of a snapshot that fit the model, after ``reset``. Not collective."""
        self._engine.restore(snapshot)
        residuals = snapshot.own.get("unsent", {})
        sizes = {name: real_numel(local(parameter)) for name, parameter in self.parameters.items()}
        fitting = {name: residual for name, residual in residuals.items() if residual.numel() == sizes.get(name)}
        self.residuals.load_state_dict(fitting)

    def reset(self) -> None:
        """Return to the state before the first step. Not collective."""
        self._committed_numbers = self.epoch = None
        self.is_exchanging = False
        self.residuals.load_state_dict({})
        self._engine.reset()

    def require_finished(self) -> None:
        """Raise if an exception interrupted the last exchange, so that unsent values may be wrong.

        Raises:
            RuntimeError: the exchange did not finish.
        """
        if self.is_exchanging:
            raise RuntimeError(
                f"An exception interrupted an exchange of {self.kind}. Call load_state_dict() or reset()."
            )

    @property
    def progress(self) -> object:
        """A value that is equal on all workers after the same number of steps."""
        return self._engine.next_step

    def obstacles(self) -> list[str]:
        """Return reasons why a checkpoint cannot hold this worker's tensors now."""
        return ["it was saved in the middle of an exchange, which an exception interrupted"] * self.is_exchanging

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which this worker continues exactly.

        Without a Trainer, save one file per worker. The state consists of plain containers and copies, so
        ``torch.load(weights_only=True)`` reads it. Not collective.
        """
        return {"kind": self.kind, **self.place, **copied(vars(self.snapshot()))}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from ``state_dict`` of the worker of the same rank, before the first step.

        Raises:
            RuntimeError: the rank or the number of workers differs, or the state is of another kind.
        """
        names = [field.name for field in fields(Snapshot)]
        found = list(saved) if isinstance(saved, Mapping) else []
        missing = [name for name in ("kind", *self.place, *names) if name not in found]
        if missing:
            raise RuntimeError(
                f"This is not the state of a {type(self).__name__}: it has {', '.join(map(str, found)) or 'nothing'}, "
                f"and lacks {', '.join(missing)}."
            )
        if saved["kind"] != self.kind:
            raise RuntimeError(
                f"This is a state of {saved['kind']}, but {type(self).__name__} exchanges {self.kind}. Load the result "
                "of its own state_dict()."
            )
        if any(saved[name] != here for name, here in self.place.items()):
            raise RuntimeError(
                f"This state is of rank {saved['rank']} of {saved['world_size']} workers, and this is rank "
                f"{self.place['rank']} of {self.place['world_size']}. Load the file of the same rank, or "
                f"{self._advice_for_others}."
            )
        self.reset()
        self.restore(Snapshot(**{name: saved[name] for name in names}))

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raise TypeError, because an averager belongs to its process group."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it belongs to this process and its process group. "
            "Save state_dict() and load it into a new averager."
        )


def warn_of_patterns(patterns: Collection[str], names: Collection[str]) -> None:
    """Warn about patterns that match no name and have no effect."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            similar = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or sorted(names)[:3]
            rank_zero_warn(
                f"lightning_sparse: layer_thresholds[{pattern!r}] matches no parameter and does nothing. Names are "
                f"{', '.join(map(repr, similar))}, …; a pattern may contain *, as in '*.bias'."
            )
