import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "script"),
    [(TORCHRUN, "plain_ddp.py"), (TORCHRUN, "local_training.py"), ([sys.executable], "with_fabric.py")],
    ids=["torchrun", "local", "fabric"],
)
def test_an_example_runs_as_its_header_says_and_learns_with_few_coordinates(command, script, request):
    if script == "plain_ddp.py":
        request.getfixturevalue("cold_start")
    path = PROJECT / "docs" / "examples" / script
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, cwd=PROJECT, check=False)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"step (\d+): loss ([\d.]+), density ([\d.]+), error ([\d.]+)", done.stdout)
    assert [int(row[0]) for row in rows] == [0, 100, 200, 300]  # printed by one worker only
    losses = [float(row[1]) for row in rows]
    assert losses[-1] < 0.1 * losses[0]
    assert all(0 < float(row[2]) < 0.25 for row in rows[1:])
    assert float(rows[-1][3]) > 0
