"""``python -m lightning_sparse.doctor``, alone and between workers and hosts."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.network_lab.lab import NetworkLab
from lightning_sparse import __version__, doctor, estimate
from tests.integration.faults.unwatched_workers import printed_by, workers
from tests.workers import run_workers


def test_the_doctor_reports_the_environment() -> None:
    text = printed_by([sys.executable, "-m", "lightning_sparse.doctor"]).stdout
    assert text.startswith(f"lightning_sparse {__version__}\n")
    assert f"torch {torch.__version__.partition('+')[0]}" in text
    assert re.search(r"compiled functions for CPUs: (yes|no, install)|Triton kernels: (yes|no, slower)", text)
    assert text.endswith("This is a single worker. Start several with torchrun to measure the link between them.\n")


@pytest.mark.full
def test_the_doctor_measures_the_link_between_workers(tmp_path: Path) -> None:
    with workers(2, tmp_path, doctor.main, ["--parameters", "1000000"]) as running:
        text, other = running.end()
    [rate] = re.findall(r"^Link: (\S+) Gbit/s to each of 2 workers", text, re.MULTILINE)
    assert float(rate) > 0
    assert "1,000,000 parameters, 2 workers" in text
    assert "lightning_sparse" not in other  # only rank 0 prints


@pytest.mark.slow
@pytest.mark.xdist_group("network")
def test_the_doctor_finds_the_rate_of_a_shaped_link() -> None:
    if reason := NetworkLab.unavailable_reason():
        pytest.skip(reason)
    with NetworkLab(hosts=2) as lab:
        lab.shape("400mbit")
        text = "\n".join(lab.run([sys.executable, "-m", "lightning_sparse.doctor"], timeout=120))
    [rate] = re.findall(r"Link: (\S+) Gbit/s to each of 2 workers", text)
    assert 0.1 < float(rate) <= 0.42  # at most the shaped rate; a busy machine may reach less


def test_advice_follows_from_the_link() -> None:
    lines = doctor.describe_link(estimate(10_000_000, num_workers=8, link_gbit_s=0.94), 3e-4).splitlines()
    assert lines[0].startswith(
        "Link: 0.94 Gbit/s to each of 8 workers in an all-reduce of 26 MB; 0.3 ms for a single element"
    )
    assert "link_gbit_s=0.94" in lines[0]
    assert lines[1].startswith("10,000,000 parameters, 8 workers, 0.94 Gbit/s each")
    fast = doctor.describe_link(estimate(10_000_000, num_workers=8, link_gbit_s=2437.0, on_gpu=True), 3e-5)
    assert fast.startswith("Link: 2440 Gbit/s")
    assert "Pass link_gbit_s=2400 to a strategy;" in fast


def test_all_workers_report_the_same_speed() -> None:
    speeds = run_workers(doctor.measure_link, 2, torch.device("cpu"))
    assert speeds[0] == speeds[1]
    gbit_s, round_seconds = speeds[0]
    assert gbit_s > 0
    assert 0 < round_seconds < 10


@pytest.mark.parametrize("arguments", [["--density", "2"], ["--density", "0"], ["--parameters", "0"]])
def test_arguments_out_of_range_are_rejected_first(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        doctor.main(arguments)
    printed = capsys.readouterr()
    assert not printed.out
    assert f"Invalid {arguments[0]}={arguments[1]}. Must be" in printed.err


def test_a_named_interface_replaces_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.socket, "gethostbyname", lambda _: "127.0.1.1")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert any(
        "127.0.1.1, which other hosts cannot reach; set the interface" in line for line in doctor.describe_machine()
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert any("reach; GLOO_SOCKET_IFNAME selects another interface" in line for line in doctor.describe_machine())
