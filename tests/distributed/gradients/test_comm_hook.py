import gc

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)
from torch.profiler import ProfilerActivity, profile

from lightning_sparse import (
    DriftOptions,
    GradientOptions,
    HardThreshold,
    LayerLayout,
    MarkingSparsifier,
    TopK,
    register_comm_hook,
)
from lightning_sparse.engine import warmup
from tests.distributed.training import Weights
from tests.workers import of_all_workers, on_workers, run_workers


def wide():
    return Weights(first=torch.zeros(4), second=torch.zeros(3), sometimes=torch.zeros(2))


def wrapped(sparsifier, model=None, find_unused_parameters=False, bucket_cap_mb=1e-6, **options):
    model = DistributedDataParallel(
        wide() if model is None else model, find_unused_parameters=find_unused_parameters, bucket_cap_mb=bucket_cap_mb
    )
    model.sparse_state = register_comm_hook(model, sparsifier, GradientOptions(**options))
    return model, model.sparse_state


def step(model, first, second, sometimes=None):
    """Run a backward with these gradients as part of training; return the averaged gradients."""
    tensors = [None if g is None else torch.tensor(g) for g in (first, second, sometimes)]
    model.zero_grad()
    model(*tensors).backward()
    model.sparse_state.commit()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.module.named_parameters()}


@on_workers(2)
def test_the_first_exchange_of_a_density_is_dense_and_later_ones_are_sparse():
    torch.manual_seed(0)
    sparsifier = HardThreshold(density=0.001)
    ddp, state = wrapped(sparsifier, torch.nn.Linear(5000, 10, bias=False), bucket_cap_mb=25, exchange="reduce_scatter")
    payload_bytes = []
    for _ in range(4):
        ddp.zero_grad()
        (ddp(torch.randn(1, 5000))).sum().backward()
        state.commit()
        payload_bytes.append(state.last_step.payload_bytes)
    dense_bytes = state.last_step.dense_bytes
    assert dense_bytes <= payload_bytes[0] <= dense_bytes + 100
    assert payload_bytes[1] < 0.7 * dense_bytes  # half are averages, dense until their number is known
    assert all(sent < dense_bytes / 3 for sent in payload_bytes[2:])


class OwnBudget(MarkingSparsifier):
    """Has another density on each worker."""

    @property
    def density(self):
        return (0.1, float("nan"))[dist.get_rank()]

    def mark(self, compensated, layout):
        return compensated >= 1.0 + dist.get_rank()


@pytest.mark.parametrize("exchange", ["auto", "gather", "reduce_scatter"])
@on_workers(2)
def test_the_density_of_a_custom_sparsifier_does_not_size_messages(exchange):
    model, state = wrapped(OwnBudget(), torch.nn.Linear(5000, 1, bias=False), exchange=exchange)
    for average in (0.75, 2.25):  # the second worker sends its residual of 1.5 with the second gradient
        model.zero_grad()
        model(torch.full((1, 5000), 1.5)).sum().backward()
        state.commit()
        assert torch.equal(model.module.weight.grad, torch.full((1, 5000), average))


@on_workers(1)
def test_register_comm_hook_rejects_unsuitable_modules_and_options():
    plain, fixed = torch.nn.Linear(2, 2), HardThreshold(threshold=0.1)
    ddp, registered = DistributedDataParallel(plain), DistributedDataParallel(torch.nn.Linear(2, 2))
    state = register_comm_hook(registered, fixed)
    with registered.join(enable=False):
        registered(torch.ones(2)).sum().backward()
    state.close()
    with pytest.raises(RuntimeError, match="The state was closed"):
        registered(torch.ones(2)).sum().backward()
    joined = DistributedDataParallel(torch.nn.Linear(2, 2))
    register_comm_hook(joined, fixed)
    with pytest.raises(RuntimeError, match="Join is not supported with a sparse exchange"), joined.join():
        joined(torch.ones(2))
    ignored = {"sparse": torch.nn.Embedding(2, 2, sparse=True), "elsewhere": torch.nn.Embedding(2, 2, device="meta")}
    ignoring = torch.nn.ModuleDict(ignored | {"linear": torch.nn.Linear(2, 2)})
    ignoring._ddp_params_and_buffers_to_ignore = ["sparse.weight", "elsewhere.weight"]
    register_comm_hook(DistributedDataParallel(ignoring), fixed)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        reduced = DistributedDataParallel(torch.nn.Linear(2, 2))
    for kind, message, module, sparsifier, options in (
        (TypeError, "Expected a torch.nn.parallel.DistributedDataParallel module, got Linear", plain, fixed, {}),
        (TypeError, "Expected a torch.nn.parallel.DistributedDataParallel module, got NoneType", None, fixed, {}),
        (TypeError, "Expected a sparsifier such as HardThreshold", ddp, 0.1, {}),
        (TypeError, "Invalid grad_scaler='x'. Must be a torch.amp.GradScaler", ddp, fixed, {"grad_scaler": "x"}),
        (TypeError, "Invalid options=Drift.* Must be GradientOptions", ddp, fixed, {"options": DriftOptions()}),
        (RuntimeError, "python_reducer", reduced, fixed, {}),
        (RuntimeError, "register_comm_hook", registered, fixed, {}),
    ):
        with pytest.raises(kind, match=message):
            register_comm_hook(module, sparsifier, **options)


