"""Values that are no numbers: every worker learns of them in their step, and no residual keeps them.

One worker of two gets a batch with a NaN or an infinity. With a loss scale all skip that step; without, all end up with
weights that are no numbers, as under plain DDP, and whoever watches for that sees it.
"""

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sparse import DDPHardThresholdStrategy, SparseDDPStrategy, TopK
from tests.integration.models import SMALL_BUCKETS_MB, Classifier, ScaledPrecision, clones, nesterov, quiet_trainer
from tests.workers import run_workers

BAD_STEP, BAD_RANK, STEPS = 3, 1, 6
ROUTES = ["gather", "dense", "reduce_scatter"]


class Batches(torch.utils.data.Dataset[Any]):
    """Other numbers on each worker; one of them is bad once, on one worker."""

    def __init__(self, bad: float | None, rank: int) -> None:
        self.bad, self.rank = bad, rank

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 * index + self.rank)
        inputs = torch.randn(4, 8, generator=generator)
        if self.bad is not None and index == BAD_STEP and self.rank == BAD_RANK:
            inputs[0, 0] = self.bad
        return inputs, torch.randint(0, 3, (4,), generator=generator)


def loader(bad: float | None) -> DataLoader:
    """This worker's batches; without a sampler Lightning hands each worker all of them."""
    return DataLoader(Batches(bad, int(os.environ["RANK"])), batch_size=None)


class Step(Classifier):
    """A classifier whose first layer alone sees the bad value as such."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


@dataclass
class Watch(Callback):
    """What is there after each optimizer step."""

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    residuals: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    non_finite: list[int] = field(default_factory=list)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.gradients.append(clones((name, one.grad) for name, one in pl_module.named_parameters()))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.weights.append(clones(pl_module.named_parameters()))
        state = getattr(trainer.strategy, "state", None)
        if state is not None:
            self.residuals.append(state.residuals.state_dict())
            self.non_finite.append(state.last_step.non_finite)


def make_strategy(kind: str, **options: Any) -> DDPStrategy:
    if kind == "ddp":
        return DDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB)
    if kind == "top k":
        return SparseDDPStrategy(TopK(0.05), bucket_cap_mb=SMALL_BUCKETS_MB, **options)
    return DDPHardThresholdStrategy(threshold=0.05, bucket_cap_mb=SMALL_BUCKETS_MB, **options)


def fit(kind: str, bad: float | None, scale: float | None, options: dict[str, Any]) -> tuple[Watch, float | None]:
    """Runs in every worker."""
    watch, plugins, scaler = Watch(), [], None
    if scale is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        plugins = [ScaledPrecision("16-mixed", "cpu", scaler=scaler)]
    trainer = quiet_trainer(
        make_strategy(kind, **options),
        num_workers=2,
        max_steps=STEPS,
        callbacks=[watch],
        plugins=plugins,
        use_distributed_sampler=False,
    )
    trainer.fit(Step(nesterov), loader(bad))
    return watch, None if scaler is None else scaler.get_scale()


def run(kind: str, bad: float | None, scale: float | None, **options: Any) -> list[tuple[Watch, float | None]]:
    return run_workers(fit, 2, kind, bad, scale, options, process_group=False)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("bad", "kind", "exchange"),
    [
        *((float("inf"), "hard threshold", route) for route in ROUTES),
        (float("nan"), "hard threshold", "gather"),
        (float("-inf"), "top k", "gather"),
        (float("nan"), "top k", "dense"),
    ],
)
def test_an_overflow_on_one_worker_is_skipped_by_all_and_undone(bad: float, kind: str, exchange: str) -> None:
    scaled = run(kind, bad, 2.0**10, exchange=exchange)
    for rank, (watch, scale) in enumerate(scaled):
        # Skipped, and the scale halved, as under plain DDP: five good steps doubled it twice.
        assert equal(watch.weights[BAD_STEP], watch.weights[BAD_STEP - 1])
        assert not equal(watch.weights[BAD_STEP + 1], watch.weights[BAD_STEP])
        assert scale == 2.0**11
        assert [count > 0 for count in watch.non_finite] == [step == BAD_STEP for step in range(STEPS)]
        # As if that backward had never been; what was held back before it waits on.
        own = own_gradient(watch.weights[BAD_STEP - 1], bad, rank)
        assert any(not one.isfinite().all() for one in own.values()) == (rank == BAD_RANK)
        assert any(one.any() for one in watch.residuals[BAD_STEP - 1].values())
        assert equal(watch.residuals[BAD_STEP], watch.residuals[BAD_STEP - 1])
        assert not equal(watch.residuals[BAD_STEP + 1], watch.residuals[BAD_STEP])
        for residuals in watch.residuals:
            assert all(one.isfinite().all() for one in residuals.values())
    assert all(equal(*pair) for pair in zip(scaled[0][0].weights, scaled[1][0].weights, strict=True))


def own_gradient(weights: dict[str, Tensor], bad: float, rank: int) -> dict[str, Tensor]:
    """The gradient of one worker in the bad step, with no DDP in sight."""
    inputs, labels = Batches(bad, rank)[BAD_STEP]
    model = Classifier()
    model.load_state_dict(weights)
    F.cross_entropy(model(inputs), labels).backward()
    return {name: one.grad.flatten() for name, one in model.named_parameters()}


@pytest.mark.parametrize("scale", [2.0**4, 2.0**20])
def test_numbers_do_not_depend_on_the_scale(scale: float) -> None:
    """A power of two rounds nothing, and it changes while training goes on."""
    for (scaled, last), (plain, _) in zip(
        run("hard threshold", None, scale), run("hard threshold", None, None), strict=True
    ):
        assert last == scale * 2**3
        assert all(equal(*pair) for pair in zip(scaled.weights, plain.weights, strict=True))
        assert all(equal(*pair) for pair in zip(scaled.residuals, plain.residuals, strict=True))


@pytest.mark.parametrize(("kind", "exchange"), [*(("hard threshold", route) for route in ROUTES), ("top k", "gather")])
def test_without_a_scale_a_nan_reaches_every_worker_in_its_step_as_under_ddp(kind: str, exchange: str) -> None:
    dense = run("ddp", float("nan"), None)
    sparse = run(kind, float("nan"), None, exchange=exchange)
    for (one, _), (other, _) in zip(sparse, dense, strict=True):
        for step in range(STEPS):
            numbers = [one.gradients[step], one.weights[step]], [other.gradients[step], other.weights[step]]
            for mine, ddp in zip(*numbers, strict=True):
                is_bad = {name: bool(value.isnan().any()) for name, value in ddp.items()}
                assert {name: bool(value.isnan().any()) for name, value in mine.items()} == is_bad
                assert any(is_bad.values()) == (step >= BAD_STEP)
        assert all(value.isfinite().all() for residuals in one.residuals for value in residuals.values())
        assert one.non_finite[BAD_STEP - 1] == 0 < one.non_finite[BAD_STEP]


class StopAtNan(Callback):
    """What Lightning's terminate_on_nan did: ends the run when weights are no numbers."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not all(parameter.isfinite().all() for parameter in pl_module.parameters()):
            trainer.should_stop = True


