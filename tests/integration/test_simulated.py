"""Simulated workers come to what as many processes come to, to the last bit."""

import os
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning.fabric.utilities import rank_zero_only
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate

from lightning_sparse import (
    Accordion,
    DensityMonitor,
    GaussianK,
    HardThreshold,
    RandomK,
    Selection,
    SimulatedWorkersStrategy,
    SparseDDPStrategy,
    Sparsifier,
    StochasticRounding,
    TopK,
)
from tests.integration.models import Classifier, adam, assert_equal, clones, data, nesterov, quiet_trainer
from tests.workers import run_workers

OPTIMIZERS = {"sgd": None, "adam": adam, "nesterov": nesterov}


class Noisy(Classifier):
    """Has dropout, batch norm, noise of other libraries, and logs its loss in two ways."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        self.norm, self.dropout = nn.BatchNorm1d(40), nn.Dropout(0.2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        noise = random.random() + float(numpy.random.rand())
        return self.last(self.dropout(self.norm(self.middle(self.first(inputs + 0.1 * noise).tanh()))).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss}


class Remembering(Classifier):
    """Carries something along from batch to batch, in an attribute that it changes in place."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        self.memory: dict[str, torch.Tensor] = {"mean": torch.zeros(8)}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.memory["mean"] = 0.5 * self.memory["mean"] + inputs.detach().mean(dim=0)
        return super().forward(inputs + self.memory["mean"])


class Forgetting(Remembering):
    """Begins each epoch without a past."""

    def on_train_epoch_start(self) -> None:
        self.memory = {"mean": torch.zeros(8)}


class Rebinding(Classifier):
    """Carries something along in an attribute that it binds anew for every batch."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        self.memory = torch.zeros(8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.memory = 0.5 * self.memory + inputs.detach().mean(dim=0)
        return super().forward(inputs + self.memory)


class InPlace(Classifier):
    """Carries it along in a tensor that stays the same object."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        self.memory = {"mean": torch.zeros(8)}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.memory["mean"].mul_(0.5).add_(inputs.detach().mean(dim=0))
        return super().forward(inputs + self.memory["mean"].clone())


class WithBuffer(Classifier):
    """What it has seen is in a buffer that its forward uses."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += inputs.detach().mean(dim=0)
        return super().forward(inputs + 0.1 * self.seen)


class Shards(IterableDataset):
    """Batches that follow from the worker's rank, sizes too, as a data set does that is told it when it is made."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.rank)
        size = 4 + 6 * self.rank  # an even sum: Lightning rounds the mean of how many examples workers had
        for _ in range(6):
            yield [torch.randn(size, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator)]


class Augmented(Classifier):
    """Its data set draws random numbers for every item."""

    def train_dataloader(self) -> DataLoader:
        loader = data(60, 3)
        return DataLoader(loader.dataset, 3, collate_fn=_jittered)


class AugmentedAndScheduled(Augmented):
    """Asks how many steps there will be, for which Lightning makes loaders, and then how many workers."""

    def configure_optimizers(self) -> Any:
        self.trainer.fit_loop.setup_data()  # as estimated_stepping_batches does where the number of epochs is limited
        return torch.optim.SGD(self.parameters(), lr=0.05 * self.trainer.world_size)


