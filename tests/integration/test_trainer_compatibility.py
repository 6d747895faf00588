"""Under a threshold of zero whatever a Trainer can do is as under Lightning's own DDPStrategy.

Each case trains the same model under both, on two workers, and shows besides that what it is about really happened.
Everything must be equal to the last bit: DDP halves the two gradients and adds them, the sparse exchange adds them and
halves the sum, and in binary halving is exact.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparse import DDPHardThresholdStrategy
from tests.integration.models import (
    SMALL_BUCKETS_MB,
    Classifier,
    ManualClassifier,
    TwoPlayers,
    clones,
    data,
    nesterov,
    quiet_trainer,
    sgd,
)
from tests.workers import run_workers

BATCHES = 8
"""Of a worker in an epoch of ``data()``."""


class Witness(Callback):
    """Notes what a user's own callbacks could see of a training."""

    def __init__(self) -> None:
        self.comm_hooks: list[str | None] = []
        self.densities: list[float] = []
        self.seen: dict[str, list[Tensor | float]] = defaultdict(list)
        self.said: list[str] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Read here: teardown unwraps the model.
        self.comm_hooks.append(trainer.strategy.model._get_ddp_logging_data().get("comm_hook"))
        if isinstance(trainer.strategy, DDPHardThresholdStrategy):
            trainer.strategy.state.subscribe(lambda step: self.densities.append(step.density))

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

    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        self.seen["test samples"].append(len(batch[0]))

    def on_predict_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        self.seen["predicted samples"].append(len(batch[0]))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.said.append(f"on_exception: {type(exception).__name__}: {exception}")


def witness_of(module: LightningModule) -> Witness:
    return next(one for one in module.trainer.callbacks if isinstance(one, Witness))


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def gradient(module: nn.Module) -> Tensor:
    """The whole gradient, with zeros where there is none."""
    parts = [(one, one.grad) for one in module.parameters()]
    return torch.cat([(torch.zeros_like(one) if grad is None else grad).flatten() for one, grad in parts])


class Student(Classifier):
    """Trained with an optimizer that has a memory, so that a wrong gradient has consequences."""

    def __init__(self, make_optimizer: Callable[..., torch.optim.Optimizer] = nesterov) -> None:
        super().__init__(make_optimizer)


@dataclass
class Run:
    """What one worker saw of a training."""

    comm_hooks: list[str | None]
    densities: list[float]
    initial: dict[str, Tensor]
    state: dict[str, Tensor]
    global_step: int
    epochs: int
    metrics: dict[str, float]
    seen: dict[str, list[Tensor | float]]
    said: list[str]
    warnings: set[str]

    def moved(self, name: str) -> bool:
        return not torch.equal(self.state[name], self.initial[name])


Drive = Callable[[Callable[[], Trainer], Any, Witness], Trainer]


def fit(make_trainer: Callable[[], Trainer], model: LightningModule, witness: Witness) -> Trainer:
    trainer = make_trainer()
    trainer.fit(model, data(), data(16))
    return trainer


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        check: is given the runs of both workers under one strategy, and fails unless the case's subject took effect.
        make_model: what is trained.
        options: of the Trainer; called for every one, so that it has callbacks of its own.
        drive: what is done with Trainers and model; returns the last Trainer.
        ddp_options: of both strategies.
    """

    check: Callable[[list[Run]], None]
    make_model: Callable[[], LightningModule] = Student
    options: Callable[[], dict[str, Any]] = dict
    drive: Drive = fit
    ddp_options: dict[str, Any] = field(default_factory=dict)


def train(case: Case, make_strategy: Callable[..., DDPStrategy]) -> Run:
    witness, model = Witness(), case.make_model()
    initial = clones(model.state_dict().items())

    def make_trainer() -> Trainer:
        options = {"max_steps": -1, "max_epochs": 2, "num_sanity_val_steps": 0} | case.options()
        callbacks = [witness, *options.pop("callbacks", [])]
        strategy = make_strategy(bucket_cap_mb=SMALL_BUCKETS_MB, **case.ddp_options)
        return quiet_trainer(strategy, num_workers=2, callbacks=callbacks, **options)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = case.drive(make_trainer, model, witness)
    return Run(
        witness.comm_hooks,
        witness.densities,
        initial,
        clones(model.state_dict().items()),
        trainer.global_step,
        trainer.current_epoch,
        {name: value.item() for name, value in trainer.callback_metrics.items()},
        dict(witness.seen),
        witness.said,
        {str(warning.message).splitlines()[0] for warning in caught},
    )


def _train_with_both(name: str) -> tuple[Run, Run]:
    # DDP first: Lightning gives some warnings once in a process.
    dense = train(CASES[name], DDPStrategy)
    return dense, train(CASES[name], partial(DDPHardThresholdStrategy, threshold=0.0))


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# What the cases train.


class SumOverWorkers(torch.autograd.Function):
    """Sums over all workers, and so does its backward, as synchronized batch normalization needs."""

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
    """Batch normalization over the batches of all workers, which torch itself has for GPUs only."""

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


class SynchronizeNorms(LayerSync):
    """What ``Trainer(sync_batchnorm=True)`` does, for CPUs."""

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
        witness_of(self).said.append(type(self.norm).__name__)


class Toggling(TwoPlayers):
    """Notes which players' parameters want a gradient while one is trained."""

    def generator_loss(self, inputs: Tensor) -> Tensor:
        self._say("generator")
        return super().generator_loss(inputs)

    def judge_loss(self, inputs: Tensor) -> Tensor:
        self._say("judge")
        return super().judge_loss(inputs)

    def _say(self, trained: str) -> None:
        wanting = [name for name in ("generator", "judge") if next(getattr(self, name).parameters()).requires_grad]
        witness_of(self).said.append(f"{trained} is trained, {' and '.join(wanting)} wants a gradient")


