"""Simulated workers give the results of as many processes, to the last bit."""

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning.fabric.utilities import rank_zero_only
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_sparse import (
    Accordion,
    DensityMonitor,
    GaussianK,
    HardThreshold,
    RandomK,
    SimulatedWorkersStrategy,
    SparseDDPStrategy,
    Sparsifier,
    StochasticRounding,
    TopK,
)
from lightning_sparse.engine.snapshot import copied
from lightning_sparse.strategies.simulated.turns import Turns
from tests.integration.checkpoints.test_checkpoint import ResumableData
from tests.integration.models import (
    Classifier,
    ManualClassifier,
    ScaledPrecision,
    WithEmbedding,
    adam,
    assert_equal,
    clones,
    data,
    mean_of,
    nesterov,
    quiet_trainer,
)
from tests.workers import on_workers, run_workers


class Noisy(Classifier):
    """Has dropout, batch norm and random numbers of other libraries; logs its loss per step and per epoch."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        self.norm, self.dropout = nn.BatchNorm1d(40), nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        noise = random.random() + float(numpy.random.rand())
        return self.last(self.dropout(self.norm(self.middle(self.first(inputs + 0.1 * noise).tanh()))).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss}


class InPlace(Classifier):
    """Keeps a state between batches, in an attribute that it changes in place."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        self.memory = {"mean": torch.zeros(8)}

    def forward(self, inputs: Tensor) -> Tensor:
        self.remember(inputs.detach().mean(dim=0))
        return super().forward(inputs + self.memory["mean"].clone())

    def remember(self, mean: Tensor) -> None:
        self.memory["mean"].mul_(0.5).add_(mean)


class Rebinding(InPlace):
    def remember(self, mean: Tensor) -> None:
        self.memory = {"mean": 0.5 * self.memory["mean"] + mean}


class Forgetting(InPlace):
    """Resets its state in each epoch."""

    def on_train_epoch_start(self) -> None:
        self.memory = {"mean": torch.zeros(8)}


class WithBuffer(Classifier):
    """Sums its inputs in a buffer, collects some in a growing buffer, and fills another for the next batch."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("first_inputs", torch.zeros(1, 8))
        self.register_buffer("center", None)

    def forward(self, inputs: Tensor) -> Tensor:
        center, self.center = self.center, inputs.detach().mean(dim=0) if self.center is None else None
        inputs = inputs if center is None else inputs - center
        self.seen += inputs.detach().mean(dim=0)
        self.first_inputs = torch.cat([self.first_inputs, inputs[:1].detach()])
        return super().forward(inputs + 0.1 * self.seen + self.first_inputs.mean(dim=0))


class Shards(IterableDataset):
    """Batches whose values and sizes depend on the rank that the constructor gets."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.rank)
        size = 4 + 6 * self.rank  # an even sum, because Lightning rounds the mean batch size of the workers
        for _ in range(6):
            yield [torch.randn(size, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator)]


class Bookmarked(ResumableData):
    """A resumable loader for one worker."""

    def __init__(self, rank: int) -> None:
        super().__init__(30)
        self.batches = list(Shards(rank))

    def batch(self, number: int) -> list[Tensor]:
        return self.batches[number * number % len(self.batches)]


class OwnData(Classifier):
    """Creates its own loader, which draws random numbers for every batch."""

    num_processes = 0

    def train_dataloader(self) -> Any:
        # The default of Linux; a process of a fork server would start another fork server.
        options = {"num_workers": self.num_processes, "multiprocessing_context": "fork" if self.num_processes else None}
        return DataLoader(data(60, 3).dataset, 3, collate_fn=_jittered, **options)


def _jittered(items: Any) -> Any:
    inputs, labels = default_collate(items)
    return [inputs + 0.1 * torch.randn_like(inputs), labels]


class Scheduled(OwnData):
    """Makes Lightning create loaders early; its learning rate depends on the number of workers."""

    def configure_optimizers(self) -> Any:
        self.trainer.fit_loop.setup_data()  # as estimated_stepping_batches does with a limited number of epochs
        return torch.optim.SGD(self.parameters(), lr=0.05 * self.trainer.world_size)


