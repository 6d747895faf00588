"""Automatic optimization with unusual uses of the closure, and tuning."""

import tempfile
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sparse import HardThreshold
from tests.integration.models import WithEmbedding, data, search_restriction
from tests.integration.programs.trainer import (
    BATCHES,
    MakeTrainer,
    ManualStudent,
    ProgramRecorder,
    Student,
    fail_to_fit,
    fit_without_validation,
    moved,
    recorder_of,
    trains,
)
from tests.integration.programs.world import Row, Run


class AscendingOptimizer(torch.optim.Optimizer):
    """Sharpness-aware minimization: evaluates its closure twice per step, first to ascend."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {"lr": 0.1})
        self.radius = 0.05
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        ascents = [parameter.grad * (self.radius / norm) for parameter in parameters]
        torch._foreach_add_(parameters, ascents)
        evaluate()
        torch._foreach_sub_(parameters, ascents)
        self.base_optimizer.step()
        return loss


class ClosureCounter(Student):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        recorder_of(self).texts.append(f"batch {batch_idx}")
        return super().training_step(batch, batch_idx)


def several_per_step(at_least: int, runs: list[Run]) -> None:
    for run in runs:
        assert run.global_step == 2 * BATCHES
        assert len(run.texts) >= at_least * 2 * BATCHES
        assert run.moved("first.weight")


class StepSkipper(Student):
    """Evaluates the closure in every batch, and steps in every other batch.

    Args:
        then: treatment of the gradients of a skipped batch: ``"dropped"``, ``"zeroed"``, or ``"kept"``. The next batch
            adds to kept gradients, unless a new epoch begins.
    """

    def __init__(self, then: str) -> None:
        super().__init__()
        self.then = then

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        is_after = batch_idx > 0 and batch_idx % 2 == 0
        if not (is_after and self.then == "kept"):
            optimizer.zero_grad(set_to_none=not (is_after and self.then == "zeroed"))


def skipped_half(runs: list[Run]) -> None:
    for run in runs:
        assert len(run.stepped_on) == BATCHES
        assert run.kind not in ("zero", "sparse", "oracle") or run.num_exchanges == 2 * BATCHES


class ManualWithoutOutput(ManualStudent):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx % 3 != 2:
            super().training_step(batch, batch_idx)


class WithLearningRate(Student):
    def __init__(self) -> None:
        super().__init__(make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=self.lr, momentum=0.5))
        self.lr = 0.05

    def train_dataloader(self) -> DataLoader:
        return data()


def fit_and_record(make_trainer: MakeTrainer, model: LightningModule, recorder: ProgramRecorder) -> Trainer:
    trainer = make_trainer()
    trainer.fit(model)
    recorder.texts.append(f"learning rate {model.lr}")
    return trainer


class Beginning(Callback):
    """Records the state of the sparse exchange at the start of training."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = getattr(trainer.strategy, "state", None)
        if state is not None:
            kept = max((float(residual.abs().max()) for residual in state.residuals.state_dict().values()), default=0.0)
            notes = {"last step": state.last_step, "kept": kept, "threshold": state.sparsifier.current_threshold}
            recorder_of(pl_module).world.run.notes.append(notes)


def with_finder() -> dict[str, Any]:
    finder = LearningRateFinder(min_lr=1e-3, max_lr=0.5, num_training_steps=16)
    return {"callbacks": [finder, Beginning()], "default_root_dir": tempfile.mkdtemp()}


BATCHES_AFTER_SEARCH = (1 if search_restriction() else 2) * len(data()) // 2
"""Before pull request 21056, the epoch in which a search stopped counted as an epoch of training."""


def began_anew(threshold: float | None, runs: list[Run]) -> None:
    for run in runs:
        assert run.global_step == BATCHES_AFTER_SEARCH
        assert run.texts != ["learning rate 0.05"]
        if run.kind in ("zero", "sparse"):
            expected = 0.0 if run.kind == "zero" or threshold is None else threshold
            assert run.notes == [{"last step": None, "kept": 0.0, "threshold": expected}]


def calibrated_again(runs: list[Run]) -> None:
    began_anew(None, runs)
    for run in runs:
        first, *others = run.densities
        assert first == 1.0  # calibration sends everything
        assert max(others) < 0.9


def refused_with_advice(runs: list[Run]) -> None:
    for run in runs:
        if run.kind == "ddp":
            assert not run.texts
            assert run.global_step == 2 * BATCHES
        else:
            assert "'words' is Embedding(sparse=True)" in run.texts[0]
            assert "sparse=False" in run.texts[0]


_fit = {"drive": fit_without_validation}

ROWS = {
    "optimizer that ascends first": Row(
        trains(partial(ClosureCounter, AscendingOptimizer), **_fit), partial(several_per_step, 2), rolls_back=True
    ),
    "LBFGS": Row(
        trains(partial(ClosureCounter, partial(torch.optim.LBFGS, lr=0.1, max_iter=3)), **_fit),
        partial(several_per_step, 3),
        rolls_back=True,
    ),
    **{
        f"steps skipped, gradients {then}": Row(
            trains(partial(StepSkipper, then), **_fit), skipped_half, rolls_back=True
        )
        for then in ("dropped", "zeroed", "kept")
    },
    "nothing done": Row(trains(ManualWithoutOutput, **_fit), partial(moved, 2 * (BATCHES - 1), ("first.weight",))),
    "learning rate finder": Row(trains(WithLearningRate, with_finder, fit_and_record), partial(began_anew, 0.05), 0.05),
    "learning rate finder and a density": Row(
        trains(WithLearningRate, with_finder, fit_and_record),
        calibrated_again,
        make_sparsifier=partial(HardThreshold, density=0.3),
        kinds=("sparse",),
        missing=search_restriction,
    ),
    "embedding with sparse gradients under a Trainer": Row(
        trains(partial(WithEmbedding, sparse=True), drive=fail_to_fit), refused_with_advice, None, is_refused=True
    ),
}
