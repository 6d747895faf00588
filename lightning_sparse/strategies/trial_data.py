"""Data that begin anew after a trial."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader


@contextmanager
def data_as_they_were(trainer: Any) -> Iterator[None]:
    """Puts back what reading data changes: states of the data module, and of loaders that were given to ``fit``.

    Of those: generators of random numbers, of the loader and of its samplers; what has ``state_dict`` and
    ``load_state_dict``; persistent processes, which begin anew. Loaders that hooks return they make anew.

    Raises:
        ValueError: a loader is an iterator, whose data are gone once they are read.
    """
    source = trainer.fit_loop._data_source
    held: list[Any] = [] if trainer.datamodule is None else [trainer.datamodule]
    loaders = [] if source.instance is None or source.is_module() else CombinedLoader(source.instance).flattened
    for loader in loaders:
        if hasattr(loader, "__next__"):
            raise ValueError(
                f"The training data are a {type(loader).__name__}, which cannot be read twice: what a measurement "
                "before the training reads would be missing in it. Give a DataLoader, or leave the callback out."
            )
        held += [loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler"))]
    with ExitStack() as undo:
        for one in held:
            if isinstance(one, DataLoader):
                undo.callback(setattr, one, "_iterator", one._iterator)
            if hasattr(one, "state_dict") and hasattr(one, "load_state_dict"):
                undo.callback(one.load_state_dict, copy.deepcopy(one.state_dict()))
            for value in vars(one).values() if hasattr(one, "__dict__") else ():
                if isinstance(value, torch.Generator):
                    undo.callback(value.set_state, value.get_state())
        yield