class InAnotherProcess(OwnData):
    """Augments in a loader process, which Lightning seeds by the rank of the worker."""

    num_processes = 1


class Sharded(OwnData):
    """Has data and a loss that depend on the rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss * (1 + self.local_rank)

    def train_dataloader(self) -> Any:
        return DataLoader(Shards(self.trainer.global_rank), batch_size=None)


class Resuming(Sharded):
    """Has a loader that can resume in the middle of an epoch."""

    def train_dataloader(self) -> Any:
        return Bookmarked(self.trainer.global_rank)


class Pictures(Classifier):
    """Has convolutions in ``channels_last`` format and a layer in double precision."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        generator = torch.Generator().manual_seed(8)
        self.first, self.middle = nn.Conv2d(2, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.last = nn.Linear(12, 3, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.middle(self.first(inputs.view(-1, 2, 2, 2)).tanh())
        return self.last(seen.tanh().mean(dim=(2, 3)).double())


class Scaled(Classifier):
    """Has a learning rate that depends on the number of workers; skips every third step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.world_size)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 3 == 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class OftenSkipping(Classifier):
    """Uses its middle layer in one of four batches, and on rank 0 in one more."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        seen = self.first(inputs).tanh()
        if batch_idx % 4 == 0 or (batch_idx % 4 == 1 and self.trainer.global_rank == 0):
            seen = self.middle(seen).tanh()
        return nn.functional.cross_entropy(self.last(seen), labels)


class Rethresholding(Classifier):
    """Sets another threshold in the fourth step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.trainer.strategy.state.set_threshold(0.2)


class Failing(Classifier):
    """Raises between the exchange and the optimizer's step, and keeps the workers' state from before."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        workers: Any = self.trainer.strategy.workers
        self.before = [copied(vars(worker.snapshot())) for worker in workers.each]

    def on_before_optimizer_step(self, _: Any) -> None:
        if self.global_step == 4:
            raise RuntimeError("no step")


class TrainingRecorder(Callback):
    """Records the training of a worker."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"steps": [], "logged": []}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.state.subscribe(self.seen["steps"].append)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seen["logged"].append(float(trainer.logged_metrics.get("loss_step", 0.0)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen |= {
            "weights": clones([*pl_module.named_parameters(), *pl_module.named_buffers()]),
            "residuals": trainer.strategy.state.residuals.state_dict(),
            "optimizer": trainer.optimizers[0].state_dict()["state"],
            "mean": float(trainer.callback_metrics.get("mean", 0.0)),
        }


def shuffled() -> DataLoader:
    return DataLoader(data(60, 3).dataset, 3, shuffle=True)


class Stream(IterableDataset):
    """Yields equal items to every worker."""

    def __iter__(self) -> Any:
        yield from data(12, 3).dataset


def persistent() -> DataLoader:
    return DataLoader(Stream(), 3, num_workers=1, persistent_workers=True, multiprocessing_context="fork")


def _fit(case: dict[str, Any], num_simulated: int, ckpt_path: str | None) -> dict[str, Any]:
    """Train on simulated workers, or on the running processes if ``num_simulated`` is 0."""
    os.environ["PL_GLOBAL_SEED"] = "3"
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    if case.get("seeds"):
        seed_everything(5, workers=True)
    sparsifier, like = case.get("sparsifier", HardThreshold(threshold=0.05)), case.get("like", {})
    if num_simulated:
        strategy: Any = SimulatedWorkersStrategy(sparsifier, num_simulated, own_attributes=case.get("own", []), **like)
    else:
        ddp_options = {"find_unused_parameters": case.get("module") is OftenSkipping}
        strategy = SparseDDPStrategy(sparsifier, exchange="gather", **ddp_options, **like)
    recorder = TrainingRecorder()
    options = {"max_steps": 9, "limit_val_batches": 0} | case.get("trainer", {})
    trainer = quiet_trainer(strategy, callbacks=[recorder], **options)
    module = case.get("module", Classifier)(case.get("optimizer"))
    make_loader = case.get("loader", partial(data, 60, 3))
    trainer.fit(module, None if isinstance(module, OwnData) else make_loader(), ckpt_path=ckpt_path)
    if path := case.get("saves"):
        trainer.save_checkpoint(path)
    return recorder.seen


def processes(case: dict[str, Any], num_workers: int = 2, ckpt_path: str | None = None) -> dict[str, Any]:
    return run_workers(_fit, num_workers, case, 0, ckpt_path, process_group=False)[0]


def simulated(case: dict[str, Any], num_workers: int = 2, ckpt_path: str | None = None) -> dict[str, Any]:
    return run_workers(_fit, 1, case, num_workers, ckpt_path, process_group=False)[0]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adam": {"optimizer": adam},
    "shuffled, several epochs": {"loader": shuffled, "optimizer": nesterov, "trainer": {"max_steps": 23}},
    "accumulated": {"trainer": {"accumulate_grad_batches": 3, "max_steps": 6}},
    "clipped": {"trainer": {"gradient_clip_val": 0.05}},
    "bfloat16": {"like": {"value_dtype": "bfloat16"}},
    "mixed": {"trainer": {"precision": "bf16-mixed"}},
    "double": {"trainer": {"precision": "64-true"}},
    "random numbers": {"module": Noisy, "optimizer": adam},
    "shards by rank": {"module": Sharded},
    "persistent processes": {"loader": persistent, "trainer": {"max_steps": 8}},
    "reloaded": {
        "module": Noisy,
        "loader": shuffled,
        "trainer": {"max_steps": 8, "limit_train_batches": 3, "reload_dataloaders_every_n_epochs": 1},
    },
    "augmented, with a schedule": {"module": Scheduled},
    "augmented by seeded processes": {"module": InAnotherProcess, "seeds": True},
    "forgets": {"module": Forgetting, "own": ["memory"], "trainer": {"max_steps": 23}},
    "buffers, accumulated": {"module": WithBuffer, "trainer": {"accumulate_grad_batches": 2, "max_steps": 6}},
    "steps left out": {"module": Scaled, "undoes": True},
    "an attribute bound anew": {"module": Rebinding, "own": ["memory"]},
    "an attribute changed in place": {"module": InPlace, "own": ["memory"]},
    "top k of the model": {"sparsifier": TopK(0.05, granularity="model")},
    "channels last, mixed dtypes": {"module": Pictures, "optimizer": adam, "sparsifier": RandomK(0.2)},
    "top k of mixed dtypes": {"module": Pictures, "sparsifier": TopK(0.1, granularity="model")},
    "accordion": {"sparsifier": Accordion(0.02, 0.2, interval=1, relative_change=5.0), "trainer": {"max_steps": 23}},
    "a changed threshold": {"module": Rethresholding},
    "layers": {"sparsifier": HardThreshold(threshold=0.05, layer_thresholds={"first.*": 0.2})},
} | {
    f"{type(sparsifier).__name__} {of}, layers unused": {
        "module": OftenSkipping,
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


# A sum of three terms depends on the order.
OF_THREE = (
    *("plain", "shuffled, several epochs", "accumulated", "bfloat16", "random numbers", "top k of the model"),
    *("an attribute bound anew", "an attribute changed in place", "buffers, accumulated"),
)


@pytest.mark.parametrize("name", CASES)
def test_simulated_workers_equal_processes(name: str) -> None:
    case, num_workers = CASES[name], 3 if name in OF_THREE else 2
    found, expected = simulated(case, num_workers), processes(case, num_workers)
    for key in ("weights", "optimizer", "residuals"):
        assert_equal(found[key], expected[key], key)
    assert found["logged"] == expected["logged"]
    assert found["mean"] == pytest.approx(expected["mean"], rel=1e-6)
    assert 0 < found["steps"][-1].density < 0.9
    if case.get("undoes"):  # skipped steps: simulation exchanges nothing, processes roll back
        assert len(found["steps"]) < len(expected["steps"])
        return
    for step, other in zip(found["steps"], expected["steps"], strict=True):
        assert (step.selected, step.num_workers) == (other.selected, num_workers)
        assert step.squared_error == pytest.approx(other.squared_error, rel=1e-6)


UP_TO_ROUNDING: dict[str, dict[str, Any]] = {
    "clipped": {"like": {"local_clip_norm": 0.2}},
    "held": {"sparsifier": HardThreshold(density=0.05)},
    "held, of each layer that some worker uses": {
        "module": OftenSkipping,
        "sparsifier": HardThreshold(density=0.1, granularity="layer"),
        "trainer": {"max_steps": 24},
    },
}


@pytest.mark.parametrize("name", UP_TO_ROUNDING)
def test_results_of_a_norm_agree_up_to_rounding(name: str) -> None:
    """Processes sum norms per bucket; simulated workers have a single bucket."""
    found, expected = simulated(UP_TO_ROUNDING[name]), processes(UP_TO_ROUNDING[name])
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-5, atol=1e-6)
    thresholds = [step.threshold for step in found["steps"]]
    assert thresholds == pytest.approx([step.threshold for step in expected["steps"]], rel=1e-5)
    assert len(set(thresholds[4:])) == {"clipped": 1, "held": 5}.get(name, 20)
    for step, other in zip(found["steps"], expected["steps"], strict=True):
        assert {key: layer.selected for key, layer in step.layers.items()} == {
            key: layer.selected for key, layer in other.layers.items()
        }
    if name == "clipped":
        assert found["steps"][0].selected < simulated({})["steps"][0].selected


@pytest.mark.parametrize(("saves", "resumes"), [(simulated, simulated), (simulated, processes), (processes, simulated)])
def test_checkpoints_move_between_simulation_and_processes(saves: Any, resumes: Any, tmp_path: Path) -> None:
    def stopped_and_resumed(saves: Any, resumes: Any) -> Any:
        path = str(tmp_path / f"{saves.__name__}.ckpt")
        case = {"module": Pictures, "optimizer": adam}
        saves(case | {"trainer": {"max_steps": 10}, "saves": path})
        return resumes(case | {"trainer": {"max_steps": 15}}, ckpt_path=path)

    expected, resumed = stopped_and_resumed(processes, processes), stopped_and_resumed(saves, resumes)
    assert len(resumed["steps"]) == 5
    assert_equal(resumed["weights"], expected["weights"])
    assert_equal(resumed["residuals"], expected["residuals"])


def test_a_small_checkpoint_holds_the_mean_residual(tmp_path: Path) -> None:
    saved = {}
    for kind in ("full", "small"):
        path = str(tmp_path / f"{kind}.ckpt")
        simulated({"like": {"worker_state": kind}, "trainer": {"max_steps": 4}, "saves": path})
        saved[kind] = [held["unsent"] for held in torch.load(path, weights_only=True)["lightning_sparse"]["workers"]]
    assert any(residual.any() for residual in saved["full"][0].values())
    assert_equal(saved["small"], [mean_of(saved["full"])])
    assert len(simulated({"trainer": {"max_steps": 6}}, ckpt_path=path)["steps"]) == 2


def test_loaders_resume_as_in_processes(tmp_path: Path) -> None:
    path = str(tmp_path / "one.ckpt")
    simulated({"module": Resuming, "trainer": {"max_steps": 4}, "saves": path})
    case = {"module": Resuming, "trainer": {"max_steps": 7}}
    resumed = simulated(case, ckpt_path=path)
    for other in (simulated(case), processes(case, ckpt_path=path)):
        assert_equal(resumed["weights"], other["weights"])
        assert_equal(resumed["residuals"], other["residuals"])


def test_a_sparsifier_observes_the_same_as_in_processes(tmp_path: Path) -> None:
    path, found = str(tmp_path / "one.ckpt"), []
    sparsifier = Accordion(0.02, 0.2, interval=1, relative_change=0.3)
    for run in (processes, simulated):
        run({"sparsifier": sparsifier, "trainer": {"max_steps": 8}, "saves": path})
        found.append(torch.load(path, weights_only=True)["lightning_sparse"]["histories"][0]["sparsifier"])
    assert all(tensor.any() for tensor in found[0]["sums"].values())
    assert_equal(*(history.pop("sums") for history in found))
    assert found[0] == found[1]


def test_simulated_workers_use_the_given_exchange() -> None:
    case = {"trainer": {"max_steps": 1}}
    [dense] = simulated(case | {"like": {"exchange": "dense"}})["steps"]
    [gathered] = simulated(case | {"like": {"exchange": "gather"}})["steps"]
    assert gathered.payload_bytes < gathered.dense_bytes <= dense.payload_bytes


def test_workers_use_the_first_device_of_the_trainer() -> None:
    strategy = SimulatedWorkersStrategy(TopK(0.1), 2)
    strategy.parallel_devices = [torch.device("cuda", 1)]  # as Lightning sets it
    assert strategy.root_device == torch.device("cuda", 1)
    assert quiet_trainer(strategy).strategy.root_device == torch.device("cpu")
    with pytest.raises(ValueError, match=r"Got device='cuda'\. Workers use the device of Trainer"):
        SimulatedWorkersStrategy(TopK(0.1), 2, device="cuda")


# Hooks, monitors and warnings.


@pytest.mark.parametrize("sparsifier", [HardThreshold(threshold=0.05), HardThreshold(density=0.1)])
@on_workers(1, process_group=False)
def test_an_exception_before_the_step_undoes_its_exchange(sparsifier: Sparsifier) -> None:
    strategy, module = SimulatedWorkersStrategy(sparsifier, 2), Failing()
    with pytest.raises(RuntimeError, match="no step"):
        quiet_trainer(strategy, max_steps=9).fit(module, data(60, 3))
    assert strategy.workers is not None
    for worker, before in zip(strategy.workers.each, module.before, strict=True):
        after = copied(vars(worker.snapshot()))
        assert (after["numbers"], after["history"]) == (before["numbers"], before["history"])
        assert_equal(after["own"]["unsent"], before["own"]["unsent"])


def test_a_resume_may_continue_between_accumulated_batches() -> None:
    turns = Turns(Classifier(), 2, ())
    with turns.of(1):  # without begin_step, which follows a step
        pass
    assert turns.take_gradients() == [{}, {}]


class PartlyUsed(Classifier):
    """Has an unused layer, and a parameter that only rank 1 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.of_second = nn.Linear(2, 2), nn.Parameter(torch.ones(3))
        self.ranks: list[tuple[int, int]] = []
        self.without_gradient: list[tuple[bool, bool]] = []
        self.sizes: list[list[int]] = []
        self.num_calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._count_call()
        assert self.trainer.is_global_zero == (self.trainer.global_rank == 0)
        self.ranks.append((self.trainer.global_rank, self.trainer.world_size))
        loss = super().training_step(batch, batch_idx)
        return loss + self.of_second.sum() if self.trainer.global_rank == 1 else loss

    @rank_zero_only
    def _count_call(self) -> None:
        self.num_calls += 1

    def on_after_backward(self) -> None:
        assert self.trainer.world_size in (1, 3)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.without_gradient.append((self.idle.weight.grad is None, self.of_second.grad is None))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.sizes.append([len(part) for part in batch])


@on_workers(1, process_group=False)
def test_hooks_and_monitors_see_all_workers_and_only_rank_0_prints() -> None:
    module, monitor = PartlyUsed(), DensityMonitor(per_layer=True)
    strategy = SimulatedWorkersStrategy(HardThreshold(threshold=0.05), 3)
    trainer = quiet_trainer(strategy, max_steps=2, val_check_interval=1, num_sanity_val_steps=0, callbacks=[monitor])
    with pytest.warns(UserWarning, match=r"PartlyUsed.on_after_backward is called for each simulated worker"):
        trainer.fit(module, data(60, 3), data(10, 5))
    last_step = trainer.strategy.state.last_step
    assert float(trainer.callback_metrics["sparse/density"]) == pytest.approx(last_step.density)
    assert last_step.num_workers == 3
    assert set(last_step.layers) == {name for name, _ in module.named_parameters()}
    assert str(monitor.table())
    assert module.without_gradient == [(True, False)] * 2
    assert module.ranks == [(2, 3), (1, 3), (0, 3)] * 2
    assert module.sizes == [[5, 5]] * 4  # each validation reads both batches once
    assert module.num_calls == 2
    trainer.callbacks.remove(monitor)
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(module, data(60, 3))
    assert trainer.global_step == 3
    assert not trainer.strategy.state.last_step.layers  # without the monitor


class OwnTransfer(Classifier):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Communicating(Classifier):
    def __init__(self, communicate: Any) -> None:
        super().__init__()
        self.communicate = communicate

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.communicate(self, batch[1])
        return super().training_step(batch, batch_idx)


class Complex(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))


class BypassingLightning(Classifier):
    """Steps once with Lightning's optimizer, then with torch's optimizer."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()
            optimizer.optimizer.step()


class Reformatted(Pictures):
    """Changes its memory format when training starts."""

    def on_train_start(self) -> None:
        self.to(memory_format=torch.contiguous_format)


class Unfrozen(Classifier):
    """Trains a layer that was frozen during set-up."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        self.first.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first.requires_grad_(batch_idx == 2)


class Sized(Classifier):
    batch_size = 4

    def train_dataloader(self) -> DataLoader:
        return data(batch_size=self.batch_size)


class SilentModel(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.trainer.global_rank == 0 else None


class Transferring(LightningDataModule):
    on_before_batch_transfer = OwnTransfer.on_before_batch_transfer

    def train_dataloader(self) -> DataLoader:
        return data()


class Changing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        nn.init.zeros_(self.first.bias)
        return super().training_step(batch, batch_idx)


class Lazy(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LazyLinear(16)


SCALER = torch.amp.GradScaler("cpu")
REFUSED: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("Simulated workers do not support manual optimization", ManualClassifier, data, {}),
    ("Simulated workers do not support on_before_batch_transfer, which would get", OwnTransfer, data, {}),
    ("closures that are called several times per step", lambda: Classifier(torch.optim.LBFGS), data, {}),
    ("steps that bypass Lightning", BypassingLightning, data, {}),
    ("training_step returned None. Must return a loss on every worker", SilentModel, data, {}),
    ("'first.weight' has strides", Reformatted, data, {}),
    ("'first.bias' has a gradient, but was frozen or absent", Unfrozen, data, {}),
    (r"'words' is Embedding\(sparse=True\)", partial(WithEmbedding, sparse=True), data, {}),
    (r"The search for a batch size .* only one worker", Sized, lambda: None, {"callbacks": [BatchSizeFinder()]}),
    (r"train_dataloader returned list\. Simulated workers read one", Classifier, lambda: [data(), data()], {}),
    (r"same tuple_iterator and would .* Make a new one in train_dataloader", Classifier, lambda: iter(()), {}),
    (r"changes a parameter \(first.bias\): change it in on_train_batch_end", Changing, data, {}),
    ("uninitialised layers: run a batch through the model first", Lazy, data, {}),
    ("all_gather, because workers run", partial(Communicating, Classifier.all_gather), data, {}),
    ("broadcast, because", partial(Communicating, lambda self, _: self.trainer.strategy.broadcast(1)), data, {}),
    ("complex parameters", Complex, data, {}),
    ("precision with a GradScaler; use", Classifier, data, {"plugins": ScaledPrecision("16-mixed", "cpu", SCALER)}),
    ("on_before_batch_transfer, which would", Classifier, Transferring, {}),
    ("sync_batchnorm", Classifier, data, {"sync_batchnorm": True}),
    ("devices=2 on 1 nodes", Classifier, data, {"num_workers": 2}),
    ("devices=1 on 2 nodes", Classifier, data, {"num_nodes": 2}),
    ("no first_one", Classifier, data, {"own_attributes": ["first_one"]}),
    ("first is not a plain attribute of Classifier", Classifier, data, {"own_attributes": ["first"]}),
    ("_parameters is not a plain attribute", Classifier, data, {"own_attributes": ["_parameters"]}),
]


@on_workers(1, process_group=False)
def test_unsupported_operations_raise_when_they_happen() -> None:
    for message, make, source, options in REFUSED:
        own = options.pop("own_attributes", [])
        strategy = SimulatedWorkersStrategy(HardThreshold(threshold=0.1), 2, own_attributes=own)
        trainer, module = quiet_trainer(strategy, max_steps=4, **options), make()
        with pytest.raises((ValueError, RuntimeError), match=message):
            trainer.fit(module, source())
        assert trainer.global_step == 1 or make is not BypassingLightning
        assert (trainer.global_rank, trainer.world_size, rank_zero_only.rank) == (0, 1, 0), (message, module)
