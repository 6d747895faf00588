"""ACCORDION as a function of epochs, learning rates and averages that it is told of."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse import Accordion, LayerLayout

LAYOUTS = [LayerLayout(("a.weight", "a.bias"), (6, 2)), LayerLayout(("b.weight",), (5,))]
NAMES = [name for layout in LAYOUTS for name in layout.names]


class Told:
    """A sparsifier that is told of a training: ``(epoch, rate, seed, is dropped)`` for each step."""

    def __init__(self, sparsifier):
        self.sparsifier, self.step = sparsifier, 0

    def goes_through(self, training):
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


def steps_of(draw, last_epoch):
    epochs = [epoch for epoch in range(last_epoch + 1) for _ in range(draw(st.integers(1, 3)))]
    rates = {epoch: draw(st.sampled_from([0.1, 0.1, 0.2])) for epoch in set(epochs)}
    return [(epoch, rates[epoch], draw(st.integers(0, 9)), draw(st.booleans())) for epoch in epochs]


@st.composite
def trainings(draw):
    return steps_of(draw, draw(st.integers(0, 5)))


@given(trainings(), st.integers(1, 3))
def test_what_was_dropped_does_not_count(training, interval):
    """Without what was dropped it is the same training; only an epoch of which nothing is left cannot be left out."""
    kept = [one for one in training if not one[3]]
    every = Told(Accordion(0.1, 0.5, interval)).goes_through(training)
    only = Told(Accordion(0.1, 0.5, interval)).goes_through(kept)
    if {one[0] for one in kept} == {one[0] for one in training}:
        assert [densities for densities, one in zip(every, training, strict=True) if not one[3]] == only


@given(trainings(), st.integers(1, 3), st.data())
def test_a_resumed_one_goes_on_as_one_that_never_stopped(training, interval, data):
    stop = data.draw(st.integers(0, len(training)))
    straight = Told(Accordion(0.1, 0.5, interval))
    straight.goes_through(training[:stop])
    saved = straight.sparsifier.state_dict(straight.step)
    before = copy.deepcopy(saved)
    resumed = Told(Accordion(0.1, 0.5, interval))
    resumed.sparsifier.load_state_dict(saved)
    resumed.step = straight.step
    assert straight.goes_through(training[stop:]) == resumed.goes_through(training[stop:])
    one, other = (comparable(told.sparsifier.state_dict(told.step)) for told in (straight, resumed))
    assert one == other
    assert comparable(saved) == comparable(before)  # what is in a file changes no more


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"sums": {name: one.tolist() for name, one in state["sums"].items()}}


def of_norms(norms: list[float], rates: list[float] | None = None, **options: Any) -> list[float]:
    """The densities epoch by epoch where the epochs' sums have these norms."""
    sparsifier, found = Accordion(0.1, 0.5, **{"interval": 1} | options), []
    for epoch, norm in enumerate(norms):
        sparsifier.begin_epoch(epoch, [0.3, (rates or [0.1] * len(norms))[epoch]])
        for half in range(2):  # the sum has the norm, not the steps
            sparsifier.begin_step(2 * epoch + half, 0)
            sparsifier.observe(LayerLayout(("weight",), (2,)), torch.tensor([norm * (3 if half else -2), 0.0]))
        found.append(sparsifier.density_of("weight"))
    return found


@pytest.mark.parametrize(
    ("norms", "options", "expected"),
    [
        ([1.0, 1.0, 1.0], {}, [0.5, 0.5, 0.1]),
        ([1.0, 1.5, 1.0, 0.6, 0.6], {}, [0.5, 0.5, 0.5, 0.1, 0.1]),  # a half of the older norm is enough
        ([1.0, 1.49, 1.0], {}, [0.5, 0.5, 0.1]),
        ([1.0, 1.2, 1.2], {"relative_change": 0.1}, [0.5, 0.5, 0.5]),
        ([0.0, 0.0, 1.0, 1.0, 1.0], {}, [0.5, 0.5, 0.5, 0.5, 0.1]),
        ([float("nan"), 1.0, 1.0, 1.0, float("inf"), 1.0], {}, [0.5, 0.5, 0.5, 0.1, 0.1, 0.5]),
        ([1.0, 9.0, 1.0, 9.0, 1.0, 9.0], {"interval": 2}, [0.5, 0.5, 0.5, 0.1, 0.1, 0.1]),  # 0, 2 and 4 count
        ([1.0] * 5, {"rates": [0.1, 0.1, 0.1, 0.05, 0.05]}, [0.5, 0.5, 0.1, 0.5, 0.1]),
        ([1.0] * 4, {"rates": [0.1, 0.1, 0.1, 0.2]}, [0.5, 0.5, 0.1, 0.1]),
        ([1.0] * 8, {"rates": [0.1] * 5 + [0.05] * 3, "interval": 3}, [0.5, 0.5, 0.5, 0.5, 0.1, 0.5, 0.5, 0.1]),
    ],
)
def test_a_layer_is_critical_while_its_norm_or_the_learning_rate_changes(norms, options, expected):
    assert of_norms(norms, **options) == expected


