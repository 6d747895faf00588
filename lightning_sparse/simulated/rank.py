"""A strategy on one device that is one of several workers while that one has its turn."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities import rank_zero_only
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor
from typing_extensions import override

from lightning_sparse.simulated.limits import refuse
from lightning_sparse.simulated.turns import Turns
from lightning_sparse.strategies.sparse_strategy import SparseStrategy


class InTurn(SparseStrategy, SingleDeviceStrategy):
    """Has the rank of the worker whose turn it is, and 0 of 1 else.

    Args:
        num_workers: n.
        **kwargs: of the base.
    """

    def __init__(self, num_workers: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_workers = num_workers
        self._turns: Turns | None = None
        self._first_states: dict[str, Any] = {}

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        self._require_nobody("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        self._require_nobody("broadcast")
        return super().broadcast(obj, src)

    def _require_nobody(self, what: str) -> None:
        if self.world_size > 1:
            refuse(f"{what}: one has run when another has not")

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @contextmanager
    def _as_worker(self, rank: int) -> Iterator[None]:
        """Within it this process is, to whoever asks the trainer, the worker of that rank."""
        self._be(rank, self.num_workers)
        try:
            with self._random_numbers_of(rank):
                yield
        finally:
            self._be(0, 1)

    @contextmanager
    def _random_numbers_of(self, rank: int) -> Iterator[None]:
        """Within it random numbers are this worker's: before training begins, what the first one drew in its place."""
        if self._turns is not None:
            with self._turns.random_numbers_of(rank):
                yield
        elif rank == 0:
            self._first_states = _collect_rng_states(self._has_cuda)
            yield
        else:  # loaders that are made because somebody asks how many steps there will be
            after = _collect_rng_states(self._has_cuda)
            _set_rng_states(self._first_states)
            yield
            _set_rng_states(after)

    @property
    def _has_cuda(self) -> bool:
        return self.root_device.type == "cuda"

    def _be(self, rank: int, world_size: int) -> None:
        self.global_rank = self.local_rank = rank  # all are on one node
        self.world_size = world_size
        setattr(rank_zero_only, "rank", rank)  # noqa: B010 (mypy knows of no such attribute)
