"""Local training in cases that test_drift_laws.py does not draw."""

import gc
import weakref
from functools import partial
from math import nan
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import DriftOptions, HardThreshold, SparseModelAverager, TopK, register_comm_hook
from tests.distributed.drift.drift_simulation import flat
from tests.distributed.gradients.test_state_dict import Watching
from tests.distributed.training import OPTIMIZERS, build_batches, build_model
from tests.workers import of_all_workers, on_workers

STEPS = 13
THRESHOLD = 0.02
adam = OPTIMIZERS["adam"]


def train(model, optimizer, steps, averager=None):
    batches = build_batches(dist.get_world_size(), steps=STEPS)
    for step in steps:
        inputs, targets = batches[step][dist.get_rank()]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if averager is not None:
            averager.step()


@on_workers(2)
def test_each_layer_sends_its_share_by_its_own_threshold():
    model = build_model()
    optimizer = adam(model.parameters())
    options = {"density": 0.2, "granularity": "layer", "layer_thresholds": {"4.bias": 0.0}}
    averager = SparseModelAverager(model, HardThreshold(**options))
    densities = []
    for step in range(150):
        train(model, optimizer, [step % STEPS])
        used = {name: averager.sparsifier.threshold_of(name) for name, _ in model.named_parameters()}
        averager.step()
        anchor = averager.anchor()
        for name, parameter in model.named_parameters():
            assert not used[name] or (parameter - anchor[name]).abs().max() < used[name]
        densities.append({name: layer.density for name, layer in averager.last_step.layers.items()})
    thresholds = dict(averager.sparsifier.calibrated_layers)
    assert of_all_workers(thresholds) == [thresholds] * 2
    assert thresholds.keys() == {"0.weight", "0.bias", "2.weight", "2.bias", "4.weight"}
    assert len(set(thresholds.values())) == 5
    # last_step has the threshold before the last correction.
    assert averager.last_step.threshold == pytest.approx(max(thresholds.values()), rel=0.5)
    mean = {name: sum(of_step[name] for of_step in densities[50:]) / 100 for name in densities[0]}
    assert mean.pop("4.bias") == 1
    assert mean == pytest.approx(dict.fromkeys(thresholds, 0.2), rel=0.2)


@on_workers(2)
def test_blocks_of_averaged_weights_may_be_nested_and_a_state_in_them_has_the_own_weights():
    model, rank = build_model(), dist.get_rank()
    averager = SparseModelAverager(model, HardThreshold(threshold=THRESHOLD))
    with torch.no_grad():
        model[4].bias.fill_(rank)
    before = averager.state_dict()["own"]["weights"]
    with averager.averaged_weights():
        with averager.averaged_weights():
            inside = flat(model)
        assert torch.equal(flat(model), inside)
        assert model[4].bias.tolist() == [0.5] * 3
        within = averager.state_dict()["own"]["weights"]
    torch.testing.assert_close(within, before, rtol=0, atol=0)
    assert within["4.bias"].tolist() == model[4].bias.tolist() == [rank] * 3


