"""Workers that have run out of batches while others go on, in torch's ``Join`` or ``DistributedDataParallel.join``.

Such a worker answers each exchange of the others with zeros and steps on nothing. So it keeps its residual for its next
backward: sent values would look like dropped gradients, which are rolled back and sent again. Nor does it see on which
exchanges the others step; λ and the number of the next step depend on them. When all have run out, it receives both
from a worker that has seen these steps.
"""

import weakref
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.exchange import current_device
from lightning_sparse.gradients.sparse_state import SparseState


class SparseJoinHook(JoinHook):
    """DDP's own hook of ``Join``, which also notifies a sparse state.

    Args:
        hook: DDP's.
        state: of the module's communication hook.
        device: the module's.
    """

    def __init__(self, hook: JoinHook, state: SparseState, device: torch.device | None) -> None:
        self._hook, self._state, self._device = hook, state, device

    def main_hook(self) -> None:
        """Takes part in a step of the workers that go on."""
        with self._state.idle():
            self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Ends the context, on all workers: each has the weights of a worker that ran out last."""
        self._hook.post_hook(is_last_joiner)
        with current_device(self._device):
            self._state.catch_up(knows=is_last_joiner)


def follow_join(module: DistributedDataParallel, state: SparseState) -> None:
    """Notifies the state of every ``Join`` context that this module is in, from now on."""
    own_module, own_state = weakref.ref(module), weakref.ref(state)  # a reference cycle would not be freed at once

    def join_hook(**options: Any) -> JoinHook:
        if not options.get("divide_by_initial_world_size", True):
            raise ValueError(
                "Invalid divide_by_initial_world_size=False. With a communication hook averages are over all workers, "
                "also those that have run out of batches: leave it at True."
            )
        module, state = own_module(), own_state()
        assert module is not None, "the caller holds it"
        hook = type(module).join_hook(module, **options)  # type: ignore[no-untyped-call]
        return hook if state is None else SparseJoinHook(hook, state, module.device)

    vars(module)["join_hook"] = join_hook
