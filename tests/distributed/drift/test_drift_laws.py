"""Laws of local training for random sizes, workers, options and events between steps.

To run more examples: LIGHTNING_SPARSE_EXAMPLES=2000 python -m pytest tests/distributed/drift/test_drift_laws.py
"""

import os
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_sparse import DriftOptions, HardThreshold, SparseModelAverager, TopK
from lightning_sparse.kernels.native import is_native
from tests.distributed.drift.drift_simulation import NESTEROV, Simulation, anchor_of, at_least, flat
from tests.workers import run_workers

WIRES = {"float32": None, "bfloat16": torch.bfloat16}
EVENTS = ("look", "reload", "reload elsewhere", "skip", "write", "anchor")
"""Between steps: all workers use the mean, resume in new objects with equal or different weights, or use the anchor;
rank 0 skips an optimizer step; the last rank writes to its weights."""


@dataclass(frozen=True)
class Case:
    """A random training.

    Attributes:
        sizes: sizes of the parameters.
        silent: workers that never move.
        events: pairs of step and event.
        density: target of calibration and control; None for a fixed threshold.
        dtype: of the parameters. Compiled functions support float32. With one or two workers and no outer optimizer,
            its bits do not depend on the order of additions.
        top_k: granularity of Top-k, "layer" or "model", at a quarter; None for a threshold.
    """

    num_workers: int = 2
    sizes: tuple[int, ...] = (3, 1)
    threshold: float = 0.5
    density: float | None = None
    steps: int = 5
    every_n_steps: int = 1
    keep_drift: bool = True
    drift_decay: float = 1.0
    has_outer: bool = False
    average_over: str = "senders"
    exchange: str = "auto"
    value_dtype: str = "float32"
    dtype: torch.dtype = torch.float64
    top_k: str | None = None
    silent: frozenset[int] = frozenset()
    events: tuple[tuple[int, str], ...] = ()

    def happens(self, event: str, step: int) -> bool:
        return (step, event) in self.events


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    num_workers, steps = draw(st.integers(1, 2 if dtype == torch.float32 else 4)), draw(st.integers(1, 9))
    keeps = draw(st.booleans())
    has_outer = dtype == torch.float64 and draw(st.booleans())
    return Case(
        num_workers=num_workers,
        sizes=tuple(draw(st.lists(st.sampled_from([1, 2, 7, 128, 1000, 70_000]), min_size=1, max_size=4))),
        threshold=draw(st.sampled_from([0.0, 1e-3, 0.3, 1.0, 2.5, 1e9])),
        density=draw(st.sampled_from([None, None, 0.3, 0.01])),
        steps=steps,
        every_n_steps=draw(st.integers(1, 4)),
        keep_drift=keeps,
        drift_decay=1.0 if keeps else draw(st.sampled_from([0.25, 1.0])),
        has_outer=has_outer,
        average_over=draw(st.sampled_from(["senders", "workers"])),
        exchange=draw(st.sampled_from(["auto", "gather", "dense", "reduce_scatter"])),
        value_dtype=draw(st.sampled_from(["float32", "float32", *WIRES])),
        dtype=dtype,
        top_k=draw(st.sampled_from([None, None, "layer", "model"])),
        silent=draw(st.frozensets(st.integers(0, num_workers - 1), max_size=num_workers)),
        events=tuple(
            draw(st.lists(st.tuples(st.integers(0, steps - 1), st.sampled_from(EVENTS)), max_size=3, unique=True))
        ),
    )


def module(case, seed=11):
    generator = torch.Generator().manual_seed(seed)
    return nn.ParameterList([torch.randn(size, generator=generator, dtype=case.dtype) for size in case.sizes])


