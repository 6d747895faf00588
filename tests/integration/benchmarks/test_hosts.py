"""Trains on several hosts, simulated as network namespaces: link problems cost only time."""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.network_lab.lab import INTERFACE, NetworkLab
from lightning_sparse import DDPHardThresholdStrategy
from tests.integration.faults.unwatched_workers import environment, wait_until
from tests.integration.models import Recorder, assert_equal, nesterov, quiet_trainer
from tests.markdown import PROJECT
from tests.workers import run_workers

pytestmark = pytest.mark.xdist_group("network")  # one lab at a time
RECIPE = PROJECT / "recipes" / "resnet18_cifar10" / "demo.yaml"
FOLDER = "FOLDER_OF_THE_RECORDERS"
STEPS = 40
CLONE_NEWNET = 0x40000000

# The command in torchrun's documentation, run on every host; agents set the other variables of workers.
TORCHRUN = """
cd "$0"
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK
exec "$1" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank "$NODE_RANK" \\
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m recipes fit --config "$2" \\
    --trainer.num_nodes=2 --trainer.devices=1 --trainer.max_epochs=2 --model.width=4 \\
    --data.batch_size=8 --data.num_train_images=64 --data.num_val_images=17 \\
    --trainer.callbacks+=tests.integration.benchmarks.test_hosts.HostRecorder
"""


@pytest.fixture(scope="module", autouse=True)
def _available() -> None:
    if reason := NetworkLab.unavailable_reason():
        pytest.skip(reason)


class HostRecorder(Recorder):
    """Writes the record of a worker into a folder that all hosts share."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        seen = {
            "node, global, local rank": (trainer.node_rank, trainer.global_rank, trainer.local_rank),
            "started by torchrun": "TORCHELASTIC_RUN_ID" in os.environ,
            "global step": trainer.global_step,
        }
        torch.save(vars(self) | seen, f"{os.environ[FOLDER]}/{trainer.global_rank}.pt")


class Model(LightningModule):
    """Has 22,000 parameters; each worker counts its steps in bytes of a file."""

    def __init__(self, folder: str | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
        self.folder = folder

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layers(batch) - batch[:, :8]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return nesterov(self.parameters())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.folder is not None:
            with open(f"{self.folder}/{self.global_rank}", "ab") as file:
                file.write(b".")


def train(namespaces: Sequence[str] | None, address: str, folder: str | None) -> dict[str, Any]:
    """Train a worker, on a separate host if namespaces are given. Runs in every worker."""
    rank, num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if namespaces is not None:
        enter(namespaces[rank])
        os.environ |= {"NODE_RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        # One thread, because all hosts share the cores; with one worker per host Lightning would use all.
        os.environ |= {"MASTER_ADDR": address, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    num_nodes = 1 if namespaces is None else num_workers
    torch.manual_seed(3)
    recorder = Recorder()
    batches = torch.randn(STEPS, num_workers, 16, 32)[:, rank]
    strategy = DDPHardThresholdStrategy(threshold=0.025, bucket_cap_mb=0.02)
    trainer = quiet_trainer(
        strategy,
        num_workers=num_workers // num_nodes,
        num_nodes=num_nodes,
        max_steps=STEPS,
        callbacks=[recorder],
        use_distributed_sampler=False,
    )
    trainer.fit(Model(folder), DataLoader(batches, batch_size=None))
    return vars(recorder)


def enter(namespace: str) -> None:
    """Move this process, which still has a single thread, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def train_on(lab: NetworkLab, folder: Path) -> list[dict[str, Any]]:
    """Return the results of a training with a worker on every host of a lab."""
    namespaces = [lab.namespace(host) for host in range(lab.hosts)]
    arguments = (namespaces, lab.address(0), str(folder))  # new processes, because setns needs a single thread
    return run_workers(train, lab.hosts, *arguments, process_group=False, timeout=100, new=True)


@cache
def undisturbed(num_workers: int) -> list[dict[str, Any]]:
    """Return the results of as many workers on one host, over loopback."""
    return run_workers(train, num_workers, None, "127.0.0.1", None, process_group=False, timeout=60)


def assert_only_time_differs(results: list[dict[str, Any]]) -> None:
    expected = undisturbed(len(results))
    assert not torch.equal(expected[0]["residuals"]["layers.2.weight"], expected[1]["residuals"]["layers.2.weight"])
    for found, reference in zip(results, expected, strict=True):
        assert len(found["steps"]) == STEPS
        # Uses both routes: dense in the first step, which has no history, and sparse later.
        assert 0 < found["steps"][-1].density < 0.3
        assert found["steps"][0].payload_bytes >= found["steps"][0].dense_bytes > found["steps"][-1].payload_bytes
        # Compares density, error norm, payload and the other statistics of every step.
        assert found["steps"] == reference["steps"]
        assert_equal(found["residuals"], reference["residuals"])
        assert_equal(found["weights"], reference["weights"])
        assert_equal(found["weights"], results[0]["weights"])