class TwoOptimizers(ManualClassifier):
    """One backward for two optimizers, of which the second steps in every other batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        often, seldom = self.optimizers()
        self.manual_backward(self.loss(batch))
        for optimizer in (often, seldom)[: 1 + batch_idx % 2]:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return nesterov(self.first.parameters()), sgd([*self.middle.parameters(), *self.last.parameters()])


class OwnBatches(Student):
    """Batches of another size on each worker."""

    def train_dataloader(self) -> DataLoader:
        samples = (3, 5)[self.trainer.global_rank]
        return data(6 * samples, samples)


class Scheduled(Student):
    def __init__(self, config: dict[str, Any], make_scheduler: Callable[..., Any]) -> None:
        super().__init__()
        self.config, self.make_scheduler = config, make_scheduler

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make_scheduler(optimizer), **self.config}}


class PartlyFrozen(Student):
    def __init__(self) -> None:
        super().__init__()
        self.middle.requires_grad_(False)


class WithBackbone(Classifier):
    backbone = property(lambda self: self.first)

    def configure_optimizers(self) -> Any:
        return nesterov([parameter for parameter in self.parameters() if parameter.requires_grad])


class FreezeForAnEpoch(BaseFinetuning):
    """Freezes a layer only once DDP has wrapped the model, so that DDP exchanges it as soon as it is trained."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        pass

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        (self.freeze if epoch == 0 else self.make_trainable)(pl_module.first)


class Hooked(Student):
    """Notes what the module's own hooks see of the gradient."""

    def on_after_backward(self) -> None:
        witness_of(self).seen["after backward"].append(gradient(self))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        witness_of(self).seen["before the step"].append(gradient(self))


class Trouble(Exception):
    pass


class Failing(Student):
    """Fails in its fourth step; not if it has failed before."""

    has_failed = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3 and not self.has_failed:
            self.has_failed = True
            self.fail()
        return super().training_step(batch, batch_idx)

    def fail(self) -> None:
        raise Trouble("on every worker")


