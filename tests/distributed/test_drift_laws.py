"""Laws of local training, for whatever is drawn: sizes, workers, thresholds, options and steps of the workers' own."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_sparse import DriftOptions, HardThreshold, SparseModelAverager
from tests.distributed.drift_simulation import Simulation, at_least, flat
from tests.workers import run_workers


@dataclass(frozen=True)
class Case:
    """One drawn training.

    Attributes:
        sizes: of the parameters.
        silent: workers that never move.
    """

    num_workers: int = 2
    sizes: tuple[int, ...] = (3, 1)
    threshold: float = 0.5
    steps: int = 5
    every_n_steps: int = 1
    keep_drift: bool = True
    drift_decay: float = 1.0
    is_late: bool = False
    has_outer: bool = False
    exchange: str = "auto"
    silent: frozenset[int] = frozenset()


@st.composite
def cases(draw):
    num_workers = draw(st.integers(1, 4))
    keeps = draw(st.booleans())
    return Case(
        num_workers=num_workers,
        sizes=tuple(draw(st.lists(st.sampled_from([1, 2, 7, 128, 1000, 70_000]), min_size=1, max_size=4))),
        threshold=draw(st.sampled_from([0.0, 1e-3, 0.3, 1.0, 2.5, 1e9])),
        steps=draw(st.integers(1, 9)),
        every_n_steps=draw(st.integers(1, 4)),
        keep_drift=keeps,
        drift_decay=1.0 if keeps else draw(st.sampled_from([0.25, 1.0])),
        is_late=draw(st.booleans()),
        has_outer=draw(st.booleans()),
        exchange=draw(st.sampled_from(["auto", "gather", "dense", "reduce_scatter"])),
        silent=draw(st.frozensets(st.integers(0, num_workers - 1), max_size=num_workers)),
    )


def module(case):
    generator = torch.Generator().manual_seed(11)
    return nn.ParameterList([torch.randn(size, generator=generator, dtype=torch.float64) for size in case.sizes])


def loss_of(model, case, rank, step):
    """Its gradient is what the worker moves by."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    moves = [torch.randn(size, generator=generator, dtype=torch.float64) for size in case.sizes]
    scale = 0.0 if rank in case.silent else 0.4
    return scale * sum((one * move).sum() for one, move in zip(model, moves, strict=True))


def play(case):
    """Returns after every step (x, θ, what is kept apart, whether there was an exchange)."""
    rank = dist.get_rank()
    model = module(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True) if case.has_outer else None
    options = DriftOptions(
        every_n_steps=case.every_n_steps,
        keep_drift=case.keep_drift,
        drift_decay=case.drift_decay,
        overlap=case.is_late,
        outer_optimizer=outer,
        exchange=case.exchange,
    )
    averager = SparseModelAverager(model, HardThreshold(case.threshold), options)
    history = []
    for step in range(case.steps):
        optimizer.zero_grad()
        loss_of(model, case, rank, step).backward()
        optimizer.step()
        before = flat(model)
        averager.step()
        history.append((before, flat(model), torch.cat([one.flatten() for one in averager.anchor().values()]).clone()))
    averager.flush()
    return history, averager.kept_state().get("kept", {}), averager.last_step


@settings(max_examples=25)
@given(cases())
@example(Case(threshold=0.0, is_late=True, every_n_steps=2))
@example(Case(num_workers=3, keep_drift=False, drift_decay=0.25, has_outer=True, is_late=True))
@example(Case(num_workers=1, threshold=2.5, steps=9))
def test_laws(case):
    results = run_workers(play, case.num_workers, case)
    models = [module(case) for _ in range(case.num_workers)]
    simulation = Simulation(
        models,
        [torch.optim.SGD(one.parameters(), lr=1.0) for one in models],
        select=at_least(case.threshold),
        every_n_steps=case.every_n_steps,
        keep_drift=case.keep_drift,
        drift_decay=case.drift_decay,
        outer=(0.7, 0.9) if case.has_outer else None,
        is_late=case.is_late,
    )
    anchor_before = flat(models[0])
    for step in range(case.steps):
        simulation.step([partial(loss_of, case=case, rank=rank, step=step) for rank in range(case.num_workers)])
        states = [history[step] for history, _, _ in results]
        for model, (_, weights, anchor) in zip(models, states, strict=True):
            torch.testing.assert_close(weights, flat(model), rtol=0, atol=1e-11)
            torch.testing.assert_close(anchor, simulation.anchor, rtol=0, atol=1e-11)
            assert torch.equal(anchor, states[0][2])  # the same bits on all
        is_exchange = (step + 1) % case.every_n_steps == 0
        if is_exchange and case.keep_drift and not case.is_late:
            drifts = torch.stack([anchor - weights for _, weights, anchor in states])
            assert (drifts.abs() < case.threshold + 1e-12).all()  # up to the last bit of a weight
            if not case.has_outer:  # nothing is lost: what was pending has moved the anchor, or is pending still
                pending = torch.stack([anchor_before - before for before, _, _ in states]).mean(0)
                moved = anchor_before - states[0][2]
                torch.testing.assert_close(pending, moved + drifts.mean(0), rtol=0, atol=1e-11)
        anchor_before = states[0][2]
    assert len({repr(last) for _, _, last in results}) == 1
    if simulation.sent:
        assert results[0][2].selected == simulation.sent[-1]
        for rank, (_, kept, _) in enumerate(results):
            if not case.keep_drift:
                torch.testing.assert_close(torch.cat(list(kept.values())), simulation.kept[rank], rtol=0, atol=1e-11)