def after(averages):
    """A sparsifier that has seen these averages in its first epoch, the last of them in the running step."""
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
def test_a_sum_is_of_copies_in_float32(averages, expected):
    assert after(averages).state_dict(len(averages))["sums"]["weight"].tolist() == expected


def test_a_norm_is_that_of_all_elements_and_no_square_is_too_large_for_it():
    sparsifier = after([torch.tensor([3e30, 4e30])])
    sparsifier.begin_epoch(1, [0.1])
    sparsifier.begin_step(1, 0)
    assert sparsifier.state_dict(1)["norms"]["weight"] == pytest.approx(5e30)


def test_of_an_epoch_that_is_told_of_twice_the_first_rates_hold():
    sparsifier = Accordion(0.1, 0.5)
    for rate in (0.1, 0.05):
        sparsifier.begin_epoch(0, [rate])
    sparsifier.begin_step(0, 0)
    assert sparsifier.state_dict(0)["learning_rates"] == [0.1]


def test_an_epoch_without_an_exchange_is_not_waited_for():
    sparsifier, layout, found = Accordion(0.1, 0.5, interval=2), LayerLayout(("weight",), (2,)), []
    for epoch in range(8):
        sparsifier.begin_epoch(epoch, [0.1])
        if epoch % 2:
            sparsifier.begin_step(epoch, 0)
            sparsifier.observe(layout, torch.ones(2))
            found.append(sparsifier.density_of("weight"))
    assert found == [0.5, 0.5, 0.1, 0.1]  # 1 and 3 are compared once 3 is over


def test_a_layer_of_another_size_begins_anew():
    saved = Told(Accordion(0.1, 0.5, interval=1))
    saved.goes_through([(0, 0.1, 1, False)] * 2)
    resumed = Told(Accordion(0.1, 0.5, interval=1))
    resumed.sparsifier.load_state_dict(saved.sparsifier.state_dict(2))
    resumed.step = 2
    resumed.sparsifier.begin_epoch(0, [0.1])
    resumed.sparsifier.begin_step(2, 0)
    resumed.sparsifier.observe(LayerLayout(("a.bias",), (3,)), torch.ones(3))
    assert resumed.sparsifier.state_dict(3)["sums"]["a.bias"].tolist() == [1.0] * 3
    resumed.sparsifier.begin_step(3, 0)
    assert resumed.sparsifier.state_dict(3)["sums"]["a.bias"].tolist() == [1.0] * 3


def test_a_bucket_may_hold_layers_of_both_kinds_and_what_is_not_finite_is_sent():
    sparsifier = Accordion(0.1, 0.5)
    sparsifier._stable_layers = {"calm"}
    layout = LayerLayout(("calm", "critical"), (10, 10))
    values = torch.arange(1.0, 21.0)
    assert sparsifier.select(values, layout).indices.tolist() == [9, 15, 16, 17, 18, 19]
    values[[0, 3]] = torch.tensor([float("nan"), float("-inf")])
    assert {0, 3} <= set(sparsifier.select(values, layout).indices.tolist())


def test_it_says_so_where_nobody_tells_of_epochs():
    sparsifier = Accordion()
    sparsifier.begin_step(0, 0)  # as kernels are tried out
    with pytest.raises(
        RuntimeError, match=r"ACCORDION needs begin_epoch\(epoch, learning_rates\) at the start of each epoch"
    ):
        sparsifier.begin_step(1, 0)


def test_it_is_the_same_sparsifier_whatever_it_was_told_of():
    sparsifier = Accordion()
    Told(sparsifier).goes_through([(0, 0.1, 1, False), (1, 0.1, 2, False)])
    assert sparsifier.settings() == Accordion().settings() != Accordion(interval=9).settings()
    sparsifier.load_state_dict({})
    assert sparsifier.state_dict(0) == Accordion().state_dict(0)