class AugmentedElsewhere(Augmented):
    """In a process of the loader's own, which Lightning seeds by the worker's rank."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(data(60, 3).dataset, 3, collate_fn=_jittered, num_workers=1)


def _jittered(items: Any) -> Any:
    inputs, labels = default_collate(items)
    return [inputs + 0.1 * torch.randn_like(inputs), labels]


class Stream(IterableDataset):
    """The same items for every worker."""

    def __iter__(self) -> Any:
        yield from data(12, 3).dataset


class Bookmarked:
    """A loader that says where it is, of a worker's own."""

    def __init__(self, rank: int) -> None:
        self.rank, self.read = rank, 0

    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Any:
        batches = list(Shards(self.rank))
        while self.read < 30:
            self.read += 1
            yield batches[self.read * self.read % len(batches)]

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class Pictures(Classifier):
    """Its convolutions lie in memory by channels, and one of its layers is in double precision."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        generator = torch.Generator().manual_seed(8)
        self.first, self.middle = nn.Conv2d(2, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.last = nn.Linear(12, 3, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        seen = self.middle(self.first(inputs.view(-1, 2, 2, 2)).tanh())
        return self.last(seen.tanh().mean(dim=(2, 3)).double())


class Scaled(Classifier):
    """Its learning rate follows from how many workers there are; every third backward it does not step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.world_size)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 3 == 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class Sharded(Classifier):
    """Its data and its loss follow from the rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss * (1 + self.local_rank)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Shards(self.trainer.global_rank), batch_size=None)


class Sometimes(Classifier):
    """Its middle layer is for one batch in four, and for one more of the first worker's."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        seen = self.first(inputs).tanh()
        if batch_idx % 4 == 0 or (batch_idx % 4 == 1 and self.trainer.global_rank == 0):
            seen = self.middle(seen).tanh()
        return nn.functional.cross_entropy(self.last(seen), labels)


class Placed(Sharded):
    """Reads loaders that can go on in their middle."""

    def train_dataloader(self) -> Any:
        return Bookmarked(self.trainer.global_rank)


