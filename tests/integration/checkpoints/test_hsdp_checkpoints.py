"""Checkpoints of sharded replicas, as a folder and as a file, with a threshold on gradients and on drifts."""

import copy
import functools
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse import Accordion, SparseHSDPStrategy, SparseLocalHSDPStrategy
from lightning_sparse.checkpointing.content import KEY
from lightning_sparse.checkpointing.restoring import restore
from lightning_sparse.exchange.sharded_tensors import full_tensors, sharded_like
from lightning_sparse.exchange.workers import as_real
from tests.distributed.drift.drift_simulation import NESTEROV
from tests.integration.models import assert_equal, mean_of, quiet_trainer, warnings_of
from tests.integration.programs.layer_rows import complex_is_missing
from tests.integration.strategies.hsdp_models import (
    DRIFTS,
    GRADIENTS,
    Sharded,
    Stateless,
    Tensors,
    Unfreezing,
    WithAdam,
    build_network,
    data,
    fit,
    on_ranks,
    run_ranks,
    whole_weights,
)
from tests.workers import of_all_workers

THRESHOLDS = {GRADIENTS: 0.03, DRIFTS: 0.02}
OUTER_ADAM = partial(torch.optim.Adam, lr=0.01)
FORMS = [True, pytest.param(False, marks=pytest.mark.slow)]
in_both_forms = pytest.mark.parametrize("is_folder", FORMS, ids=["folder", "file"])


class Mixing(nn.Module):
    """Multiplies by a complex matrix."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(size, dtype=torch.complex128) * (1 + 1j))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.to(self.weight.dtype) @ self.weight).abs()


class WithComplex(Sharded):
    def make_network(self) -> nn.Sequential:
        if complex_is_missing():
            return super().make_network()
        *first, tanh, last = build_network()
        return nn.Sequential(*first, nn.Sequential(tanh, Mixing(7)), last)


class WithComplexAndAdam(WithComplex, WithAdam):
    pass


class WithBuffers(WithAdam):
    """Has batch norm, and a frozen layer that tracks the first; only one rank updates its bias."""

    def configure_model(self) -> None:
        if self.network is None:
            super().configure_model()
            self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
            self.target = nn.Linear(6, 9, dtype=torch.float64).requires_grad_(False)
            nn.init.zeros_(self.target.weight)
            nn.init.zeros_(self.target.bias)
            for module in (self.norm, self.target):
                fully_shard(module, mesh=self.network[0].weight.device_mesh)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.network(self.norm(batch[0])), batch[1]) + self.target(batch[0]).mean()

    def on_train_batch_start(self, *_: Any) -> None:
        with torch.no_grad():
            self.target.weight.lerp_(self.network[0].weight.detach(), 0.1)
            if self.target.bias.device_mesh.get_local_rank() == 0:
                self.target.bias.to_local()[0] += 0.1


class StatelessUnfreezing(Unfreezing, Stateless):
    pass


class UnfreezingWithAdam(Unfreezing, WithAdam):
    first_step = 5


SPARSE_LOCO = {"threshold": 0.02, "keep_drift": False, "every_n_steps": 2, "outer_optimizer": NESTEROV}
SETTINGS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gradients": (GRADIENTS, WithComplex, {"threshold": 0.03}),
    "gradients, share of each layer": (GRADIENTS, Sharded, {"density": 0.2, "granularity": "layer"}),
    "drifts": (DRIFTS, WithComplexAndAdam, {"threshold": 0.02}),
    "share of each layer": (DRIFTS, WithAdam, {"density": 0.2, "granularity": "layer", "every_n_steps": 2}),
    "buffers": (DRIFTS, WithBuffers, {"threshold": 0.02, "every_n_steps": 3}),
    "SparseLoCo": (DRIFTS, WithAdam, SPARSE_LOCO),
    "no state": (DRIFTS, Stateless, {"threshold": 0.02}),
    "unfrozen": (DRIFTS, StatelessUnfreezing, {"threshold": 0.02, "outer_optimizer": OUTER_ADAM}),
}
OF_EIGHT = {"tensor parallelism": (GRADIENTS, Tensors, {"threshold": 0.03, "tensor_parallel_size": 2})}
IN_ONE_FILE = ("gradients", "drifts", "share of each layer", "buffers", "SparseLoCo")
"""These cover all kinds of saved state. Lightning's own strategy cannot resume a stateless one from a file either."""


