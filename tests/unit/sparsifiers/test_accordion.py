"""ACCORDION as a function of epochs, learning rates and averaged gradients."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_sparse import Accordion, LayerLayout

LAYOUTS = [LayerLayout(("a.weight", "a.bias"), (6, 2)), LayerLayout(("b.weight",), (5,))]
NAMES = [name for layout in LAYOUTS for name in layout.names]


class Trainee:
    """Shows a sparsifier a training: ``(epoch, rate, seed, is dropped)`` for each step."""

    def __init__(self, sparsifier):
        self.sparsifier, self.step = sparsifier, 0

    def train_through(self, training):
        densities = []
        for epoch, rate, seed, is_dropped in training:
            self.sparsifier.begin_epoch(epoch, [rate])
            self.sparsifier.begin_step(self.step, 0)
            densities.append([self.sparsifier.density_of(name) for name in NAMES])
            generator = torch.Generator().manual_seed(seed)
            for layout in LAYOUTS:
                memory = torch.randn(layout.num_elements, generator=generator)
                self.sparsifier.observe(layout, memory)
                memory.fill_(1e9)  # it is the gradient's
            self.step += not is_dropped
        return densities


@st.composite
def trainings(draw):
    epochs = [epoch for epoch in range(draw(st.integers(1, 6))) for _ in range(draw(st.integers(1, 3)))]
    rates = {epoch: draw(st.sampled_from([0.1, 0.1, 0.2])) for epoch in set(epochs)}
    return [(epoch, rates[epoch], draw(st.integers(0, 9)), draw(st.booleans())) for epoch in epochs]


@given(trainings(), st.integers(1, 3))
def test_accordion_ignores_dropped_steps(training, interval):
    """A training equals itself without its dropped steps, unless an epoch has no other steps."""
    kept = [step for step in training if not step[3]]
    assume({step[0] for step in kept} == {step[0] for step in training})
    every = Trainee(Accordion(0.1, 0.5, interval)).train_through(training)
    only = Trainee(Accordion(0.1, 0.5, interval)).train_through(kept)
    assert [densities for densities, step in zip(every, training, strict=True) if not step[3]] == only


@given(trainings(), st.integers(1, 3), st.data())
def test_a_resumed_accordion_equals_an_uninterrupted_accordion(training, interval, data):
    stop = data.draw(st.integers(0, len(training)))
    straight = Trainee(Accordion(0.1, 0.5, interval))
    straight.train_through(training[:stop])
    saved = straight.sparsifier.state_dict(straight.step)
    before = copy.deepcopy(saved)
    resumed = Trainee(Accordion(0.1, 0.5, interval))
    resumed.sparsifier.load_state_dict(saved)
    resumed.step = straight.step
    assert straight.train_through(training[stop:]) == resumed.train_through(training[stop:])
    actual, expected = (comparable(trained.sparsifier.state_dict(trained.step)) for trained in (resumed, straight))
    assert actual == expected
    assert comparable(saved) == comparable(before)  # a saved state does not change later


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"sums": {name: total.tolist() for name, total in state["sums"].items()}}


def of_norms(norms: list[float | None], rates: list[float] | None = None, **options: Any) -> list[float]:
    """Return the density of each epoch if the sums of epochs have these norms; None is an epoch without steps."""
    sparsifier, found = Accordion(0.1, 0.5, **{"interval": 1} | options), []
    for epoch, norm in enumerate(norms):
        sparsifier.begin_epoch(epoch, [0.3, (rates or [0.1] * len(norms))[epoch]])
        if norm is None:
            continue
        for half in range(2):  # the norm is that of the sum, not of the steps
            sparsifier.begin_step(2 * epoch + half, 0)
            sparsifier.observe(LayerLayout(("weight",), (2,)), torch.tensor([norm * (3 if half else -2), 0.0]))
        found.append(sparsifier.density_of("weight"))
    return found


@pytest.mark.parametrize(
    ("norms", "options", "expected"),
    [
        ([1.0, 1.0, 1.0], {}, [0.5, 0.5, 0.1]),
        ([1.0, 1.5, 1.0, 0.6, 0.6], {}, [0.5, 0.5, 0.5, 0.1, 0.1]),  # half of the older norm suffices
        ([1.0, 1.49, 1.0], {}, [0.5, 0.5, 0.1]),
        ([1.0, 1.2, 1.2], {"relative_change": 0.1}, [0.5, 0.5, 0.5]),
        ([0.0, 0.0, 1.0, 1.0, 1.0], {}, [0.5, 0.5, 0.5, 0.5, 0.1]),
        ([float("nan"), 1.0, 1.0, 1.0, float("inf"), 1.0], {}, [0.5, 0.5, 0.5, 0.1, 0.1, 0.5]),
        ([1.0, 9.0, 1.0, 9.0, 1.0, 9.0], {"interval": 2}, [0.5, 0.5, 0.5, 0.1, 0.1, 0.1]),  # 0, 2 and 4 count
        ([None, 1.0] * 4, {"interval": 2}, [0.5, 0.5, 0.1, 0.1]),  # compares epochs 1 and 3 after epoch 3
        ([1.0] * 5, {"rates": [0.1, 0.1, 0.1, 0.05, 0.05]}, [0.5, 0.5, 0.1, 0.5, 0.1]),
        ([1.0] * 4, {"rates": [0.1, 0.1, 0.1, 0.2]}, [0.5, 0.5, 0.1, 0.1]),
        ([1.0] * 8, {"rates": [0.1] * 5 + [0.05] * 3, "interval": 3}, [0.5, 0.5, 0.5, 0.5, 0.1, 0.5, 0.5, 0.1]),
    ],
)
def test_a_layer_is_critical_while_its_norm_or_the_learning_rate_changes(norms, options, expected):
    assert of_norms(norms, **options) == expected


def after(averages):
    """Return a sparsifier that saw these averages in its first epoch, the last of them in the current step."""
    sparsifier = Accordion(0.1, 0.5, interval=1)
    sparsifier.begin_epoch(0, [0.1])
    for step, average in enumerate(averages):
        sparsifier.begin_step(step, 0)
        sparsifier.observe(LayerLayout(("weight",), (2,)), average)
        average.fill_(1e9)  # it is the gradient's
    return sparsifier


@pytest.mark.parametrize(
    ("averages", "expected"),
    [
        ([torch.tensor([3.0, 4.0]), torch.ones(2)], [4.0, 5.0]),
        ([torch.ones(2, dtype=torch.bfloat16) for _ in range(300)], [300.0] * 2),  # in bfloat16 it ends at 256
    ],
)
def test_sums_copy_averages_to_float32(averages, expected):
    assert after(averages).state_dict(len(averages))["sums"]["weight"].tolist() == expected


def test_norms_of_huge_elements_do_not_overflow():
    sparsifier = after([torch.tensor([3e30, 4e30])])
    sparsifier.begin_epoch(1, [0.1])
    sparsifier.begin_step(1, 0)
    assert sparsifier.state_dict(1)["norms"]["weight"] == pytest.approx(5e30)


def test_an_epoch_that_begins_twice_keeps_its_first_rates():
    sparsifier = Accordion(0.1, 0.5)
    for rate in (0.1, 0.05):
        sparsifier.begin_epoch(0, [rate])
    sparsifier.begin_step(0, 0)
    assert sparsifier.state_dict(0)["learning_rates"] == [0.1]


def test_a_resized_layer_starts_anew():
    resumed = Accordion(0.1, 0.5, interval=1)
    resumed.load_state_dict(after([torch.ones(2), torch.ones(2)]).state_dict(2))
    resumed.begin_epoch(0, [0.1])
    resumed.begin_step(2, 0)
    resumed.observe(LayerLayout(("weight",), (3,)), torch.ones(3))
    assert resumed.state_dict(3)["sums"]["weight"].tolist() == [1.0] * 3
    resumed.begin_step(3, 0)
    assert resumed.state_dict(3)["sums"]["weight"].tolist() == [1.0] * 3


def test_a_bucket_mixes_stable_and_critical_layers_and_sends_non_finite_values():
    sparsifier = Accordion(0.1, 0.5)
    sparsifier._stable_layers = {"calm"}
    layout = LayerLayout(("calm", "critical"), (10, 10))
    values = torch.arange(1.0, 21.0)
    assert sparsifier.select(values, layout).indices.tolist() == [9, 15, 16, 17, 18, 19]
    values[[0, 3]] = torch.tensor([float("nan"), float("-inf")])
    assert {0, 3} <= set(sparsifier.select(values, layout).indices.tolist())


def test_accordion_raises_without_begin_epoch():
    sparsifier = Accordion()
    sparsifier.begin_step(0, 0)  # as the warm-up of kernels does
    with pytest.raises(
        RuntimeError, match=r"ACCORDION needs begin_epoch\(epoch, learning_rates\) at the start of each epoch"
    ):
        sparsifier.begin_step(1, 0)


def test_settings_of_accordion_do_not_depend_on_its_history():
    sparsifier = Accordion()
    Trainee(sparsifier).train_through([(0, 0.1, 1, False), (1, 0.1, 2, False)])
    assert sparsifier.settings() == Accordion().settings() != Accordion(interval=9).settings()
    sparsifier.load_state_dict({})
    assert sparsifier.state_dict(0) == Accordion().state_dict(0)