class Witness(Callback):
    """What a worker comes to."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"steps": [], "logged": []}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.state.subscribe(self.seen["steps"].append)
        self.seen["began with"] = trainer.strategy.state.residuals.state_dict()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seen["logged"].append(float(trainer.logged_metrics.get("loss_step", 0.0)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = trainer.strategy.state
        self.seen |= {
            "weights": clones([*pl_module.named_parameters(), *pl_module.named_buffers()]),
            "residuals": state.residuals.state_dict(),
            "optimizer": trainer.optimizers[0].state_dict()["state"],
            "mean": float(trainer.callback_metrics.get("mean", 0.0)),
        }


def fit(strategy: Any, num_processes: int, case: dict[str, Any], ckpt_path: str | None = None) -> dict[str, Any]:
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    if case.get("seeds"):
        seed_everything(5, workers=True)
    witness = Witness()
    options = {"max_steps": 9, "limit_val_batches": 0} | case.get("trainer", {})
    trainer = quiet_trainer(strategy, num_workers=num_processes, callbacks=[witness], **options)
    module = case.get("module", Classifier)(OPTIMIZERS[case.get("optimizer", "sgd")])
    loader = None if isinstance(module, (Sharded, Augmented)) else case.get("loader", unshuffled)()
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    if path := case.get("saves"):
        trainer.save_checkpoint(path)
    return witness.seen


def unshuffled() -> DataLoader:
    return data(60, 3)


def shuffled() -> DataLoader:
    return DataLoader(data(60, 3).dataset, 3, shuffle=True)


def persistent() -> DataLoader:
    return DataLoader(Stream(), 3, num_workers=1, persistent_workers=True)


def _processes(case: dict[str, Any], num_workers: int, ckpt_path: str | None = None) -> Any:
    os.environ["PL_GLOBAL_SEED"] = "3"
    may_leave_out = {"find_unused_parameters": case.get("module") is Sometimes}
    strategy = SparseDDPStrategy(
        case.get("sparsifier", HardThreshold(threshold=0.05)),
        exchange="gather",
        **may_leave_out,
        **case.get("like", {}),
    )
    return fit(strategy, num_workers, case, ckpt_path)


def _simulated(case: dict[str, Any], num_workers: int, ckpt_path: str | None = None) -> Any:
    os.environ["PL_GLOBAL_SEED"] = "3"
    sparsifier = case.get("sparsifier", HardThreshold(threshold=0.05))
    own = {"own_attributes": case.get("own", [])}
    return fit(SimulatedWorkersStrategy(sparsifier, num_workers, **own, **case.get("like", {})), 1, case, ckpt_path)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adam": {"optimizer": "adam"},
    "shuffled, several epochs": {"loader": shuffled, "optimizer": "nesterov", "trainer": {"max_steps": 23}},
    "accumulated": {"trainer": {"accumulate_grad_batches": 3, "max_steps": 6}},
    "clipped": {"trainer": {"gradient_clip_val": 0.05}},
    "bfloat16": {"like": {"value_dtype": "bfloat16"}},
    "mixed": {"trainer": {"precision": "bf16-mixed"}},
    "double": {"trainer": {"precision": "64-true"}},
    "random numbers": {"module": Noisy, "optimizer": "adam"},
    "shards by rank": {"module": Sharded},
    "persistent processes": {"loader": persistent, "trainer": {"max_steps": 8}},
    "reloaded": {
        "module": Noisy,
        "loader": shuffled,
        "trainer": {"max_steps": 8, "limit_train_batches": 3, "reload_dataloaders_every_n_epochs": 1},
    },
    "augmented": {"module": Augmented},
    "augmented, with a schedule": {"module": AugmentedAndScheduled},
    "augmented by seeded processes": {"module": AugmentedElsewhere, "seeds": True},
    "forgets": {"module": Forgetting, "own": ["memory"], "trainer": {"max_steps": 23}},
    "buffers, accumulated": {"module": WithBuffer, "trainer": {"accumulate_grad_batches": 2, "max_steps": 6}},
    "steps left out": {"module": Scaled, "undoes": True},
    "remembers": {"module": Remembering, "own": ["memory"]},
    "an attribute bound anew": {"module": Rebinding, "own": ["memory"]},
    "an attribute changed in place": {"module": InPlace, "own": ["memory"]},
    "top k": {"sparsifier": TopK(0.05)},
    "top k of the model": {"sparsifier": TopK(0.05, granularity="model")},
    "gaussian k": {"sparsifier": GaussianK(0.1)},
    "random k": {"sparsifier": RandomK(0.2, same_on_all=False)},
    "channels last, mixed dtypes": {"module": Pictures, "optimizer": "adam", "sparsifier": RandomK(0.2)},
    "top k of mixed dtypes": {"module": Pictures, "sparsifier": TopK(0.1, granularity="model")},
    "accordion": {"sparsifier": Accordion(0.02, 0.2, interval=1, relative_change=5.0), "trainer": {"max_steps": 23}},
    "layers": {"sparsifier": HardThreshold(threshold=0.05, layer_thresholds={"first.*": 0.2})},
} | {
    f"{type(sparsifier).__name__} {of}, layers unused": {
        "module": Sometimes,
        "sparsifier": sparsifier,
        "trainer": {"max_steps": 14},
    }
    for of, sparsifier in {
        "constant": HardThreshold(threshold=0.05),
        "of each layer": TopK(0.05),
        "of the model": TopK(0.05, granularity="model"),
        "of a Gaussian": GaussianK(0.1),
        "the same on all": RandomK(0.2),
        "each its own": RandomK(0.2, same_on_all=False),
        "by chance": StochasticRounding(0.02),
        "of two densities": Accordion(0.02, 0.2, interval=1),
    }.items()
}


# In a sum of three the order matters.
OF_THREE = (
    *("plain", "shuffled, several epochs", "accumulated", "bfloat16", "random numbers", "top k of the model"),
    *("an attribute bound anew", "an attribute changed in place", "buffers, accumulated"),
)


@pytest.mark.parametrize(("name", "num_workers"), [(name, 3 if name in OF_THREE else 2) for name in CASES])
def test_simulated_workers_come_to_what_processes_come_to(name: str, num_workers: int) -> None:
    case = CASES[name]
    processes = run_workers(_processes, num_workers, case, num_workers, process_group=False)
    (simulated,) = run_workers(_simulated, 1, case, num_workers, process_group=False)
    assert_equal(simulated["weights"], processes[0]["weights"])
    assert_equal(simulated["optimizer"], processes[0]["optimizer"])
    assert_equal(simulated["residuals"], processes[0]["residuals"])
    assert simulated["logged"] == processes[0]["logged"]
    assert simulated["mean"] == pytest.approx(processes[0]["mean"], rel=1e-6)
    assert 0 < simulated["steps"][-1].density < 0.9
    if case.get("undoes"):  # what no optimizer steps on is not exchanged here, and undone there
        assert len(simulated["steps"]) < len(processes[0]["steps"])
        return
    for one, other in zip(simulated["steps"], processes[0]["steps"], strict=True):
        assert (one.selected, one.num_workers) == (other.selected, num_workers)
        assert one.squared_error == pytest.approx(other.squared_error, rel=1e-6)


def test_a_density_of_each_layer_counts_steps_in_which_any_worker_used_it() -> None:
    sparsifier = HardThreshold(density=0.1, calibration_steps=2, granularity="layer")
    case = {"module": Sometimes, "sparsifier": sparsifier, "trainer": {"max_steps": 24}}
    processes = run_workers(_processes, 2, case, 2, process_group=False)
    (simulated,) = run_workers(_simulated, 1, case, 2, process_group=False)
    for one, other in zip(simulated["steps"], processes[0]["steps"], strict=True):
        assert one.threshold == pytest.approx(other.threshold, rel=1e-5)
        assert {name: layer.selected for name, layer in one.layers.items()} == {
            name: layer.selected for name, layer in other.layers.items()
        }
    torch.testing.assert_close(simulated["weights"], processes[0]["weights"])


def test_a_clipped_worker_is_that_of_processes_up_to_rounding() -> None:
    """Its norm is added up bucket by bucket, and here is one bucket."""
    case = {"like": {"local_clip_norm": 0.2}}
    processes = run_workers(_processes, 2, case, 2, process_group=False)
    (simulated,) = run_workers(_simulated, 1, case, 2, process_group=False)
    torch.testing.assert_close(simulated["weights"], processes[0]["weights"], rtol=1e-5, atol=1e-6)
    (unclipped,) = run_workers(_simulated, 1, {}, 2, process_group=False)
    assert simulated["steps"][0].selected < unclipped["steps"][0].selected


@pytest.mark.parametrize("control", ["calibrate", "hold"])
def test_a_calibrated_threshold_is_that_of_processes_up_to_rounding(control: str) -> None:
    case = {"sparsifier": HardThreshold(density=0.05, calibration_steps=3), "like": {"density_control": control}}
    processes = run_workers(_processes, 2, case, 2, process_group=False)
    (simulated,) = run_workers(_simulated, 1, case, 2, process_group=False)
    thresholds = [[step.threshold for step in one["steps"]] for one in (simulated, processes[0])]
    assert thresholds[0] == pytest.approx(thresholds[1], rel=1e-6)
    assert len(set(thresholds[0][4:])) == (1 if control == "calibrate" else 5)


@pytest.mark.parametrize(
    ("saves", "resumes"), [(_simulated, _simulated), (_simulated, _processes), (_processes, _simulated)]
)
def test_a_checkpoint_of_one_continues_in_the_other(saves: Any, resumes: Any, tmp_path: Path) -> None:
    def run(kind: Any, case: dict[str, Any], path: str | None = None) -> Any:
        return run_workers(kind, 2 if kind is _processes else 1, case, 2, path, process_group=False)[0]

    def stopped_and_resumed(saves: Any, resumes: Any) -> Any:
        path = str(tmp_path / f"{saves.__name__}.ckpt")
        case = {"module": Pictures, "optimizer": "adam"}
        run(saves, case | {"trainer": {"max_steps": 10}, "saves": path})
        return run(resumes, case | {"trainer": {"max_steps": 15}}, path)

    expected, resumed = stopped_and_resumed(_processes, _processes), stopped_and_resumed(saves, resumes)
    assert len(resumed["steps"]) == 5
    assert_equal(resumed["weights"], expected["weights"])
    assert_equal(resumed["residuals"], expected["residuals"])


def test_loaders_go_on_where_those_of_processes_would(tmp_path: Path) -> None:
    path = str(tmp_path / "one.ckpt")
    begun = {"module": Placed, "trainer": {"max_steps": 4}, "saves": path}
    run_workers(_simulated, 1, begun, 2, process_group=False)
    resumes = {"module": Placed, "trainer": {"max_steps": 7}}
    (simulated,) = run_workers(_simulated, 1, resumes, 2, path, process_group=False)
    (unstopped,) = run_workers(_simulated, 1, resumes, 2, process_group=False)
    processes = run_workers(_processes, 2, resumes, 2, path, process_group=False)
    for other in (unstopped, processes[0]):
        assert_equal(simulated["weights"], other["weights"])
        assert_equal(simulated["residuals"], other["residuals"])


def test_another_number_of_workers_starts_from_the_mean(tmp_path: Path) -> None:
    path = str(tmp_path / "one.ckpt")
    (first,) = run_workers(_simulated, 1, {"trainer": {"max_steps": 4}, "saves": path}, 2, process_group=False)
    saved = torch.load(path, weights_only=True)["lightning_sparse"]
    own, other = (worker["residual"] for worker in saved["workers"])
    mean = {name: (tensor + other[name]) / 2 for name, tensor in own.items()}
    assert_equal(own, first["residuals"])
    assert any(one.any() for one in mean.values())
    (after,) = run_workers(_simulated, 1, {"trainer": {"max_steps": 5}}, 5, path, process_group=False)
    assert_equal(after["began with"], mean)


def _monitored(folder: str) -> Any:
    strategy = SimulatedWorkersStrategy(HardThreshold(threshold=0.05), 4)
    monitor = DensityMonitor(per_layer=True)
    trainer = quiet_trainer(strategy, num_workers=1, callbacks=[monitor], max_steps=5, default_root_dir=folder)
    trainer.fit(Classifier(), data())
    assert strategy.state is not None
    return float(trainer.callback_metrics["sparse/density"]), strategy.state.last_step, monitor.table()


def test_monitors_and_loggers_see_all_workers(tmp_path: Path) -> None:
    ((density, last_step, table),) = run_workers(_monitored, 1, str(tmp_path), process_group=False)
    assert density == pytest.approx(last_step.density)
    assert last_step.num_workers == 4
    assert set(last_step.layers) == {name for name, _ in Classifier().named_parameters()}
    assert str(table)


class OwnTransfer(Classifier):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Manual(Classifier):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "message"), [(Manual, "manual optimization"), (OwnTransfer, "on_before_batch_transfer, which would be")]
)
def test_what_is_not_simulated_is_refused(module: Any, message: str) -> None:
    one = module()
    if module is Manual:
        one.automatic_optimization = False
    trainer = quiet_trainer(SimulatedWorkersStrategy(HardThreshold(threshold=0.1), 2), num_workers=1)
    with pytest.raises(ValueError, match=f"Simulated workers do not do {message}"):
        trainer.fit(one, data(), data())


class Gathering(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(batch[1])
        return super().training_step(batch, batch_idx)


class Perturbing(Classifier):
    """Steps as SAM does."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step(closure=optimizer_closure)


