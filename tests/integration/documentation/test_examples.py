"""The scripts of docs/examples.

One starts with the command in its header. For the others, forked processes get torchrun's variables, which is faster.
"""

import importlib.util
import os
import re
import signal
import sys

import pytest
import torch

from tests.integration.faults.unwatched_workers import printed_by, run_script, workers
from tests.markdown import PROJECT

EXAMPLES = PROJECT / "docs" / "examples"
QUICK = [("local_training.py", 2), ("with_fabric.py", 2), ("sharded_local.py", 4)]
SLOW = [("sharded.py", 4), ("plain_ddp.py", 0)]  # 0 starts the command in the header


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "num_workers"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_an_example_learns_with_few_coordinates(script, num_workers, tmp_path):
    if not num_workers:  # its header's command
        torchrun = re.search(r"torchrun (.*) docs/examples", (EXAMPLES / script).read_text()).group(1)
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun.split(), str(EXAMPLES / script)]
        printed = printed_by(command).stdout
    else:
        with workers(num_workers, tmp_path, run_script, EXAMPLES / script, tmp_path) as running:
            printed = "".join(running.end())
    rows = re.findall(r"step (\d+): loss ([\d.]+), density ([\d.]+), error ([\d.]+)", printed)
    assert [int(row[0]) for row in rows] == [0, 100, 200]  # printed by one worker only
    losses = [float(row[1]) for row in rows]
    assert losses[-1] < 0.1 * losses[0]
    assert all(0 < float(row[2]) < 0.25 for row in rows[1:])
    assert float(rows[-1][3]) > 0


def on_two_workers(max_steps, folder):
    return workers(2, folder, run_script, EXAMPLES / "cluster.py", folder, "--devices=2", f"--max-steps={max_steps}")


@pytest.mark.full
@pytest.mark.long
def test_the_example_for_clusters_saves_on_a_signal_and_resumes(tmp_path):
    with on_two_workers(1_000_000, tmp_path) as running:
        running.wait_for(0, lambda: "step 100:" in running.output(0), "step 100")
        os.kill(running.processes[1].pid, signal.SIGUSR1)
        printed = running.end()
    assert not any("holds no residuals" in text for text in printed)
    saved = torch.load(tmp_path / "requeue-none.ckpt", weights_only=True)
    steps = saved["global_step"]
    assert 100 < steps < 1_000_000
    assert steps % 10 == 0
    first, second = (worker["unsent"] for worker in saved["lightning_sparse"]["workers"])
    assert any(not torch.equal(residual, second[name]) for name, residual in first.items())
    for rank in range(2):
        (tmp_path / f"output of {rank}").unlink()
    with on_two_workers(steps + 25, tmp_path) as running:
        printed = running.end()
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
