"""Points of a training at which a fault can be injected: before and after functions and collectives of the package."""

import functools
import os
import signal
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.fabric.plugins.io.torch_io as torch_io
import lightning.pytorch.trainer.connectors.signal_connector as signal_connector
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from lightning_sparse.checkpointing import files, saving
from lightning_sparse.drift.drift_exchange import DriftExchange
from lightning_sparse.drift.model_averager import SparseModelAverager
from lightning_sparse.drift.shared_weights import SharedWeights
from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.residuals import ResidualMemory
from lightning_sparse.exchange import save_barrier
from lightning_sparse.exchange.exchange import Exchange
from lightning_sparse.exchange.workers import Pending, Workers
from lightning_sparse.gradients.ddp_averager import DDPGradientAverager
from lightning_sparse.gradients.pending_gradients import PendingGradients
from lightning_sparse.selection import extraction

COLLECTIVES = (
    *("irecv", "isend", "send", "recv", "all_reduce", "all_gather", "all_gather_into_tensor"),
    *("all_gather_object", "all_to_all_single", "broadcast_object_list", "new_group", "destroy_process_group"),
)
PARTS: dict[Any, tuple[str, ...]] = {
    DDPGradientAverager: ("receive", "_begin_step", "_prepare", "_end_step"),
    extraction: ("sent_and_kept", "compensate", "keep_residual"),
    Exchange: ("new_transfer", "start", "finish"),
    Pending: ("wait",),
    ResidualMemory: ("keep", "commit"),
    PendingGradients: ("end_exchange", "note_gradients", "_step_begins", "_step_ends"),
    save_barrier.SaveBarrier: ("wait", "saving_workers"),
    saving: ("run_together", "collect"),
    Workers: ("average", "gather_objects_to_first"),
    DriftExchange: ("run", "_move_anchor"),
    Engine: ("add", "finish", "end_step"),
    SparseModelAverager: ("step", "snapshot"),
    SharedWeights: ("load_mean", "restore_own", "mean", "replaced"),
    files.WholeFileCheckpointIO: ("save_checkpoint",),
    torch_io: ("_atomic_save",),
}
SAVES = {2: "save 1", 4: "save 2"}
"""The windows in which a training of six steps saves, by the number of completed steps."""
AFTERWARDS = "afterwards"
"""The window from a fault to the next batch, which includes the checkpoint saved because of the fault."""


@dataclass(frozen=True, order=True)
class Point:
    """The moment when a worker reaches a name in a window for the k-th time, counted from 0."""

    window: str
    name: str
    k: int = 0

    def __str__(self) -> str:
        return f"{self.window}: {self.name}" + (f" ({self.k})" if self.k else "")


@dataclass(frozen=True)
class Fault:
    """An exception or a signal at a point of some workers.

    Args:
        way: ``"raise"``, ``"SIGUSR1"``, ``"SIGINT"`` or ``"SIGKILL"``.
        points: by rank; None for a worker without a fault.
        then: a second fault, injected after the first.
    """

    way: str
    points: tuple[Point | None, ...]
    then: "Fault | None" = None

    def injections(self, rank: int) -> list[tuple[str, Point]]:
        """Return the way and point of each fault of this worker, in order."""
        point, later = self.points[rank], [] if self.then is None else self.then.injections(rank)
        return later if point is None else [(self.way, point), *later]

    @property
    def ranks(self) -> list[int]:
        return [rank for rank, point in enumerate(self.points) if point is not None]

    @property
    def is_everywhere(self) -> bool:
        return len(set(self.points)) == 1 and self.points[0] is not None

    def __str__(self) -> str:
        then = "" if self.then is None else f", then {self.then}"
        if self.is_everywhere:
            return f"{self.way} on all at {self.points[0]}{then}"
        return f"{self.way} " + ", ".join(f"on {rank} at {self.points[rank]}" for rank in self.ranks) + then


