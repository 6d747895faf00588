"""``Trainer(strategy="local_hardthreshold")``: local training with the features of a Trainer."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_sparse import (
    DensityMonitor,
    ErrorMonitor,
    LocalHardThresholdStrategy,
)
from tests.integration.checkpoints.test_checkpoint import ResumableData, SaveAt, WithSchedule
from tests.integration.models import (
    Classifier,
    Normalized,
    TwoPlayers,
    WithEmbedding,
    adam,
    assert_equal,
    clones,
    compiled,
    data,
    nesterov,
    quiet_trainer,
    warnings_of,
)
from tests.workers import of_all_workers, on_workers, run_workers


class WithAdam(Classifier):
    default_optimizer = staticmethod(adam)
    lr = 0.01


def local_trainer(*callbacks: Callback, every_n_steps: int = 1, **options: Any) -> Trainer:
    strategy = LocalHardThresholdStrategy(threshold=0.01, every_n_steps=every_n_steps)
    return quiet_trainer(strategy, callbacks=list(callbacks), use_distributed_sampler=False, **options)


class WithSparseMomentum(WithEmbedding):
    default_optimizer = staticmethod(partial(torch.optim.SGD, lr=0.1, momentum=0.9))

    def __init__(self) -> None:
        super().__init__(sparse=True)


@on_workers(2, process_group=False)
def test_layers_with_sparse_gradients_train_and_resume(tmp_path: Path) -> None:
    path, model, resumed = f"{tmp_path}/saved.ckpt", WithSparseMomentum(), WithSparseMomentum()
    before = model.words.weight.detach().clone()
    local_trainer(SaveAt(4, path), max_steps=8).fit(model, ResumableData(1000))
    assert not torch.equal(model.words.weight, before)
    local_trainer(max_steps=8).fit(resumed, ResumableData(1000), ckpt_path=path)
    assert_equal(everything_of(resumed), everything_of(model))


def flat(module: nn.Module) -> Tensor:
    tensors = [*module.parameters(), *module.buffers()]
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def everything_of(module: nn.Module) -> dict[str, Tensor]:
    return clones([*module.named_parameters(), *module.named_buffers()])


# Training.


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}, {"is_compiled": True}], ids=str
)
@on_workers(2, process_group=False)
def test_threshold_zero_with_sgd_equals_ddp(options: dict[str, Any]) -> None:
    models, graphs = [WithSchedule(nesterov), WithSchedule(nesterov)], []
    is_compiled = options.pop("is_compiled", False)
    for model, strategy in zip(models, ("ddp", LocalHardThresholdStrategy(threshold=0.0)), strict=True):
        trained = compiled(model, graphs) if is_compiled and strategy != "ddp" else model
        quiet_trainer(strategy, max_steps=8, **options).fit(trained, ResumableData(1000))
    assert bool(graphs) == is_compiled
    expected, found = (clones(model.named_parameters()) for model in models)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2 if "precision" in options else 1e-6)


class Players(TwoPlayers):
    """Steps with two optimizers in different orders.

    Args:
        order: the steps of a batch: "G" and "J" compute the loss of generator or judge, backward and step. "losses
            first" and "shared graph" have backwards that need weights from before the other player's step.
    """

    def __init__(self, order: str) -> None:
        super().__init__(toggles=False)
        self.order = order

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator, judge = self.optimizers()
        if self.order == "losses first":
            losses = [(generator, self.generator_loss(batch[0])), (judge, self.judge_loss(batch[0]))]
            for optimizer, loss in losses:
                self._step(optimizer, loss)
        elif self.order == "shared graph":
            fake = self.generator(batch[0])
            self._step(judge, self.judge(fake.detach()).square().mean())
            self._step(generator, (self.judge(fake) - 1).square().mean())
        elif self.order == "every other batch":
            self._steps("GJ"[batch_idx % 2], batch)
        elif not self.order.endswith("in a hook"):
            self._steps(self.order, batch)

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        if self.order.endswith("in a hook"):
            self._steps(self.order[:2], batch)

    def _steps(self, players: str, batch: list[Tensor]) -> None:
        generator, judge = self.optimizers()
        for player in players:
            if player == "G":
                self._step(generator, self.generator_loss(batch[0]))
            else:
                self._step(judge, self.judge_loss(batch[0]))

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize(
    ("order", "steps_per_batch", "every_n_steps", "equals_ddp"),
    [
        ("losses first", 1, 1, True),
        ("shared graph", 1, 1, False),
        ("every other batch", 1, 1, True),
        ("GJ", 1, 1, False),
        ("GJ", 1, 2, False),
        ("GJGJ", 2, 1, False),
        ("GJGJ", 2, 2, False),
        ("JJJG", 1, 1, False),
        ("GJ in a hook", 2, 1, True),
    ],
)
@on_workers(2, process_group=False)
def test_several_optimizers(order: str, steps_per_batch: int, every_n_steps: int, equals_ddp: bool) -> None:
    models, batches = [Players(order), Players(order)], 2
    local = LocalHardThresholdStrategy(threshold=0.0, every_n_steps=every_n_steps)
    for model, strategy in zip(models, ("ddp_find_unused_parameters_true", local), strict=True):
        trainer = quiet_trainer(strategy, max_steps=-1, max_epochs=1, limit_train_batches=batches)
        trainer.fit(model, data())
    assert (local.state.last_step.step + 1) * every_n_steps == local.state.num_steps == steps_per_batch * batches
    expected, found = (clones(model.named_parameters()) for model in models)
    assert_equal(*of_all_workers(found))
    # In the other orders, a player's gradient depends on the other player's step, which is not averaged yet.
    if equals_ddp:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


# Validation, logs and checkpoints.


def _everything(folder: str) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Fit, then test; return the weights during both, after the fit and after the test."""
    seen: dict[str, Any] = {"trained": [], "validated": [], "tested": [], "steps": []}
    observer = LambdaCallback(
        on_train_start=lambda trainer, _: trainer.strategy.state.subscribe(seen["steps"].append),
        on_train_batch_end=lambda _, module, *__: seen["trained"].append(flat(module)),
        on_validation_batch_start=lambda _, module, *__: seen["validated"].append(flat(module)),
        on_test_batch_start=lambda _, module, *__: seen["tested"].append(flat(module)),
    )
    model = Normalized(adam)
    trainer = quiet_trainer(
        LocalHardThresholdStrategy(threshold=0.01, every_n_steps=2),
        max_steps=-1,
        max_epochs=2,
        val_check_interval=4,
        callbacks=[observer, DensityMonitor(), ErrorMonitor(), ModelCheckpoint(folder, save_last=True)],
    )
    trainer.fit(model, data(), data(32))
    seen["metrics"] = {name: value.item() for name, value in trainer.callback_metrics.items()}
    after_fit = flat(model)
    trainer.test(model, data(32), verbose=False)
    assert trainer.global_step == 16
    return seen, after_fit, flat(model)


