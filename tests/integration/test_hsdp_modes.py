"""What a Trainer can do with replicas of shards beside what torch does alone: each once."""

import os
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from lightning_sparse import DensityMonitor, ErrorMonitor, HSDPHardThresholdStrategy
from lightning_sparse.engine.grouping import local
from tests.distributed.simulation import Plan, simulate
from tests.integration.hsdp_models import (
    Sharded,
    build_network,
    data,
    fit,
    make_optimizer,
    num_ranks,
    whole_weights,
)
from tests.integration.models import quiet_trainer
from tests.workers import run_workers

THRESHOLD = 0.03


def replica_batches(batches_of_ranks: list[list[Any]], ranks: int) -> list[list[Any]]:
    """What each replica saw in each step, from what its ranks did; ranks of tensor parallelism see the same."""
    return [
        [tuple(map(torch.cat, zip(*step[i : i + ranks], strict=True))) for i in range(0, len(step), ranks)]
        for step in zip(*batches_of_ranks, strict=True)
    ]


class Tensors(Sharded):
    """Shares the tensors of its first two layers between two ranks, and shards over what is left of a replica."""

    def configure_model(self) -> None:
        if self.network is not None:
            return
        self.network = build_network(8)  # torch shares a layer of 9 unevenly, and then not at all
        assert self.device_mesh is not None
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.network, self.device_mesh["tensor_parallel"], plan)
        for one in (self.network[0], self.network[2], self.network[4], self.network):
            fully_shard(one, mesh=self.device_mesh["data_parallel"])


def _train_tensors(threshold: float) -> Any:
    model = Tensors()
    strategy = HSDPHardThresholdStrategy(threshold=threshold, replicas=2, tensor_parallel_size=2)
    fit(strategy, model)
    return whole_weights(model.network), model.batches


