"""What users are told: each row is a run of exchanges, and what must be said of it, once, or not at all."""

import logging
import re
import warnings
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_sparse import HardThreshold, Sparsifier, StepStats, TopK
from lightning_sparse.engine.step_stats import LayerStats
from lightning_sparse.sparsifiers import Dense
from lightning_sparse.strategies.advice import Advice

ELEMENTS, WORKERS = 1000, 2


def step(selected: float, *, error: float = 1.0, dense: float = 0.0, layers: Any = None, calibrates: bool = False):
    """The numbers of an exchange in which so many of 1,000 coordinates were sent by each worker."""
    return StepStats(
        0, WORKERS, ELEMENTS, int(selected * WORKERS), error, 1.0, 0, 1, 1,
        threshold=1.0,
        dense_elements=int(dense * ELEMENTS),
        is_calibration=calibrates,
        layers={name: LayerStats(10, int(sent), sent / 20, norm**2) for name, (sent, norm) in (layers or {}).items()},
    )  # fmt: skip


CALIBRATION = step(ELEMENTS, calibrates=True)


@dataclass
class Situation:
    """A run.

    Attributes:
        steps: its exchanges.
        said: a pattern for each message that must come, in order.
        sparsifier: the running one.
        optimizer: of the training.
        averages: gradients or drifts.
        planned: how many exchanges there will be.
        workers: how many.
        holds: whether the density is held.
    """

    steps: list[StepStats]
    said: list[str] = field(default_factory=list)
    sparsifier: Sparsifier = field(default_factory=lambda: _calibrated(0.01))
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    averages: str = "gradients"
    planned: float | None = 10_000
    workers: int = WORKERS
    holds: bool = False


def _calibrated(density: float) -> HardThreshold:
    sparsifier = HardThreshold(density=density)
    sparsifier.fix_threshold(1.0)
    return sparsifier


SITUATIONS = {
    "as asked for": Situation([CALIBRATION] * 5 + [step(10)] * 500),
    "too much": Situation([step(40)] * 300, [r"4 % were sent, and 1 % asked for. With λ = 1 now, set threshold=2, or"]),
    "too little": Situation([step(2)] * 300, [r"0.2 % were sent, and 1 % asked for. .* set threshold=0.45"]),
    "not so far off": Situation([step(19)] * 300 + [step(6)] * 200),
    # 100 layers of 10 elements, each held to one coordinate a step where 1 % would be a tenth of one.
    "as small layers must": Situation(
        [step(100, layers={str(layer): (2, 1.0) for layer in range(100)})] * 300,
        sparsifier=HardThreshold(density=0.01, granularity="layer"),
        holds=True,
    ),
    "too much for small layers": Situation(
        [step(300, layers={str(layer): (6, 1.0) for layer in range(100)})] * 300,
        [r"30 % were sent, and 10 % asked for. .* it is corrected until"],
        sparsifier=HardThreshold(density=0.01, granularity="layer"),
        holds=True,
    ),
    "too early to say": Situation([step(40)] * 199),
    "calibration counts for nothing": Situation([CALIBRATION] * 50 + [step(10)] * 210),
    "off with a constant threshold": Situation([step(40)] * 300, sparsifier=HardThreshold(threshold=1.0)),
    "off with Top-k, whose layers are small": Situation([step(40)] * 300, sparsifier=TopK(0.01)),
    "nothing for 200 exchanges": Situation(
        # Of 1,000 coordinates a squared norm that grows by 0.5 in each step: 0.0005 a coordinate.
        [step(5)] + [step(0, error=0.5 * number) for number in range(1, 231)],
        [r"nothing was sent in 200 exchanges: λ = 1 is far above .* \(norm 10\). .* threshold=0.22, or density=0.01"],
    ),
    "nothing twice": Situation(
        ([step(0, error=number) for number in range(1, 211)] + [step(10)]) * 2, ["nothing was sent"]
    ),
    "nothing, and λ is not far above": Situation(
        [step(0, error=1000.0 * number) for number in range(1, 201)], [r"set threshold=0.5, or"]
    ),
    "nothing while λ is corrected": Situation(
        [step(0, error=number) for number in range(1, 201)], [r"far above .* It is being lowered"], holds=True
    ),
    "nothing of zero gradients, after others": Situation([step(10)] + [step(0)] * 200, ["gradients are zero"]),
    "nothing moves": Situation([step(10)] + [step(0)] * 200, averages="drifts"),
    "too much while λ is corrected": Situation([step(40)] * 300, [r"λ = 1 now, it is corrected until"], holds=True),
    "thrown away": Situation([CALIBRATION] * 20, optimizer=torch.optim.Adam, planned=None),
    "nothing for 199 exchanges": Situation(([step(0)] * 199 + [step(3000)]) * 2),
    "nothing of zero gradients": Situation([step(0, error=0.0)] * 200, [r"gradients are zero"]),
    "all of it densely": Situation(
        [step(300, dense=1.0)] * 250,
        [r"30 % were sent", r"100 % of what was exchanged travelled whole, since at a density of 30 % that costs less"],
    ),
    "densely on purpose": Situation([step(1000, dense=1.0)] * 250, sparsifier=HardThreshold(threshold=0.0)),
    "densely by the control": Situation([step(1000, dense=1.0)] * 250, sparsifier=Dense()),
    "some of it densely": Situation([step(10, dense=0.4)] * 250),
    "ends in calibration": Situation(
        [CALIBRATION] * 20, [r"training ended after 20 exchanges, in the middle of calibration: everything was sent"]
    ),
    "short": Situation(
        [], [r"a density of 0.01 in 100 exchanges a coordinate is sent 1 times .* set density=0.05"], planned=100
    ),
    "long calibration": Situation(
        [CALIBRATION] * 50 + [step(10)], [r"calibration took 50 of 1,000 exchanges \(5 %\)"], planned=1000
    ),
    "nobody knows how long": Situation([CALIBRATION] * 50 + [step(10)], planned=float("inf")),
    "Adam": Situation(
        [], [r"AdamW divides by .* 2.01 .* 1.69 .* Use strategy='local_hardthreshold'"], optimizer=torch.optim.AdamW
    ),
    "Adam, Top-k": Situation([], [r"Adam divides by"], sparsifier=TopK(0.01), optimizer=torch.optim.Adam),
    "Adam on drifts": Situation([], optimizer=torch.optim.AdamW, averages="drifts"),
    "Adam with everything sent": Situation([], optimizer=torch.optim.Adam, sparsifier=HardThreshold(threshold=0.0)),
    "layers that never send": Situation(
        [step(10, layers={"a": (5, 1.0), "b": (0, 2.0), "c": (0, 0.0)})] * 600,
        [r"1 layers have sent nothing in 600 exchanges, and all of their gradients wait .* b \(norm 2\)\. Give"],
    ),
    "layers that send late": Situation(
        [step(10, layers={"a": (5, 1.0), "b": (0, 2.0)})] * 599 + [step(10, layers={"a": (5, 1.0), "b": (1, 2.0)})]
    ),
    "layers in so short a run": Situation([step(10, layers={"a": (5, 1.0), "b": (0, 2.0)})] * 300),
    "one worker": Situation(
        [CALIBRATION] * 20, ["one worker has nobody to exchange with: gradients pass through whole"],
        optimizer=torch.optim.Adam, planned=20, workers=1,
    ),
    "one worker's drifts": Situation(
        [], ["one worker has nobody to exchange with: drifts pass through whole"], workers=1, averages="drifts"
    ),
    "one worker, thrown away": Situation([CALIBRATION] * 20, planned=None, workers=1),
}  # fmt: skip