def _watched(kind: str, watcher: str) -> int:
    callbacks = {
        "callback": StopAtNan(),
        "early stopping": EarlyStopping("loss", check_on_train_epoch_end=True, check_finite=True, patience=9),
    }
    trainer = quiet_trainer(
        make_strategy(kind),
        num_workers=2,
        max_steps=3 * STEPS,
        callbacks=[callbacks[watcher]],
        use_distributed_sampler=False,
    )
    trainer.fit(Step(nesterov), loader(float("nan")))
    return trainer.global_step


@pytest.mark.parametrize(("watcher", "stops_at"), [("callback", BAD_STEP + 1), ("early stopping", STEPS)])
@pytest.mark.parametrize("kind", ["ddp", "hard threshold"])
def test_who_watches_for_nan_stops_every_worker_where_ddp_stops(kind: str, watcher: str, stops_at: int) -> None:
    assert run_workers(_watched, 2, kind, watcher, process_group=False) == [stops_at] * 2


@pytest.mark.parametrize("kind", ["ddp", "hard threshold"])
def test_detect_anomaly_names_the_step_on_the_worker_that_has_the_nan(kind: str) -> None:
    """Only that worker finds it in its own backward; the others' exchange breaks off, as under DDP."""
    with pytest.raises(AssertionError) as caught:
        run_workers(_anomaly, 2, kind, process_group=False, timeout=60)
    assert "returned nan values in its 0th output" in str(caught.value)


def _anomaly(kind: str) -> None:
    trainer = quiet_trainer(
        make_strategy(kind), num_workers=2, max_steps=STEPS, detect_anomaly=True, use_distributed_sampler=False
    )
    trainer.fit(Step(nesterov), loader(float("nan")))