class FailingBackward(Failing):
    """Its fourth backward meets a NaN when the gradients of later layers are on their way already."""

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
    """The loss of one worker is not a number once."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if (self.global_step, self.global_rank) == (5, 1) else loss


class StopsItself(Student):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.trainer.should_stop = self.global_step == 10
        return super().training_step(batch, batch_idx)


class LogsTraining(Student):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


# What is done with a Trainer, where that is more than one fit.


def fit_shuffled(make_trainer: Callable[[], Trainer], model: LightningModule, witness: Witness) -> Trainer:
    trainer = make_trainer()
    trainer.fit(model, DataLoader(data().dataset, 4, shuffle=True), data())
    return trainer


def fit_uneven(make_trainer: Callable[[], Trainer], model: LightningModule, witness: Witness) -> Trainer:
    trainer = make_trainer()
    trainer.fit(model, data(27), data(9))
    return trainer


def fit_own_batches(make_trainer: Callable[[], Trainer], model: LightningModule, witness: Witness) -> Trainer:
    trainer = make_trainer()
    trainer.fit(model)
    return trainer


def fit_without_validation(make_trainer: Callable[[], Trainer], model: LightningModule, witness: Witness) -> Trainer:
    trainer = make_trainer()
    trainer.fit(model, data())
    return trainer


def fit_twice(make_trainer: Callable[[], Trainer], model: LightningModule, witness: Witness) -> Trainer:
    trainer = fit(make_trainer, model, witness)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, data(), data(16))
    return trainer


def fit_after_an_exception(make_trainer: Callable[[], Trainer], model: LightningModule, witness: Witness) -> Trainer:
    try:
        fit(make_trainer, model, witness)
    except (Trouble, RuntimeError, ValueError) as error:
        witness.said.append(f"raised: {type(error).__name__}: {error}")
    witness.said.append(f"there is a process group: {dist.is_initialized()}")
    witness.seen["steps before the exception"].append(len(witness.seen["gradients"]))
    return fit(make_trainer, model, witness)


def fail_to_fit(make_trainer: Callable[[], Trainer], model: LightningModule, witness: Witness) -> Trainer:
    trainer = make_trainer()
    with suppress(ValueError):
        trainer.fit(model, data())
    return trainer


def evaluate_before_and_after_fit(
    make_trainer: Callable[[], Trainer], model: LightningModule, witness: Witness
) -> Trainer:
    trainer = make_trainer()
    for when in ("before", "after"):
        [validated] = trainer.validate(model, data(20), verbose=False)
        [tested] = trainer.test(model, data(24), verbose=False)
        predicted = trainer.predict(model, data(28))
        witness.seen[f"evaluation {when}"] += [validated["val_loss"], tested["test_loss"], *predicted]
        if when == "before":
            trainer.fit(model, data(), data(16))
    return trainer


def fit_test_and_predict(make_trainer: Callable[[], Trainer], model: LightningModule, witness: Witness) -> Trainer:
    trainer = fit(make_trainer, model, witness)
    trainer.test(model, data(), verbose=False)
    trainer.predict(model, data())
    return trainer


# What shows that a case's subject took effect.


def synchronized(runs: list[Run]) -> None:
    assert not torch.equal(runs[0].seen["inputs"][-1], runs[1].seen["inputs"][-1])
    for run in runs:
        assert run.said == ["SynchronizedNorm"]
        assert run.moved("norm.running_mean")
        assert torch.equal(run.state["norm.running_mean"], runs[0].state["norm.running_mean"])
        assert torch.equal(run.state["norm.running_var"], runs[0].state["norm.running_var"])


def normalized_by_worker(runs: list[Run]) -> None:
    assert [run.said for run in runs] == [["BatchNorm1d"]] * 2
    assert not torch.equal(runs[0].state["norm.running_mean"], runs[1].state["norm.running_mean"])


def converted_and_refused(runs: list[Run]) -> None:
    # So says DDP when it is given one.
    for run in runs:
        assert run.said == ["on_exception: ValueError: SyncBatchNorm layers only work with GPU modules"]
        assert run.global_step == 0


def toggled(runs: list[Run]) -> None:
    for run in runs:
        turns = [f"{player} is trained, {player} wants a gradient" for player in ("generator", "judge")]
        assert run.said == turns * 2 * BATCHES
        assert run.global_step == 2 * 2 * BATCHES
        assert run.moved("generator.0.weight")
        assert run.moved("judge.0.weight")


def stepped_with_both(runs: list[Run]) -> None:
    for run in runs:
        assert run.global_step == 2 * (BATCHES + BATCHES // 2)
        assert run.moved("first.weight")
        assert run.moved("last.weight")


def clipped_by_norm(runs: list[Run]) -> None:
    for run in runs:
        norms = [float(one.norm()) for one in run.seen["gradients"]]
        applied = [float(one.norm()) for one in run.seen["applied gradients"]]
        assert len(applied) == len(norms) - 1 == 2 * BATCHES - 1  # the last stays
        assert min(norms) > 0.1
        assert applied == pytest.approx([0.1] * len(applied), rel=1e-4)


def clipped_by_value(runs: list[Run]) -> None:
    for run in runs:
        pairs = list(zip(run.seen["gradients"], run.seen["applied gradients"], strict=False))
        assert len(pairs) == 2 * BATCHES - 1
        for before, applied in pairs:
            assert before.abs().max() > 0.02
            assert_equal(applied, before.clamp(-0.02, 0.02))


def stopped_early(runs: list[Run]) -> None:
    for run in runs:
        assert 2 < run.epochs < 20
        assert run.epochs == runs[0].epochs


def averaged_weights(runs: list[Run]) -> None:
    for run in runs:
        assert run.seen["steps before the epoch"] == [0, BATCHES, 2 * BATCHES, 3 * BATCHES]
        weights = run.seen["weights before the epoch"]
        assert not torch.equal(weights[-1], weights[-2])
        average = torch.stack(weights[1:]).double().mean(0).float()
        final = torch.cat([run.state[name].flatten() for name in dict(Classifier().named_parameters())])
        torch.testing.assert_close(final, average, rtol=1e-5, atol=1e-6)


def saw_the_same_two_batches(runs: list[Run]) -> None:
    for run in runs:
        assert run.seen["samples"] == [4] * 2 * 2
        assert_equal(run.seen["inputs"][:2], run.seen["inputs"][2:])
        assert run.seen["validation samples"] == [4] * 2 * 2
    assert not torch.equal(runs[0].seen["inputs"][0], runs[1].seen["inputs"][0])


def limited(runs: list[Run]) -> None:
    for run in runs:
        assert run.global_step == 2 * 3
        assert run.seen["validation samples"] == [4] * 2
        assert run.seen["test samples"] == [4] * 2
        assert run.seen["predicted samples"] == [4]


def padded(runs: list[Run]) -> None:
    for run in runs:
        assert run.seen["samples"] == [4, 4, 4, 2] * 2
        assert run.seen["validation samples"] == [4, 1] * 2


def unequal(runs: list[Run]) -> None:
    assert [run.seen["samples"] for run in runs] == [[3] * 12, [5] * 12]


def evaluated(runs: list[Run]) -> None:
    for run in runs:
        before, after = run.seen["evaluation before"], run.seen["evaluation after"]
        assert len(before) == len(after) == 2 + 4
        assert before[0] != after[0]
        assert before[1] != after[1]
        assert run.global_step == 2 * BATCHES


def lowered(expected: list[float], runs: list[Run]) -> None:
    for run in runs:
        assert [float(rate) for rate in run.seen["learning rates"]] == pytest.approx(expected)


def accumulated(steps: list[int], total: int, runs: list[Run]) -> None:
    for run in runs:
        assert run.seen["steps before the epoch"] == steps
        assert run.global_step == len(run.seen["gradients"]) == total
        assert len(run.seen["samples"]) == BATCHES * len(steps)


def left_out(runs: list[Run]) -> None:
    for run in runs:
        assert not run.moved("middle.weight")
        assert run.moved("first.weight")


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
        # Every second backward is exchanged; the others leave what this worker alone has.
        assert_equal(after_backward[1::2], run.seen["before the step"])
        assert_equal(after_backward[1::2], runs[0].seen["after backward"][1::2])
    for one, other in zip(*[run.seen["after backward"][::2] for run in runs], strict=True):
        assert not torch.equal(one, other)


def failed(message: str, runs: list[Run]) -> None:
    for run in runs:
        assert run.said[0].startswith(f"on_exception: {message}")
        assert run.said[1].startswith(f"raised: {message}")
        assert len(run.said) == 3
        assert run.seen["steps before the exception"] == [3]
        # A training of its own.
        assert len(run.comm_hooks) == 2
        assert len(run.seen["gradients"]) == 3 + 2 * BATCHES
        assert all(weight.isfinite().all() for weight in run.state.values())


def not_a_number_anywhere(runs: list[Run]) -> None:
    for run in runs:
        assert [bool(one.isnan().any()) for one in run.seen["gradients"]] == [False] * 5 + [True] * 11
        assert all(weight.isnan().all() for weight in run.state.values())


def stopped_after(steps: int, runs: list[Run]) -> None:
    for run in runs:
        assert run.global_step == steps


def bare(runs: list[Run]) -> None:
    for run in runs:
        assert run.global_step == 2 * BATCHES
        assert run.metrics == {}


def logged(runs: list[Run]) -> None:
    for run in runs:
        assert run.metrics.keys() >= {"val_loss", "train_loss", "train_loss_step", "train_loss_epoch"}


CASES: dict[str, Case] = {
    # A validation would begin with the first worker's statistics on both.
    "batch norm": Case(normalized_by_worker, Normalized, drive=fit_without_validation),
    "synchronized batch norm": Case(
        synchronized, Normalized, lambda: {"plugins": [SynchronizeNorms()]}, fit_without_validation
    ),
    "sync_batchnorm": Case(converted_and_refused, Normalized, lambda: {"sync_batchnorm": True}, fail_to_fit),
    "toggled optimizers": Case(toggled, Toggling, ddp_options={"find_unused_parameters": True}),
    "two optimizers": Case(stepped_with_both, TwoOptimizers),
    "clipping by norm": Case(clipped_by_norm, options=lambda: {"gradient_clip_val": 0.1}, drive=fit_without_validation),
    "clipping by value": Case(
        clipped_by_value,
        options=lambda: {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
        drive=fit_without_validation,
    ),
    "early stopping": Case(
        stopped_early,
        options=lambda: {"max_epochs": 20, "callbacks": [EarlyStopping("val_loss", patience=2)]},
    ),
    "stochastic weight averaging": Case(
        averaged_weights,
        options=lambda: {
            "max_epochs": 4,
            "callbacks": [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)],
        },
    ),
    "overfit_batches": Case(saw_the_same_two_batches, options=lambda: {"overfit_batches": 2}, drive=fit_shuffled),
    "a share of overfit_batches": Case(
        saw_the_same_two_batches, options=lambda: {"overfit_batches": 0.25}, drive=fit_shuffled
    ),
    "limits": Case(
        limited,
        options=lambda: {
            "limit_train_batches": 3,
            "limit_val_batches": 0.5,
            "limit_test_batches": 2,
            "limit_predict_batches": 1,
        },
        drive=fit_test_and_predict,
    ),
    "uneven last batch": Case(padded, drive=fit_uneven),
    "batches of unequal size": Case(unequal, OwnBatches, lambda: {"use_distributed_sampler": False}, fit_own_batches),
    "evaluation before and after": Case(evaluated, drive=evaluate_before_and_after_fit),
    "schedule by steps": Case(
        partial(lowered, [0.1 * 0.5 ** (step // 3) for step in range(2 * BATCHES)]),
        partial(Scheduled, {"interval": "step"}, partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5)),
    ),
    "schedule by a plateau": Case(
        partial(lowered, [rate for rate in (0.1, 0.1, 0.1, 0.05, 0.025) for _ in range(BATCHES)]),
        partial(
            Scheduled,
            {"monitor": "val_loss"},
            partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0),
        ),
        lambda: {"max_epochs": 5},
    ),
    "accumulation": Case(partial(accumulated, [0, 3], 6), options=lambda: {"accumulate_grad_batches": 3}),
    "scheduled accumulation": Case(
        partial(accumulated, [0, 8, 12], 14),
        options=lambda: {"max_epochs": 3, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]},
    ),
    "frozen layer": Case(left_out, PartlyFrozen),
    "backbone finetuning": Case(
        unfrozen,
        WithBackbone,
        lambda: {"max_epochs": 3, "callbacks": [BackboneFinetuning(1, lambda epoch: 1.5)]},
    ),
    "finetuning of what DDP knows": Case(
        unfrozen,
        Student,
        lambda: {"max_epochs": 3, "callbacks": [FreezeForAnEpoch()]},
        ddp_options={"find_unused_parameters": True},
    ),
    "two fits": Case(trained_again, drive=fit_twice),
    "hooks of the module": Case(seen_by_hooks, Hooked, lambda: {"accumulate_grad_batches": 2}),
    "exception in a step": Case(partial(failed, "Trouble: on every worker"), Failing, drive=fit_after_an_exception),
    "anomaly in a backward": Case(
        partial(failed, "RuntimeError: Function "),
        FailingBackward,
        lambda: {"detect_anomaly": True},
        fit_after_an_exception,
    ),
    "not a number on one worker": Case(not_a_number_anywhere, FailingOnOne),
    "should_stop": Case(partial(stopped_after, 11), StopsItself, lambda: {"max_epochs": 5}),
    "fast_dev_run": Case(partial(stopped_after, 3), options=lambda: {"fast_dev_run": 3}),
    "logging": Case(logged, LogsTraining),
    "barebones": Case(bare, options=lambda: {"barebones": True}, drive=fit_without_validation),
}


@pytest.mark.parametrize("name", CASES)
def test_threshold_zero_behaves_as_ddp(name: str) -> None:
    workers = run_workers(_train_with_both, 2, name, process_group=False, timeout=60)
    for runs in zip(*workers, strict=True):
        CASES[name].check(list(runs))
    for dense, sparse in workers:
        assert dense.comm_hooks == [None] * len(sparse.comm_hooks)
        assert sparse.comm_hooks == ["sparse_hook"] * len(dense.comm_hooks)
        assert_equal(sparse.state, dense.state)
        assert_equal(sparse.seen, dense.seen)
        assert sparse.said == dense.said
        assert (sparse.global_step, sparse.epochs) == (dense.global_step, dense.epochs)
        own_metrics = {name: value for name, value in sparse.metrics.items() if not name.startswith("sparse/")}
        assert_equal(own_metrics, dense.metrics)
        # Each is sent whole, but for parameters that a backward did not reach.
        assert all(
            density == 1.0 or "find_unused_parameters" in CASES[name].ddp_options for density in sparse.densities
        )
        assert sparse.warnings <= dense.warnings
