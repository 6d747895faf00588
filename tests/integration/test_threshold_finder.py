"""Looking for a threshold: it leaves no trace of itself, is used where it shall be, and tells what it found."""

import copy
import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchmetrics import MeanMetric

from lightning_sparse import (
    CommunicationProfiler,
    DDPHardThresholdStrategy,
    DensityMonitor,
    HardThreshold,
    LocalHardThresholdStrategy,
    SimulatedWorkersStrategy,
    SparseDDPStrategy,
    ThresholdCurve,
    ThresholdFinder,
    TopK,
    find_threshold,
)
from tests.integration.models import Classifier, ManualClassifier, TwoPlayers, adam, data, nesterov, quiet_trainer
from tests.integration.test_monitors import Listener
from tests.workers import run_workers

STEPS = 6


class Everything(Classifier):
    """Has buffers, random numbers, a metric, an extra state and a schedule that waits for validation."""

    def __init__(self) -> None:
        super().__init__(nesterov)
        self.norm = nn.BatchNorm1d(40)
        self.mean_loss = MeanMetric()
        self.counter = Counter()
        self.validated = 0
        self.seen: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(F.dropout(self.norm(self.middle(self.first(inputs).tanh())), 0.2, self.training))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch[0].sum().item())
        self.counter.count += 1
        loss = self.loss(batch)
        self.mean_loss(loss.detach())
        self.log("mean_loss", self.mean_loss)
        if self.global_step == STEPS:  # the search is longer than most of these trainings
            self.log("late", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.validated += 1

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        by_step = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [by_step, {"scheduler": plateau, "monitor": "val_loss", "interval": "epoch"}]


class Counter(nn.Module):
    """A state that is no tensor."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class Assigned(Classifier):
    """Assigns its buffer in place of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)
        return super().loss([batch[0] - self.mean, batch[1]])


class Drawn(torch.utils.data.Dataset):
    """Its samples are drawn when they are read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(8), index % 3


class Counted(DataLoader):
    """Gives other data in each epoch, and can be set back."""

    epoch = 0

    def __iter__(self) -> Any:
        self.epoch += 1
        generator = torch.Generator().manual_seed(self.epoch)
        yield from ([torch.randn(4, 8, generator=generator), torch.arange(4) % 3] for _ in range(len(self)))

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class Shuffler(torch.utils.data.Sampler):
    """Has a generator by another name than torch's own."""

    def __init__(self) -> None:
        self.numbers = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Any:
        return iter(torch.randperm(64, generator=self.numbers).tolist())


class Renewing(LightningDataModule):
    """Makes other data each time that it is asked, and can be set back."""

    asked = 0

    def train_dataloader(self) -> DataLoader:
        self.asked += 1
        samples = torch.randn(64, 8, generator=torch.Generator().manual_seed(self.asked))
        return DataLoader(TensorDataset(samples, torch.arange(64) % 3), 4)

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


def with_own_generator() -> DataLoader:
    samples = torch.randn(64, 8, generator=torch.Generator().manual_seed(11))
    labels = torch.arange(64) % 3
    generator = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(samples, labels), 4, sampler=RandomSampler(samples, generator=generator))


@dataclass
class Program:
    """A training that must not notice that a threshold was looked for.

    Attributes:
        model: to train.
        strategy: with which.
        options: of the Trainer.
        loader: of the training data.
        num_processes: workers that are processes.
    """

    model: Callable[[], LightningModule] = Classifier
    strategy: Callable[[], Any] = lambda: DDPHardThresholdStrategy(threshold=0.05)
    options: dict[str, Any] = field(default_factory=dict)
    loader: Callable[[], Any] = data
    num_processes: int = 2