class Injected(RuntimeError):
    """The error that a fault of the way ``"raise"`` raises."""


@dataclass
class Injector:
    """Injects each fault of this worker once, and records all points that the worker reaches."""

    injections: list[tuple[str, Point]]
    log: Path
    window: str = "set-up"
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    trace: list[Point] = field(default_factory=list)

    def reach(self, name: str) -> None:
        here = Point(self.window, name, self.counts[self.window, name])
        self.counts[self.window, name] += 1
        self.trace.append(here)
        if not self.injections or here != self.injections[0][1]:
            return
        way, _ = self.injections.pop(0)
        self.window = AFTERWARDS
        self.log.touch()
        if way == "raise":
            raise Injected(f"injected at {here}")
        os.kill(os.getpid(), getattr(signal, way))

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def notifying(*args: Any, **kwargs: Any) -> Any:
            self.reach(f"before {name}")
            result = function(*args, **kwargs)
            self.reach(f"after {name}")
            return result

        return notifying

    def collective(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        notifying = self.around(name, function)

        @functools.wraps(function)
        def of_the_package(*args: Any, **kwargs: Any) -> Any:
            # Collectives of Lightning and DDP are no points.
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return (notifying if caller.startswith("lightning_sparse") else function)(*args, **kwargs)

        return of_the_package

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap functions of the package and of torch, so that their calls become points."""
        injector = self

        class Store(save_barrier.PrefixStore):
            def set(self, key: str, value: str) -> None:
                injector.around(f"store.set {key.split('/')[-1]}", super().set)(key, value)

            def add(self, key: str, amount: int) -> int:
                return injector.around("store.add", super().add)(key, amount)

            def check(self, keys: list[str]) -> bool:
                injector.reach("before store.check")
                return super().check(keys)

        with ExitStack() as stack:
            for owner, name in ((owner, name) for owner, names in PARTS.items() for name in names):
                label = f"{owner.__name__.rpartition('.')[2]}.{name}"
                stack.enter_context(patch.object(owner, name, self.around(label, getattr(owner, name))))
            for name in COLLECTIVES:
                stack.enter_context(patch.object(dist, name, self.collective(name, getattr(dist, name))))
            stack.enter_context(patch.object(os, "replace", self.collective("os.replace", os.replace)))
            stack.enter_context(patch.object(save_barrier, "PrefixStore", Store))
            stack.enter_context(patch.object(signal_connector, "call", lambda command: 0))  # scontrol is missing here
            yield


class _Pickled(OrderedDict):
    """A checkpoint entry whose pickling is a point; unpickles as an empty OrderedDict."""

    def __init__(self, reach: Callable[[str], None]) -> None:
        super().__init__()
        self.reach = reach

    def __reduce__(self) -> Any:
        self.reach("while written")
        return OrderedDict, ()


class Watcher(Callback):
    """Sets the window, makes callbacks points, and saves after the second and the fourth step."""

    def __init__(self, injector: Injector, folder: Path) -> None:
        self.injector, self.path = injector, folder / "regular.ckpt"
        for name in ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"):
            setattr(self, name, lambda *_, name=name: injector.reach(name))

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        state = getattr(trainer.strategy, "state", None)
        if state is not None:
            state.subscribe(lambda stats: self.injector.reach("futures are complete"))

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.injector.window = f"step {trainer.global_step}"
        self.injector.reach("on_train_batch_start")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.injector.reach("on_save_checkpoint")
        checkpoint["point"] = _Pickled(self.injector.reach)  # the point "while written"; no reader needs the entry

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.injector.reach("on_train_batch_end")
        if trainer.global_step in SAVES:
            self.injector.window = SAVES[trainer.global_step]
            self.injector.reach("before save_checkpoint")
            trainer.save_checkpoint(self.path)
            self.injector.reach("after save_checkpoint")

    def on_train_end(self, *_: Any) -> None:
        self.injector.window = "end"
        self.injector.reach("on_train_end")
