"""What workers know alike of a training, as of the last step of an optimizer."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_sparse.ddp.arrival import Arrival
from lightning_sparse.ddp.learning_rates import LastLearningRates
from lightning_sparse.engine import Engine
from lightning_sparse.engine.holder import EngineHolder


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
        self._note_shared_state()

    def shared_state(self) -> dict[str, Any]:
        """Returns what was the same on every worker when an optimizer stepped last, in plain containers."""
        rates = {"learning_rates": self._rates.state_dict()}
        return self._shared | rates | self._sparsifier_state(self._shared["next_step"])

    def load_shared_state(self, saved: Mapping[str, Any], *, same_world_size: bool) -> None:
        """Continues from what ``shared_state`` returned in another run.

        λ and its calibration continue where the sparsifier has the settings of then; with others those of now hold.

        Args:
            saved: the other run's.
            same_world_size: whether it had as many workers; if not, the history of its exchange says nothing.
        """
        self._engine.load_shared_state(saved, same_world_size=same_world_size)
        self._rates.load_state_dict(saved["learning_rates"])
        if same_world_size:
            self._arrival.continue_with(saved["layout"])
        self._note_shared_state()

    def _count_step(self, names: set[str]) -> None:
        self._engine.calibrator.confirm(names)
        self._note_shared_state()

    def _note_shared_state(self) -> None:
        self._shared = self._engine.shared_state() | {"layout": [list(names) for names in self._bucket_names]}

    def catch_up(self, *, knows: bool) -> None:
        """Learns from the first worker that knows which exchanges of late have trained. Collective.

        Args:
            knows: whether this one does: it had batches to the end.
        """
        own = self._shared, self._engine.shared_state() | self._sparsifier_state(self._shared["next_step"])
        settled, running = self.workers.first_object(own if knows else None)
        if not knows:
            last_step, epoch = self._engine.last_step, self._engine.epoch
            self._engine.load_shared_state(running, same_world_size=True)
            self._engine.last_step, self._engine.epoch = last_step, epoch  # of which it was told like all others
            self._shared = settled