PROGRAMS = {
    "a threshold": Program(),
    "a density": Program(strategy=lambda: DDPHardThresholdStrategy(density=0.1)),
    "layers of their own": Program(
        strategy=lambda: DDPHardThresholdStrategy(threshold=0.05, layer_thresholds={"*bias": 0.1})
    ),
    "epochs, validation, momentum, random numbers": Program(
        Everything,
        options={"max_epochs": 2, "max_steps": -1, "limit_val_batches": 2, "accumulate_grad_batches": 3},
        loader=lambda: DataLoader(data().dataset, 4, shuffle=True),
    ),
    "a generator of one's own": Program(
        Everything, loader=with_own_generator, options={"use_distributed_sampler": False}
    ),
    "by hand": Program(ManualClassifier),
    "two players": Program(
        TwoPlayers, strategy=lambda: DDPHardThresholdStrategy(threshold=0.05, find_unused_parameters=True)
    ),
    "learning-rate residuals": Program(
        strategy=lambda: DDPHardThresholdStrategy(threshold=0.05, error_feedback="learning_rate")
    ),
    "static graph": Program(strategy=lambda: DDPHardThresholdStrategy(threshold=0.05, static_graph=True)),
    "half precision": Program(
        strategy=lambda: DDPHardThresholdStrategy(density=0.1), options={"precision": "bf16-mixed"}
    ),
    "drifts": Program(lambda: Classifier(adam), lambda: LocalHardThresholdStrategy(threshold=0.003)),
    "drifts, kept apart, every 2": Program(
        lambda: Classifier(adam), lambda: LocalHardThresholdStrategy(density=0.1, keep_drift=False, every_n_steps=2)
    ),
    "drifts, overlapping, batch norm": Program(
        Everything, lambda: LocalHardThresholdStrategy(threshold=0.003, overlap=True)
    ),
    "simulated": Program(
        Everything,
        lambda: SimulatedWorkersStrategy(HardThreshold(threshold=0.05), 3, device="cpu"),
        {"limit_val_batches": 2},
        num_processes=1,
    ),
    "alone": Program(num_processes=1),
    "an assigned buffer": Program(Assigned),
    "an outer optimizer": Program(
        strategy=lambda: LocalHardThresholdStrategy(
            threshold=0.003, every_n_steps=2, outer_optimizer=partial(torch.optim.SGD, lr=0.7, momentum=0.9)
        )
    ),
    "persistent processes": Program(
        loader=lambda: DataLoader(Drawn(), 4, num_workers=1, persistent_workers=True),
        options={"use_distributed_sampler": False},
    ),
    "a loader with a state": Program(
        loader=lambda: Counted(data().dataset, 4), options={"use_distributed_sampler": False}
    ),
    "a sampler of one's own": Program(
        loader=lambda: DataLoader(data().dataset, 4, sampler=Shuffler()), options={"use_distributed_sampler": False}
    ),
    "a data module with a state": Program(loader=Renewing),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_training_goes_as_if_nothing_had_been_looked_for(name: str) -> None:
    num_processes = PROGRAMS[name].num_processes
    for plain, searched in run_workers(_train_with_and_without, num_processes, name, process_group=False):
        assert searched.pop("found").densities[0] > 0.4  # of two players half each time
        assert_equal(searched, plain)


MEASURED = ("a density", "epochs, validation, momentum, random numbers", "by hand", "drifts, kept apart, every 2")


@pytest.mark.parametrize("name", MEASURED)
def test_a_training_goes_as_if_nothing_had_been_measured(name: str) -> None:
    for plain, measured in run_workers(_train_with_and_without, 2, name, True, process_group=False):
        profile = measured.pop("found")
        assert min(profile.compute_seconds, profile.dense_seconds, profile.sparse_seconds) > 0
        assert 0 < profile.density < 0.5
        assert profile.num_workers == 2
        assert profile.exchanges_per_step == (0.5 if name.endswith("every 2") else 1)
        assert_equal(measured, plain)


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def _train_with_and_without(name: str, measures: bool = False) -> list[dict[str, Any]]:
    program, seen = PROGRAMS[name], []
    finder = CommunicationProfiler(4, 0.05) if measures else ThresholdFinder(0.05, num_steps=7, update=False)
    for finders in ([], [finder]):
        torch.manual_seed(1)
        model, monitor = program.model(), DensityMonitor()
        options = {"max_steps": STEPS} | program.options
        workers = program.num_processes
        strategy = program.strategy()
        witness = Witness()
        trainer = quiet_trainer(strategy, num_workers=workers, callbacks=[monitor, witness, *finders], **options)
        validation = data() if options.get("limit_val_batches") else None
        trainer.fit(model, program.loader(), validation)
        seen.append(
            {
                "weights": model.state_dict(),
                "optimizers": [one.state_dict()["state"] for one in trainer.strategy.optimizers],
                "progress": [trainer.global_step, trainer.current_epoch],
                "logged": {key: value for key, value in trainer.callback_metrics.items() if key != "epoch"},
                "random": torch.rand(1),
                "validated": getattr(model, "validated", 0),
                "data": getattr(model, "seen", [])[-STEPS:],
                "exchanges": witness.exchanges,
                "totals": {key: value for key, value in monitor.state_dict().items() if key == "steps"},
            }
        )
    seen[-1]["found"] = finder.profile if isinstance(finder, CommunicationProfiler) else finder.curve
    return seen


def _find_and_measure() -> list[float | None]:
    thresholds = []
    for callbacks in ([], [CommunicationProfiler(4, 0.05)]):
        torch.manual_seed(1)
        finder, strategy = ThresholdFinder(0.05, num_steps=7), DDPHardThresholdStrategy(threshold=9.0)
        trainer = quiet_trainer(strategy, num_workers=2, max_steps=STEPS, callbacks=[finder, *callbacks])
        trainer.fit(Classifier(), data())
        thresholds.append(strategy.state.sparsifier.threshold)
    return thresholds


def test_a_measurement_keeps_the_threshold_that_was_found_before() -> None:
    for found, kept in run_workers(_find_and_measure, 2, process_group=False):
        assert found == kept != 9.0


class Witness(Callback):
    """Sees every exchange, and nothing of a search."""

    def __init__(self) -> None:
        self.exchanges: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.state.subscribe(
            lambda step: self.exchanges.append(copy.copy(vars(step)) | {"layers": len(step.layers)})
        )


@pytest.mark.parametrize("callback", [ThresholdFinder, CommunicationProfiler])
def test_an_exception_of_one_worker_ends_all_with_it(callback: Any) -> None:
    with pytest.raises(AssertionError, match="a bad file") as raised:
        run_workers(_fail_alone, 2, callback, process_group=False, timeout=60, new=True)
    assert "rank 1:" in str(raised.value)


def _fail_alone(callback: Any) -> None:
    quiet_trainer(DDPHardThresholdStrategy(threshold=0.1), num_workers=2, callbacks=[callback()]).fit(Failing(), data())


class Failing(Classifier):
    """Cannot read the fifth batch on the second worker."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 4 and self.global_rank == 1:
            raise ValueError("a bad file")
        return super().training_step(batch, batch_idx)


NOTHING: dict[str, dict[str, Any]] = {
    "no batches": {"limit_train_batches": 0},
    "no epochs": {"max_epochs": 0, "max_steps": -1},
    "no exchange": {
        "strategy": LocalHardThresholdStrategy(threshold=0.1, every_n_steps=50),
        "max_epochs": 1,
        "max_steps": -1,
    },
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_training_without_an_exchange_is_left_in_peace(name: str) -> None:
    for messages in run_workers(_train_nothing, 2, name, process_group=False):
        assert any("ThresholdFinder found nothing: the training makes no exchange" in one for one in messages)
        assert any("CommunicationProfiler measured nothing: the training makes 0 exchanges" in one for one in messages)


def _train_nothing(name: str) -> list[str]:
    options = {"strategy": DDPHardThresholdStrategy(threshold=0.1), "num_workers": 2} | NOTHING[name]
    finder, profiler = ThresholdFinder(num_steps=4), CommunicationProfiler(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(options.pop("strategy"), callbacks=[finder, profiler], **options).fit(Classifier(), data(32))
    assert finder.curve is None
    assert profiler.profile is None
    # Only the first worker says it.
    said = [str(one.message) for one in caught]
    return said if torch.distributed.get_rank() == 0 else _EXPECTED


_EXPECTED = [
    "ThresholdFinder found nothing: the training makes no exchange",
    "CommunicationProfiler measured nothing: the training makes 0 exchanges",
]


def test_data_that_can_be_read_once_are_refused() -> None:
    run_workers(_read_once, 2, process_group=False)


def _read_once() -> None:
    trainer = quiet_trainer(DDPHardThresholdStrategy(threshold=0.1), num_workers=2, callbacks=[ThresholdFinder()])
    with pytest.raises(ValueError, match="The training data are a generator, which cannot be read twice"):
        trainer.fit(Classifier(), (batch for batch in data()))


def test_two_densities_are_refused() -> None:
    run_workers(_two_densities, 2, process_group=False)


def _two_densities() -> None:
    for strategy, raises in (("ddp_hardthreshold", True), (DDPHardThresholdStrategy(density=0.2), False)):
        finder = ThresholdFinder(density=0.2, num_steps=3)
        trainer = quiet_trainer(strategy, num_workers=2, callbacks=[finder])
        with pytest.raises(ValueError, match=r"hold λ to its own density=0\.001") if raises else nullcontext():
            trainer.fit(Classifier(), data())
        assert (finder.curve is None) == raises


def test_a_ddp_module_that_is_held_is_told_of() -> None:
    run_workers(_hold, 2, process_group=False)


def _hold() -> None:
    trainer = quiet_trainer(
        DDPHardThresholdStrategy(threshold=0.1), num_workers=2, callbacks=[Holder(), ThresholdFinder(num_steps=2)]
    )
    with pytest.raises(RuntimeError, match="Something holds the DDP module of before the measurement"):
        trainer.fit(Classifier(), data())


class Holder(Callback):
    """Keeps what would exchange gradients a second time."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.model = trainer.model


@pytest.mark.parametrize(
    "strategy",
    [
        DDPHardThresholdStrategy(threshold=1e9),
        DDPHardThresholdStrategy(density=0.2),
        LocalHardThresholdStrategy(threshold=1e9),
        LocalHardThresholdStrategy(density=0.2),
    ],
    ids=["threshold", "density", "drift threshold", "drift density"],
)
def test_what_is_found_is_used_from_the_first_step_on(strategy: Any) -> None:
    for curve, thresholds, said in run_workers(_use, 2, strategy, process_group=False):
        assert thresholds[0] == curve.suggestion()
        if strategy.sparsifier.density is None:
            assert set(thresholds) == {curve.suggestion()}
        else:
            assert len(set(thresholds)) > 1  # held from there
        assert not [text for text in said if "calibrated" in text]


def _use(strategy: Any) -> tuple[ThresholdCurve, list[float], list[str]]:
    finder, witness, listener = ThresholdFinder(0.2, num_steps=5), Witness(), Listener()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).addHandler(listener)
    trainer = quiet_trainer(strategy, num_workers=2, max_steps=STEPS, callbacks=[witness, finder])
    trainer.fit(Classifier(adam), data())
    assert finder.curve is not None
    assert not any(one["is_calibration"] for one in witness.exchanges)
    return finder.curve, [one["threshold"] for one in witness.exchanges], listener.messages


