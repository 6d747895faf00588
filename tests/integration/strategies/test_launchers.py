"""Lightning's launchers: scripts that start their workers themselves, as scripts of users do."""

import os
from pathlib import Path

import pytest

from tests.integration.faults.unwatched_workers import run_script, workers
from tests.workers import environment_of

# The test gets the output of every worker, but not its objects.
SCRIPT = """
import sys
import torch
from lightning.pytorch import LightningModule, Trainer
import lightning_sparse


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        strategy = self.trainer.strategy
        hook = strategy.model._get_ddp_logging_data()["comm_hook"]
        steps = strategy.state.last_step.step + 1
        sys.stdout.write(f"<rank {self.global_rank} of {self.trainer.world_size}: {hook}, {steps} steps>\\n")
        sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = Trainer(
        strategy=sys.argv[1], accelerator="cpu", devices=2, max_steps=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(16, 4), 2))
"""


def output_of(script: str, strategy: str, folder: Path) -> str:
    """Return the output of a script, which runs in a process that has imported everything."""
    (folder / "train.py").write_text(script)
    with workers(1, folder, start_script, folder, strategy) as running:
        return running.end()[0]


def start_script(folder: Path, strategy: str) -> None:
    for name in environment_of(0, 1, 0):
        del os.environ[name]
    run_script(folder / "train.py", folder, strategy)


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    ["ddp_topk_fork", "ddp_hardthreshold", pytest.param("ddp_hardthreshold_spawn", marks=pytest.mark.slow)],
)
def test_every_launched_worker_has_the_hook(strategy: str, tmp_path: Path) -> None:
    printed = output_of(SCRIPT, strategy, tmp_path)
    markers = [line for line in printed.splitlines() if line.startswith("<rank")]
    assert sorted(markers) == [f"<rank {rank} of 2: sparse_hook, 3 steps>" for rank in range(2)]


# As in a notebook: the process that forked workers gets their weights, but cannot save residuals.
SAVES = (
    SCRIPT
    + """
    trainer.save_checkpoint("after.ckpt")
    inside, after = (
        torch.load(path, weights_only=True) for path in (trainer.checkpoint_callback.best_model_path, "after.ckpt")
    )
    assert all(torch.equal(inside["state_dict"][name], tensor) for name, tensor in after["state_dict"].items())
    assert inside["global_step"] == 3
    assert "lightning_sparse" in inside
    assert after["global_step"] == 0
    assert after["optimizer_states"] == []
    assert "a process that is not a worker" in after["lightning_sparse"]["why_incomplete"]
    trainer = Trainer(strategy=sys.argv[1], accelerator="cpu", devices=2, max_steps=3, logger=False)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(16, 4), 2), ckpt_path="after.ckpt")
"""
)


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "lost"), [("ddp_hardthreshold_fork", "residuals"), ("local_hardthreshold_notebook", "drifts")]
)
def test_a_checkpoint_after_a_forked_fit_names_its_gaps(strategy: str, lost: str, tmp_path: Path) -> None:
    printed = output_of(
        SAVES.replace("enable_checkpointing=False", "enable_checkpointing=True")
        .replace('strategy.model._get_ddp_logging_data()["comm_hook"]', "None")
        .replace("strategy.state.last_step.step + 1", "3"),
        strategy,
        tmp_path,
    )
    message = f"the checkpoint holds no {lost} (it is saved by a process that is not a worker"
    assert printed.count(message) == 1, printed  # Python shows an equal warning only once


def test_the_process_that_forked_workers_raises_their_exception(tmp_path: Path) -> None:
    script = SCRIPT.replace("return self.layer", "raise ValueError(f'boom {self.layer}')  #")
    with pytest.raises(AssertionError, match=r"(?s)^(?!.*is not attached).*boom"):
        output_of(script, "local_hardthreshold_fork", tmp_path)
