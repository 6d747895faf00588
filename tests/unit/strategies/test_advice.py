"""Advice: each row is a run of exchanges and its expected messages."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_sparse import HardThreshold, Sparsifier, StepStats
from lightning_sparse.engine.step_stats import LayerStats
from lightning_sparse.exchange.exchange import ExchangeMode
from lightning_sparse.sparsifiers.hard_threshold import Dense
from lightning_sparse.strategies import advice as advice_module
from lightning_sparse.strategies.advice import Advice, _normalising
from tests.integration.models import messages_of, warnings_of
from tests.markdown import PROJECT

ELEMENTS, WORKERS = 1000, 2
TINY, HUGE = 1.23456e-9, 1.23456e15


@pytest.fixture(autouse=True)
def forget_reported_messages() -> Iterator[None]:
    advice_module._reported.clear()
    yield
    advice_module._reported.clear()


def step(selected: float, *, error: float = 1.0, dense: float = 0.0, layers: Any = None, calibrates: bool = False):
    """Return the statistics of an exchange in which each worker sent so many of 1,000 coordinates."""
    return StepStats(
        WORKERS, ELEMENTS, int(selected * WORKERS), error, 0, 1.0, 0, 1, 1,
        threshold=1.0,
        dense_elements=int(dense * ELEMENTS),
        is_calibration=calibrates,
        layers={name: LayerStats(2, 10, int(sent), norm**2) for name, (sent, norm) in (layers or {}).items()},
    )  # fmt: skip


CALIBRATION = replace(step(ELEMENTS, calibrates=True), squared_gradient_norm=1.0)


@dataclass
class Situation:
    """A run.

    Attributes:
        steps: its exchanges.
        expected: a pattern for each expected message.
        planned: number of exchanges to come.
        trained: number of elements that the model trains.
        searched: exchanges of an earlier search that used the same objects.
    """

    steps: list[StepStats]
    expected: list[str] = field(default_factory=list)
    sparsifier: Sparsifier = field(default_factory=lambda: _calibrated(0.01))
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    kind: str = "gradients"
    is_sharded: bool = False
    exchange: ExchangeMode = "auto"
    planned: float | None = 10_000
    workers: int = WORKERS
    trained: int = 1_000_000
    searched: list[StepStats] = field(default_factory=list)


def _calibrated(density: float, threshold: float = 1.0) -> HardThreshold:
    sparsifier = HardThreshold(density=density)
    sparsifier.fix_threshold(threshold)
    return sparsifier


SITUATIONS = {
    "as asked for": Situation([CALIBRATION] + [step(10)] * 500),
    "one exchange": Situation([CALIBRATION]),
    "as asked for after a search": Situation([step(10)] * 500, searched=[step(0)] * 300),
    "nothing for 200 exchanges": Situation(
        # The squared norm grows by 0.5 per step: 0.0005 for each of 1,000 coordinates.
        [step(5)] + [step(0, error=0.5 * number) for number in range(1, 231)],
        [r"nothing was sent in 200 exchanges: λ=2 is too high. Set threshold=0.71 or density=0.001"],
        sparsifier=HardThreshold(threshold=2.0),
    ),
    "nothing twice": Situation(
        ([step(0, error=number) for number in range(1, 211)] + [step(10)]) * 2, ["nothing was sent"]
    ),
    "nothing, and λ is not far above": Situation(
        [step(0, error=1000.0 * number) for number in range(1, 201)],
        [r"Set threshold=0.5 or"],
        sparsifier=HardThreshold(threshold=1.0),
    ),
    "nothing while λ is corrected": Situation(
        [step(0, error=number) for number in range(1, 201)], [r"too high. λ is being lowered"]
    ),
    "nothing of zero gradients, after others": Situation([step(10)] + [step(0)] * 200, ["gradients are zero"]),
    "nothing moves": Situation([step(10)] + [step(0)] * 200, kind="drifts"),
    "a single simulated worker": Situation([], workers=1),
    "everything after set_threshold(0)": Situation([step(1000)] * 300, sparsifier=_calibrated(0.01, 0.0)),
    "thrown away": Situation([CALIBRATION] * 20, optimizer=torch.optim.Adam, planned=None),
    "nothing for 199 exchanges": Situation(([step(0)] * 199 + [step(3000)]) * 2),
    "nothing of zero gradients": Situation([step(0, error=0.0)] * 200, [r"gradients are zero"]),
    "all of it densely": Situation(
        [step(300, dense=1.0)] * 250,
        [r"100 % of coordinates were sent densely at a density of 30 %.* Set a lower density"],
    ),
    "densely on purpose": Situation([step(1000, dense=1.0)] * 250, sparsifier=HardThreshold(threshold=0.0)),
    "densely by exchange='dense'": Situation([step(10, dense=1.0)] * 250, exchange="dense"),
    "densely by the control": Situation([step(1000, dense=1.0)] * 250, sparsifier=Dense()),
    "some of it densely": Situation([step(10, dense=0.4)] * 250),
    "never calibrated": Situation([replace(CALIBRATION, squared_gradient_norm=0.0)] * 300),
    "short": Situation(
        [], [r"steps × density is only 1 .100 × 0.01.. Set density=0.052"], planned=100
    ),
    "nearly long enough": Situation([], [r"only 4.6 .460 × 0.01.. Set density=0.011"], planned=460),
    "nobody knows how long": Situation([CALIBRATION] * 50 + [step(10)], planned=float("inf")),
    "Adam": Situation(
        [], [r"AdamW normalises gradients, .* Use 'local_hardthreshold'. See docs/guides/local-training.md"],
        optimizer=torch.optim.AdamW,
    ),
    "an optimizer around Adam": Situation(
        [], [r"Adam normalises gradients"], optimizer=lambda *_, **__: _wrapping("base", _optimizer("Adam"))
    ),
    "Adam on shards": Situation(
        [], [r"Use 'local_hsdp_hardthreshold'. See docs/guides/big-models.md"],
        optimizer=torch.optim.Adam, is_sharded=True,
    ),
    "Adam on drifts": Situation([], optimizer=torch.optim.AdamW, kind="drifts"),
    "Adam with everything sent": Situation([], optimizer=torch.optim.Adam, sparsifier=HardThreshold(threshold=0.0)),
    "layers that never send": Situation(
        [step(10, layers={"a": (5, 1.0), "b": (0, 2.0), "c": (0, 0.0)})] * 600,
        [r"1 layers sent nothing in 600 exchanges, such as b\. Set layer_thresholds"],
    ),
    "layers that send late": Situation(
        [step(10, layers={"a": (5, 1.0), "b": (0, 2.0)})] * 599 + [step(10, layers={"a": (5, 1.0), "b": (1, 2.0)})]
    ),
    "layers in so short a run": Situation([step(10, layers={"a": (5, 1.0), "b": (0, 2.0)})] * 300),
    "one worker": Situation(
        [CALIBRATION] * 20, ["a single worker exchanges nothing: its gradients are not sparsified"],
        optimizer=torch.optim.Adam, planned=20, workers=1, sparsifier=Dense(),
    ),
    "one replica": Situation(
        [], ["a single replica exchanges nothing: .* Set replicas or num_nodes to 2. See docs/troubleshooting"],
        workers=1, sparsifier=Dense(), is_sharded=True,
    ),
    "a small LoRA": Situation(
        [],
        [r"the model trains 768 parameters: .* < 1 ms .* See docs/evidence/performance.md", r"is only 0.6 .60 × 0.01"],
        trained=768, planned=60,
    ),
    "a small LoRA that sends everything": Situation([], trained=768, sparsifier=HardThreshold(threshold=0.0)),
    "a small ResNet-18": Situation([], trained=176_402),
    "a small ResNet-18 of many workers": Situation([], trained=176_402, workers=1024),
}  # fmt: skip


def listen(situation: Situation) -> list[str]:
    messages: list[str] = []
    subscribers: list[Any] = []
    holder: Any = SimpleNamespace(
        sparsifier=situation.sparsifier,
        workers=SimpleNamespace(num_workers=situation.workers),
        replica=SimpleNamespace(num_workers=2),
        parameter_sizes={"weight": situation.trained // 2},
        kind=situation.kind,
        subscribe=subscribers.append,
    )
    optimizer = situation.optimizer([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    warned: list[str] = []
    with messages_of(messages), warnings_of(warned):
        advice = Advice(holder, is_sharded=situation.is_sharded, exchange=situation.exchange)
        for planned, steps in ((None, situation.searched), (situation.planned, situation.steps)):
            advice.begin([optimizer], planned)
            for number, exchange in enumerate(steps):
                for receive in subscribers:
                    receive(replace(exchange, step=number))
            advice.end()
    return messages + warned


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_situation_brings_its_messages_once_per_process(name):
    situation = SITUATIONS[name]
    messages = listen(situation)
    assert len(messages) == len(situation.expected), messages
    for pattern in situation.expected:
        assert any(re.search(pattern, message) for message in messages), messages
    assert listen(situation) == []  # a resume, or another Trainer
    advice_module._reported.clear()
    assert listen(situation) == messages


LONG_NAME = "base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight"


class ScheduleFreeAdamWithAVeryLongName(torch.optim.Adam):
    pass


EXTREMES = [
    *(
        Situation([], kind=kind, workers=1, sparsifier=Dense())
        for kind in ("gradients", "drifts")
    ),
    *(Situation([], trained=size) for size in (2, 26_000)),
    *(Situation([], sparsifier=_calibrated(TINY, 1.0), planned=planned) for planned in (1.0, 1.23456e6, 1.23456e9)),
    *(
        Situation([], is_sharded=is_sharded, optimizer=ScheduleFreeAdamWithAVeryLongName)
        for is_sharded in (False, True)
    ),
    *(
        Situation([step(0, error=error * n) for n in range(200)], sparsifier=sparsifier)
        for error in (0.0, HUGE)
        for λ in (TINY, HUGE)
        for sparsifier in (_calibrated(TINY, λ), HardThreshold(threshold=λ))
    ),
    Situation([replace(step(0.12 * HUGE), dense_elements=int(0.98 * HUGE), num_elements=int(HUGE))] * 200),
    Situation([step(100, layers={LONG_NAME + str(number): (0, HUGE) for number in range(1234)})] * 600),
]  # fmt: skip


def test_a_message_has_at_most_120_characters_and_a_link():
    kinds: set[str] = set()
    for situation in EXTREMES:
        advice_module._reported.clear()
        for message in listen(situation):
            line, link = re.fullmatch(r"(lightning_sparse: .*) See (docs/[a-z/-]+\.md)\.", message).groups()
            assert len(line) <= 120, f"{len(line)} characters: {line}"
            assert (PROJECT / link).is_file()
        kinds |= advice_module._reported
    assert kinds == set(re.findall(r'self\._(?:report|warn)\(\s*"([a-z ]+)"', inspect.getsource(Advice)))
    assert len(kinds) == 7


def _optimizer(name: str, **defaults: Any) -> torch.optim.Optimizer:
    """Return an optimizer of this name that has these hyperparameters and does nothing."""
    make = type(name, (torch.optim.Optimizer,), {})
    return make([torch.nn.Parameter(torch.ones(1))], {"lr": 0.1, **defaults})


def _wrapping(attribute: str, inner: torch.optim.Optimizer, name: str = "Lookahead") -> torch.optim.Optimizer:
    outer = _optimizer(name)
    setattr(outer, attribute, inner)
    return outer


NORMALISING = (
    *("Adafactor", "Adagrad", "Adadelta", "RMSprop", "Rprop", "AdamW8bit", "FusedAdam", "DeepSpeedCPUAdam"),
    *("Lion", "PagedLion32bit", "Muon", "Dion", "Lamb", "LAMB", "FusedLAMB", "ADOPT", "Kron", "PSGD", "SOAP"),
    *("SparseAdam", "Shampoo", "DistributedShampoo", "SophiaG", "Prodigy", "MADGRAD", "SignSGD", "LARS", "LARC"),
)  # fmt: skip


@pytest.mark.parametrize("name", NORMALISING)
def test_normalising_recognises_optimizers_by_name(name):
    assert _normalising(_optimizer(name)) == [name]


@pytest.mark.parametrize("name", ["SGD", "ASGD", "LBFGS", "SGDW", "SGDP", "QHM", "SAM", "Lookahead"])
def test_normalising_skips_optimizers_proportional_to_gradients(name):
    assert _normalising(_optimizer(name, momentum=0.9)) == []
    assert _normalising(_wrapping("base_optimizer", _optimizer("SGD"))) == []
    assert _normalising(_optimizer("AggMo", betas=(0.0, 0.9, 0.99))) == []


def test_normalising_recognises_unknown_optimizers_by_betas_or_base_class():
    assert _normalising(_optimizer("Ranger21", betas=(0.9, 0.999))) == ["Ranger21"]
    assert _normalising(type("Mine", (torch.optim.AdamW,), {})([torch.nn.Parameter(torch.ones(1))])) == ["Mine"]


def test_normalising_finds_nested_optimizers():
    innermost = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    nested = _wrapping("optimizer", _wrapping("_inner", innermost), "SAM")
    assert _normalising(nested) == ["AdamW"]
    innermost.outer = nested  # a cycle
    assert _normalising(nested) == ["AdamW"]
