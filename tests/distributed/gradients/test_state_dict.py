"""A loop without a Trainer saves the state of the hook and resumes from it."""

import copy
import io

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import Accordion, GaussianK, GradientOptions, HardThreshold, RandomK, TopK, register_comm_hook
from tests.distributed.training import OPTIMIZERS, build_batches, build_model
from tests.workers import of_all_workers, on_workers, run_workers

STOP, END, EPOCH = 6, 11, 4


def begin(sparsifier):
    model = DistributedDataParallel(build_model(torch.float32), bucket_cap_mb=0.0005)
    return model, OPTIMIZERS["adam"](model.parameters()), register_comm_hook(model, sparsifier)


def run(model, optimizer, batches, dropped=None, state=None, first=0):
    for place, of_workers in enumerate(batches):
        if state is not None:
            state.begin_epoch((first + place) // EPOCH, [0.1])
        inputs, targets = of_workers[dist.get_rank()]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        if place == dropped:
            optimizer.zero_grad()
        else:
            optimizer.step()


def everything(model, optimizer, state):
    return copy.deepcopy([model.module.state_dict(), optimizer.state_dict(), state.state_dict()])


def _stop_and_go_on(sparsifier, stop=STOP, dropped=None):
    batches = build_batches(dist.get_world_size(), torch.float32, END)
    model, optimizer, state = begin(sparsifier)
    run(model, optimizer, batches[:stop], dropped, state)
    file = io.BytesIO()
    torch.save(everything(model, optimizer, state), file)
    run(model, optimizer, batches[stop:], None, state, stop)
    straight = everything(model, optimizer, state)

    model, optimizer, state = begin(sparsifier)
    file.seek(0)
    of_model, of_optimizer, of_state = torch.load(file, weights_only=True)
    model.module.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    state.load_state_dict(of_state)
    assert state.state_dict()["numbers"] == of_state["numbers"]
    run(model, optimizer, batches[stop:], None, state, stop)
    return straight, everything(model, optimizer, state)


@pytest.mark.parametrize("sparsifier", [HardThreshold(threshold=0.2), HardThreshold(density=0.05)])
@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_resumed_loop_equals_an_uninterrupted_loop(num_workers, sparsifier):
    for straight, resumed in run_workers(_stop_and_go_on, num_workers, sparsifier):
        assert any(residual.any() for residual in straight[2]["own"]["unsent"].values())
        for expected, found in zip(straight, resumed, strict=True):
            for plain in {"kind", "numbers"} & expected.keys():
                assert expected.pop(plain) == found.pop(plain)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "sparsifier",
    [
        HardThreshold(threshold=np.float64(0.2)),
        HardThreshold(density=np.float64(0.05)),
        HardThreshold(density=0.05, granularity="layer"),
        TopK(0.1, granularity="model"),
        RandomK(0.1),
        RandomK(0.1, same_on_all=False),
        GaussianK(0.1),
        Accordion(0.05, 0.2, interval=1, relative_change=0.9),
    ],
)
@pytest.mark.parametrize(("stop", "dropped"), [(1, None), (1, 0), (STOP, STOP - 1), (STOP, STOP - 2)])
def test_a_stop_after_the_first_or_a_dropped_step_changes_no_weight(sparsifier, stop, dropped):
    for straight, resumed in run_workers(_stop_and_go_on, 2, sparsifier, stop, dropped):
        assert any(residual.any() for residual in straight[2]["own"]["unsent"].values())
        torch.testing.assert_close(straight[:2], resumed[:2], rtol=0, atol=0)
        torch.testing.assert_close(straight[2]["own"]["unsent"], resumed[2]["own"]["unsent"], rtol=0, atol=0)
        for key in ("sums", "norms"):  # of the current epoch, and of the last, which contains the stop
            found = [end[2]["history"]["sparsifier"].get(key, {}) for end in (straight, resumed)]
            torch.testing.assert_close(*found, rtol=0, atol=0)


