"""LightningModules that change under a Trainer: norms, frozen layers, hooks, failures."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, EarlyStopping
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import Tensor, nn

from tests.integration.models import Classifier, assert_equal, data, nesterov
from tests.integration.programs.trainer import (
    BATCHES,
    MakeTrainer,
    ManualStudent,
    ProgramRecorder,
    Student,
    fit,
    fit_without_validation,
    gradient,
    left_frozen,
    recorder_of,
    train_data,
    trains,
)
from tests.integration.programs.world import Row, Run


class SumOverWorkers(torch.autograd.Function):
    """Sums over all workers in forward and backward, as synchronized batch normalization needs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class SynchronizedNorm(nn.BatchNorm1d):
    """Batch normalization over the batches of all workers, which torch supports only on GPUs."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return super().forward(inputs)
        samples = len(inputs) * dist.get_world_size()
        mean = SumOverWorkers.apply(inputs.sum(0)) / samples
        variance = SumOverWorkers.apply((inputs - mean).square().sum(0)) / samples
        with torch.no_grad():
            self.num_batches_tracked += 1
            # None under SWA: the mean of all batches.
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(variance * samples / (samples - 1), momentum)
        return (inputs - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


class NormSynchronizer(LayerSync):
    """Replaces ``Trainer(sync_batchnorm=True)`` on CPUs."""

    def apply(self, model: nn.Module) -> nn.Module:
        return self._convert(model, nn.BatchNorm1d, SynchronizedNorm)

    def revert(self, model: nn.Module) -> nn.Module:
        return self._convert(model, SynchronizedNorm, nn.BatchNorm1d)

    def _convert(self, model: nn.Module, old: type, new: type) -> nn.Module:
        for module in model.modules():
            if type(module) is old:
                module.__class__ = new
        return model


class Normalized(Student):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(40)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.middle(self.norm(self.first(inputs)).tanh()).tanh())

    def on_train_start(self) -> None:
        recorder_of(self).texts.append(type(self.norm).__name__)


class PartlyFrozen(Student):
    def __init__(self) -> None:
        super().__init__()
        self.middle.requires_grad_(False)


class WithBackbone(Classifier):
    backbone = property(lambda self: self.first)

    def configure_optimizers(self) -> Any:
        return nesterov([parameter for parameter in self.parameters() if parameter.requires_grad])


class EpochFreezer(BaseFinetuning):
    """Freezes a layer after DDP has wrapped the model, so that DDP exchanges it once it is unfrozen."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        pass

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        (self.freeze if epoch == 0 else self.make_trainable)(pl_module.first)


class Hooked(Student):
    """Records the gradient in the hooks of the module."""

    def on_after_backward(self) -> None:
        recorder_of(self).seen["after backward"].append(gradient(self))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        recorder_of(self).seen["before the step"].append(gradient(self))


class Failing(Student):
    """Fails in its fourth step, but only once."""

    has_failed = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3 and not self.has_failed:
            self.has_failed = True
            self.fail()
        return super().training_step(batch, batch_idx)

    def fail(self) -> None:
        raise RuntimeError("on every worker")


class FailingBackward(Failing):
    """Meets a NaN in its fourth backward while the gradients of later layers are being exchanged."""

    is_broken = False

    def fail(self) -> None:
        self.is_broken = True

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if self.is_broken:
            self.is_broken = False
            hidden = hidden + (0 * hidden).sqrt()
        return self.last(self.middle(hidden.tanh()).tanh())