class Noise(LightningModule):
    """Its gradients are noise of deviation 1 for ever, whatever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20_000))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight @ torch.randn(len(self.weight))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.mark.parametrize(
    "strategy", [DDPHardThresholdStrategy(threshold=1.0), LocalHardThresholdStrategy(threshold=1.0)], ids=["g", "d"]
)
def test_gradients_that_stay_what_they_are_are_sent_as_was_foretold(strategy: Any) -> None:
    [(density, suggestion), _] = run_workers(_foretell, 2, strategy, process_group=False)
    assert density == pytest.approx(0.02, rel=0.15)
    assert suggestion == pytest.approx(0.02**-0.5 - 0.583, rel=0.1) or suggestion < 1


def _foretell(strategy: Any) -> tuple[float, float]:
    torch.manual_seed(int(torch.distributed.is_initialized()))
    finder, witness = ThresholdFinder(0.02, num_steps=20), Witness()
    trainer = quiet_trainer(strategy, num_workers=2, max_steps=400, callbacks=[witness, Diverse(), finder])
    trainer.fit(Noise(), data(4000))
    later = witness.exchanges[200:]
    assert finder.curve is not None
    return sum(one["selected"] for one in later) / (2 * 20_000 * len(later)), finder.curve.suggestion()


class Diverse(Callback):
    """Gives every worker other random numbers."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        torch.manual_seed(trainer.global_rank)