@on_workers(2)
def test_load_state_dict_rejects_the_state_of_another_worker():
    *_, state = begin(HardThreshold(threshold=0.2))
    saved = state.state_dict() | {"rank": 1 - dist.get_rank()}
    with pytest.raises(RuntimeError, match=r"This state is of rank \d of 2 workers, and this is rank \d of 2"):
        state.load_state_dict(saved)


@on_workers(2)
def test_a_reset_forgets_the_bucket_layout():
    layouts = []
    for comes_from_another_run in (False, True):
        model, optimizer, state = begin(HardThreshold(threshold=0.2))
        if comes_from_another_run:
            other = state.snapshot()
            other.numbers["layout"] = [[name] for name, _ in model.module.named_parameters()]
            state.restore(other)
            state.reset()
        run(model, optimizer, build_batches(dist.get_world_size(), torch.float32, 1))
        layouts.append(state.snapshot().numbers["layout"])
    assert layouts[0] == layouts[1]
    assert len(layouts[0]) == 1  # DDP's first step has one bucket


@on_workers(2)
def test_an_epoch_begins_anew_after_a_load_or_reset():
    model, optimizer, state = begin(Accordion(0.05, 0.2, interval=1))
    fresh = state.sparsifier.state_dict(0)
    rate = torch.tensor(0.1)
    state.begin_epoch(0, [rate])
    rate.mul_(0.5)  # as a scheduler does
    run(model, optimizer, build_batches(dist.get_world_size(), torch.float32, 2))
    saved = state.state_dict()
    assert saved["history"]["sparsifier"]["learning_rates"] == [pytest.approx(0.1)]
    assert set(saved["history"]["sparsifier"]["sums"]) == set(dict(model.module.named_parameters()))
    state.load_state_dict(saved)
    assert state.epoch is None
    assert state.sparsifier.state_dict(2)["epoch"] == 0
    state.begin_epoch(1, [0.1])
    assert state.epoch == 1
    state.reset()
    assert state.epoch is None
    assert state.sparsifier.state_dict(0) == fresh
    for arguments in ((0, 0.1), ("0", [0.1]), (1.5, [0.1]), (0, ["x"])):
        with pytest.raises(TypeError, match="Give the number of the epoch, and the learning rates"):
            state.begin_epoch(*arguments)


class OfAnotherKind(HardThreshold):
    returned = None

    def state_dict(self, next_step):
        return self.returned


@on_workers(2)
def test_the_state_of_a_sparsifier_must_be_a_dict_of_plain_values():
    *_, state = begin(OfAnotherKind(threshold=0.1))
    for returned, found in (([1], "list"), ({"mean": [np.float64(1)]}, "values of type numpy.float64")):
        OfAnotherKind.returned = returned
        with pytest.raises(TypeError, match=f"OfAnotherKind.state_dict returned {found}. Return a dict"):
            state.state_dict()


class Watching(HardThreshold):
    """Records the averages it observes."""

    needs_averages = True

    def observe(self, layout, average):
        parts = zip(layout.names, average.clone().split(layout.sizes), strict=True)
        self._seen = {**getattr(self, "_seen", {}), **dict(parts)}


@pytest.mark.parametrize("exchange", ["gather", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_workers(2)
def test_a_sparsifier_observes_the_unscaled_average(dtype, exchange):
    model = DistributedDataParallel(build_model(dtype), bucket_cap_mb=0.0005)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    state = register_comm_hook(model, Watching(threshold=0.05), GradientOptions(exchange=exchange), grad_scaler=scaler)
    for of_workers in build_batches(dist.get_world_size(), dtype, 2):
        inputs, targets = of_workers[dist.get_rank()]
        model.zero_grad()
        scaler.scale(torch.nn.functional.mse_loss(model(inputs), targets)).backward()
    seen = state.sparsifier._seen
    for name, parameter in model.module.named_parameters():
        assert torch.equal((seen[name] * 64).to(dtype), parameter.grad.flatten())
    assert any(average.any() for average in seen.values())
    torch.testing.assert_close(*of_all_workers(seen), rtol=0, atol=0)
