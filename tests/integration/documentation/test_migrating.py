"""Runs both sides of each diff in docs/start/migrating.md and checks which communication hook is registered.

test_snippets.py also trains with the side after the change.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.integration.models import Classifier, Recorder, data, quiet_trainer
from tests.integration.programs.loops import loss_of
from tests.markdown import PROJECT, blocks
from tests.workers import on_workers, run_workers

SNIPPETS = [block.code for block in blocks((PROJECT / "docs/start/migrating.md").read_text(), "diff")]
OF_TRAINERS = [snippet for snippet in SNIPPETS if "Trainer(" in snippet]
OF_FABRIC = [snippet for snippet in SNIPPETS if "fabric." in snippet]
OF_LOOPS = [snippet for snippet in SNIPPETS if "DistributedDataParallel(" in snippet]


def side(snippet: str, sign: str) -> str:
    """Return the program before (``-``) or after (``+``) the change."""
    return "\n".join(line[1:] for line in snippet.splitlines() if line[0] in (" ", sign))


def test_every_snippet_is_run() -> None:
    assert (len(OF_TRAINERS), len(OF_FABRIC), len(OF_LOOPS)) == (5, 1, 1)
    assert len(SNIPPETS) == 7


@pytest.mark.parametrize("snippet", OF_TRAINERS)
@pytest.mark.parametrize("sign", ["-", "+"])
@on_workers(2, process_group=False)
def test_a_trainer_trains_before_and_after(snippet: str, sign: str) -> None:
    recorder = Recorder()

    def make_trainer(*, num_nodes: int, devices: int, strategy: Any) -> Trainer:
        assert (num_nodes, devices) == (8, 1)  # the numbers in the page
        return quiet_trainer(strategy, callbacks=[recorder])

    program = side(snippet, sign)
    exec(program, {"Trainer": make_trainer, "model": Classifier(), "loader": data()})
    is_sparse = "HardThreshold" in program or "hardthreshold" in program
    # On a CPU Lightning's own strategy registers no hook.
    assert recorder.comm_hooks == ["sparse_hook" if is_sparse else None]


def run_loop(program: str, with_fabric: bool) -> tuple[str | None, bool]:
    """Run a custom loop; return its hook, and whether both workers have equal weights."""
    model = nn.Linear(8, 3)
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    names: dict[str, Any] = {
        "DistributedDataParallel": DistributedDataParallel,
        "loader": [[torch.randn(4, 8), torch.randint(0, 3, (4,))] for _ in range(3)],
        "loss_of": loss_of,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    if with_fabric:
        names["fabric"] = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        names["fabric"].launch()
    exec(program, names)
    wrapped = names["ddp_model"] if "ddp_model" in names else names["model"]._forward_module
    weights = [torch.empty_like(model.weight) for _ in range(2)]
    dist.all_gather(weights, model.weight.detach())
    return wrapped._get_ddp_logging_data().get("comm_hook"), torch.equal(*weights)


@pytest.mark.parametrize(
    ("snippet", "sign", "hook"),
    [
        (OF_FABRIC[0], "-", None),
        (OF_FABRIC[0], "+", "sparse_hook"),
        (OF_LOOPS[0], "-", "fp16_compress_hook"),
        (OF_LOOPS[0], "+", "sparse_hook"),
    ],
    ids=["Fabric before", "Fabric after", "loop before", "loop after"],
)
def test_a_loop_trains_before_and_after(snippet: str, sign: str, hook: str | None) -> None:
    with_fabric = snippet in OF_FABRIC
    results = run_workers(run_loop, 2, side(snippet, sign), with_fabric, process_group=not with_fabric)
    assert results == [(hook, True)] * 2