class FailingOnOne(Student):
    """Has a NaN loss once on one worker."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if (self.global_step, self.global_rank) == (2, 1) else loss


def fit_twice(make_trainer: MakeTrainer, model: LightningModule, recorder: ProgramRecorder) -> Trainer:
    trainer = fit(make_trainer, model, recorder)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, train_data(), data(16))
    return trainer


def fit_after_an_exception(make_trainer: MakeTrainer, model: LightningModule, recorder: ProgramRecorder) -> Trainer:
    try:
        fit(make_trainer, model, recorder)
    except RuntimeError as error:
        recorder.texts.append(f"raised: {type(error).__name__}: {error}")
    recorder.texts.append(f"there is a process group: {dist.is_initialized()}")
    recorder.seen["steps before the exception"].append(len(recorder.seen["gradients"]))
    return fit(make_trainer, model, recorder)


def synchronized(runs: list[Run]) -> None:
    assert not torch.equal(runs[0].seen["inputs"][-1], runs[1].seen["inputs"][-1])
    for run in runs:
        assert run.texts == ["SynchronizedNorm"]
        assert run.moved("norm.running_mean")
        assert torch.equal(run.state["norm.running_mean"], runs[0].state["norm.running_mean"])
        assert torch.equal(run.state["norm.running_var"], runs[0].state["norm.running_var"])


def normalized_by_worker(runs: list[Run]) -> None:
    assert [run.texts for run in runs] == [["BatchNorm1d"]] * 2
    assert not torch.equal(runs[0].state["norm.running_mean"], runs[1].state["norm.running_mean"])


def unfrozen(runs: list[Run]) -> None:
    for run in runs:
        size = run.initial["first.weight"].numel()
        first_layer = [weights[:size] for weights in run.seen["weights before the epoch"]]
        assert torch.equal(first_layer[0], first_layer[1])
        assert not torch.equal(first_layer[1], first_layer[2])
        assert not torch.equal(run.seen["weights before the epoch"][0], run.seen["weights before the epoch"][1])


def trained_again(runs: list[Run]) -> None:
    for run in runs:
        assert len(run.comm_hooks) == 2
        assert run.global_step == 4 * BATCHES
        assert len(run.seen["gradients"]) == 4 * BATCHES


def seen_by_hooks(runs: list[Run]) -> None:
    for run in runs:
        after_backward = run.seen["after backward"]
        assert len(after_backward) == 2 * BATCHES
        # Every second backward is exchanged; the others leave local gradients.
        assert_equal(after_backward[1::2], run.seen["before the step"], "gradients")
        assert_equal(after_backward[1::2], runs[0].seen["after backward"][1::2], "gradients")
    for mine, theirs in zip(*[run.seen["after backward"][::2] for run in runs], strict=True):
        assert not torch.equal(mine, theirs)


def failed(message: str, runs: list[Run]) -> None:
    for run in runs:
        assert run.texts[0].startswith(f"on_exception: {message}")
        assert run.texts[1].startswith(f"raised: {message}")
        assert len(run.texts) == 3
        assert run.seen["steps before the exception"] == [3]
        # A separate training.
        assert len(run.comm_hooks) == 2
        assert len(run.seen["gradients"]) == 3 + 2 * BATCHES
        assert all(weight.isfinite().all() for weight in run.state.values())


class LossLogger(FailingOnOne):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def stops_early() -> dict[str, Any]:
    return {"callbacks": [EarlyStopping("loss", check_on_train_epoch_end=True, check_finite=True, patience=9)]}


def not_a_number(steps: int, runs: list[Run]) -> None:
    """Check for NaN in all weights of all workers from the third step on, and in no residual."""
    for run in runs:
        is_bad = [False] * 2 + [True] * (steps - 2)
        assert [bool(gradient.isnan().any()) for gradient in run.seen["gradients"]] == is_bad
        assert all(weight.isnan().all() for weight in run.state.values())
        assert all(residual.isfinite().all() for residual in run.residuals.values())
        if run.kind in ("zero", "sparse"):
            assert run.non_finite == is_bad


ROWS = {
    # A validation starts with the statistics of rank 0 on both workers, as every step of DDP does, unlike the oracle.
    "batch norm": Row(trains(Normalized, drive=fit_without_validation), normalized_by_worker, None),
    "synchronized batch norm": Row(
        trains(Normalized, lambda: {"plugins": [NormSynchronizer()]}, fit_without_validation), synchronized
    ),
    "frozen layer": Row(trains(PartlyFrozen), left_frozen),
    "backbone finetuning": Row(
        trains(WithBackbone, lambda: {"max_epochs": 3, "callbacks": [BackboneFinetuning(1, lambda epoch: 1.5)]}),
        unfrozen,
        warns_of=frozenset({"first.weight"}),  # DDP does not exchange it
    ),
    "finetuning of layers that DDP exchanges": Row(
        trains(Student, lambda: {"max_epochs": 3, "callbacks": [EpochFreezer()]}, find_unused_parameters=True),
        unfrozen,
        leaves_out=True,
    ),
    "two fits": Row(trains(drive=fit_twice), trained_again),
    # Lightning's DDPStrategy exchanges nothing in the second fit: it starts the exchange of a static graph only once.
    "two fits, manual, static graph": Row(
        trains(ManualStudent, drive=fit_twice, static_graph=True), trained_again, kinds=("oracle", "sparse")
    ),
    "hooks of the module": Row(trains(Hooked, lambda: {"accumulate_grad_batches": 2}), seen_by_hooks),
    "exception in a step": Row(
        trains(Failing, drive=fit_after_an_exception), partial(failed, "RuntimeError: on every worker")
    ),
    "anomaly in a backward": Row(
        trains(FailingBackward, lambda: {"detect_anomaly": True}, fit_after_an_exception),
        partial(failed, "RuntimeError: Function "),
    ),
    **{
        f"not a number on one worker, {exchange}": Row(
            trains(FailingOnOne), partial(not_a_number, 2 * BATCHES), exchange=exchange
        )
        for exchange in ("gather", "dense", "reduce_scatter")
    },
    "not a number, seen by early stopping": Row(trains(LossLogger, stops_early), partial(not_a_number, BATCHES)),
}
