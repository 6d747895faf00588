"""Workers with different configurations all raise the same error at set-up, which names the difference."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_sparse.exchange.agreement
from lightning_sparse import DDPHardThresholdStrategy
from lightning_sparse.exchange.agreement import differing
from tests.integration.models import Classifier, data, quiet_trainer
from tests.workers import on_workers, run_workers

CHANGES: dict[str, Callable[[Classifier], Any]] = {
    "wider": lambda model: setattr(model, "last", torch.nn.Linear(24, 3)),
    "longer": lambda model: setattr(model, "another", torch.nn.Linear(3, 3)),
    "frozen": lambda model: model.first.requires_grad_(False),
    "double": lambda model: model.last.double(),
    "of an older package": lambda model: setattr(lightning_sparse.exchange.agreement, "__version__", "0.0.1"),
    "same": lambda model: None,
}


def _start(change: str, options: dict[str, Any]) -> str:
    """Give rank 1 another model or other options; return the error."""
    is_different = os.environ["RANK"] == "1"
    model = Classifier()
    CHANGES[change if is_different else "same"](model)
    strategy = DDPHardThresholdStrategy(**({"threshold": 0.1} | (options if is_different else {})))
    with pytest.raises(RuntimeError, match="The workers differ in model, settings or versions") as caught:
        quiet_trainer(strategy).fit(model, data())
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "options", "difference"),
    [
        ("wider", {}, "parameter last.weight: rank 0: '[3, 40], torch.float32', rank 1: '[3, 24], torch.float32'"),
        ("longer", {}, "parameter another.weight: rank 0: None, rank 1: '[3, 3], torch.float32'"),
        ("frozen", {}, "parameter first.bias: rank 0: '[40], torch.float32', rank 1: '[40], torch.float32, frozen'"),
        ("double", {}, "parameter last.bias: rank 0: '[3], torch.float32', rank 1: '[3], torch.float64'"),
        ("of an older package", {}, f"lightning_sparse: rank 0: '{lightning_sparse.__version__}', rank 1: '0.0.1'"),
        ("same", {"threshold": 0.2}, "threshold: rank 0: 0.1, rank 1: 0.2"),
        ("same", {"value_dtype": "bfloat16"}, "value_dtype: rank 0: 'float32', rank 1: 'bfloat16'"),
        ("same", {"exchange": "dense"}, "exchange: rank 0: 'auto', rank 1: 'dense'"),
        ("same", {"bucket_cap_mb": 1}, "bucket_bytes_cap: rank 0: 26214400, rank 1: 1048576"),
        ("same", {"find_unused_parameters": True}, "find_unused_parameters: rank 0: False, rank 1: True"),
        ("same", {"worker_state": "small"}, "worker_state: rank 0: 'full', rank 1: 'small'"),
    ],
)
def test_every_worker_raises_and_names_the_difference(change: str, options: dict[str, Any], difference: str) -> None:
    first, second = run_workers(_start, 2, change, options, process_group=False, timeout=60)
    assert first == second
    assert difference in first


@on_workers(2, process_group=False, timeout=60)
def test_a_long_list_of_differences_is_truncated() -> None:
    layers = [torch.nn.Linear(2, 2 + int(os.environ["RANK"])) for _ in range(8)]
    model = Classifier()
    model.others = torch.nn.ModuleList(layers)
    with pytest.raises(RuntimeError) as caught:
        quiet_trainer(DDPHardThresholdStrategy(threshold=0.1)).fit(model, data())
    message = str(caught.value)
    assert message.count("parameter others") == 10
    assert message.endswith("and 6 more")


@on_workers(2)
def test_equal_nans_are_no_difference() -> None:
    assert differing({"lr": float("nan")}) == {}
    assert differing({"rank": dist.get_rank()}) == {"rank": [0, 1]}
