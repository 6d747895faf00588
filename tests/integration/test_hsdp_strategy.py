"""``Trainer(strategy="hsdp_hardthreshold")``: replicas of two ranks each, against Lightning's own and plain workers."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse import HSDPHardThresholdStrategy
from lightning_sparse.shards.whole_tensors import like_parameter, whole
from tests.distributed.simulation import Plan, simulate
from tests.integration.models import quiet_trainer
from tests.workers import run_workers

THRESHOLD = 0.03
STEPS = 8


def build_network() -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    network = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7, bias=False), nn.Tanh(), nn.Linear(7, 1))
    with torch.no_grad():
        for one in network.parameters():
            one.copy_(torch.randn(one.shape, generator=generator))
    return network.double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Sharded(LightningModule):
    """Shards its network over the ranks of a replica, or over all in Lightning's own way."""

    def __init__(self, *, native: bool = False) -> None:
        super().__init__()
        self.network: Any = None
        self.native = native
        self.batches: list[tuple[Tensor, Tensor]] = []

    def configure_model(self) -> None:
        if self.network is not None:
            return
        self.network = build_network()
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        if self.native:
            mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        for one in self.network:
            if isinstance(one, nn.Linear):
                fully_shard(one, mesh=mesh)
        fully_shard(self.network, mesh=mesh)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.network(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.parameters())


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(24 * STEPS, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=4)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().full_tensor() for name, one in model.named_parameters()}


def fit(strategy: Any, model: LightningModule, **options: Any) -> Any:
    trainer = quiet_trainer(strategy, num_workers=dist_size(), **({"max_steps": STEPS} | options))
    trainer.fit(model, data())
    return trainer


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def _train(threshold: float, options: dict[str, Any]) -> Any:
    model = Sharded()
    strategy = HSDPHardThresholdStrategy(threshold=threshold, replicas=2)
    trainer = fit(strategy, model, **options)
    return whole_weights(model.network), model.batches, dict(trainer.callback_metrics), strategy.state.last_step


def _train_natively(options: dict[str, Any]) -> Any:
    model = Sharded(native=True)
    fit(ModelParallelStrategy(data_parallel_size=dist_size(), tensor_parallel_size=1), model, **options)
    return whole_weights(model.network)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clip_val": 0.5}, {"accumulate_grad_batches": 2}],
    ids=["plain", "clipping", "accumulation"],
)
def test_nothing_held_back_is_lightnings_own(options: dict[str, Any]) -> None:
    native = run_workers(_train_natively, 4, options, process_group=False, new=True)
    for weights, *_ in run_workers(_train, 4, 0.0, options, process_group=False, new=True):
        torch.testing.assert_close(weights, native[0], rtol=0, atol=1e-12)


def test_a_threshold_is_that_of_plain_workers() -> None:
    results = run_workers(_train, 4, THRESHOLD, {}, process_group=False, new=True)
    steps = zip(*(batches for _, batches, _, _ in results), strict=True)
    batches = [[tuple(map(torch.cat, zip(*step[i : i + 2], strict=True))) for i in (0, 2)] for step in steps]
    assert len({tuple(one[0].flatten().tolist()) for step in batches for one in step}) == 2 * STEPS  # data of its own
    model = build_network()
    records = simulate(
        model, make_optimizer(model.parameters()), batches, Plan(lambda _, whole: ~(whole.abs() < THRESHOLD))
    )
    for weights, _, metrics, last in results:
        torch.testing.assert_close(weights, dict(model.named_parameters()), rtol=0, atol=1e-12)
        assert last.density == pytest.approx(records[-1].density)
        assert metrics["sparse/density"] == pytest.approx(records[-1].density)
        assert metrics["sparse/error_norm"] == pytest.approx(records[-1].error_norm)
        assert metrics["sparse/threshold"] == pytest.approx(THRESHOLD)
        assert metrics["sparse/payload_bytes"] > 0
    assert 0.1 < records[-1].density < 0.9


# Checkpoints.


class AtStart(Callback):
    """Notes every parameter's residual, whole, when training begins."""

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}
        self.threshold: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.residuals = whole_residuals(trainer.strategy.state)
        self.threshold = trainer.strategy.state.sparsifier.threshold


def whole_residuals(exchange: Any) -> dict[str, Tensor]:
    named = exchange.residuals().items()
    return {name: whole(like_parameter(exchange.parameters[name], one)).clone() for name, one in named}


def _train_epochs(
    replicas: int, epochs: int, save: str | None, resume: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    model, witness = Sharded(), AtStart()
    strategy = HSDPHardThresholdStrategy(**({"threshold": THRESHOLD} | options), replicas=replicas)
    trainer = quiet_trainer(
        strategy,
        num_workers=dist_size(),
        max_steps=-1,
        max_epochs=epochs,
        limit_train_batches=4,
        callbacks=[witness],
    )
    trainer.fit(model, data(), ckpt_path=resume)
    residuals = whole_residuals(strategy.state)
    if save is not None:
        trainer.save_checkpoint(save)
    return {
        "weights": whole_weights(model.network),
        "residuals": residuals,
        "at start": witness.residuals,
        "threshold": strategy.state.sparsifier.threshold,
        "threshold at start": witness.threshold,
    }


def epochs_of(ranks: int, replicas: int, epochs: int, *, save: Any = None, resume: Any = None, **options: Any) -> Any:
    paths = [None if one is None else str(one) for one in (save, resume)]
    return run_workers(_train_epochs, ranks, replicas, epochs, *paths, options, process_group=False, new=True)


@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize("options", [{}, {"threshold": None, "density": 0.2}], ids=["threshold", "density"])
def test_a_resume_equals_a_run_without_a_stop(tmp_path: Path, is_folder: bool, options: dict[str, Any]) -> None:
    options = options | {"save_distributed_checkpoint": is_folder}
    one = epochs_of(4, 2, 2, **options)
    epochs_of(4, 2, 1, save=tmp_path / "a.ckpt", **options)
    two = epochs_of(4, 2, 2, resume=tmp_path / "a.ckpt", **options)
    for straight, resumed in zip(one, two, strict=True):
        torch.testing.assert_close(resumed["weights"], straight["weights"], rtol=0, atol=0)
        torch.testing.assert_close(resumed["residuals"], straight["residuals"], rtol=0, atol=0)
        assert resumed["threshold"] == straight["threshold"] == one[0]["threshold"]
    assert (tmp_path / "a.ckpt").is_dir() == is_folder


@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (6, 2), (3, 3), (2, 1)])
def test_others_keep_what_is_pending(tmp_path: Path, is_folder: bool, ranks: int, replicas: int) -> None:
    path, options = tmp_path / "a.ckpt", {"save_distributed_checkpoint": is_folder}
    before = epochs_of(4, 2, 1, save=path, **options)
    after = epochs_of(ranks, replicas, 2, resume=path, **options)
    shards = ranks // replicas
    old = [before[0]["residuals"], before[2]["residuals"]]
    for rank, one in enumerate(after):
        mean = {name: (old[0][name] + old[1][name]) / 2 for name in old[0]}
        wanted = old[rank // shards] if replicas == 2 else mean
        torch.testing.assert_close(one["at start"], wanted, rtol=0, atol=1e-15)
    assert max(float(one.abs().max()) for one in old[0].values()) > 0