def notes_start(found: dict[str, Any]) -> Callback:
    """Return a callback that writes the state of a replica at the start of training to a dict."""
    return LambdaCallback(on_train_start=lambda trainer, _: found.update(held(trainer.strategy)))


def held(strategy: Any) -> dict[str, Any]:
    """Return the state of this rank's replica in full tensors."""
    state = strategy.state
    parameters, snapshot = state.parameters, state.snapshot()

    def in_full(tensors: Any) -> dict[str, Tensor]:
        flat = {name: as_real(tensor).reshape(-1) for name, tensor in tensors.items()}
        parts = {name: sharded_like(tensor, parameters[name]) for name, tensor in flat.items()}
        return {name: full_tensors(part).clone() for name, part in parts.items()}

    own, buffers = dict(snapshot.own), {}
    if isinstance(strategy, DRIFTS):
        worker_tensors = state.shared.weights() | state.shared.own
        own["weights"] = {name: tensor for name, tensor in worker_tensors.items() if name in parameters}
        buffers = {name: tensor.clone() for name, tensor in worker_tensors.items() if name not in parameters}
    [optimizer] = strategy.optimizers
    states = [optimizer.state.get(parameter, {}) for parameter in parameters.values()]
    momentum = [of_parameter.get("exp_avg", of_parameter.get("momentum_buffer")) for of_parameter in states]
    return {
        "model": {name: full_tensors(parameter.detach()).clone() for name, parameter in parameters.items()},
        "own": {kind: in_full(tensors) for kind, tensors in own.items()},
        "shared": {kind: in_full(tensors) for kind, tensors in snapshot.shared.items()},
        "momentum": [None if tensor is None else full_tensors(tensor).clone() for tensor in momentum],
        "buffers": buffers,
        "threshold": state.sparsifier.threshold,
        "thresholds of layers": dict(state.sparsifier.calibrated_layers),
        "progress": state.progress,
        "history": snapshot.history["exchange"],
    }


def train(
    setting: str, replicas: int, epochs: int, save: str | None, resume: str | None, is_folder: bool, **others: Any
) -> dict[str, Any]:
    """Train epochs of four steps; save after each as ``save``, and an unresumed run at the end as ``save.end``."""
    kind, make, options = (SETTINGS | OF_EIGHT)[setting]
    strategy = kind(replicas=replicas, save_distributed_checkpoint=is_folder, **(options | others))
    at_start: dict[str, Any] = {}
    callbacks: list[Callback] = [notes_start(at_start)]
    if save is not None:
        folder, name = Path(save).parent, Path(save).stem
        callbacks.append(ModelCheckpoint(folder, name, every_n_train_steps=4, save_on_train_epoch_end=False))
    trainer = quiet_trainer(strategy, max_steps=-1, max_epochs=epochs, limit_train_batches=4, callbacks=callbacks)
    trainer.fit(make(), data(), ckpt_path=resume)
    result = held(strategy) | {"at start": at_start}
    if save is not None and resume is None:
        trainer.save_checkpoint(save + ".end")
    return result