class PastLightning(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.optimizer.step()


class Relaid(Pictures):
    """Changes how it lies in memory once it trains."""

    def on_train_start(self) -> None:
        self.to(memory_format=torch.contiguous_format)


class Unfrozen(Classifier):
    """Trains a layer that was frozen when training was set up."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        self.first.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first.requires_grad_(batch_idx == 2)


class Embedded(Classifier):
    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        self.words = nn.Embedding(4, 8, sparse=True)


class Sized(Classifier):
    batch_size = 4

    def train_dataloader(self) -> DataLoader:
        return data(batch_size=self.batch_size)


class Unranked(Classifier):
    """Leaves it to torch to find out which worker it is."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(data().dataset, sampler=DistributedSampler(data().dataset))


class SaysNothing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.trainer.global_rank == 0 else None


class Transferring(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return data()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Exhausted:
    """Has one iterator, however often it is asked for."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise StopIteration


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "a closure that is called several": (lambda: Classifier(torch.optim.LBFGS), data, {}, {}),
    "a closure that is called several times for a step": (Perturbing, data, {}, {}),
    "steps that go past Lightning": (PastLightning, data, {}, {}),
    "a training_step that returns None": (SaysNothing, data, {}, {}),
    "'first.weight' has strides": (Relaid, data, {}, {}),
    "'first.bias' has a gradient, and was frozen or not there": (Unfrozen, data, {}, {}),
    r"'words' is Embedding\(sparse=True\)": (Embedded, data, {}, {}),
    r"The search for a batch size .* is for one worker": (Sized, lambda: None, {"callbacks": [BatchSizeFinder()]}, {}),
    r"initialized.* Simulated workers have none\. In train_dataloader": (Unranked, lambda: None, {}, {}),
    r"train_dataloader returned list\. Simulated workers read one": (Classifier, lambda: [data(), data()], {}, {}),
    r"Exhausted for training is one for all .* Make one in train_dataloader": (Classifier, Exhausted, {}, {}),
    "all_gather: one has": (Gathering, data, {}, {}),
    "on_before_batch_transfer, which would": (Classifier, Transferring, {}, {}),
    "sync_batchnorm": (Classifier, data, {"sync_batchnorm": True}, {}),
    "devices=2 on 1 nodes": (Classifier, data, {"devices": 2}, {}),
    "no first_one": (Classifier, data, {}, {"own_attributes": ["first_one"]}),
    "first is no attribute of Classifier's own": (Classifier, data, {}, {"own_attributes": ["first"]}),
    "_parameters is no attribute": (Classifier, data, {}, {"own_attributes": ["_parameters"]}),
}


def _refused() -> None:
    for message, (module, source, options, own) in REFUSED.items():
        strategy = SimulatedWorkersStrategy(HardThreshold(threshold=0.1), 2, **own)
        trainer = quiet_trainer(strategy, num_workers=options.pop("devices", 1), **options)
        with pytest.raises((ValueError, RuntimeError), match=message):
            trainer.fit(one := module(), source())
        assert (trainer.global_rank, trainer.world_size, rank_zero_only.rank) == (0, 1, 0), (message, one)


def test_what_would_be_something_else_is_refused_when_it_happens() -> None:
    run_workers(_refused, 1, process_group=False)


class Speaking(Classifier):
    """Counts who speaks."""

    said = 0
    warned = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._say()
        assert self.trainer.is_global_zero == (self.trainer.global_rank == 0)
        return super().training_step(batch, batch_idx)

    @rank_zero_only
    def _say(self) -> None:
        self.said += 1

    def on_after_backward(self) -> None:
        assert self.trainer.world_size in (1, 3)


def _spoken() -> Any:
    module = Speaking()
    trainer = quiet_trainer(SimulatedWorkersStrategy(HardThreshold(threshold=0.1), 3), num_workers=1, max_steps=5)
    with pytest.warns(UserWarning, match=r"Speaking.on_after_backward is called for each simulated worker"):
        trainer.fit(module, data())
    return module.said


def test_the_first_worker_speaks_alone() -> None:
    assert run_workers(_spoken, 1, process_group=False) == [5]


class Guessing(Sparsifier):
    """Sends what chance picks, torch's own."""

    def select(self, compensated: torch.Tensor, layout: Any) -> Selection:
        indices = (torch.rand(compensated.numel()) < 0.1).nonzero().squeeze(1)
        return Selection(indices, compensated[indices])


def _guessed() -> None:
    trainer = quiet_trainer(SimulatedWorkersStrategy(Guessing(), 2), num_workers=1)
    with pytest.warns(UserWarning, match=r"the sparsifier draws torch's random numbers.* in begin_step") as caught:
        trainer.fit(Classifier(), data())
    assert sum("random numbers" in str(one.message) for one in caught) == 1


def test_a_sparsifier_that_draws_what_threads_have_in_common_is_warned_of() -> None:
    run_workers(_guessed, 1, process_group=False)
