import json
import os
import signal
import subprocess
import sys

import pytest

from benchmarks.network_lab.lab import NetworkLab
from benchmarks.network_lab.namespaces import clean
from tests.integration.faults.unwatched_workers import is_running, wait_until
from tests.markdown import PROJECT

pytestmark = pytest.mark.xdist_group("network")  # one lab at a time

SHOW_ENVIRONMENT = "import json, os; print(json.dumps([dict(os.environ), sorted(os.sched_getaffinity(0))]))"

EXCHANGE = """
# Two hosts send bytes to each other at the same time, and print the seconds until all have arrived.
import os, socket, sys, threading, time
size, address = int(sys.argv[1]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(("", address[1])) as server:
        connection = server.accept()[0]
else:
    connection = None
    while connection is None:
        try:
            connection = socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.02)
connection.sendall(b"?")
connection.recv(1)
started = time.perf_counter()
sender = threading.Thread(target=connection.sendall, args=(bytes(size),))
sender.start()
received = 0
while received < size:
    received += len(connection.recv(1 << 20))
print(time.perf_counter() - started, connection.getsockname()[0])
sender.join()
"""

COMMAND_LINE = """
# Restores Ctrl-C, which background processes ignore.
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from benchmarks.network_lab.__main__ import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def lab():
    if reason := NetworkLab.unavailable_reason():
        pytest.skip(reason)
    with NetworkLab(hosts=2) as lab:
        yield lab


def namespaces(process_id):
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if f"-{process_id}-" in line]


def test_a_worker_has_the_variables_of_torchrun_and_its_own_core(lab):
    outputs = lab.run([sys.executable, "-c", SHOW_ENVIRONMENT], workers_per_host=2, env={"EXTRA": "1"})
    for rank, output in enumerate(outputs):
        environment, cores = json.loads(output)
        expected = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank % 2}", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
        expected |= {"GROUP_RANK": f"{rank // 2}", "NODE_RANK": f"{rank // 2}", "MASTER_ADDR": lab.address(0)}
        expected |= {"GLOO_SOCKET_IFNAME": "uplink", "EXTRA": "1"}
        expected |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        assert environment.items() >= expected.items()
        assert int(environment["MASTER_PORT"]) > 1024
        available = sorted(os.sched_getaffinity(0))
        assert cores == [available[rank % len(available)]]
    unpinned = lab.run([sys.executable, "-c", SHOW_ENVIRONMENT], pin=False)
    assert [json.loads(output)[1] for output in unpinned] == [sorted(os.sched_getaffinity(0))] * 2


def test_a_link_keeps_its_rate_in_both_directions_and_counts(lab):
    size = 3_000_000
    lab.shape(rate="1gbit")
    lab.shape(rate="20mbit")
    before = [lab.bytes_sent(host) for host in range(2)], [lab.bytes_received(host) for host in range(2)]
    outputs = lab.run([sys.executable, "-c", EXCHANGE, str(size)], timeout=60)
    seconds, addresses = zip(*(output.split() for output in outputs), strict=True)
    # 3 MB at 20 Mbit/s take at least 1.2 s. A busy machine cannot violate a lower bound.
    assert min(map(float, seconds)) > 1.0
    assert addresses == (lab.address(0), lab.address(1))
    assert addresses[0] != addresses[1]
    for host in range(2):
        assert size < lab.bytes_sent(host) - before[0][host] < 1.5 * size
        assert size < lab.bytes_received(host) - before[1][host] < 1.5 * size
    lab.shape()
    root = subprocess.run(lab.on_host(0, ["tc", "qdisc", "show", "dev", "uplink"]), capture_output=True, text=True)
    assert "tbf" not in root.stdout


def test_a_worker_that_fails_ends_the_others(lab):
    command = ["sh", "-c", "echo rank $RANK; test $RANK = 1 && exit 7; sleep 60 & wait"]
    workers = lab.start(command)
    assert workers.wait(timeout=30) == 7
    assert workers.failed_rank == 1
    assert workers.processes[0].returncode == -signal.SIGTERM
    with pytest.raises(RuntimeError, match=r"Rank 1 ended with status=7:\nrank 1"):
        lab.run(command)
    with pytest.raises(TimeoutError, match=r"Workers \[0, 1\] still run after 0.1 s"):
        lab.run(["sleep", "60"], timeout=0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(lab, number):
    arguments = ["--rate", "1gbit", "--", "sh", "-c", "echo $$; exec sleep 60"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", COMMAND_LINE, *arguments], cwd=PROJECT, **pipes) as process:
        lines = sorted(process.stdout.readline() for _ in range(2))
        process_ids = [int(line.rpartition("]")[2]) for line in lines]
        assert [line[:9] for line in lines] == ["[host 0] ", "[host 1] "]
        assert len(namespaces(process.pid)) == 3
        process.send_signal(number)
        process.wait(timeout=30)
    if number == signal.SIGKILL:
        assert len(namespaces(process.pid)) == 3
        assert len([name for name in clean() if f"-{process.pid}-" in name]) == 3
        assert lab.namespace(0) in namespaces(os.getpid())
    else:
        assert process.returncode == 128 + number
    assert namespaces(process.pid) == []
    # After SIGKILL of the lab, its workers take a moment to die and to be reaped by their new parent.
    timeout = 20.0 if number == signal.SIGKILL else 0.0
    wait_until(lambda: not any(map(is_running, process_ids)), "workers end", timeout)


def test_the_command_runs_on_loopback_without_ip():
    command = [sys.executable, "-m", "benchmarks.network_lab", "--hosts", "2", "--workers-per-host", "1", "--"]
    command += [sys.executable, "-c", SHOW_ENVIRONMENT]
    environment = os.environ | {"PATH": "/nowhere"}
    done = subprocess.run(command, env=environment, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stderr == "ip or tc is missing (Linux package iproute2). Running on loopback, unshaped.\n"
    lines = sorted(done.stdout.splitlines())
    assert [line[:9] for line in lines] == ["[host 0] ", "[host 1] "]
    for rank, line in enumerate(lines):
        worker = json.loads(line[9:])[0]
        assert (worker["RANK"], worker["MASTER_ADDR"], worker["GLOO_SOCKET_IFNAME"]) == (str(rank), "127.0.0.1", "lo")