def listen(situation: Situation, advice: Advice) -> list[str]:
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logs, listener = [logging.getLogger(f"lightning.{name}") for name in ("fabric", "pytorch")], Listener()
    subscribers: list[Any] = []
    holder: Any = SimpleNamespace(
        sparsifier=situation.sparsifier,
        workers=SimpleNamespace(num_workers=situation.workers),
        subscribe=subscribers.append,
    )
    for log in logs:
        log.addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            advice.follow(holder, holds_density=situation.holds)
            advice.begin([situation.optimizer([torch.nn.Parameter(torch.ones(1))], lr=0.1)], situation.planned)
            for number, one in enumerate(situation.steps):
                for receive in subscribers:
                    receive(replace(one, step=number))
            advice.end()
    finally:
        for log in logs:
            log.removeHandler(listener)
    return messages + [str(one.message) for one in caught]


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_is_said_is_said_once_and_nothing_else_is(name):
    situation = SITUATIONS[name]
    advice = Advice(situation.averages)
    for _ in range(2):  # a second fit hears it again
        messages = listen(situation, advice)
        assert len(messages) == len(situation.said), messages
        for pattern in situation.said:
            assert any(re.search(pattern, one) for one in messages), messages
        assert all(one.startswith("lightning_sparse: ") for one in messages)


def test_of_a_search_before_the_training_nothing_is_said_or_counted():
    """Lightning's own, or one for a threshold: the same objects train after it."""
    advice, subscribers = Advice("gradients"), []
    holder: Any = SimpleNamespace(
        sparsifier=_calibrated(0.01), workers=SimpleNamespace(num_workers=2), subscribe=subscribers.append
    )
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)]
    advice.follow(holder, holds_density=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for planned, sent in ((None, 500), (10_000, 10)):
            advice.begin(optimizers, planned)
            for _ in range(300):
                subscribers[0](step(sent))
            advice.end()
        assert not caught
        advice.begin(optimizers, 10_000)
        for _ in range(300):
            subscribers[0](step(500))
    [told] = caught
    assert "in 200 exchanges after calibration 50 % were sent, and 1 % asked for" in str(told.message)