def _stop_and_resume(folder: str, names: list[str]) -> dict[str, Any]:
    """Return by name the end of an uninterrupted run, and of a stopped and a resumed run in each form."""
    results: dict[str, Any] = {}
    for name in names:
        results[name] = [train(name, 2, 2, None, None, True)]
        for is_folder in (True, False) if name in (*IN_ONE_FILE, *OF_EIGHT) else (True,):
            path = f"{folder}/{is_folder}/{name}.ckpt"
            turns = ((1, path, None), (2, None, path))
            results[name].append([train(name, 2, epochs, save, resume, is_folder) for epochs, save, resume in turns])
    return results


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (4, [*SETTINGS][:4]),
        pytest.param(4, [*SETTINGS][4:], marks=pytest.mark.slow),
        pytest.param(8, [*OF_EIGHT], marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_run(tmp_path: Path, num_ranks: int, names: list[str]) -> None:
    results = run_ranks(_stop_and_resume, num_ranks, str(tmp_path), names)
    for of_rank in results:
        for name, (straight, *forms) in of_rank.items():
            for stopped, resumed in forms:
                for key in straight.keys() - {"at start"}:
                    assert_equal(resumed[key], straight[key], f"{name}: {key}")
                for key in ("threshold", "history"):  # each rank restores the values of its own shards
                    assert_equal(resumed["at start"][key], stopped[key], f"{name}: {key}")
            assert straight["threshold"] == results[0][name][0]["threshold"]
    kind = "weights" if names[0] == "buffers" else "unsent"
    own = [of_rank[names[0]][0]["own"][kind]["network.0.weight"] for of_rank in results]
    assert torch.equal(own[0], own[1])
    assert not torch.equal(own[0], own[-1])  # each replica has its own


WRITTEN = ("gradients", "drifts", "SparseLoCo")


def _write(folder: str, is_folder: bool) -> dict[str, Any]:
    return {name: train(name, 2, 1, f"{folder}/{name}.ckpt", None, is_folder) for name in WRITTEN}


def _resume_elsewhere(folder: str, replicas: int, is_folder: bool) -> dict[str, Any]:
    return {name: train(name, replicas, 2, None, f"{folder}/{name}.ckpt.end", is_folder) for name in WRITTEN}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns the checkpoints of one form and the state of each rank."""

    @functools.cache
    def save(is_folder: bool) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("saved")
        return folder, run_ranks(_write, 4, str(folder), is_folder)

    return save


@pytest.mark.xdist_group("checkpoints of shards")
@pytest.mark.parametrize(
    ("is_folder", "num_ranks", "replicas"),
    [(True, 6, 2), (False, 2, 2), (True, 3, 3), (False, 2, 1)],
)
def test_other_numbers_of_shards_or_replicas_resume(saved: Any, is_folder: bool, num_ranks: int, replicas: int) -> None:
    folder, before = saved(is_folder)
    results = run_ranks(_resume_elsewhere, num_ranks, str(folder), replicas, is_folder)
    for name in WRITTEN:
        old = [before[0][name], before[2][name]]
        mean = {kind: mean_of([replica["own"][kind] for replica in old]) for kind in old[0]["own"]}
        assert all(any(tensor.any() for tensor in tensors.values()) for tensors in mean.values())
        for rank, result in enumerate(results):
            start = result[name]["at start"]
            if replicas == 2:
                mine = old[rank * replicas // num_ranks]
                torch.testing.assert_close(start["own"], mine["own"], rtol=0, atol=1e-15)
                for key in ("shared", "momentum"):
                    assert_equal(start[key], mine[key])
            else:
                torch.testing.assert_close(start["own"], mean, rtol=0, atol=1e-15)
                assert_equal(start["momentum"], old[0]["momentum"])
                if "anchor" in start["shared"]:
                    torch.testing.assert_close(start["shared"]["anchor"], mean["weights"], rtol=0, atol=1e-15)


@in_both_forms
@on_ranks(4)
def test_a_small_checkpoint_has_the_mean_weights_and_no_residuals(tmp_path: Path, is_folder: bool) -> None:
    for name, replicas in (*((name, 2) for name in WRITTEN), ("gradients", 4)):
        path, messages = f"{tmp_path}/{name}_{replicas}.ckpt", list[str]()
        before = train(name, replicas, 1, path, None, is_folder, worker_state="small")
        with warnings_of(messages):
            start = train(name, replicas, 2, None, f"{path}.end", is_folder)["at start"]
        own = of_all_workers(before["own"])
        if name == "gradients":
            assert any("holds no residuals (worker_state='small')" in text for text in messages) == (
                dist.get_rank() == 0
            )
            assert any(residual.any() for residual in own[0]["unsent"].values())
            assert not any(residual.any() for residual in start["own"]["unsent"].values())
            continue
        mean = mean_of([own[0]["weights"], own[2]["weights"]])
        torch.testing.assert_close(start["own"]["weights"], mean, rtol=0, atol=1e-15)
        assert_equal(start["momentum"], of_all_workers(before["momentum"])[0])
        assert_equal(start["own"].get("unsent", {}), before["own"].get("unsent", {}))


class Narrower(Sharded):
    """Has layers of other sizes, except for the last layer."""

    def make_network(self) -> Any:
        return build_network(width=8)


class ResidualRestorer(Callback):
    """Restores from the checkpoint of another model at the start of training."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        meta = f"{self.path}/meta.pt" if os.path.isdir(self.path) else self.path
        self.messages: list[str] = []
        with warnings_of(self.messages):
            content = torch.load(meta, weights_only=True)[KEY]
            restore(trainer.strategy.averagers, content, path=Path(self.path))
        self.residuals = held(trainer.strategy)["own"]["unsent"]


def _restore_narrower(path: str) -> tuple[list[str], dict[str, Tensor]]:
    callback = ResidualRestorer(path)
    fit(GRADIENTS(threshold=0.03, replicas=2), Narrower(), callbacks=[callback], max_steps=1)
    return callback.messages, callback.residuals


@pytest.mark.xdist_group("checkpoints of shards")
@in_both_forms
def test_a_changed_model_keeps_matching_state_and_names_the_lost_parameters(saved: Any, is_folder: bool) -> None:
    folder, before = saved(is_folder)
    old = [of_rank["gradients"]["own"]["unsent"] for of_rank in before]
    results = run_ranks(_restore_narrower, 4, str(folder / "gradients.ckpt.end"))
    lost = ["network.0.bias", "network.0.weight", "network.2.weight"]
    [message] = [text for text in results[0][0] if "the model is not the one of the checkpoint" in text]
    lost_part, new_part = message.split("The checkpoint lacks these parameters, so their residuals start from zero: ")
    assert "so their residuals are lost: " in lost_part
    assert all(name in lost_part and name in new_part for name in lost), message
    for rank, (_, residuals) in enumerate(results):
        for name, residual in residuals.items():
            assert_equal(residual, torch.zeros_like(residual) if name in lost else old[rank][name])


class MidStepSaver(WithBuffers):
    """Saves between forward and backward if a folder is given."""

    folder: str | None = None

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.folder is not None:
            self.trainer.save_checkpoint(f"{self.folder}/middle.ckpt")


@on_ranks(4)
def test_saving_does_not_change_training(tmp_path: Path) -> None:
    for kind, make, options in (
        (GRADIENTS, Stateless, {"density": 0.2}),  # torch creates its state with a zero gradient
        (DRIFTS, UnfreezingWithAdam, {"threshold": 0.02, "every_n_steps": 4}),
        (DRIFTS, MidStepSaver, {"threshold": 0.02, "every_n_steps": 4}),
    ):
        pair = []
        for saves in (False, True):
            model, strategy, callbacks = make(), kind(replicas=2, **options), []
            if saves and make is MidStepSaver:
                model.folder = str(tmp_path)
            elif saves:
                callbacks = [ModelCheckpoint(tmp_path, every_n_train_steps=1)]
            fit(strategy, model, callbacks=callbacks)
            found = held(strategy)
            pair.append([found["model"], found["own"], strategy.state.last_step])
        quiet, saving = pair
        assert_equal(saving[:2], quiet[:2])
        assert saving[2] == quiet[2]


class ExchangeAborter(Callback):
    """Aborts the exchange of the fourth step on all ranks, and saves afterwards."""

    anchor: Tensor | None = None

    def __init__(self, path: str, *, is_late: bool) -> None:
        self.path, self.is_late = path, is_late

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if self.is_late and trainer.global_step == 3:
            self.fail()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and not self.is_late:
            trainer.strategy.state._engine.finish = self.fail

    def fail(self) -> None:
        raise RuntimeError("in the middle")

    def on_exception(self, trainer: Any, *_: Any) -> None:
        if isinstance(trainer.strategy, DRIFTS):
            self.anchor = trainer.strategy.state.anchor()["network.0.weight"].clone()
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(("kind", "is_late"), [(DRIFTS, False), (GRADIENTS, False), (GRADIENTS, True)])
@on_ranks(4)
def test_a_checkpoint_excludes_an_aborted_exchange(tmp_path: Path, kind: Any, is_late: bool) -> None:
    make, lacking = (WithAdam, "drifts") if kind is DRIFTS else (Sharded, "residuals")
    why = "between an exchange and the optimizer's step" if is_late else "in the middle of an exchange"
    path, seen, messages = str(tmp_path / "a.ckpt"), dict[str, Any](), list[str]()
    aborter = ExchangeAborter(path, is_late=is_late)
    options = {"threshold": THRESHOLDS[kind], "replicas": 2}
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(kind(**options), make(), callbacks=[aborter])
    with warnings_of(messages):
        trainer = quiet_trainer(kind(**options), max_steps=6, callbacks=[notes_start(seen)])
        trainer.fit(make(), data(), ckpt_path=path)
    if dist.get_rank() == 0:
        assert f"holds no {lacking} (it was saved {why}" in "\n".join(messages)
    if kind is GRADIENTS:
        assert not any(residual.any() for residual in seen["own"]["unsent"].values())
        return
    assert_equal(seen["own"]["weights"], seen["shared"]["anchor"])
    assert_equal(seen["own"], of_all_workers(seen["own"])[0])
    whole_anchor = seen["shared"]["anchor"]["network.0.weight"]
    assert any(torch.equal(aborter.anchor, part) for part in whole_anchor.split(5))  # 9 rows in 2 shards


@on_ranks(4)
def test_weights_that_change_after_training_are_saved(tmp_path: Path) -> None:
    path, model = tmp_path / "a.ckpt", WithAdam()
    make = partial(DRIFTS, threshold=0.02, replicas=2, save_distributed_checkpoint=False)
    trainer = quiet_trainer(make(), max_steps=3)
    trainer.fit(model, data())
    with torch.no_grad():
        model.network[0].weight.neg_()
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=True)[KEY]
    assert content["workers"] == []
    assert "were changed" in content["why_incomplete"]
    changed, resumed = copy.deepcopy(whole_weights(model)), WithAdam()
    quiet_trainer(make(), max_steps=3).fit(resumed, data(), ckpt_path=path)
    assert_equal(whole_weights(resumed), changed)


