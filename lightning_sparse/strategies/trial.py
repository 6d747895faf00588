"""A few steps of training that leave no trace, as those of Lightning's search for a learning rate."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torchmetrics import Metric

from lightning_sparse.strategies.trial_data import data_as_they_were


class Trial(Callback):
    """What a Trainer has in place of its callbacks during a trial, and by which it is known."""


def is_trial(trainer: Any) -> bool:
    """Whether what runs now is thrown away: a trial, or Lightning's search for a learning rate."""
    return any(isinstance(one, (Trial, _LRCallback)) for one in trainer.callbacks)


def run_trial(
    trainer: Any,
    num_steps: int,
    restart: Callable[[], None],
    *during: AbstractContextManager[Any],
    trial: Trial | None = None,
) -> None:
    """Trains for some steps from within ``on_fit_start``, without validation, and puts everything back. Collective.

    Put back are weights, buffers, extra states and metrics of the module, optimizers, learning-rate schedulers, the
    GradScaler, the Trainer's progress and metrics, all global random states, and the data (see ``trial_data``).
    Callbacks and loggers see nothing of it. What the module keeps in attributes of its own, and what a data set does
    when it is read, cannot be put back.

    Args:
        trainer: at the beginning of a fit.
        num_steps: optimizer steps, fewer if the training is shorter.
        restart: brings back the strategy's own state; called last, and not after an exception, which other workers may
            know nothing of.
        *during: what holds while it runs; left before anything else is put back.
        trial: the callback to use, such as one that measures.

    Raises:
        ValueError: data that can be read once only.
    """
    module = trainer.lightning_module
    with ExitStack() as undo:
        undo.enter_context(isolate_rng())
        undo.enter_context(data_as_they_were(trainer))
        undo.enter_context(_module_as_it_was(module))
        undo.enter_context(_optimizers_as_they_were(trainer))
        undo.enter_context(_trainer_as_it_was(trainer))
        trainer.callbacks = [trial or Trial()]
        trainer.loggers = [DummyLogger()] if trainer.loggers else []
        trainer.limit_val_batches = 0
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + num_steps
        trainer.fit_loop._combined_loader = None
        for one in during:
            undo.enter_context(one)
        trainer.fit_loop.run()
    restart()


def require_gone(wrapper: weakref.ref[Any]) -> None:
    """Raises where a DDP module that another takes the place of is still there: it would answer to backward, too.

    Raises:
        RuntimeError: says so.
    """
    gc.collect()
    if wrapper() is not None:
        raise RuntimeError(
            "Something holds the DDP module of before the measurement (trainer.model, say, in a callback's attribute), "
            "and it would exchange gradients a second time. Keep the LightningModule instead."
        )


@contextmanager
def _module_as_it_was(module: LightningModule) -> Iterator[None]:
    tensors = [(one, one.detach().clone(), one.requires_grad) for one in [*module.parameters(), *module.buffers()]]
    buffers = [(one, dict(one._buffers)) for one in module.modules()]
    gradients = [(one, None if one.grad is None else one.grad.clone()) for one in module.parameters()]
    extra = [
        (one, copy.deepcopy(one.get_extra_state()))
        for one in module.modules()
        if type(one).get_extra_state is not nn.Module.get_extra_state
    ]
    modes = [(one, one.training) for one in module.modules()]
    metrics = [
        (one, copy.deepcopy({name: getattr(one, name) for name in one._defaults}), one._update_count)
        for one in module.modules()
        if isinstance(one, Metric)
    ]
    try:
        yield
    finally:
        for owner, own in buffers:  # some may have been assigned anew
            owner._buffers.update(own)
        with torch.no_grad():
            for tensor, before, needed_gradient in tensors:
                tensor.copy_(before)
                tensor.requires_grad_(needed_gradient)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for one, state in extra:
            one.set_extra_state(state)
        for one, mode in modes:
            one.training = mode
        for metric, states, count in metrics:
            metric.reset()
            for name, value in states.items():
                setattr(metric, name, value)
            metric._update_count = count


@contextmanager
def _optimizers_as_they_were(trainer: Trainer) -> Iterator[None]:
    strategy = trainer.strategy
    states = [copy.deepcopy(one.state_dict()) for one in strategy.optimizers]
    configs = strategy.lr_scheduler_configs
    schedules = [copy.deepcopy(one.scheduler.state_dict()) for one in configs]
    scaler = copy.deepcopy(strategy.precision_plugin.state_dict())
    # Those that wait for a metric of validation would wait in vain.
    strategy.lr_scheduler_configs = [one for one in configs if not one.reduce_on_plateau]
    try:
        yield
    finally:
        strategy.lr_scheduler_configs = configs
        for optimizer, state in zip(strategy.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        for config, state in zip(configs, schedules, strict=True):
            config.scheduler.load_state_dict(state)
        strategy.precision_plugin.load_state_dict(scaler)


@contextmanager
def _trainer_as_it_was(trainer: Trainer) -> Iterator[None]:
    connector = trainer._logger_connector
    names = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
    held: list[tuple[Any, str, Any]] = [
        *((trainer, name, getattr(trainer, name)) for name in ("callbacks", "loggers", "limit_val_batches")),
        *((connector, name, dict(getattr(connector, name))) for name in names),
        *(one for loop in _loops(trainer.fit_loop) for one in _progress_of(loop)),
    ]
    try:
        yield
    finally:
        trainer.should_stop = False
        for one, name, value in held:
            setattr(one, name, value)


def _loops(loop: _Loop) -> Iterator[_Loop]:
    yield loop
    for one in vars(loop).values():
        if isinstance(one, _Loop):
            yield from _loops(one)


def _progress_of(loop: _Loop) -> Iterator[tuple[_Loop, str, Any]]:
    """What a loop counts, and the data that it goes through: the object, its attribute and the value."""
    for name, value in vars(loop).items():
        if isinstance(value, _BaseProgress):
            yield loop, name, copy.deepcopy(value)
        elif isinstance(value, list):
            yield loop, name, copy.copy(value)
        elif not isinstance(value, (_Loop, Trainer)):
            yield loop, name, value
