"""The scripts of docs/examples, started with the commands in their headers."""

import importlib.util
import re
import signal
import sys
import time

import pytest
import torch

from tests.integration.unwatched_workers import environment, printed_by, scripts
from tests.markdown import PROJECT

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "script"),
    [
        (TORCHRUN, "local_training.py"),
        (TORCHRUN, "plain_ddp.py"),
        ([*TORCHRUN[:-1], "--nproc-per-node=4"], "sharded.py"),
        ([*TORCHRUN[:-1], "--nproc-per-node=4"], "sharded_local.py"),
        ([sys.executable], "with_fabric.py"),
    ],
    ids=["local", "torchrun", "sharded", "sharded local", "fabric"],
)
def test_an_example_runs_as_its_header_says_and_learns_with_few_coordinates(command, script):
    path = PROJECT / "docs" / "examples" / script
    printed = printed_by([*command, str(path)]).stdout
    rows = re.findall(r"step (\d+): loss ([\d.]+), density ([\d.]+), error ([\d.]+)", printed)
    assert [int(row[0]) for row in rows] == [0, 100, 200]  # printed by one worker only
    losses = [float(row[1]) for row in rows]
    assert losses[-1] < 0.1 * losses[0]
    assert all(0 < float(row[2]) < 0.25 for row in rows[1:])
    assert float(rows[-1][3]) > 0


def on_two_workers(max_steps, folder):
    """Start two processes of docs/examples/cluster.py without an agent."""
    script = PROJECT / "docs" / "examples" / "cluster.py"
    command = [sys.executable, str(script), "--devices=2", f"--max-steps={max_steps}"]
    return scripts(command, folder, environment())


def end_of(workers, folder):
    statuses = [worker.wait(timeout=100) for worker in workers]
    printed = [(folder / f"output of {rank}").read_text() for rank in range(2)]
    assert statuses == [0, 0], "\n".join(printed)
    return printed


@pytest.mark.full
@pytest.mark.long
def test_the_example_for_clusters_saves_on_a_signal_and_resumes(tmp_path):
    with on_two_workers(1_000_000, tmp_path) as workers:
        while "step 100:" not in (tmp_path / "output of 0").read_text() and workers[0].poll() is None:
            time.sleep(0.05)
        workers[1].send_signal(signal.SIGUSR1)
        printed = end_of(workers, tmp_path)
    assert not any("without residuals" in text for text in printed)
    saved = torch.load(tmp_path / "requeue-none.ckpt", weights_only=True)
    steps = saved["global_step"]
    assert 100 < steps < 1_000_000
    assert steps % 10 == 0
    first, second = (worker["unsent"] for worker in saved["lightning_sparse"]["workers"])
    assert any(not torch.equal(residual, second[name]) for name, residual in first.items())
    with on_two_workers(steps + 25, tmp_path) as workers:
        printed = end_of(workers, tmp_path)
    for rank in range(2):
        assert f"worker {rank} of 2: {steps + 25} steps" in printed[rank]
    assert "calibrated" not in printed[0]  # which was done before
    assert "step 0:" not in printed[0]


@pytest.mark.full
@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='not installed: ray. `pip install "ray[train]"`; 600 MB.'
)
def test_the_example_for_ray_trains_and_resumes(tmp_path):
    script = PROJECT / "docs" / "examples" / "ray_train.py"
    for arguments, steps in (((), 60), (("--resume",), 90)):
        command = [sys.executable, str(script), f"--max-steps={steps}", f"--folder={tmp_path}", *arguments]
        done = printed_by(command, tmp_path, RAY_USAGE_STATS_ENABLED="0")
        printed = done.stdout + done.stderr
        assert {f"worker {rank}: {steps} steps" for rank in range(2)} <= set(
            re.findall(r"worker \d: \d+ steps", printed)
        )
    assert "Restored all states" in printed
    assert "calibrated the threshold" not in printed