@on_workers(2)
def test_top_k_of_the_model_ignores_residuals_of_idle_layers():
    ddp, state = wrapped(TopK(1 / 3, granularity="model"), find_unused_parameters=True)
    selected = []
    state.subscribe(lambda numbers: selected.append(numbers.selected))
    first = step(ddp, [0.1, 0.2, 0.3, 0.4], [5.0, 6.0, 7.0], [0.9, 0.8])
    later = step(ddp, [0.0] * 4, [0.0] * 3)
    assert selected == [2 * 3, 2 * 3]
    assert first["second"].tolist() == [5.0, 6.0, 7.0]
    assert later["first"].tolist() == pytest.approx([0.0, 0.2, 0.3, 0.4])
    assert state.residuals.state_dict()["sometimes"].tolist() == pytest.approx([0.9, 0.8])


@on_workers(2)
def test_top_k_of_the_model_compares_float32_and_float64():
    model = wide()
    model.second = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    ddp, _ = wrapped(TopK(3 / 9, granularity="model"), model)
    close = torch.tensor([1.0 + 1e-12, 1.0 + 3e-12, 1.0 + 2e-12], dtype=torch.float64)  # equal in float32
    ddp(torch.tensor([0.1, 5.0, -1.0, 1.0]), close, torch.zeros(2)).backward()
    assert model.first.grad.tolist() == [0.0, 5.0, 0.0, 0.0]
    assert model.second.grad.tolist() == [0.0, 1.0 + 3e-12, 1.0 + 2e-12]


class RecordingTopK(TopK):
    """Records the steps that begin."""

    def __init__(self):
        super().__init__(0.5)
        self._steps = []

    def begin_step(self, step, rank):
        self._steps.append((step, rank))


@on_workers(2)
def test_begin_step_counts_only_training_steps():
    sparsifier = RecordingTopK()
    model, state = wrapped(sparsifier)
    layout = LayerLayout(("first",), (4,))
    warmup._run_warmup(state._engine, layout, torch.float32, torch.device("cpu"), is_scaled=False, has_unused=True)
    assert state.sparsifier._steps == []
    step(model, [0.1] * 4, [0.1] * 3, [0.9, 0.3])
    step(model, [0.1] * 4, [0.1] * 3, [0.9, 0.3])
    model(torch.ones(4), torch.ones(3), torch.ones(2)).backward()
    model.zero_grad()  # dropped: a run that resumes from here does not count this step
    assert state.snapshot().numbers["next_step"] == 2
    for _ in range(2):
        step(model, [0.1] * 4, [0.1] * 3, [0.9, 0.3])
    assert state.sparsifier._steps == [(number, dist.get_rank()) for number in (0, 1, 2, 2, 3)]
    assert sparsifier._steps == []


@on_workers(1)
def test_a_state_may_be_collected_during_a_step():
    gc.disable()

    def train():
        module = DistributedDataParallel(torch.nn.Linear(4, 2))
        state = register_comm_hook(module, HardThreshold(threshold=0.01))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return state

    cycle = [train()]  # a program of a user may contain such a cycle
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
    assert _global_optimizer_post_hooks
    alive.close()
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks


def _thresholds_with_steps_that_do_not_count(granularity, bad_steps, skips):
    """Return λ after each step that an optimizer made; NaN in a backward does not change λ."""
    model, state = wrapped(HardThreshold(density=0.2, granularity=granularity))
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
def test_threshold_control_ignores_non_finite_steps(granularity, skips):
    expected = run_workers(_thresholds_with_steps_that_do_not_count, 2, granularity, (), True)
    found = run_workers(_thresholds_with_steps_that_do_not_count, 2, granularity, (5, 6, 20), skips)
    assert found[0] == found[1]
    assert len({tuple(of_layers) for of_layers in found[0]}) > 10
    if skips:  # skipped backwards leave no trace
        assert found == expected


@pytest.mark.parametrize("granularity", ["layer", "model"])
@on_workers(2)
def test_threshold_control_moves_only_after_optimizer_steps_of_the_layer(granularity):
    sparsifier = HardThreshold(density=0.3, granularity=granularity)
    model, state = wrapped(sparsifier)
    optimizer = torch.optim.SGD([model.module.first], lr=0.1)
    generator, thresholds = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(20):
        for scale in (1.0, 1.0, 1e6):
            thresholds.append([state.sparsifier.threshold_of(name) for name in ("first", "second")])
            model(*(torch.randn(n, generator=generator) * by for n, by in ((4, 1.0), (3, scale), (2, 1.0)))).backward()
        optimizer.step()
        model.zero_grad()
    assert sparsifier.threshold is None  # the caller's sparsifier is a separate copy
    assert of_all_workers(thresholds) == [thresholds] * 2
    calibrated = thresholds[3:]
    assert granularity == "model" or len({second for _, second in calibrated}) == 1
    of_steps = [{first for first, _ in calibrated[place : place + 3]} for place in range(0, len(calibrated), 3)]
    assert all(len(of_step) == 1 for of_step in of_steps)
    assert len(set.union(*of_steps)) > 10


@on_workers(2)
def test_a_large_payload_overlaps_with_backward():
    layers = [torch.nn.Linear(128, 128) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)  # more than one layer
    register_comm_hook(model, HardThreshold(threshold=1e-6), GradientOptions(exchange="gather"))
    inputs = torch.randn(4, 128)
    for _ in range(3):
        model(inputs).square().sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(inputs).square().sum().backward()
    wanted = {"c10d::send": "send", "autograd::engine::evaluate_function: AddmmBackward0": "differentiate"}
    events = [(event.time_range.start, wanted[event.name]) for event in profiler.events() if event.name in wanted]
    kinds = [kind for _, kind in sorted(events)]
    assert kinds.count("differentiate") == 6
    assert kinds.count("send") == 3  # each of two layers
    first = kinds.index("send")
    assert kinds[first:].count("differentiate") >= 3  # more than half of backward is still to come
    assert kinds[-1] == "send"
