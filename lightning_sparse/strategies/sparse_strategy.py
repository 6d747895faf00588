"""The base class of all Lightning strategies with a sparse exchange."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.checkpointing.content import KEY, WorkerState, empty_content, warn_of_incomplete
from lightning_sparse.checkpointing.files import WholeFileCheckpointIO
from lightning_sparse.checkpointing.restoring import restore
from lightning_sparse.checkpointing.saving import collect_together
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.optimizer_steps import weak_method
from lightning_sparse.engine.options import DriftOptions, ExchangeOptions
from lightning_sparse.sparsifiers.checks import require_word
from lightning_sparse.sparsifiers.protocol import Sparsifier, require_sparsifier
from lightning_sparse.strategies.advice import Advice, exchanges_of
from lightning_sparse.strategies.arguments import TakesOptions
from lightning_sparse.strategies.step_log import StepLog

MAX_BATCHES = 200
"""Batches without an optimizer step before a warning, or twice ``accumulate_grad_batches`` if more."""


class SparseStrategy(TakesOptions):
    """The base of all strategies. Subclasses set ``_options`` before ``__init__``.

    Args:
        sparsifier: selects coordinates, such as ``HardThreshold(density=0.01)`` or ``TopK(density=0.01)``.
        worker_state: state of the workers in checkpoints. ``"full"``: every worker's residual, n times the size of the
            model, or every worker's weights and optimizers. A resume then equals an uninterrupted run. ``"small"``: the
            size of one worker's state. ``ddp_*`` saves the mean residual, which keeps the pending update (1/n) Σ e_i.
            ``hsdp_*`` saves no residuals. ``local_*`` saves the mean weights, the anchor and the optimizers of rank 0.
            ``local_hsdp_*`` with ``keep_drift=False`` also saves every unsent drift.
        **kwargs: arguments of Lightning's strategy.

    Attributes:
        state: the averager of the running or last ``fit``, None before.
        averagers: the averagers of this process, whose first is ``state``; empty before a ``fit``.
        sparsifier: the given sparsifier.
        step_log: exchanges of the running or last ``fit`` that are not logged yet.
        per_layer_stats: whether the next ``fit`` exchanges statistics of layers, the same on all ranks. Callbacks may
            set it in ``setup``.

    Raises:
        ValueError: an option is invalid, or a sparse exchange does not support an argument.
        TypeError: an argument is unknown, or the sparsifier has a wrong type.
    """

    state: Any
    _timeout: timedelta | None
    _options: ExchangeOptions
    _call_each_step: ClassVar[str | None] = None
    """The call that a loop without torch optimizers needs, for a warning; None disables the warning."""

    def __init__(self, sparsifier: Sparsifier, *, worker_state: WorkerState = "full", **kwargs: Any) -> None:
        require_sparsifier(sparsifier)
        require_word("worker_state", worker_state, get_args(WorkerState))
        self._options.validate(sparsifier)
        timeout = kwargs.get("timeout")
        if timeout is not None and not isinstance(timeout, timedelta):  # torch would raise at the start of fit
            raise TypeError(f"Invalid {timeout=}. Must be a duration, such as datetime.timedelta(seconds=300).")
        kwargs = self._lightning_arguments(kwargs)
        super().__init__(**kwargs)
        self.sparsifier = sparsifier
        self.worker_state = worker_state
        self.state = None
        self.averagers: Sequence[Averager] = []
        self.per_layer_stats = self._ignores_steps = False

    @abstractmethod
    def _lightning_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for Lightning's strategy, after a check."""

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _begin_fit(self, state: Any) -> None:
        """Use the averager of a new ``fit``: log its exchanges, report likely problems and observe steps."""
        self.state, self.averagers = state, [state]
        self.per_layer_stats = False  # the callbacks of a later fit ask again
        self.step_log = StepLog(state)
        is_sharded = isinstance(self, ModelParallelStrategy)
        self._advice = Advice(state, is_sharded=is_sharded, exchange=self._options.exchange)
        if state.step_observer is not None:
            state.step_observer.on_step = weak_method(self._after_any_step)

    @override
    def __getstate__(self) -> dict[str, Any]:
        # A copy, as of a callback with its Trainer, is like a new strategy: an averager belongs to its process and
        # group, and DDP's module refers to it.
        of_fit = {"step_log", "_advice"}
        kept = {name: value for name, value in super().__getstate__().items() if name not in of_fit}
        return kept | {"state": None, "averagers": [], "_model": self._lightning_module}

    # Steps.

    @contextmanager
    def _ignoring_steps(self) -> Iterator[None]:
        """Do not count optimizer steps inside the context as steps that bypass Lightning."""
        before, self._ignores_steps = self._ignores_steps, True
        try:
            yield
        finally:
            self._ignores_steps = before

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with self._ignoring_steps():
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._after_step(optimizer)
        return output

    def _after_any_step(self, stepped: Any) -> None:
        # Steps can bypass the strategy: self.optimizers(use_pl_optimizer=False) returns torch's own optimizers.
        if not self._ignores_steps:
            self._after_step(stepped)

    def _after_step(self, stepped: Any) -> None:
        """Log the exchanges of an optimizer step; ``stepped`` is the optimizer, or the names of its parameters."""
        self.step_log.write(self.lightning_module, self.state)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        every_n_steps = getattr(self._options, "every_n_steps", 1)
        self._advice.begin(self.optimizers, exchanges_of(self._module, every_n_steps))
        self._batches, self._progress_at_start = 0, self.state.progress
        self._most_batches = max(MAX_BATCHES, 2 * self._module.trainer.accumulate_grad_batches)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        trainer = self._module.trainer
        self.step_log.begin_batch(trainer)
        if self.state.epoch != trainer.current_epoch:
            groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
            rates = [group["lr"] for group in groups if group.get("lr") is not None]  # Adafactor computes its own rate
            for averager in self.averagers:
                averager.begin_epoch(trainer.current_epoch, rates)
        if self._batches == self._most_batches:
            self._warn_of_no_exchange()
        self._batches += 1

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._advice.end()
        if 0 < self._batches <= self._most_batches:
            self._warn_of_no_exchange()

    def _warn_of_no_exchange(self) -> None:
        if self._call_each_step is not None and self.state.progress == self._progress_at_start:
            rank_zero_warn(
                f"lightning_sparse: in {self._batches} batches no torch.optim.Optimizer stepped on parameters of the "
                "model, so nothing was exchanged and the weights differ. If you update weights by other means, call "
                f"strategy.state.{self._call_each_step} each update. See docs/troubleshooting.md."
            )

    # Checkpoints.

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeFileCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = WholeFileCheckpointIO()  # no effect if the user has set it
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, *others: Any, **options: Any) -> dict[str, Any]:
        # The other arguments differ between versions of Lightning.
        if not isinstance(self, ModelParallelStrategy) and Path(checkpoint_path).is_dir():
            raise ValueError(
                f"The checkpoint {str(checkpoint_path)!r} is a folder, but {type(self).__name__} reads files. Folders "
                "are written by hsdp_* and local_hsdp_* strategies: resume with one of these, or save one file with "
                "save_distributed_checkpoint=False."
            )
        return super().load_checkpoint(checkpoint_path, *others, **options)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        # A checkpoint with only weights has no state for a resume.
        has_state = "optimizer_states" in checkpoint
        if has_state and self.state is not None:
            checkpoint[KEY] = self._content(checkpoint, Path(filepath))
        elif has_state and isinstance(self._launcher, _MultiProcessingLauncher) and not dist.is_initialized():
            # The process that started the workers gets weights and metrics from Lightning, but no optimizer states.
            why = "it is saved by a process that is not a worker, and also lacks optimizer states and the step count"
            kind = "drifts" if isinstance(self._options, DriftOptions) else "gradients"
            warn_of_incomplete(kind, why)
            checkpoint[KEY] = empty_content(kind, why)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _content(self, checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
        """Return our entry of Lightning's checkpoint, complete on rank 0. Collective.

        ``path`` is the checkpoint's file, or a folder to which all ranks may write.
        """
        return collect_together(self.state, self.worker_state, self._timeout)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # After the model's set-up. Sharded replicas restore in load_checkpoint.
        content: Any = checkpoint.get(KEY)
        states = checkpoint["optimizer_states"]
        extra = restore(self.averagers, content)
        if "optimizer_states" in extra:
            saved_states = content["extras"][0][0]["optimizer_states"]
            states = [*map(_own_state, states, saved_states, extra["optimizer_states"])]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
        if "precision_state" in extra:  # replaces rank 0's state, which Lightning has loaded
            self.precision_plugin.load_state_dict(extra["precision_state"])


def _own_state(of_first: dict[str, Any], saved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return a worker's own optimizer state, with entries that hooks have changed.

    Hooks have changed those entries of ``of_first``, rank 0's loaded state, that differ from ``saved``.
    """
    return {key: own[key] if _is_equal(value, saved.get(key)) else value for key, value in of_first.items()}


def _is_equal(value: Any, other: Any) -> bool:
    """Return whether nested containers of tensors and plain values are equal."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        # The momentum of an nn.Embedding(sparse=True) is sparse.
        is_alike = value.shape == other.shape and value.dtype == other.dtype
        return is_alike and torch.equal(value.to_dense().cpu(), other.to_dense().cpu())
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(_is_equal(value[key], other[key]) for key in value)
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(_is_equal, value, other))
    return type(value) is type(other) and bool(value == other)