@pytest.mark.parametrize("strategy", ["ddp_hardthreshold", "ddp_hardthreshold_fork"])
def test_a_curve_can_be_had_without_training(strategy: str) -> None:
    num_processes = 1 if strategy.endswith("fork") else 2
    for curve, moved, again in run_workers(_find, num_processes, strategy, process_group=False, new=True):
        assert 0.05 == curve.density != curve.densities[0]
        assert curve.num_steps == 4
        assert not moved
        assert again == (0 if num_processes == 1 else STEPS)


def _find(strategy: str) -> tuple[ThresholdCurve, bool, int]:
    model = Classifier(adam)
    before = copy.deepcopy(model.state_dict())
    trainer = quiet_trainer(strategy, num_workers=2, max_steps=STEPS)
    callbacks = [*trainer.callbacks]
    curve = find_threshold(trainer, model, data(), density=0.05, num_steps=4)
    assert trainer.callbacks == callbacks
    moved = any(not torch.equal(one, before[name]) for name, one in model.state_dict().items())
    if strategy == "ddp_hardthreshold":  # processes that are forked Lightning lets a Trainer have once
        trainer.fit(model, data())
    return curve, moved, trainer.global_step


def test_where_there_is_nothing_to_look_for_it_says_so() -> None:
    run_workers(_look_in_vain, 1, process_group=False)