@pytest.mark.slow
def test_torchrun_trains_the_recipe_on_two_hosts(tmp_path: Path) -> None:
    with NetworkLab(hosts=2) as lab:
        variables = {FOLDER: str(tmp_path), "PYTHONPATH": environment()["PYTHONPATH"]}
        workers = lab.start(["sh", "-ec", TORCHRUN, str(tmp_path), sys.executable, str(RECIPE)], env=variables)
        status = workers.wait(timeout=150)
        assert status == 0, "\n".join(f"host {host}:\n{''.join(lines)}" for host, lines in enumerate(workers.lines))
        sent = [lab.bytes_sent(host) for host in range(2)]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert first["node, global, local rank"] == (0, 0, 0)
    assert second["node, global, local rank"] == (1, 1, 0)
    for seen in (first, second):
        assert seen["started by torchrun"]
        assert seen["comm_hooks"] == ["sparse_hook"]
        # 2 epochs of 64 images; each of 2 hosts takes 8 images per step.
        assert seen["global step"] == len(seen["steps"]) == 8
        assert 0 < seen["steps"][-1].density < 1
        assert seen["steps"] == first["steps"]
        assert_equal(seen["weights"], first["weights"])
    assert min(sent) > 4 * first["steps"][-1].num_elements
    assert any(not torch.equal(residual, second["residuals"][name]) for name, residual in first["residuals"].items())
    assert any((tmp_path / "lightning_logs").rglob("events*"))


@pytest.mark.slow
def test_a_link_that_fails_for_seconds_costs_only_time(tmp_path: Path) -> None:
    def steps_made() -> int:
        files = [tmp_path / str(rank) for rank in range(2)]
        return min(file.stat().st_size if file.exists() else 0 for file in files)

    # The lab exits first and ends its workers, even if an assertion fails while the link is down.
    with ThreadPoolExecutor(1) as thread, NetworkLab(hosts=2) as lab:
        # At this rate data is nearly always in transit, and the training outlasts the `ip` command.
        lab.shape(rate="1mbit")
        training = thread.submit(train_on, lab, tmp_path)
        wait_until(lambda: training.done() or steps_made() >= 10, "ten steps")
        assert not training.done(), training.result()
        lab.link_down(1)
        time.sleep(1.0)
        before = steps_made()
        time.sleep(1.5)
        assert steps_made() == before < STEPS
        lab.link_up(1)
        lab.shape()
        assert_only_time_differs(training.result())


@pytest.mark.full
def test_lost_frames_cost_only_time(tmp_path: Path) -> None:
    with NetworkLab(hosts=2) as lab:
        try:
            lab.lose(0.05)
        except RuntimeError as error:
            pytest.skip(f"This kernel does not lose frames: {error}")
        assert_only_time_differs(train_on(lab, tmp_path))
        for host in range(2):
            arrived = queue(lab, host, "clsact")
            assert 0.01 * arrived["packets"] < arrived["drops"] < 0.15 * arrived["packets"]


@pytest.mark.full
def test_hosts_on_links_of_different_rates_agree(tmp_path: Path) -> None:
    with NetworkLab(hosts=4) as lab:
        for host, rate in ((1, "100mbit"), (2, "20mbit"), (3, "4mbit")):
            configure(lab, host, f"qdisc replace dev {INTERFACE} root tbf rate {rate} burst 20000 limit 10000000")
        assert_only_time_differs(train_on(lab, tmp_path))
        # The slowest link delayed frames.
        assert queue(lab, 3, "tbf")["overlimits"] > STEPS


def configure(lab: NetworkLab, host: int, line: str) -> None:
    """Run a line of `tc` on a host; skip the test if the kernel does not allow it."""
    command = ["tc", "-n", lab.namespace(host), "-batch", "-"]
    done = subprocess.run(command, input=line, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"This kernel does not allow `tc {line}`: {' '.join(done.stderr.split())}")


def queue(lab: NetworkLab, host: int, kind: str) -> dict[str, Any]:
    """Return the statistics of a queue on a host, as `tc` shows them."""
    command = ["tc", "-n", lab.namespace(host), "-j", "-s", "qdisc", "show", "dev", INTERFACE]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    [found] = [shown_queue for shown_queue in json.loads(shown) if shown_queue["kind"] == kind]
    return found
