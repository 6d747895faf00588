"""A sharded model between two steps: what FSDP2 has gathered for a forward is let go, and shards are what counts."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def reshard(module: nn.Module) -> None:
    """Lets go of gathered parameters, of which FSDP2 keeps the outermost module's after a forward without a backward.

    While it has them, the module shows these as its parameters, and a forward that comes does not see what has been
    written to the shards.
    """
    for one in module.modules():
        if isinstance(one, FSDPModule):
            one.reshard()


class Resharded(nn.Module):
    """A sharded model as a module whose tensors can be asked for at any time between steps, and are the shards.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._of = [module]  # not a child, whose names would begin with its own

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the model."""
        reshard(self._of[0])
        return self._of[0].named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Those of the model."""
        return self._of[0].named_buffers(*args, **kwargs)