def loss_of(model, case, rank, step):
    """Return a loss whose gradient is the move of the worker."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    moves = [torch.randn(size, generator=generator, dtype=case.dtype) for size in case.sizes]
    scale = 0.0 if rank in case.silent else 0.4
    return scale * sum((parameter * move).sum() for parameter, move in zip(model, moves, strict=True))


def begin(case, seed=11):
    options = DriftOptions(
        every_n_steps=case.every_n_steps,
        keep_drift=case.keep_drift,
        drift_decay=case.drift_decay,
        average_over=case.average_over,
        outer_optimizer=NESTEROV if case.has_outer else None,
        value_dtype=case.value_dtype,
        exchange=case.exchange,
    )
    sparsifier = HardThreshold(threshold=case.threshold)
    if case.top_k is not None:
        sparsifier = TopK(0.25, granularity=case.top_k)
    elif case.density is not None:
        sparsifier = HardThreshold(density=case.density)
    model = module(case, seed)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), SparseModelAverager(model, sparsifier, options)


def halve(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def run_case(case):
    """Run a case on this worker.

    Returns:
        For every step: θ before the exchange, θ, x, the mean if used, and the largest drift. Then λ by exchange, the
        final unsent drifts, and the last statistics.
    """
    rank = dist.get_rank()
    model, optimizer, averager = begin(case)
    history, thresholds = [], []
    averager.subscribe(lambda stats: thresholds.append(stats.threshold))
    for step in range(case.steps):
        if case.happens("write", step) and rank == case.num_workers - 1:
            halve(model)
        if not (case.happens("skip", step) and rank == 0):
            optimizer.zero_grad()
            loss_of(model, case, rank, step).backward()
            optimizer.step()
        before = flat(model)
        averager.step()
        after, anchor, largest = flat(model), anchor_of(averager), averager.drift_exchange.largest_drift
        seen = None
        if case.happens("look", step):
            own = flat(model)
            with averager.averaged_weights():
                seen = flat(model)
            assert torch.equal(flat(model), own)
        if case.happens("anchor", step):
            own = flat(model)
            averager.shared.load(averager.shared.anchor())
            assert torch.equal(flat(model), anchor_of(averager))
            with averager.shared.replaced({name: torch.zeros_like(own) for name, own in averager.shared.own.items()}):
                assert not flat(model).any()
            assert not averager.shared.was_written_to
            averager.shared.restore_own()
            assert torch.equal(flat(model), own)
        for word, seed in (("reload", 11), ("reload elsewhere", 12 + rank)):
            if case.happens(word, step):
                saved = averager.state_dict()
                model, optimizer, averager = begin(case, seed)
                averager.load_state_dict(saved)
                averager.subscribe(lambda stats: thresholds.append(stats.threshold))
        history.append((before, after, anchor, seen, largest))
    return history, thresholds, averager.state_dict()["own"].get("unsent", {}), averager.last_step


def build_selection(case):
    """Return a function that selects the largest quarter of each parameter or of the model, at least an element."""

    def select(drift):
        if case.top_k == "model":
            largest = drift.abs().sort(descending=True).values
            return (drift.abs() >= largest[max(1, drift.numel() // 4) - 1]) & (drift != 0)
        parts = []
        for part in torch.split(drift, list(case.sizes)):
            mask = torch.zeros_like(part, dtype=torch.bool)
            mask[part.abs().topk(max(1, part.numel() // 4)).indices] = True
            parts.append(mask)
        return torch.cat(parts)

    return select


@settings(max_examples=int(os.environ.get("LIGHTNING_SPARSE_EXAMPLES", "25")))
@given(cases())
@example(Case(threshold=0.0, every_n_steps=2))
@example(Case(threshold=0.0, sizes=(1000,), silent=frozenset({1})))
@example(Case(num_workers=3, keep_drift=False, drift_decay=0.25, has_outer=True, events=((1, "reload"),)))
@example(Case(num_workers=1, threshold=2.5, steps=9))
@example(Case(dtype=torch.float32, sizes=(70_000,), exchange="gather", steps=9, threshold=0.3, average_over="workers"))
@example(Case(dtype=torch.float32, sizes=(1000,), exchange="dense", steps=9, density=0.3))
@example(Case(num_workers=3, top_k="model", keep_drift=False, sizes=(7, 1000), every_n_steps=2))
@example(Case(top_k="model", exchange="gather", sizes=(128, 2, 1000), silent=frozenset({1})))
@example(Case(num_workers=1, threshold=0.0, steps=2, sizes=(70000,), exchange="auto", value_dtype="bfloat16"))
@example(Case(dtype=torch.float32, sizes=(70_000, 1, 1000), exchange="gather", steps=9, threshold=0.3))
@example(Case(dtype=torch.float32, sizes=(1000, 128), value_dtype="bfloat16", steps=9, density=0.3))
@example(Case(dtype=torch.float32, sizes=(70_000,), threshold=2.5, steps=9, events=((4, "reload"), (6, "write"))))
@example(Case(steps=9, density=0.3, sizes=(1000,), events=((4, "reload elsewhere"), (6, "look"))))
def test_an_averager_obeys_its_laws(case):
    results = run_workers(run_case, case.num_workers, case)
    models = [module(case) for _ in range(case.num_workers)]
    is_exact, has_functions = case.dtype == torch.float32, is_native(torch.empty(0), wire_dtype=torch.float32)
    value_dtype = case.value_dtype if case.num_workers > 1 else "float32"  # a single worker sends nothing
    simulation = Simulation(
        models,
        [torch.optim.SGD(model.parameters(), lr=1.0) for model in models],
        select=build_selection(case),
        every_n_steps=case.every_n_steps,
        keep_drift=case.keep_drift,
        drift_decay=case.drift_decay,
        outer=(0.7, 0.9) if case.has_outer else None,
        wire=WIRES[value_dtype],
        moves_in_place=is_exact and has_functions and case.top_k is None and case.keep_drift,
    )
    close = {"rtol": 0, "atol": 0 if is_exact else 1e-11}
    last_bits = 1e-6 if is_exact else 1e-12
    rounding = {"float32": 0.0, "bfloat16": 2**-8}[value_dtype]  # half of the last bit
    anchor_before = flat(models[0])
    for step in range(case.steps):
        states = [history[step] for history, *_ in results]
        is_exchange = (step + 1) % case.every_n_steps == 0
        threshold = results[0][1][len(simulation.sent)] if is_exchange else None
        if threshold is not None:
            simulation.select = at_least(threshold)
        simulation.by_senders = case.average_over == "senders" and threshold != 0
        if case.happens("write", step):
            halve(models[-1])
        losses = [partial(loss_of, case=case, rank=rank, step=step) for rank in range(case.num_workers)]
        if case.happens("skip", step):
            losses[0] = None
        simulation.step(losses)
        for model, (_, weights, anchor, *_) in zip(models, states, strict=True):
            torch.testing.assert_close(weights, flat(model), **close)
            torch.testing.assert_close(anchor, simulation.anchor, **close)
            assert torch.equal(anchor, states[0][2])  # equal bits on all workers
        if is_exchange and case.keep_drift:
            drifts = torch.stack([anchor - weights for _, weights, anchor, *_ in states])
            pending = torch.stack([anchor_before - before for before, *_ in states])
            assert {largest for *_, largest in states} == {pending.abs().max().item()}
            if case.top_k is None:  # up to the last bit of a weight or of a sent value
                assert (drifts.abs() < threshold + last_bits + rounding * pending.abs()).all()
            if not (case.has_outer or simulation.by_senders):  # conservation: a drift moves the anchor or stays pending
                moved = anchor_before - states[0][2]
                torch.testing.assert_close(pending.mean(0), moved + drifts.mean(0), rtol=0, atol=10 * last_bits)
        for *_, seen, _ in states:
            if seen is not None:
                torch.testing.assert_close(seen, simulation.mean(), **close)
                assert torch.equal(seen, states[0][3])
        anchor_before = states[0][2]
    if simulation.sent:
        assert results[0][3].dense_bytes == case.every_n_steps * flat(models[0]).nbytes  # as DDP in the same steps
    assert len({repr((thresholds, last)) for _, thresholds, _, last in results}) == 1
    if simulation.sent:
        assert results[0][3].selected == simulation.sent[-1]
        for rank, (_, _, kept, _) in enumerate(results):
            if not case.keep_drift:
                torch.testing.assert_close(torch.cat(list(kept.values())), simulation.kept[rank], **close)
