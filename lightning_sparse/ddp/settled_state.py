"""What workers know alike of a training, as of the last step of an optimizer."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_sparse.ddp.arrival import Arrival
from lightning_sparse.ddp.learning_rates import LastLearningRates
from lightning_sparse.engine import Engine
from lightning_sparse.engine.holder import EngineHolder
from lightning_sparse.engine.snapshot import Snapshot


class SettledState(EngineHolder):
    """The base of what exchanges gradients of which only some train: its numbers as of the last that did.

    Args:
        engine: averages.
        parameter_names: the name of every parameter that DDP may bring.
        num_numbered: see ``Arrival``.
    """

    def __init__(self, engine: Engine, parameter_names: Mapping[Tensor, str], num_numbered: int | None) -> None:
        super().__init__(engine, parameter_names.values())
        self._rates = LastLearningRates(parameter_names)
        self._arrival = Arrival(parameter_names, num_numbered)
        self._bucket_names: list[tuple[str, ...]] = []
        self._note_numbers()

    def _settled_snapshot(self) -> Snapshot:
        """Return numbers and history as of the last optimizer step, without residuals."""
        snapshot = self._engine.snapshot(self._numbers, self._exchange_history)
        layout = [list(names) for names in self._layout]
        snapshot.numbers |= {"layout": layout, "learning_rates": self._rates.state_dict()}
        return snapshot

    def _restore_numbers(self, snapshot: Snapshot) -> None:
        self._engine.restore(snapshot)
        self._rates.load_state_dict(snapshot.numbers.get("learning_rates", {}))
        if snapshot.history.get("exchange"):  # of as many workers: with others, the last bits of sums differ anyway
            self._arrival.continue_with(snapshot.numbers.get("layout", []))
        self._note_numbers()

    def _count_step(self, names: set[str]) -> None:
        self._engine.calibrator.confirm(names)
        self._note_numbers()

    def _note_numbers(self) -> None:
        """Keep what a checkpoint holds of the step that has just counted; a later backward may be rolled back."""
        self._numbers, self._exchange_history = self._engine.numbers(), self._engine.exchange_history()
        self._layout = self._bucket_names

    def catch_up(self, *, knows: bool) -> None:
        """Learns from the first worker that knows which exchanges of late have trained. Collective.

        Args:
            knows: whether this one does: it had batches to the end.
        """
        own: Any = None
        if knows:
            running = self._engine.snapshot()
            running.history["sparsifier"] = self._engine.sparsifier.state_dict(self._numbers["next_step"])
            own = self._numbers, self._exchange_history, self._layout, running
        told = self.workers.first_object(own)
        if not knows:
            last_step, epoch = self._engine.last_step, self._engine.epoch
            self._numbers, self._exchange_history, self._layout, running = told
            self._engine.restore(running)
            self._engine.last_step, self._engine.epoch = last_step, epoch  # this worker took part in every exchange