@on_workers(2)
def test_an_averager_handles_parameters_of_every_kind():
    rank = dist.get_rank()
    torch.manual_seed(rank)  # rank 0's weights win
    model = nn.Module()
    model.usual = nn.Parameter(torch.randn(5, 3))
    model.wide = nn.Parameter(torch.randn(7, dtype=torch.float64))
    model.narrow = nn.Parameter(torch.randn(9).bfloat16())
    model.spiral = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    model.columns = nn.Parameter(torch.randn(6, 2).t())
    model.tied = model.usual
    model.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model.late = nn.Parameter(torch.randn(3), requires_grad=False)
    model.norm = nn.BatchNorm1d(3)
    [started, _] = of_all_workers({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    averager = SparseModelAverager(
        model, HardThreshold(threshold=0.5), DriftOptions(every_n_steps=2), per_layer_stats=True
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, started[name])
    for step in range(4):
        if step == 2:
            model.late.requires_grad_(True)
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                if parameter.requires_grad:
                    generator = torch.Generator().manual_seed(100 * rank + 10 * step + index)
                    parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
            model.norm.running_mean.fill_(float(rank + step))
        averager.step()
    weights, anchor = dict(model.named_parameters()), dict(averager.anchor())
    assert set(weights) == set(anchor) == set(averager.last_step.layers)
    assert "tied" not in weights
    torch.testing.assert_close(*of_all_workers(anchor), rtol=0, atol=0)
    for name, weight in weights.items():
        shared = torch.view_as_complex(anchor[name]) if weight.is_complex() else anchor[name]
        far = torch.view_as_real(weight - shared) if weight.is_complex() else weight.double() - shared.double()
        rounding = 0.05 if weight.dtype == torch.bfloat16 else 1e-6
        assert (far.abs() < 0.5 + rounding).all(), name
    assert averager.last_step.dense_bytes == 2 * sum(weight.nbytes for weight in weights.values())
    assert model.norm.running_mean.tolist() == [3.5] * 3
    assert (model.late != started["late"]).all()


@on_workers(3)
def test_all_workers_see_non_finite_drifts_in_the_same_exchange():
    model = build_model().append(nn.Linear(1, 1))  # float32, so in a second bucket
    averager = SparseModelAverager(model, HardThreshold(threshold=1e30))
    with torch.no_grad():
        if dist.get_rank() == 1:
            model[-1].bias.fill_(float("nan"))
            model[0].weight[0, 0] = float("inf")
    averager.step()
    assert [model[-1].bias.item(), averager.drift_exchange.largest_drift] == pytest.approx([nan, nan], nan_ok=True)
    assert not model[0].weight[0, 0].isfinite()
    assert sum(int((~parameter.isfinite()).sum()) for parameter in model.parameters()) == 2
    assert averager.last_step.non_finite == 2


@on_workers(2)
def test_a_sparsifier_observes_averages_of_drifts():
    model = nn.Linear(4, 3)
    averager = SparseModelAverager(model, Watching(threshold=0.05), DriftOptions(exchange="gather"))
    for step in range(1, 4):
        before = {name: anchor.clone() for name, anchor in averager.anchor().items()}
        for parameter in model.parameters():
            parameter.data.sub_(0.1 * step * (1 + dist.get_rank()))
        averager.step()
        moved = {name: (before[name] - anchor).flatten() for name, anchor in averager.anchor().items()}
        torch.testing.assert_close(averager.sparsifier._seen, moved)


def averaged_by(outer):
    return SparseModelAverager(build_model(), HardThreshold(threshold=0.1), DriftOptions(outer_optimizer=outer))


class Zeroing(TopK):
    def select(self, compensated, layout):
        return super().select(compensated.zero_(), layout)


class ZeroingMark(TopK):
    def mark(self, compensated, layout):  # on dense routes, as in the first step
        return super().mark(compensated.zero_(), layout)


@on_workers(2)
def test_errors_of_averagers_name_the_remedy():
    fixed = HardThreshold(threshold=0.1)
    closed, within = (SparseModelAverager(build_model(), fixed) for _ in range(2))
    closed.close()
    model = build_model()
    older, newer = (SparseModelAverager(part, fixed) for part in (model, model[4]))
    newer.step()
    model = build_model()
    model[0].requires_grad_(False)
    whole = SparseModelAverager(model, fixed)
    model[0].requires_grad_(True)
    part = SparseModelAverager(model[0], fixed)
    whole.step()  # gives the layer an anchor too
    for make, word in (
        (lambda: SparseModelAverager(nn.Sequential(DistributedDataParallel(build_model())), fixed), "Unwrap"),
        (lambda: SparseModelAverager(nn.LazyLinear(3), fixed), "not initialised"),
        (lambda: SparseModelAverager(3, fixed), "Invalid module=3. Must be a torch.nn.Module"),
        (lambda: SparseModelAverager(build_model(), 0.1), "Expected a sparsifier such as .*, got 0.1"),
        *((partial(averaged_by, outer), "Must return a torch.optim.Optimizer") for outer in (torch.optim.LBFGS, list)),
        (lambda: averaged_by(None).load_state_dict(None), "it has nothing, and lacks kind, world_size, rank"),
        (
            lambda: older.load_state_dict(older.state_dict() | {"kind": "gradients"}),
            "gradients, but .* exchanges drifts",
        ),
        (lambda: averaged_by(None).subscribe(3), "Invalid receiver=3. Must be a function of StepStats"),
        (lambda: SparseModelAverager(build_model().requires_grad_(False), fixed), "nothing to average"),
        (
            lambda: SparseModelAverager(build_model(), fixed, DriftOptions(every_n_steps=1 + dist.get_rank())),
            "every_n_steps",
        ),
        (lambda: DriftOptions(keep_drift=False, drift_decay=1.5), r"\(0, 1\]"),
        (lambda: DriftOptions(keep_drift=False, drift_decay="0.5"), r"\(0, 1\]"),
        (lambda: DriftOptions(outer_optimizer=0.7), r"partial\(torch.optim.SGD"),
        (lambda: DriftOptions(keep_drift="yes"), "True or False"),
        *(
            (SparseModelAverager(build_model(), kind(0.1)).step, "changed the compensated gradient in place")
            for kind in (Zeroing, ZeroingMark)
        ),
        (closed.step, "was closed"),
        (older.step, r"step\(\) of the newest"),
        (part.step, r"step\(\) of the newest"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=word):
            make()
    with within.averaged_weights(), pytest.raises(RuntimeError, match="Step before or after"):
        within.step()


@on_workers(2)
def test_a_layer_with_its_own_threshold_is_averaged_over_senders_while_another_is_sent_whole():
    model = nn.ParameterDict({"a": torch.zeros(3), "b": torch.zeros(3)})
    for sparsifier in ({"threshold": 0.0}, {"density": 0.1}):
        averager = SparseModelAverager(model, HardThreshold(**sparsifier, layer_thresholds={"b": 0.25}))
        before = {name: anchor.clone() for name, anchor in averager.anchor().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.2 + 0.1 * dist.get_rank())
        averager.step()
        moved = {name: (before[name] - anchor).tolist() for name, anchor in averager.anchor().items()}
        assert moved == {"a": pytest.approx([0.25] * 3), "b": pytest.approx([0.3] * 3)}
        averager.close()


def _with_averager(**options):
    model = build_model()
    averager = SparseModelAverager(model, HardThreshold(threshold=THRESHOLD), DriftOptions(**options))
    for _ in range(3):
        averager.step()
    with averager.averaged_weights():
        pass
    return model, weakref.ref(averager)


def _with_hook():
    ddp = DistributedDataParallel(build_model())
    state = register_comm_hook(ddp, HardThreshold(threshold=THRESHOLD))
    train(ddp, adam(ddp.parameters()), range(2))
    return None, weakref.ref(state)


@on_workers(2)
def test_an_averager_is_freed_without_references_and_a_hook_with_its_module():
    gc.collect()
    gc.disable()
    for make in (_with_hook, _with_averager, partial(_with_averager, keep_drift=False)):
        _model, gone = make()
        assert gone() is None


def interrupt(averager, method):
    """Interrupt an exchange in a method of the engine."""
    with patch.object(averager._engine, method, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        averager.step()


@pytest.mark.parametrize("interrupted", ["finish", "add"])
@on_workers(2, timeout=40)
def test_a_reset_leaves_the_memory_of_an_interrupted_exchange_to_its_collectives(interrupted):
    options = DriftOptions(exchange="dense", average_over="workers")
    averager = SparseModelAverager(model := build_model(), HardThreshold(threshold=THRESHOLD), options)
    train(model, adam(model.parameters()), range(1), averager)
    interrupt(averager, interrupted)
    with pytest.raises(RuntimeError, match="An exception interrupted an exchange of drifts"):
        averager.step()
    written = [bucket.drift for bucket in averager.drift_exchange.buckets]
    averager.reset()
    assert not any(bucket.drift is old for bucket, old in zip(averager.drift_exchange.buckets, written, strict=True))


def train_unfreezing(looks_at):
    """Unfreeze a layer between two exchanges; use averaged weights after some steps."""
    model = build_model()
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    optimizer = adam(model.parameters())
    averager = SparseModelAverager(model, HardThreshold(threshold=THRESHOLD), DriftOptions(every_n_steps=4))
    for step in range(STEPS):
        if step == 5:
            frozen.requires_grad_(True)
        train(model, optimizer, [step], averager)
        if step in looks_at:
            with averager.averaged_weights():
                assert torch.equal(*of_all_workers(flat(model)))
    with averager.averaged_weights():
        return flat(model)


@on_workers(2)
def test_an_averager_trains_with_fabric_as_without():
    trained = []
    for fabric in (None, Fabric(accelerator="cpu", devices=2, strategy="ddp")):
        model = build_model()
        optimizer = adam(model.parameters())
        if fabric is not None:
            fabric.launch()
            model, optimizer = fabric.to_device(model), fabric.setup_optimizers(optimizer)
        averager = SparseModelAverager(model, HardThreshold(threshold=THRESHOLD))
        train(model, optimizer, range(STEPS), averager)
        averager.close()
        trained.append(flat(model))
    assert torch.equal(*trained)


@on_workers(2)
def test_looking_at_averaged_weights_changes_nothing_after_unfreezing():
    plain = train_unfreezing(())
    for looks_at in ((5,), (5, 6)):
        assert torch.equal(train_unfreezing(looks_at), plain)


@on_workers(2)
def test_an_outer_optimizer_continues_a_layer_that_was_unfrozen_before_the_save():
    options = DriftOptions(outer_optimizer=partial(torch.optim.Adam, lr=0.01))
    models, averagers = [build_model(), build_model()], []
    next(models[0].parameters()).requires_grad_(False)
    for model in models:
        averagers.append(SparseModelAverager(model, HardThreshold(threshold=THRESHOLD), options))
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        if model is models[0]:
            train(model, inner, range(5), averagers[0])
            next(model.parameters()).requires_grad_(True)  # five steps fewer of the outer optimizer
            train(model, inner, range(5, 8), averagers[0])
            saved = averagers[0].state_dict()
        else:
            averagers[1].load_state_dict(saved)
        train(model, inner, range(8, STEPS), averagers[-1])
    assert torch.equal(*map(flat, models))


@on_workers(2, timeout=40)
def test_a_new_buffer_is_averaged_when_all_workers_have_it():
    rank, model = dist.get_rank(), build_model()
    averager = SparseModelAverager(model, HardThreshold(threshold=0.0))
    for owner, expected in ((1, 1.0), (0, float(rank)), (None, 0.5)):
        if rank == owner:
            model.register_buffer("lazy", torch.tensor([float(rank)]))
        with averager.averaged_weights():
            averager.snapshot(averager.workers)
        averager.step()
        assert not hasattr(model, "lazy") or model.lazy.item() == expected


@on_workers(2)
def test_integer_and_boolean_buffers_become_those_of_rank_0():
    rank, model = dist.get_rank(), build_model()
    own, expected = ({"count": torch.tensor([3, 5]) + of, "mask": torch.tensor([of == 0, True])} for of in (rank, 0))
    averager = SparseModelAverager(model, HardThreshold(threshold=0.0))
    for name, buffer in own.items():
        model.register_buffer(name, buffer.clone())
    averager.step()  # from now on, workers compare the new buffers
    with averager.averaged_weights():
        assert all(torch.equal(getattr(model, name), expected[name]) for name in expected)
    assert all(torch.equal(getattr(model, name), own[name]) for name in own)
    averager.step()
    assert all(torch.equal(getattr(model, name), expected[name]) for name in expected)


class Outer:
    """A callable object as a command line creates it from YAML, whose repr shows only an address."""

    def __call__(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)


@on_workers(2)
def test_averagers_accept_callable_outer_optimizers():
    for outer in (Outer(), partial(Outer.__call__, Outer())):
        averaged_by(outer).close()
