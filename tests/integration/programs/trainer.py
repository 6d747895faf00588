"""Programs for a Trainer: a LightningModule, options and a function that runs them."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_sparse import SparseDDPStrategy
from tests.integration.models import Classifier, ManualClassifier, data, nesterov, quiet_trainer
from tests.integration.programs.oracle import OracleStrategy
from tests.integration.programs.world import Run, World

BATCHES = 4
"""Number of batches of a worker in an epoch of ``train_data()``."""
train_data = partial(data, 2 * 4 * BATCHES)


class ProgramRecorder(Callback):
    """Records the state that callbacks of a user can see."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen = world.run.seen
        self.texts = world.run.texts

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        # Read here: teardown unwraps the model.
        is_ddp = self.world.kind != "oracle"
        self.world.run.comm_hooks.append(strategy.model._get_ddp_logging_data().get("comm_hook") if is_ddp else None)
        if isinstance(strategy, SparseDDPStrategy):
            self.world.follow_state(strategy.state)
        for optimizer in trainer.optimizers:
            self.world.note_steps(optimizer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["steps before the epoch"].append(trainer.global_step)
        self.seen["weights before the epoch"].append(flat(pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.seen["learning rates"].append(torch.tensor([group["lr"] for group in trainer.optimizers[0].param_groups]))
        self.seen["samples"].append(len(batch[0]))
        self.seen["inputs"].append(batch[0].clone())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.seen["gradients"].append(gradient(pl_module))

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if any(parameter.grad is not None for parameter in pl_module.parameters()):
            self.seen["applied gradients"].append(gradient(pl_module))

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        self.seen["validation samples"].append(len(batch[0]))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.texts.append(f"on_exception: {type(exception).__name__}: {exception}")


def recorder_of(module: LightningModule) -> ProgramRecorder:
    return next(callback for callback in module.trainer.callbacks if isinstance(callback, ProgramRecorder))


def commit(strategy: Any) -> None:
    """Commit the backwards so far, if the strategy supports it."""
    if isinstance(strategy, SparseDDPStrategy):
        strategy.state.commit()
    elif isinstance(strategy, OracleStrategy):
        strategy.oracle.commit()


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def gradient(module: nn.Module) -> Tensor:
    """Return the flat gradient, with zeros for missing gradients."""
    parts = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().to_dense()
        for parameter in module.parameters()
    ]
    return torch.cat([part.flatten() for part in parts])


class Student(Classifier):
    """Uses an optimizer with momentum, so that the effect of a wrong gradient lasts."""

    default_optimizer = staticmethod(nesterov)


class ManualStudent(ManualClassifier):
    default_optimizer = staticmethod(nesterov)


def moved(steps: int, names: tuple[str, ...], runs: list[Run]) -> None:
    """Check how many steps Lightning counted, and that these parameters have changed."""
    for run in runs:
        assert run.global_step == steps
        assert all(map(run.moved, names))


def left_frozen(runs: list[Run]) -> None:
    for run in runs:
        assert not run.moved("middle.weight")
        assert run.moved("first.weight")


MakeTrainer = Callable[[], Trainer]
Drive = Callable[[MakeTrainer, Any, ProgramRecorder], Trainer]


def fitting(*make_loaders: Callable[[], Any], may_fail: bool = False) -> Drive:
    """Return a function that fits on these loaders; ``on_exception`` records an exception."""

    def drive(make_trainer: MakeTrainer, model: LightningModule, recorder: ProgramRecorder) -> Trainer:
        trainer = make_trainer()
        with suppress(Exception) if may_fail else nullcontext():
            trainer.fit(model, *(make_loader() for make_loader in make_loaders))
        return trainer

    return drive


fit = fitting(train_data, partial(data, 16))
fit_without_validation = fitting(train_data)
fail_to_fit = fitting(train_data, may_fail=True)


def trains(
    make_model: Callable[[], LightningModule] = Student,
    options: Callable[[], dict[str, Any]] = dict,
    drive: Drive = fit,
    **ddp_options: Any,
) -> Callable[[World], None]:
    """Return a program for a Trainer.

    Args:
        make_model: creates the module.
        options: returns options of the Trainer; called for each Trainer, so that callbacks are not shared.
        drive: runs one or more Trainers on the module; returns the last Trainer.
        **ddp_options: options of the strategy.
    """

    def program(world: World) -> None:
        model = make_model()
        recorder = ProgramRecorder(world)
        world.follow_module(model)

        def make_trainer() -> Trainer:
            defaults = {"max_steps": -1, "max_epochs": 2, "num_sanity_val_steps": 0}
            settings = defaults | options()
            callbacks = [recorder, *settings.pop("callbacks", [])]
            return quiet_trainer(world.strategy(**ddp_options), callbacks=callbacks, **settings)

        trainer = drive(make_trainer, model, recorder)
        run = world.run
        run.global_step, run.epochs = trainer.global_step, trainer.current_epoch
        run.metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}

    return program