@pytest.mark.parametrize("ranks", [4, 8])
def test_tensor_parallelism_inside_a_replica(ranks: int) -> None:
    results = run_workers(_train_tensors, ranks, THRESHOLD, process_group=False, new=True)
    firsts = [batches for _, batches in results[::2]]  # two ranks of tensors have the same data
    assert all(torch.equal(a[0], b[0]) for a, b in zip(results[0][1], results[1][1], strict=True))
    model = build_network(8)
    plan = Plan(lambda _, whole: ~(whole.abs() < THRESHOLD))
    simulate(model, make_optimizer(model.parameters()), replica_batches(firsts, ranks // 4), plan)
    for weights, _ in results:
        torch.testing.assert_close(weights, dict(model.named_parameters()), rtol=0, atol=1e-10)


def _resume_tensors(folder: str, is_folder: bool) -> Any:
    results = []
    environment = dict(os.environ)
    for epochs, resume in ((2, None), (1, None), (2, f"{folder}/a.ckpt")):
        os.environ.update(environment)
        model = Tensors()
        strategy = HSDPHardThresholdStrategy(
            threshold=THRESHOLD, replicas=2, tensor_parallel_size=2, save_distributed_checkpoint=is_folder
        )
        trainer = quiet_trainer(strategy, num_workers=num_ranks(), max_steps=-1, max_epochs=epochs)
        trainer.fit(model, data(), ckpt_path=resume)
        if epochs == 1:
            trainer.save_checkpoint(f"{folder}/a.ckpt")
        results.append(
            (
                {name: one.clone() for name, one in strategy.state.snapshot().own["residual"].items()},
                whole_weights(model),
            )
        )
    return results


@pytest.mark.full
@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_a_resume_with_tensor_parallelism(tmp_path: Path, is_folder: bool) -> None:
    for straight, _, resumed in run_workers(
        _resume_tensors, 8, str(tmp_path), is_folder, process_group=False, new=True
    ):
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
        assert max(float(one.abs().max()) for one in straight[0].values() if one.numel()) > 0


class Branching(Sharded):
    """Each replica uses a last layer of its own; a further one nobody uses."""

    def configure_model(self) -> None:
        if self.network is not None:
            return
        super().configure_model()
        assert self.device_mesh is not None
        self.mine = self.device_mesh.get_local_rank("replicate")
        self.branches = nn.ModuleList(nn.Linear(7, 1, dtype=torch.float64) for _ in range(3))
        for one in self.branches:
            nn.init.constant_(one.weight, 0.1)
            nn.init.constant_(one.bias, 0.1)
            fully_shard(one, mesh=self.device_mesh["data_parallel"])

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.branches[self.mine](self.network[:4](batch[0])), batch[1])


def _train_branches() -> Any:
    model = Branching()
    fit(HSDPHardThresholdStrategy(threshold=0.0, replicas=2), model, gradient_clip_val=5.0)
    return whole_weights(model), model.batches


def test_what_some_replicas_use_is_averaged_for_all() -> None:
    results = run_workers(_train_branches, 4, process_group=False, new=True)
    network = build_network()
    branches = nn.ModuleList(nn.Linear(7, 1, dtype=torch.float64) for _ in range(2))
    for one in branches:
        nn.init.constant_(one.weight, 0.1)
        nn.init.constant_(one.bias, 0.1)
    model = nn.ModuleList([network, branches])
    optimizer = make_optimizer(model.parameters())
    for step in replica_batches([batches for _, batches in results], 2):
        optimizer.zero_grad()
        losses = [F.mse_loss(branch(network[:4](x)), y) for branch, (x, y) in zip(branches, step, strict=True)]
        (sum(losses) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    for weights, _ in results:
        for name, one in network.named_parameters():
            torch.testing.assert_close(weights[f"network.{name}"], one, rtol=0, atol=1e-12)
        for name, one in branches.named_parameters():
            torch.testing.assert_close(weights[f"branches.{name}"], one, rtol=0, atol=1e-12)
        assert float((weights["branches.2.weight"] - 0.1).abs().max()) == 0


class Infinite(Sharded):
    """Has an infinite gradient on one rank, once."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        is_struck = dist.get_rank() == 3 and len(self.batches) == 4
        return loss * float("inf") if is_struck else loss


class Numbers(Callback):
    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.weights: list[bool] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.state.subscribe(self.steps.append)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.weights.append(all(bool(local(one).isfinite().all()) for one in pl_module.parameters()))


def _train_infinite() -> Any:
    model, numbers = Infinite(), Numbers()
    fit(HSDPHardThresholdStrategy(threshold=THRESHOLD, replicas=2), model, callbacks=[numbers])
    return [one.non_finite > 0 for one in numbers.steps], numbers.weights


def test_an_infinite_gradient_is_everybodys_in_that_step() -> None:
    for non_finite, weights in run_workers(_train_infinite, 4, process_group=False, new=True):
        assert non_finite.index(True) == 3
        assert weights[:3] == [True] * 3
        assert weights[3] is False


def _train_logged(folder: str) -> Any:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    model, numbers = Sharded(), Numbers()
    strategy = HSDPHardThresholdStrategy(density=0.1, replicas=2)
    monitor = DensityMonitor()
    loggers = [TensorBoardLogger(folder, name="tb"), CSVLogger(folder, name="csv")]
    trainer = quiet_trainer(
        strategy,
        num_workers=num_ranks(),
        max_steps=-1,
        max_epochs=12,
        logger=loggers,
        log_every_n_steps=1,
        callbacks=[monitor, ErrorMonitor(per_layer=True), numbers],
    )
    trainer.fit(model, data(), data())
    trainer.validate(model, data())
    return {
        "thresholds": [one.threshold for one in numbers.steps],
        "densities": [one.density for one in numbers.steps if not one.is_calibration],
        "bytes": [(one.payload_bytes, one.dense_bytes) for one in numbers.steps],
        "table": monitor.table(),
        "layers": set(numbers.steps[-1].layers),
        "metrics": {name: float(one) for name, one in trainer.callback_metrics.items()},
    }


@pytest.mark.full
def test_a_density_is_met_and_everything_is_logged(tmp_path: Path) -> None:
    results = run_workers(_train_logged, 4, str(tmp_path), process_group=False, new=True)
    first = results[0]
    for one in results:
        assert one["thresholds"] == first["thresholds"]
        assert one["densities"] == first["densities"]
    assert "bytes sent per replica" in first["table"]
    densities = first["densities"]
    assert len(densities) > 40
    assert sum(densities) / len(densities) == pytest.approx(0.1, rel=0.35)  # few exchanges, slowly corrected
    elements = sum(one.numel() for one in build_network().parameters())
    assert {dense for _, dense in first["bytes"]} == {8 * elements}
    assert first["layers"] == {f"network.{name}" for name, _ in build_network().named_parameters()}
    rows = next((tmp_path / "csv").rglob("metrics.csv")).read_text().splitlines()
    assert sum("sparse/density" in one for one in rows[:1]) == 1
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    held = events.EventAccumulator(str(next((tmp_path / "tb").rglob("events*")).parent))
    held.Reload()
    tags = set(held.Tags()["scalars"])
    assert {"sparse/density", "sparse/error_norm", "sparse/threshold", "sparse/payload_bytes"} <= tags
    assert any("network.0.weight" in one for one in tags)


def _hold(replicas: int) -> Any:
    model = Sharded()
    strategy = HSDPHardThresholdStrategy(threshold=THRESHOLD, replicas=replicas)
    fit(strategy, model)
    held = [one.residual for one in strategy.state._buckets]
    return sum(one.nbytes for one in held), sum(local(one).numel() for one in model.parameters())


@pytest.mark.parametrize("ranks", [2, 4])
def test_residuals_are_sharded_as_parameters_are(ranks: int) -> None:
    results = run_workers(_hold, ranks, 2, process_group=False, new=True)
    for held, elements in results:
        assert held == 8 * elements  # float64, as the parameters
    assert sum(elements for _, elements in results) == 2 * sum(one.numel() for one in build_network().parameters())


class Empty(Sharded):
    """Is made on no device, and takes its first weights where it is needed."""

    def configure_model(self) -> None:
        if self.network is None:
            with torch.device("meta"):
                super().configure_model()
            torch.manual_seed(dist.get_rank())

    def on_fit_start(self) -> None:
        self.at_start = whole_weights(self.network)


def _train_from_nothing() -> Any:
    model = Empty()
    fit(HSDPHardThresholdStrategy(threshold=0.0, replicas=2), model)
    return model.at_start


def test_replicas_begin_alike_where_each_made_its_own_weights() -> None:
    results = run_workers(_train_from_nothing, 4, process_group=False, new=True)
    for one in results[1:]:
        torch.testing.assert_close(one, results[0], rtol=0, atol=0)


# What is refused.


class Forgotten(Sharded):
    """Shards its first layer only."""

    def configure_model(self) -> None:
        if self.network is None:
            self.network = build_network()
            assert self.device_mesh is not None
            fully_shard(self.network[0], mesh=self.device_mesh["data_parallel"])


class Whole(Sharded):
    """Is not sharded at all."""

    def configure_model(self) -> None:
        if self.network is None:
            self.network = build_network()


class Everywhere(Sharded):
    """Shards over all replicas."""

    def configure_model(self) -> None:
        if self.network is None:
            self.network = build_network()
            fully_shard(self.network)


def _refuse(make: Any, strategy_options: dict[str, Any], options: dict[str, Any]) -> str:
    strategy_options = {
        name: value[dist_rank() % len(value)] if isinstance(value, list) else value
        for name, value in strategy_options.items()
    }
    strategy = HSDPHardThresholdStrategy(**({"threshold": THRESHOLD, "replicas": 2} | strategy_options))
    try:
        fit(strategy, make(), **options)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return "nothing was raised"


def dist_rank() -> int:
    return int(os.environ["RANK"])


@pytest.mark.parametrize(
    ("make", "strategy_options", "options", "message"),
    [
        (Forgotten, {}, {}, "network.2.weight is not sharded"),
        (Whole, {}, {}, "network.0.weight is not sharded"),
        (Everywhere, {}, {}, "over ranks of several replicas"),
        (Sharded, {"replicas": 3}, {}, "4 ranks cannot be 3 replicas"),
        (Sharded, {"tensor_parallel_size": 4}, {}, "4 ranks cannot be 2 replicas of equal size with"),
        (Sharded, {}, {"precision": "16-mixed"}, "Choose a different precision"),
        (Sharded, {"threshold": [0.1, 0.1, 0.2, 0.2]}, {}, "workers disagree"),
        (Sharded, {"threshold": [0.1, 0.2]}, {}, "workers disagree"),
        (Sharded, {"save_distributed_checkpoint": [True, False]}, {}, "in one file: rank 0: False"),
        (Sharded, {"threshold": [0.2, 0.1, 0.1, 0.1]}, {}, "rank 3: 0.1"),
    ],
)
def test_what_cannot_work_is_told_of(make: Any, strategy_options: Any, options: Any, message: str) -> None:
    for said in run_workers(_refuse, 4, make, strategy_options, options, process_group=False, new=True):
        assert message in said


def _train_by_name(options: dict[str, Any]) -> str:
    if options.pop("is_scaled", False):
        options["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    try:
        strategy = fit("hsdp_hardthreshold", Sharded(), **options).strategy
    except ValueError as error:
        return str(error)
    return f"{type(strategy).__name__}, {tuple(strategy.device_mesh.shape)}, density {strategy.state.last_step.density}"


def test_by_name_a_node_is_a_replica() -> None:
    for said in run_workers(_train_by_name, 2, {}, process_group=False, new=True):
        assert said == "HSDPHardThresholdStrategy, (1, 2, 1), density 1.0"  # there is nobody to exchange with
    for said in run_workers(_train_by_name, 2, {"is_scaled": True}, process_group=False, new=True):
        assert "Scaled losses (precision='16-mixed') are not supported" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "Invalid replicas=0"),
        ({"replicas": "all"}, 'whole number of at least 1 or "auto"'),
        ({"tensor_parallel_size": "auto"}, "Invalid tensor_parallel_size='auto'"),
        ({"residual_checkpoint": "mean"}, "Must be one of 'full', 'none'"),
        ({"on_world_size_change": "x"}, "Invalid on_world_size_change='x'"),
        ({"value_dtype": "float8", "threshold": 0.0}, "float8"),
        ({"density_control": "hold", "threshold": 0.1}, "density_control"),
        ({"exchange": "ring"}, "Invalid exchange='ring'"),
    ],
)
def test_a_wrong_option_is_told_of_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HSDPHardThresholdStrategy(**options)


class ByHand(Sharded):
    """Updates its weights with no optimizer."""

    def __init__(self, *, averages: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.averages = averages

    def configure_optimizers(self) -> None:
        return None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.averages:
            self.trainer.strategy.state.average_gradients()
        with torch.no_grad():
            for one in self.parameters():
                one -= 0.01 * one.grad


def _update_by_hand(averages: bool) -> Any:
    model = ByHand(averages=averages)
    options = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 4}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(HSDPHardThresholdStrategy(threshold=THRESHOLD, replicas=2), model, **options)
    return whole_weights(model), "\n".join(str(one.message) for one in caught)


def test_who_updates_weights_by_hand_is_told_how() -> None:
    results = run_workers(_update_by_hand, 4, False, process_group=False, new=True)
    assert "in 4 batches no torch.optim.Optimizer stepped" in results[0][1]
    results = run_workers(_update_by_hand, 4, True, process_group=False, new=True)
    for weights, said in results:
        assert "no torch.optim.Optimizer" not in said
        torch.testing.assert_close(weights, results[0][0], rtol=0, atol=0)


def _sleep() -> float:
    strategy = HSDPHardThresholdStrategy(threshold=0.0, replicas=2, timeout=timedelta(seconds=5))
    started = time.monotonic()
    try:
        fit(strategy, Sleeping())
    except RuntimeError:
        return time.monotonic() - started
    return float("inf")


class Sleeping(Sharded):
    """One rank does nothing for long."""

    def loss(self, batch: Any) -> Tensor:
        if dist.get_rank() == 3 and len(self.batches) == 3:
            time.sleep(20)
        return super().loss(batch)


@pytest.mark.full
def test_who_waits_for_longer_than_the_timeout_ends() -> None:
    seconds = run_workers(_sleep, 4, process_group=False, new=True)
    assert max(seconds[:3]) < 18


class Around(torch.optim.Optimizer):
    """An optimizer that steps with another one, as Lookahead and its like do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Wrapped(Sharded):
    """Steps by an optimizer around another, of which the Trainer knows or not."""

    def __init__(self, *, is_known: bool) -> None:
        super().__init__()
        self.automatic_optimization = is_known

    def configure_optimizers(self) -> Any:
        return Around(make_optimizer(self.parameters()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        return None


def _train_wrapped() -> list[int]:
    environment, exchanges = dict(os.environ), []
    for is_known in (True, False):
        os.environ.update(environment)
        numbers = Numbers()
        options: dict[str, Any] = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 4, "callbacks": [numbers]}
        fit(HSDPHardThresholdStrategy(threshold=THRESHOLD, replicas=2), Wrapped(is_known=is_known), **options)
        exchanges.append(len(numbers.steps))
    return exchanges


def test_an_optimizer_around_another_exchanges_once_a_step() -> None:
    assert run_workers(_train_wrapped, 4, process_group=False, new=True) == [[4, 4]] * 4


class BreaksOff(Callback):
    """Breaks off the exchange of the fourth step, on all ranks, and saves what is there then."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            trainer.strategy.state._engine.finish = self.fail

    def fail(self) -> None:
        raise RuntimeError("in the middle")

    def on_exception(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def _save_what_is_broken(folder: str) -> tuple[str, float]:
    path, environment = f"{folder}/a.ckpt", dict(os.environ)
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(HSDPHardThresholdStrategy(threshold=THRESHOLD, replicas=2), Sharded(), callbacks=[BreaksOff(path)])
    os.environ.update(environment)
    return resumed_from(path)


def resumed_from(path: str) -> tuple[str, float]:
    """What is said when a training resumes from a checkpoint, and its largest residual then."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = HSDPHardThresholdStrategy(threshold=1e9, replicas=2, save_distributed_checkpoint=os.path.isdir(path))
        trainer = quiet_trainer(strategy, num_workers=num_ranks(), max_steps=0)
        trainer.fit(Sharded(), data(), ckpt_path=path)
    largest = max(float(one.abs().max()) for one in strategy.state.snapshot().own["residual"].values() if one.numel())
    return "\n".join(str(one.message) for one in caught), largest


@pytest.mark.full
def test_half_an_exchange_is_not_saved(tmp_path: Path) -> None:
    results = run_workers(_save_what_is_broken, 4, str(tmp_path), process_group=False, new=True)
    assert "holds no residuals (it was saved in the middle of an exchange" in results[0][0]
    assert all(largest == 0 for _, largest in results)


def _save(folder: str) -> None:
    strategy = HSDPHardThresholdStrategy(threshold=THRESHOLD, replicas=2)
    fit(strategy, Sharded()).save_checkpoint(f"{folder}/a.ckpt")


@pytest.mark.full
def test_one_file_out_of_a_folder_has_no_residuals(tmp_path: Path) -> None:
    run_workers(_save, 4, str(tmp_path), process_group=False, new=True)
    folder = tmp_path / "a.ckpt"
    merged = _load_distributed_checkpoint(folder)
    merged["optimizer_states"] = [merged.pop("optimizer_0")]
    torch.save(merged, tmp_path / "one.ckpt")
    results = run_workers(resumed_from, 4, str(tmp_path / "one.ckpt"), process_group=False, new=True)
    assert "is missing. Residuals start from zero" in results[0][0]
    assert all(largest == 0 for _, largest in results)
