"""What a module has beside the weights that training moves: buffers, and frozen parameters that code updates itself."""

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor, nn

from lightning_sparse.drift.fingerprints import fingerprints
from lightning_sparse.engine.grouping import local
from lightning_sparse.exchange import Workers


def ignored_names(module: nn.Module) -> set[str]:
    """Returns the parameters and buffers that live on one worker each, as DDP is told (experts of a mixture)."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


class UntrainedTensors:
    """Buffers, and parameters that require no gradient. What differs between workers is averaged, nothing else.

    So constants stay what they are to the last bit, and a statistic (batch norm) or a target network (a moving average
    of weights) that each worker has made from its own weights is shared. Only what was there at set-up, and only where
    it still has one size everywhere. Integers and truth values, by what they were at set-up, stay each worker's own.

    Args:
        module: whose.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers: list[str] = []
        self._names: list[str] = []
        self._kinds: dict[str, bool] = {}
        self._at_first: dict[str, Tensor] = {}
        self._told: dict[bool, dict[str, Tensor]] = {}
        self._is_set_up = False
        self.take_in_new()
        self._is_set_up = True

    def take_in_new(self) -> None:
        """Takes in new buffers, and frozen parameters of new layers; at set-up all of them."""
        known, is_set_up = set(self._names), self._is_set_up
        buffers = [name for name, _ in self._module.named_buffers()]
        if is_set_up and known.issuperset(buffers):
            return  # frozen parameters come with buffers, or are handled when they train
        ignored = ignored_names(self._module)
        frozen = [name for name, one in self._module.named_parameters() if not one.requires_grad]
        self._buffers += [name for name in buffers if name not in ignored | known]
        self._names += [name for name in (*frozen, *buffers) if name not in ignored | known]
        for name, one in self._tensors([name for name in self._names if name not in known]).items():
            self._kinds[name] = one.is_floating_point() or one.is_complex()
            # A new one differs from what it was at set-up, so that files hold each worker's.
            self._at_first[name] = torch.full((2,), nan) if is_set_up else fingerprints([one])

    def prints(self, *, only_buffers: bool) -> Tensor:
        """Returns what tells whether workers have the same: float64, two numbers each, on the tensors' device.

        Args:
            only_buffers: leaves frozen parameters out, which may be large.
        """
        self._told[only_buffers] = self._floating(only_buffers)
        tensors = list(self._told[only_buffers].values())
        return fingerprints(tensors) if tensors else torch.zeros(0, dtype=torch.float64)

    def average(self, workers: Workers, prints: Tensor, *, only_buffers: bool) -> None:
        """Averages what differs between workers. Collective.

        Args:
            workers: all of them.
            prints: everybody's ``prints``, shape (n, numbers), on the CPU.
            only_buffers: as for those.
        """
        workers.average(list(self.differing(prints, only_buffers=only_buffers).values()))

    def differing(self, prints: Tensor, *, only_buffers: bool) -> dict[str, Tensor]:
        """Returns by name what differs between workers and has one size; the same names on all of them.

        By what they told each other. What has another size by now, or has gone, takes part as it was then, for nothing.
        """
        if not prints.numel():
            return {}
        rows = prints.view(len(prints), -1, 2)
        is_same = (rows == rows[:1]).all(0)
        told, floating = self._told[only_buffers], self._floating(only_buffers)
        return {
            name: one if one.numel() == told[name].numel() and one.dtype == told[name].dtype else told[name]
            for (name, one), (has_one_hash, has_one_size) in zip(floating.items(), is_same.tolist(), strict=True)
            if has_one_size and not has_one_hash
        }

    def changed(self, workers: Workers | None = None) -> dict[str, Tensor]:
        """Returns by name, of any dtype, what is not as it was at set-up.

        Args:
            workers: on any of them; None on this one alone. Collective if given.
        """
        now = self._tensors(self._names)
        flags = [not torch.equal(fingerprints([one]), self._at_first[name]) for name, one in now.items()]
        if workers is not None and flags:
            counts = torch.tensor(flags, dtype=torch.int32, device=next(iter(now.values())).device)
            workers.all_reduce(counts).wait()
            flags = counts.bool().tolist()
        return {name: one for (name, one), flag in zip(now.items(), flags, strict=True) if flag}

    def _floating(self, only_buffers: bool) -> dict[str, Tensor]:
        names = self._buffers if only_buffers else self._names
        return self._tensors([name for name in names if self._kinds[name]])

    def _tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """By name; nothing in place of what has gone, and what requires a gradient by now has an anchor."""
        held = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        return {name: local(held[name]) if name in held else torch.zeros(0) for name in names}