def test_workers_evaluate_shared_weights_and_train_their_own(tmp_path: Path) -> None:
    (mine, after_fit, after_test), (theirs, *after_others) = run_workers(
        _everything, 2, str(tmp_path), process_group=False
    )
    assert len(mine["steps"]) == 8
    assert mine["steps"] == theirs["steps"]
    logged = {f"sparse/{name}" for name in ("density", "error_norm", "threshold", "payload_bytes", "largest_drift")}
    own = {"sparse/exchange_wait_ms", "sparse/average_density", "sparse/total_error", "val_loss"}
    assert logged | own <= mine["metrics"].keys()
    assert {name: mine["metrics"][name] for name in logged} == {name: theirs["metrics"][name] for name in logged}
    for name in ("validated", "tested"):
        assert len(mine[name]) > 1
        assert_equal(mine[name], theirs[name])
    # During training, each worker has its own weights, which validation does not change.
    assert all((own != other).any() for own, other in zip(mine["trained"], theirs["trained"], strict=True))
    mean = (mine["trained"][3] + theirs["trained"][3]) / 2
    floating = slice(None, -1)  # the last is a counter
    torch.testing.assert_close(mine["validated"][4][floating], mean[floating], rtol=1e-6, atol=1e-7)
    for after in (after_test, *after_others):
        assert torch.equal(after, after_fit)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    names = [*dict(Normalized().named_parameters()), "norm.running_mean"]
    flat_saved = torch.cat([saved[name].flatten().double() for name in names])
    assert_equal(flat_saved, after_fit[: flat_saved.numel()])


class Target(WithAdam):
    """Has a target network as in BYOL, and buffers, one of them a constant that overflows in sums."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(8, 40).requires_grad_(False)
        self.register_buffer("masked", torch.full((3,), torch.finfo(torch.float32).min))
        self.register_buffer("third", torch.full((5,), 1 / 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.target.weight.data.mul_(0.9).add_(self.first.weight.data, alpha=0.1)
        self.count += 1 + self.global_rank
        return super().training_step(batch, batch_idx)


class ConstantNorms(WithAdam):
    """Has buffers that differ between workers and steps, but have constant norms."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sign", torch.full((2,), 0.5))
        self.register_buffer("place", torch.eye(5)[0])
        self.register_buffer("order", torch.arange(8))
        self.register_buffer("flags", torch.tensor([True, False, False]))
        self.register_buffer("of_first", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.sign *= 1 if self.global_rank else -1  # changes only on rank 0
        for buffer in (self.place, self.order, self.flags):
            buffer.copy_(buffer.roll(1 + self.global_rank))
        self.of_first += self.global_rank == 0
        return super().training_step(batch, batch_idx)


class WeightClamper(WithAdam):
    """Limits weights in a hook before each batch."""

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.05, 0.05)