def _look_in_vain() -> None:
    def train(strategy: Any, **options: Any) -> tuple[ThresholdFinder, list[str]]:
        finder = ThresholdFinder(num_steps=2)
        return finder, listen_to(finder, strategy, **options)

    finder, [said] = train("ddp")
    assert finder.curve is None
    assert "idle: DDPStrategy exchanges whole gradients" in said
    profiler = CommunicationProfiler()
    for strategy, options, why in (
        ("ddp", {}, "it measures the exchange of workers or of replicas, not that of DDPStrategy"),
        (
            SimulatedWorkersStrategy(HardThreshold(threshold=0.1), 2, device="cpu"),
            {},
            "it measures the exchange of workers or of replicas, not that of Simulated",
        ),
        (DDPHardThresholdStrategy(threshold=0.1), {}, "one worker exchanges with nobody"),
        (DDPHardThresholdStrategy(threshold=0.1), {"fast_dev_run": True}, "fast_dev_run"),
    ):
        [said] = listen_to(profiler, strategy, **options)
        assert f"CommunicationProfiler does nothing: {why}" in said
        assert profiler.profile is None
    finder, [said] = train(DDPHardThresholdStrategy(threshold=0.1), fast_dev_run=True)
    assert finder.curve is None
    assert "does nothing: fast_dev_run" in said
    with pytest.raises(RuntimeError, match="Found no threshold with strategy=DDPStrategy"):
        find_threshold(quiet_trainer("ddp", num_workers=1), Classifier(), data())


