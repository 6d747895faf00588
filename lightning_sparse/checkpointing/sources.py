"""Where a resume reads tensors: one file that holds them whole, or a folder that all ranks have written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from lightning_sparse.checkpointing.collecting import OPTIMIZERS
from lightning_sparse.engine.grouping import as_real, kept_dtype, local
from lightning_sparse.engine.snapshot import DamagedStateError
from lightning_sparse.exchange import raised_together
from lightning_sparse.exchange.sharded_tensors import like_parameter, own_part, read_folder, sizes_in_folder

SHARED = "shared"
ALWAYS_FINITE = ("residual", "unsent")

Place = tuple[str, str]
"""A worker's number or ``SHARED``, and the kind of tensors."""


class FileSource:
    """Whole tensors in the content itself.

    Args:
        content: of the checkpoint.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def _held(self, place: Place) -> Mapping[str, Any]:
        worker, kind = place
        of_workers = {str(place): held for place, held in enumerate(self._content["workers"])}
        held = self._content["shared"] if worker == SHARED else of_workers.get(worker, {})
        tensors: Mapping[str, Any] = held.get(kind, {})
        return tensors

    def sizes(self, place: Place) -> dict[str, int]:
        """Return the number of elements of each saved tensor by parameter name."""
        return {name: tensor.numel() for name, tensor in self._held(place).items()}

    def whole(self, place: Place, names: Sequence[str]) -> dict[str, Tensor]:
        """Return whole tensors, flat."""
        return {name: self._held(place)[name] for name in names}

    def parts(self, place: Place, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's parts, flat, of tensors that are saved in the parameters' sizes."""
        held = self._held(place)
        return {name: own_part(parameter, held[name]) for name, parameter in parameters.items()}

    def load_optimizers(self, worker: int, module: Any, optimizers: Sequence[Any]) -> None:
        """Give optimizers a worker's states, if they are saved."""
        for at, saved in self._held((str(worker), OPTIMIZERS)).items():
            state: Any = get_optimizer_state_dict(module, optimizers[int(at)])
            for name, of_name in state["state"].items():
                for key, value in of_name.items():
                    full = saved["state"].get(name, {}).get(key)
                    if isinstance(value, Tensor) and isinstance(full, Tensor):
                        local(value).copy_(own_part(value, full).view(local(value).shape))
            state["param_groups"] = saved["param_groups"]
            set_optimizer_state_dict(module, optimizers[int(at)], state)


class FolderSource:
    """The same for tensors in a folder beside the content: collective, all ranks ask for the same in the same order.

    Args:
        folder: where they are.

    Raises:
        FileNotFoundError: the folder is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, sizes_in_folder(folder)

    def sizes(self, place: Place) -> dict[str, int]:
        """See ``FileSource``."""
        prefix = ".".join(place) + "."
        return {path[len(prefix) :]: size.numel() for path, size in self._known.items() if path.startswith(prefix)}

    def whole(self, place: Place, names: Sequence[str]) -> dict[str, Tensor]:
        """See ``FileSource``."""
        found = {name: torch.empty(self._known[".".join((*place, name))]) for name in names}
        self._read(place, found)
        return {name: tensor.flatten() for name, tensor in found.items()}

    def parts(self, place: Place, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``FileSource``."""
        found = {}
        for name, parameter in parameters.items():
            held = as_real(local(parameter))
            dtype = held.dtype if place[1] == "weights" else kept_dtype(parameter)
            found[name] = like_parameter(parameter, torch.empty(held.numel(), dtype=dtype, device=held.device))
        self._read(place, found)
        return {name: local(tensor).flatten() for name, tensor in found.items()}

    def load_optimizers(self, worker: int, module: Any, optimizers: Sequence[Any]) -> None:
        """See ``FileSource``."""
        for at, optimizer in enumerate(optimizers):
            place = (str(worker), OPTIMIZERS)
            if any(path.startswith(f"{worker}.{OPTIMIZERS}.{at}.") for path in self._known):
                tree: dict[str, Any] = {str(at): get_optimizer_state_dict(module, optimizer)}
                self._read(place, tree)
                set_optimizer_state_dict(module, optimizer, tree[str(at)])

    def _read(self, place: Place, tensors: dict[str, Any]) -> None:
        worker, kind = place
        if not tensors:
            return
        problem = read_folder({worker: {kind: tensors}}, self._folder)
        if problem is not None:
            raise DamagedStateError(str(self._folder), f"cannot be read ({problem})")
        with raised_together():
            for name, tensor in tensors.items() if kind in ALWAYS_FINITE else ():
                if not bool(local(tensor).isfinite().all()):
                    path = f"{self._folder}, {worker}.{kind}.{name}"
                    raise DamagedStateError(path, "has values that are NaN or infinite")


Source = FileSource | FolderSource