@in_both_forms
@on_ranks(4)
def test_a_module_that_has_trained_resumes(tmp_path: Path, is_folder: bool) -> None:
    model, path = Sharded(), str(tmp_path / "a.ckpt")
    same = DataLoader(TensorDataset(*torch.ones(2, 144, 6, dtype=torch.float64)), batch_size=4)
    ends = []
    for resume in (None, path):
        saver = LambdaCallback(
            on_train_batch_end=lambda trainer, *_: trainer.global_step == 3 and trainer.save_checkpoint(path)
        )
        strategy = GRADIENTS(threshold=0.03, replicas=2, save_distributed_checkpoint=is_folder)
        quiet_trainer(strategy, max_steps=6, callbacks=[saver]).fit(model, same, ckpt_path=resume)
        ends.append(copy.deepcopy(whole_weights(model)))
    assert_equal(*ends)


@on_ranks(4)
def test_lightnings_own_strategy_reads_the_model(tmp_path: Path) -> None:
    for setting in ("gradients", "drifts"):
        expected = train(setting, 2, 1, f"{tmp_path}/{setting}.ckpt", None, True)["model"]
        model = SETTINGS[setting][1]()
        trainer = quiet_trainer(ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1), max_steps=0)
        trainer.fit(model, data(), ckpt_path=f"{tmp_path}/{setting}.ckpt.end")
        assert_equal(whole_weights(model), expected)