class GrowingModel(WithAdam):
    """Has a cache that is longer on one worker and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.cache = torch.ones(4 + batch_idx * self.global_rank)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.cache = torch.ones(20)
        super().validation_step(batch, batch_idx)


class Odd(WithAdam):
    """Has an empty parameter, and a layer that DDP ignores, with a different size on each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.expert = nn.Linear(2 + int(os.environ["RANK"]), 3)
        nn.init.constant_(self.expert.weight, float(os.environ["RANK"]))
        self._ddp_params_and_buffers_to_ignore = ["expert.weight", "expert.bias"]


class Unfreezes(WithAdam):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch >= 1:
            self.first.requires_grad_(True)


def _validated(make: Callable[[], Classifier], *callbacks: Any) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Fit with validations; return the weights in each validation and after training."""
    seen: list[dict[str, Tensor]] = []
    observer = LambdaCallback(on_validation_batch_start=lambda _, module, *__: seen.append(everything_of(module)))
    model = make()
    made = [make_callback() for make_callback in callbacks]
    local_trainer(observer, *made, every_n_steps=2, max_steps=9, val_check_interval=3).fit(
        model, ResumableData(12), ResumableData(2)
    )
    return seen, everything_of(model)


@pytest.mark.parametrize(
    ("make", "callbacks", "own"),
    [
        (WithAdam, (partial(LearningRateFinder, num_training_steps=5),), ()),
        (Target, (), ()),
        (ConstantNorms, (), ()),
        (Odd, (), ("expert.weight", "expert.bias")),
        (GrowingModel, (), ("cache",)),
    ],
    ids=["search for a learning rate", "target network and constants", "buffers of equal norm", "odd", "growing"],
)
def test_workers_agree_to_the_end(make: Any, callbacks: tuple[Any, ...], own: tuple[str, ...]) -> None:
    results = run_workers(_validated, 2, make, *callbacks, process_group=False)
    (seen, left), (other_seen, other_left) = results
    assert len(seen) >= 4
    for mine, theirs in zip([*seen, left], [*other_seen, other_left], strict=True):
        for name in mine.keys() - set(own):
            assert torch.equal(mine[name], theirs[name]), name
    assert (seen[-1]["last.weight"] != seen[0]["last.weight"]).any()
    if make is Target:
        assert torch.equal(left["masked"], Target().masked)
        assert torch.equal(left["third"], Target().third)
        assert left["count"] == 9  # rank 0's; rank 1 counts twice as fast
    if make is Odd:
        for rank, (_, mine) in enumerate(results):
            assert torch.equal(mine["expert.weight"], torch.full((3, 2 + rank), float(rank)))


@pytest.mark.parametrize("make", [Target, Unfreezes, ConstantNorms, WeightClamper])
@on_workers(2, process_group=False)
def test_a_resume_is_exact_and_a_finished_run_keeps_the_saved_weights(make: Any, tmp_path: Path) -> None:
    ends: list[dict[str, Tensor]] = []

    class End(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_step == 12:
                ends.append(everything_of(pl_module))

    middle, end = str(tmp_path / "8.ckpt"), str(tmp_path / "12.ckpt")
    savers, done = (SaveAt(8, middle), SaveAt(12, end)), make()
    for model, callbacks, resume in ((make(), savers, None), (make(), (), middle), (done, (), end)):
        local_trainer(End(), *callbacks, max_steps=12).fit(model, ResumableData(4), ckpt_path=resume)
    straight, again = ends
    saved, finished = torch.load(end, weights_only=True)["state_dict"], everything_of(done)
    for name, tensor in straight.items():
        assert torch.equal(tensor, again[name]), name
        if tensor.is_floating_point():
            assert torch.equal(finished[name], saved[name]), name


class Hooked(WithAdam):
    """Changes saved optimizer states, and weights in validation, for good or for its duration."""

    restores, rate = False, 1e-4

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = self.rate
        checkpoint["optimizer_states"] *= bool(self.rate)

    def on_validation_epoch_end(self) -> None:
        with torch.no_grad():
            self.first.weight.mul_(2.0)
            if self.restores:
                self.first.weight.mul_(0.5)


@on_workers(2, process_group=False)
def test_hooks_may_change_saved_optimizers_and_lost_writes_cause_a_warning(tmp_path: Path) -> None:
    path, model = str(tmp_path / "4.ckpt"), Hooked()
    local_trainer(SaveAt(4, path), max_steps=4).fit(WithAdam(), ResumableData(8))
    for model.rate in (1e-4, 0.0):
        trainer = local_trainer(max_steps=5)
        trainer.fit(model, ResumableData(8), ckpt_path=path)
        assert trainer.optimizers[0].param_groups[0]["lr"] == (model.rate or WithAdam.lr)
    for model.restores in (True, False):
        trainer, said = local_trainer(max_steps=4, val_check_interval=2), []
        with warnings_of(said, "weights were changed"):
            trainer.fit(model, ResumableData(4), ResumableData(1))
        assert bool(said) == (trainer.global_rank == 0 and not model.restores)


@pytest.mark.parametrize("where", ["validation", "training"])
@on_workers(2, process_group=False)
def test_weights_agree_after_an_exception_and_user_writes_stay(tmp_path: Path, where: str) -> None:
    own: list[Tensor] = []

    class FailingModel(Callback):
        def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if where == "validation" and trainer.global_step:
                raise ZeroDivisionError

        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            own[:] = [weight.detach().clone() for weight in pl_module.parameters()]
            if where == "training" and trainer.global_step == 5:
                raise ZeroDivisionError

    model = WithAdam()
    trainer = local_trainer(FailingModel(), max_steps=8, val_check_interval=4, num_sanity_val_steps=0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, ResumableData(100), ResumableData(2))
    assert torch.equal(*of_all_workers(flat(model)))
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    saved = torch.load(tmp_path / "late.ckpt", weights_only=True)["lightning_sparse"]["workers"][dist.get_rank()]
    for weight, kept in zip(own, saved["weights"].values(), strict=True):
        assert torch.equal(weight.flatten(), kept)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    local_trainer(max_steps=8).validate(model, ResumableData(2), verbose=False)
    assert (flat(model) == 0.5).all()


@on_workers(2, process_group=False)
def test_weights_loaded_after_training_are_saved(tmp_path: Path) -> None:
    model = WithAdam()
    trainer = local_trainer(SaveAt(3, str(tmp_path / "best.ckpt")), max_steps=6)
    trainer.fit(model, ResumableData(100))
    saved = []
    for _ in range(2):
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        saved.append(torch.load(tmp_path / "last.ckpt", weights_only=True)["lightning_sparse"]["workers"])
        trainer.validate(model, ResumableData(2), verbose=False)  # broadcasts equal weights
    assert len(saved[1]) == 2
    torch.testing.assert_close(saved[1], saved[0], rtol=0, atol=0)
    with torch.no_grad():
        model.first.weight.neg_()  # has the same norm
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["lightning_sparse"]["workers"] == []
    trainer.test(model, ResumableData(2), ckpt_path=tmp_path / "best.ckpt", verbose=False)
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    best, again = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("best", "again"))
    assert_equal(again["state_dict"], best["state_dict"])
    assert again["lightning_sparse"]["workers"] == []
    assert "were changed" in again["lightning_sparse"]["why_incomplete"]


@pytest.mark.parametrize("who_writes", [[], [0], [1], [0, 1]], ids=str)
@on_workers(2, process_group=False)
def test_a_save_in_validation_is_equal_for_all_workers_after_writes(who_writes: list[int], tmp_path: Path) -> None:
    class Writer(Callback):
        def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_rank in who_writes:
                with torch.no_grad():
                    next(pl_module.parameters()).fill_(0.5)
            trainer.save_checkpoint(tmp_path / "in.ckpt")

    trainer = local_trainer(Writer(), max_steps=6, val_check_interval=3, num_sanity_val_steps=0)
    trainer.fit(WithAdam(), ResumableData(6), ResumableData(1))
    assert trainer.global_step == 6
    saved = torch.load(tmp_path / "in.ckpt", weights_only=True)["lightning_sparse"]
    assert len(saved["workers"]) == (0 if who_writes else 2)
    assert ("were changed" in str(saved["why_incomplete"])) is bool(who_writes)


# Rejected options.


class WithShardedOptimizer(Classifier):
    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.01)


@on_workers(2, process_group=False)
def test_an_optimizer_that_needs_averaged_gradients_raises() -> None:
    with pytest.raises(ValueError, match=r"ZeroRedundancyOptimizer.* inside it"):
        local_trainer(max_steps=2).fit(WithShardedOptimizer(), ResumableData(4))
