import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)

import lightning_sparse
from lightning_sparse import GaussianK, HardThreshold, LayerLayout, TopK, register_comm_hook
from lightning_sparse.engine import warmup
from tests.workers import run_workers


class Wide(torch.nn.Module):
    """Two used layers and one that is used on demand; y = x @ w, so gradients are easy to set."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(4))
        self.second = torch.nn.Parameter(torch.zeros(3))
        self.sometimes = torch.nn.Parameter(torch.zeros(2))

    def forward(self, first, second, sometimes=None):
        loss = (self.first * first).sum() + (self.second * second).sum()
        return loss if sometimes is None else loss + (self.sometimes * sometimes).sum()


def wrapped(sparsifier, model=None, find_unused_parameters=False, bucket_cap_mb=1e-6, **options):
    model = DistributedDataParallel(
        Wide() if model is None else model,
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=bucket_cap_mb,
    )
    model.sparse_state = register_comm_hook(model, sparsifier, **options)
    return model, model.sparse_state


def step(model, first, second, sometimes=None):
    """One backward with these gradients, as part of training; returns what DDP left in .grad."""
    tensors = [None if g is None else torch.tensor(g) for g in (first, second, sometimes)]
    model.zero_grad()
    model(*tensors).backward()
    model.sparse_state.commit()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.module.named_parameters()}


ZERO3, ZERO2 = [0.0] * 3, [0.0] * 2


def _train_with_scaler(scaled, overflow_at):
    """SGD on fixed gradients; with a scaler, losses are multiplied by S and one worker overflows once."""
    model = Wide()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3, enabled=scaled)
    ddp, state = wrapped(HardThreshold(threshold=0.5), model, grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    statistics, around_overflow = [], None
    for index in range(12):
        gradients = [torch.randn(size, generator=generator) for size in (4, 3, 2)]
        overflows = index == overflow_at
        if overflows and not scaled:
            continue
        before = copy.deepcopy(state.residuals.state_dict())
        if overflows and dist.get_rank() == 1:
            gradients[0][2] = float("inf")
        optimizer.zero_grad()
        scaler.scale(ddp(*gradients)).backward()
        if overflows:
            weight = model.first.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            after = state.residuals.state_dict()
            around_overflow = before, after, weight, model.first.detach().clone()
        else:
            statistics.append((state.last_step.density, state.last_step.error_norm))
    return [p.detach() for p in model.parameters()], statistics, around_overflow


def test_a_loss_scale_changes_no_number_and_an_overflowed_step_is_undone():
    scaled = run_workers(_train_with_scaler, 2, True, 5)
    plain = run_workers(_train_with_scaler, 2, False, 5)
    for (weights, statistics, around), (plain_weights, plain_statistics, _) in zip(scaled, plain, strict=True):
        assert statistics == plain_statistics
        for one, other in zip(weights, plain_weights, strict=True):
            assert torch.equal(one, other)
        before, after, weight_before, weight_after = around
        assert torch.equal(weight_before, weight_after)  # skipped on both workers, though only rank 1 overflowed
        assert any(residual.any() for residual in before.values())
        for name, residual in before.items():
            torch.testing.assert_close(after[name], residual, rtol=0, atol=0)


def _disagreement():
    try:
        wrapped(TopK(0.1) if dist.get_rank() else HardThreshold(threshold=0.1))
    except RuntimeError as error:
        return str(error)


def test_workers_that_disagree_are_told_so_on_every_rank():
    messages = run_workers(_disagreement, 2)
    assert messages[0] == messages[1]
    assert "sparsifier: rank 0: 'HardThreshold', rank 1: 'TopK'" in messages[0]


def _payload_bytes(exchange):
    # Seven steps: everything is sent, then almost nothing, then everything again.
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 10, bias=False)
    ddp, state = wrapped(HardThreshold(threshold=1.0), model, bucket_cap_mb=25, exchange=exchange)
    payload_bytes = []
    for size in (2.0, 2.0, 1e-3, 1e-3, 1e-3, 2.0, 2.0):
        ddp.zero_grad()
        (ddp(torch.full((1, 300), size))).sum().backward()
        payload_bytes.append(state.last_step.payload_bytes)
    return payload_bytes, state.last_step.dense_bytes


def test_auto_gathers_what_is_sparse_and_reduces_what_is_not():
    for payload_bytes, dense_bytes in run_workers(_payload_bytes, 2, "auto"):
        first, everything, nothing_yet, nothing, still, jump, everything_again = payload_bytes
        assert first == everything == nothing_yet == everything_again
        assert dense_bytes <= first <= dense_bytes + 100
        assert nothing == still < 200
        assert dense_bytes < jump < dense_bytes + 300  # what was gathered did not hold it: it goes again, dense


def test_a_forced_exchange_is_kept_to():
    for payload_bytes, dense_bytes in run_workers(_payload_bytes, 2, "dense"):
        assert all(dense_bytes <= sent <= dense_bytes + 100 for sent in payload_bytes)
    for payload_bytes, dense_bytes in run_workers(_payload_bytes, 2, "gather"):
        # The third step still has the room that the second needed.
        assert [sent > dense_bytes for sent in payload_bytes] == [True, True, True, False, False, True, True]


def _payload_bytes_of_a_calibration(exchange):
    torch.manual_seed(0)
    sparsifier = HardThreshold(density=0.001, calibration_steps=3)
    ddp, state = wrapped(sparsifier, torch.nn.Linear(5000, 10, bias=False), bucket_cap_mb=25, exchange=exchange)
    payload_bytes = []
    for _ in range(6):
        ddp.zero_grad()
        (ddp(torch.randn(1, 5000))).sum().backward()
        state.commit()
        payload_bytes.append(state.last_step.payload_bytes)
    return payload_bytes, state.last_step.dense_bytes


@pytest.mark.parametrize("exchange", ["gather", "reduce_scatter", "auto"])
def test_a_calibration_goes_dense_and_what_follows_has_no_room_for_everything(exchange):
    for payload_bytes, dense_bytes in run_workers(_payload_bytes_of_a_calibration, 2, exchange):
        assert all(dense_bytes <= sent <= dense_bytes + 100 for sent in payload_bytes[:3])
        if exchange != "auto":  # which is dense until it has seen a step of usual size
            assert payload_bytes[3] < 0.7 * dense_bytes  # half of it are averages, dense until their number is known
        assert all(sent < dense_bytes / 3 for sent in payload_bytes[4:])


def _errors():
    plain = torch.nn.Linear(2, 2)
    ddp = DistributedDataParallel(plain)
    with pytest.raises(TypeError, match=r"Expected a torch.nn.parallel.DistributedDataParallel module, got Linear"):
        register_comm_hook(plain, HardThreshold(threshold=0.1))
    with pytest.raises(TypeError, match="Expected a sparsifier such as HardThreshold"):
        register_comm_hook(ddp, 0.1)
    with pytest.raises(ValueError, match=r"needs the learning rates. Pass optimizer="):
        register_comm_hook(ddp, HardThreshold(threshold=0.1), error_feedback="learning_rate")
    with pytest.raises(
        ValueError, match=r"Invalid exchange='sparse'. Must be one of 'auto', 'gather', 'reduce_scatter',"
    ):
        register_comm_hook(ddp, HardThreshold(threshold=0.1), exchange="sparse")
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        reduced = DistributedDataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="python_reducer"):
        register_comm_hook(reduced, HardThreshold(threshold=0.1))
    state = register_comm_hook(ddp, HardThreshold(threshold=0.1))
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        register_comm_hook(ddp, HardThreshold(threshold=0.1))
    return isinstance(state, lightning_sparse.SparseState)


def test_a_module_that_cannot_take_the_hook_is_refused():
    assert run_workers(_errors, 1) == [True]


def _the_callers_sparsifier_stays_as_it_was():
    sparsifier = HardThreshold(density=0.5, calibration_steps=1)
    model, state = wrapped(sparsifier)
    step(model, [1.0] * 4, [1.0] * 3, ZERO2)
    return sparsifier.threshold, state.sparsifier.threshold


def test_calibration_does_not_change_the_callers_sparsifier():
    [(original, calibrated)] = run_workers(_the_callers_sparsifier_stays_as_it_was, 1)
    assert original is None
    assert calibrated == pytest.approx((7 / (0.5 * 9)) ** 0.5)


def _metrics_on_one_worker():
    model, state = wrapped(HardThreshold(threshold=1.0))
    average_density, total_error = lightning_sparse.AverageDensity(), lightning_sparse.TotalError()
    state.subscribe(average_density.update)
    state.subscribe(total_error.update)
    step(model, [2.0, 0.5, 0.0, 0.0], ZERO3, ZERO2)
    if dist.get_rank() == 1:
        return None  # a synchronising metric would now wait for this worker
    return average_density.compute().item(), total_error.compute().item()


def test_metrics_can_be_computed_on_one_worker_alone():
    results = run_workers(_metrics_on_one_worker, 2)
    assert results[0] == (pytest.approx(1 / 9), pytest.approx(0.25))


def _hold_a_density_that_is_not_there():
    with pytest.raises(ValueError, match="density_control='hold' with GaussianK"):
        wrapped(GaussianK(0.1), density_control="hold")


def test_a_density_that_cannot_be_held_is_refused():
    run_workers(_hold_a_density_that_is_not_there, 2)


def _held_back_and_idle():
    ddp, state = wrapped(TopK(1 / 3, granularity="model"), find_unused_parameters=True)
    selected = []
    state.subscribe(lambda numbers: selected.append(numbers.selected))
    first = step(ddp, [0.1, 0.2, 0.3, 0.4], [5.0, 6.0, 7.0], [0.9, 0.8])
    later = step(ddp, [0.0] * 4, [0.0] * 3)
    return selected, first, later, state.residuals.state_dict()["sometimes"]


def test_what_is_held_back_of_an_idle_layer_is_not_among_the_largest_of_the_model():
    for selected, first, later, held_back in run_workers(_held_back_and_idle, 2):
        assert selected == [2 * 3, 2 * 3]
        assert first["second"].tolist() == [5.0, 6.0, 7.0]
        assert later["first"].tolist() == pytest.approx([0.0, 0.2, 0.3, 0.4])
        assert held_back.tolist() == pytest.approx([0.9, 0.8])


class MixedPrecision(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.coarse = torch.nn.Parameter(torch.zeros(4))
        self.fine = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, coarse, fine):
        return (self.coarse * coarse).sum().double() + (self.fine * fine).sum()


def _largest_of_both_precisions():
    model = DistributedDataParallel(MixedPrecision())
    register_comm_hook(model, TopK(3 / 7, granularity="model"))
    close = [1.0 + 1e-12, 1.0 + 3e-12, 1.0 + 2e-12]  # alike in float32
    model(torch.tensor([0.1, 5.0, -1.0, 1.0]), torch.tensor(close, dtype=torch.float64)).backward()
    return model.module.coarse.grad.tolist(), model.module.fine.grad.tolist()


def test_the_largest_of_the_model_are_found_among_float32_and_float64_alike():
    for coarse, fine in run_workers(_largest_of_both_precisions, 2):
        assert coarse == [0.0, 5.0, 0.0, 0.0]
        assert fine == [0.0, 1.0 + 3e-12, 1.0 + 2e-12]


class Remembering(TopK):
    """Notes what it is told of."""

    def __init__(self):
        super().__init__(0.5)
        self._told = []

    def begin_step(self, step, rank):
        self._told.append((step, rank))


def _tell():
    sparsifier = Remembering()
    model, state = wrapped(sparsifier)
    layout = LayerLayout(("first",), (4,))
    warmup._run_warmup(state._engine, layout, torch.float32, torch.device("cpu"), is_scaled=False, has_unused=True)
    at_first = list(state.sparsifier._told)
    step(model, [0.1] * 4, [0.1] * 3, [0.9, 0.3])
    step(model, [0.1] * 4, [0.1] * 3, [0.9, 0.3])
    model(torch.ones(4), torch.ones(3), torch.ones(2)).backward()
    model.zero_grad()  # dropped: a run that resumes from here knows nothing of it
    saved = state.snapshot().numbers["next_step"]
    for _ in range(2):
        step(model, [0.1] * 4, [0.1] * 3, [0.9, 0.3])
    return at_first, saved, state.sparsifier._told, sparsifier._told


def test_a_sparsifier_is_told_of_the_steps_of_the_training_and_of_no_other():
    for rank, (at_first, saved, told, of_the_callers) in enumerate(run_workers(_tell, 2)):
        assert at_first == of_the_callers == []
        assert saved == 2
        assert told == [(number, rank) for number in (0, 1, 2, 2, 3)]


def _collected_within_a_step():
    gc.disable()

    def train():
        module = DistributedDataParallel(torch.nn.Linear(4, 2))
        state = register_comm_hook(module, HardThreshold(threshold=0.01))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return state

    cycle = [train()]  # as a program of a user's may hold it
    cycle.append(cycle)
    del cycle
    alive = train()
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 2)).sum().backward()
    handles = [register_optimizer_step_post_hook(lambda *_: gc.collect()) for _ in range(2)]
    optimizer.step()
    for handle in handles:
        handle.remove()
    is_followed = bool(_global_optimizer_post_hooks)
    alive.close()
    return is_followed, bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def test_a_state_may_be_collected_in_the_middle_of_a_step():
    assert run_workers(_collected_within_a_step, 1) == [(True, False)]


def _goes_with_its_module():
    gc.collect()
    gc.disable()
    model = DistributedDataParallel(Wide())
    state = register_comm_hook(model, HardThreshold(threshold=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4), torch.ones(3), torch.ones(2)).backward()
        optimizer.step()
    gone = weakref.ref(state)
    del model, optimizer, state
    return gone() is None


def test_a_state_and_its_group_go_with_the_module_and_not_when_a_forked_process_collects_them():
    assert run_workers(_goes_with_its_module, 2) == [True, True]


def _thresholds_with_steps_that_do_not_count(granularity, bad_steps, skips):
    """Returns λ after each step that an optimizer made; some come after a backward with NaN, which moves none."""
    model, state = wrapped(HardThreshold(density=0.2, calibration_steps=1, granularity=granularity))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator, thresholds = torch.Generator().manual_seed(dist.get_rank()), []
    for place in range(30):
        for is_bad in [True] * (place in bad_steps) + [False]:
            inputs = [torch.randn(size, generator=None if is_bad else generator) for size in (4, 3, 2)]
            if is_bad and dist.get_rank() == 1:
                inputs[0][0] = float("nan")
            before = state.sparsifier.threshold_of("first")
            model.zero_grad()
            model(*inputs).backward()
            if not (is_bad and skips):
                optimizer.step()
            assert not is_bad or state.sparsifier.threshold_of("first") == before
        thresholds.append([state.sparsifier.threshold_of(name) for name in ("first", "second", "sometimes")])
    return thresholds


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("granularity", ["model", "layer"])
def test_a_held_threshold_takes_no_notice_of_what_is_not_finite(granularity, skips):
    expected = run_workers(_thresholds_with_steps_that_do_not_count, 2, granularity, (), True)
    found = run_workers(_thresholds_with_steps_that_do_not_count, 2, granularity, (5, 6, 20), skips)
    assert found[0] == found[1]
    assert len({tuple(one) for one in found[0]}) > 10
    if skips:  # those backwards have never been
        assert found == expected


def _thresholds_of_two_players(granularity):
    """One player's backward leaves large gradients on the other, which are dropped."""
    model, state = wrapped(HardThreshold(density=0.3, calibration_steps=1, granularity=granularity))
    first = torch.optim.SGD([model.module.first], lr=0.1)
    second = torch.optim.SGD([model.module.second, model.module.sometimes], lr=0.1)
    generator, before_and_after = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(20):
        model.zero_grad()
        model(
            *(torch.randn(size, generator=generator) * scale for size, scale in ((4, 1), (3, 1e6), (2, 1e6)))
        ).backward()
        before = state.sparsifier.threshold_of("second")
        first.step()
        before_and_after.append((before, state.sparsifier.threshold_of("second")))
        model.zero_grad()
        model(*(torch.randn(size, generator=generator) for size in (4, 3, 2))).backward()
        second.step()
    return before_and_after[1:], [state.sparsifier.threshold_of(name) for name in ("first", "second")]


def test_gradients_that_are_dropped_move_no_layers_threshold():
    (moved, thresholds), others = run_workers(_thresholds_of_two_players, 2, "layer")
    assert (moved, thresholds) == others
    assert all(before == after for before, after in moved)
    assert len({before for before, _ in moved}) > 10  # by its own steps


def _backwards_before_a_step(num_backwards):
    model, state = wrapped(HardThreshold(density=0.2, calibration_steps=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator, thresholds = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(10):
        model.zero_grad()
        for _ in range(num_backwards):  # each exchanges its gradients
            model(*(torch.randn(size, generator=generator) for size in (4, 3, 2))).backward()
            thresholds.append(state.sparsifier.threshold)
        optimizer.step()
    return thresholds


def test_between_optimizer_steps_a_held_threshold_is_constant():
    for thresholds in run_workers(_backwards_before_a_step, 2, 3):
        of_steps = [set(thresholds[place : place + 3]) for place in range(3, 30, 3)]
        assert all(len(one) == 1 for one in of_steps)
        assert len(set.union(*of_steps)) > 5