@in_both_forms
@on_ranks(4)
def test_a_sparsifier_resumes_its_history_of_each_ranks_shards(tmp_path: Path, is_folder: bool) -> None:
    for make in (SparseHSDPStrategy, SparseLocalHSDPStrategy):
        remembered: list[Any] = []  # at the start and end of each training

        def remember(trainer: Any, _: Any, remembered: list[Any] = remembered) -> None:
            remembered.append(copy.deepcopy(trainer.strategy.state.snapshot().history["sparsifier"]))

        path, messages = tmp_path / f"{make.__name__}.ckpt", list[str]()
        for steps, resume, replicas in ((3, None, 2), (4, path, 2), (4, path, 4)):
            strategy = make(Accordion(interval=1), replicas=replicas, save_distributed_checkpoint=is_folder)
            notes = LambdaCallback(on_train_start=remember, on_train_end=remember)
            trainer = quiet_trainer(strategy, max_steps=steps, callbacks=[notes])
            with warnings_of(messages, "history belongs to other shards"):
                trainer.fit(WithAdam(), data(), ckpt_path=resume)
            assert len(messages) == (replicas == 4 and dist.get_rank() == 0)
            if resume is None:
                trainer.save_checkpoint(path)
        _, saved, resumed, *_ = remembered
        assert_equal(resumed, saved)
        first, second, *_ = of_all_workers(str(saved))
        assert first != second  # each rank has seen its own shards