def listen_to(callback: Callback, strategy: Any, **options: Any) -> list[str]:
    """What a callback says in a training."""
    listener = Listener()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).addHandler(listener)
    quiet_trainer(strategy, num_workers=1, callbacks=[callback], **options).fit(Classifier(), data())
    return [text for text in listener.messages if type(callback).__name__ in text]


def test_what_has_no_threshold_and_what_has_no_gradient_are_refused() -> None:
    run_workers(_refuse, 1, process_group=False)


def _refuse() -> None:
    simulated = SimulatedWorkersStrategy(TopK(0.1), 2, device="cpu")
    with pytest.raises(TypeError, match="looks for the λ of a HardThreshold, and the sparsifier is TopK"):
        find_threshold(quiet_trainer(simulated, num_workers=1), Classifier(), data())
    simulated = SimulatedWorkersStrategy(HardThreshold(threshold=0.1), 2, device="cpu")
    trainer = quiet_trainer(simulated, num_workers=1)
    with pytest.raises(RuntimeError, match=r"measured no gradient in 50 steps: all were zero"):
        find_threshold(trainer, Still(), data(1000))


class Still(Classifier):
    """Learns nothing."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return 0.0 * super().loss(batch)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"density": 0.0}, r"Invalid density=0\.0"),
        ({"num_steps": 0}, "Invalid num_steps=0. Must be a whole number of at least 1"),
        ({"num_steps": 1.5}, r"Invalid num_steps=1\.5"),
        ({"num_steps": "5"}, "Invalid num_steps='5'"),
    ],
)
@pytest.mark.parametrize("callback", [ThresholdFinder, CommunicationProfiler])
def test_options_outside_their_range_are_refused(callback: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        callback(**options)


def test_one_step_has_no_spread() -> None:
    with pytest.raises(ValueError, match=r"Invalid num_steps=1\. Must be at least 2"):
        CommunicationProfiler(num_steps=1)


@pytest.mark.parametrize(("max_steps", "measures"), [(4, False), (5, True)])
def test_a_short_training_is_measured_if_two_steps_can_be_timed(max_steps: int, measures: bool) -> None:
    for profile in run_workers(_measure_short, 2, max_steps, process_group=False):
        assert (profile is not None) == measures
        assert profile is None or 0 <= profile.spread_seconds < float("inf")


def _measure_short(max_steps: int) -> Any:
    profiler = CommunicationProfiler()
    batches = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": max_steps}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = DDPHardThresholdStrategy(threshold=0.1)
        quiet_trainer(strategy, num_workers=2, callbacks=[profiler], **batches).fit(Classifier(), data())
    return profiler.profile


def test_a_training_that_resumes_keeps_its_threshold(tmp_path: Any) -> None:
    run_workers(_resume, 2, str(tmp_path / "half.ckpt"), process_group=False)


def _resume(path: str) -> None:
    strategy = DDPHardThresholdStrategy(density=0.2)
    trainer = quiet_trainer(strategy, num_workers=2, max_steps=3, callbacks=[ThresholdFinder(num_steps=3)])
    trainer.fit(Classifier(), data())
    trainer.save_checkpoint(path)
    assert strategy.state is not None
    threshold, finder = strategy.state.sparsifier.current_threshold, ThresholdFinder(num_steps=3)
    strategy = SparseDDPStrategy(HardThreshold(density=0.2))
    witness = Witness()
    trainer = quiet_trainer(strategy, num_workers=2, max_steps=5, callbacks=[witness, finder])
    trainer.fit(Classifier(), data(), ckpt_path=path)
    assert finder.curve is None
    assert witness.exchanges[0]["threshold"] == threshold
