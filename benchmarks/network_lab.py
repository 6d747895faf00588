"""Simulates several hosts on a machine: network namespaces on a bridge, with links of a chosen rate.

    python -m benchmarks.network_lab --hosts 2 --rate 1gbit -- python script.py arguments
    python -m benchmarks.network_lab --clean

The first command runs a program on every host, with torchrun's environment variables. The second removes the remains of
killed labs. Without root, `ip` or `tc`, the program runs on loopback, after a message.

    namespace …-host0                namespace …-bridge
    worker ─ uplink 10.77.0.1 ─────── port0 ─┐
    namespace …-host1                      bridge      rate: on uplink and port, so in both directions
    worker ─ uplink 10.77.0.2 ─────── port1 ─┘

The bridge also has a namespace, so that labs do not change the machine's network and do not collide.
"""

import argparse
import atexit
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "sparse-lab"
INTERFACE = "uplink"
MARK = "RESULT "
"""Begins the line in which a worker prints its result as JSON."""
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}

# Burst of a link after a pause. A larger burst speeds up short transfers; a smaller burst lets timers slow a fast link.
BURST_SECONDS, MIN_BURST_BYTES = 0.25e-3, 20_000
# Longest frame of TCP. The kernel would cut a frame longer than the burst into 1500 bytes, which takes CPU time.
FRAME_BYTES = 16_384
# Larger than the socket buffers of a few connections, because a full queue drops packets.
QUEUE_BYTES = 64_000_000

# Opcodes of classic BPF, because few kernels include tc's netem.
LOAD_RANDOM, JUMP_IF_GREATER, RETURN = "32 0 0 4294963256", "37 1 0", "6 0 0"
LOST, PASSED = 2, 0

_numbers = itertools.count()


class Workers:
    """The processes of a command, started with torchrun's environment variables.

    Args:
        commands: Program and arguments for each host.
        workers_per_host: Processes per host.
        variables: Environment variables in addition to torchrun's and this process's. OMP_NUM_THREADS is 1 by default.
        pin: Whether to pin each worker to a processor core, in turn over the available cores.
        echo: Whether to print each line with the number of its host.

    Attributes:
        processes: Processes by rank; each leads a process group.
        lines: Lines that each worker has written to stdout and stderr, by rank.
        failed_rank: The worker whose nonzero exit status `wait` returned.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        workers_per_host: int,
        variables: Mapping[str, str],
        pin: bool,
        echo: bool,
    ) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.lines: list[list[str]] = []
        self.failed_rank: int | None = None
        self._readers: list[threading.Thread] = []
        cores = os.sched_getaffinity(0)
        affinities = itertools.cycle([{core} for core in sorted(cores)] if pin else [cores])
        world_size = len(commands) * workers_per_host
        try:
            for rank in range(world_size):
                host, local_rank = divmod(rank, workers_per_host)
                environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ}
                environment |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
                environment |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(workers_per_host)}
                environment |= {"GROUP_RANK": str(host), "NODE_RANK": str(host), **variables}
                # A child inherits the affinity before it counts cores or starts threads.
                os.sched_setaffinity(0, next(affinities))
                self._start(commands[host], environment, f"[host {host}] " if echo else None)
        except BaseException:
            self.end()
            raise
        finally:
            os.sched_setaffinity(0, cores)

    def _start(self, command: Sequence[str], environment: Mapping[str, str], label: str | None) -> None:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            command, env=environment, text=True, errors="replace", start_new_session=True, **pipes
        )
        self.processes.append(process)
        self.lines.append([])
        self._readers.append(threading.Thread(target=_read, args=(process, self.lines[-1], label), daemon=True))
        self._readers[-1].start()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all workers and return 0, or end them at the first nonzero exit status and return it.

        Raises:
            TimeoutError: After `timeout` seconds; ends all workers.
        """
        deadline = time.monotonic() + timeout if timeout is not None else float("inf")
        try:
            while True:
                statuses = [process.poll() for process in self.processes]
                if any(statuses):
                    self.failed_rank, status = next((rank, status) for rank, status in enumerate(statuses) if status)
                    return status if status > 0 else 128 - status  # as a shell reports a signal
                if None not in statuses:
                    return 0
                if time.monotonic() > deadline:
                    running = [rank for rank, status in enumerate(statuses) if status is None]
                    raise TimeoutError(f"Workers {running} still run after {timeout} s.")
                time.sleep(0.02)
        finally:
            self.end()

    def outputs(self, timeout: float | None = None) -> list[str]:
        """Wait for all workers and return their output by rank.

        Raises:
            RuntimeError: A worker fails; ends the other workers.
            TimeoutError: After `timeout` seconds; ends all workers.
        """
        status = self.wait(timeout)
        outputs = ["".join(lines) for lines in self.lines]
        if self.failed_rank is not None:
            raise RuntimeError(f"Rank {self.failed_rank} ended with {status=}:\n{outputs[self.failed_rank]}")
        return outputs

    def end(self) -> None:
        """Terminate the running workers, and kill them after five seconds."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self.processes if process.poll() is None]
            deadline = time.monotonic() + 5.0
            for process in running:
                os.killpg(process.pid, number)
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        for reader in self._readers:
            reader.join(1.0)  # with a limit, because a child of a worker may keep the pipe open


class NetworkLab:
    """Hosts with links whose rate you can change while they are in use.

        with NetworkLab(hosts=4) as lab:
            lab.shape(rate="1gbit")
            outputs = lab.run(["python", "script.py"])

    Leaving the block ends all workers and removes the network, also after an exception, Ctrl-C or SIGTERM.

    Args:
        hosts: Number of hosts, within [1, 254].

    Raises:
        RuntimeError: On entry, if this machine does not support a lab.
    """

    def __init__(self, hosts: int = 2) -> None:
        if not 1 <= hosts <= 254:
            raise ValueError(f"Invalid {hosts=}. Must be within [1, 254].")
        self.hosts = hosts
        self._name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._bridge = f"{self._name}-bridge"
        self._owner = os.getpid()
        self._ports = itertools.count(29500)
        self._cleanup = contextlib.ExitStack()

    @staticmethod
    def unavailable_reason() -> str | None:
        """Return a sentence with the reason why a lab is impossible, or None if it is possible."""
        if not shutil.which("ip") or not shutil.which("tc"):
            return "ip or tc is missing (Linux package iproute2)."
        if os.geteuid() != 0:
            return "Only root may create network namespaces."
        probe = f"{PREFIX}-{os.getpid()}-{next(_numbers)}-probe"
        try:
            _run("ip", "netns", "add", probe)
            _configure("ip", probe, "link add name a type veth peer name b", "link add name c type bridge")
            _configure("tc", probe, "qdisc add dev a root tbf rate 1gbit burst 100000 limit 100000")
        except RuntimeError as error:
            return f"This machine does not support network namespaces: {error}."
        finally:
            _remove(probe)
        return None

    def __enter__(self) -> "NetworkLab":
        if reason := self.unavailable_reason():
            raise RuntimeError(reason)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _exit_on_sigterm)
            self._cleanup.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)
        atexit.register(self.close)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every worker and remove the network."""
        if os.getpid() == self._owner:  # not in a forked child
            self._cleanup.close()
            atexit.unregister(self.close)

    def _build(self) -> None:
        namespaces = [self.namespace(host) for host in range(self.hosts)]
        for namespace in (self._bridge, *namespaces):
            self._cleanup.callback(_remove, namespace)
            _run("ip", "netns", "add", namespace)
        _configure("ip", self._bridge, "link add name bridge type bridge", "link set bridge addrgenmode none up")
        for host, namespace in enumerate(namespaces):
            # No IPv6 address, because its packets would count. Linux's default congestion control on any machine.
            _configure(
                "ip",
                namespace,
                "link set lo up",
                f"link add name {INTERFACE} type veth peer name port{host} netns {self._bridge}",
                f"link set {INTERFACE} addrgenmode none gso_max_size {FRAME_BYTES} up",
                f"address add {self.address(host)}/24 dev {INTERFACE} noprefixroute",
                f"route add 10.77.0.0/24 dev {INTERFACE} congctl cubic",
            )
            _configure("ip", self._bridge, f"link set port{host} master bridge addrgenmode none up")
            # New connections must not reuse TCP metrics of a link with another rate.
            _run(*self.on_host(host, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save"]))

    def namespace(self, host: int) -> str:
        """Return the name of a host's network namespace, as `ip netns` lists it."""
        if not 0 <= host < self.hosts:
            raise ValueError(f"Invalid {host=}. Must be within [0, {self.hosts - 1}].")
        return f"{self._name}-host{host}"

    def address(self, host: int) -> str:
        """Return a host's IPv4 address."""
        return f"10.77.0.{host + 1}"

    def on_host(self, host: int, command: Sequence[str]) -> list[str]:
        """Return a command that executes `command` on a host with an unchanged process id."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def shape(self, rate: str | None = None) -> None:
        """Set the rate of every link, also for open connections; None removes the limit.

        Args:
            rate: Rate of each direction of a link, such as "200mbit" or "2.5gbit". It includes Ethernet headers, so TCP
                gets 95.6 % of it with packets of 1500 bytes. After a pause, the first 20 kB or 0.25 ms are not limited.
        """
        for host in range(self.hosts):
            _configure("tc", self.namespace(host), _shape(INTERFACE, rate))
            _configure("tc", self._bridge, _shape(f"port{host}", rate))

    def lose(self, share: float) -> None:
        """Drop a share of the frames (up to 16 kB) that each host receives.

        Raises:
            RuntimeError: The kernel does not support BPF in tc.
        """
        for host in range(self.hosts):
            program = f"4,{LOAD_RANDOM},{JUMP_IF_GREATER} {int(2**32 * share)},{RETURN} {LOST},{RETURN} {PASSED}"
            _configure(
                "tc",
                self.namespace(host),
                f"qdisc add dev {INTERFACE} clsact",
                f"filter add dev {INTERFACE} ingress bpf da bytecode {program!r}",
            )

    def link_down(self, host: int) -> None:
        """Disconnect a host: its interface loses the carrier and all packets are lost."""
        _configure("ip", self._bridge, f"link set port{host} down")

    def link_up(self, host: int) -> None:
        """Reconnect a host; the link keeps its rate."""
        _configure("ip", self._bridge, f"link set port{host} up")

    def bytes_sent(self, host: int) -> int:
        """Return the bytes that a host has sent since the start, with headers once per frame of TCP."""
        return self._counter(host, "tx")

    def bytes_received(self, host: int) -> int:
        """Return the bytes that a host has received since the start, with headers as in `bytes_sent`."""
        return self._counter(host, "rx")

    def _counter(self, host: int, direction: str) -> int:
        report = _run("ip", "-n", self.namespace(host), "-j", "-s", "link", "show", "dev", INTERFACE)
        return json.loads(report)[0]["stats64"][direction]["bytes"]

    def start(
        self,
        command: Sequence[str],
        workers_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        pin: bool = True,
        echo: bool = False,
    ) -> Workers:
        """Start a command on every host; the arguments are those of `Workers`."""
        variables = {"MASTER_ADDR": self.address(0), "MASTER_PORT": str(next(self._ports))}
        variables |= {"GLOO_SOCKET_IFNAME": INTERFACE, **(env or {})}
        commands = [self.on_host(host, command) for host in range(self.hosts)]
        workers = Workers(commands, workers_per_host, variables, pin, echo)
        self._cleanup.callback(workers.end)
        return workers

    def run(self, command: Sequence[str], timeout: float | None = None, **options: Any) -> list[str]:
        """Run a command on every host with the options of `start`, and return `Workers.outputs`."""
        return self.start(command, **options).outputs(timeout)


def start_on_loopback(
    command: Sequence[str],
    hosts: int,
    workers_per_host: int = 1,
    env: Mapping[str, str] | None = None,
    pin: bool = True,
    echo: bool = False,
) -> Workers:
    """Start a command on loopback as the workers of several hosts; see `Workers` for the arguments."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
    return Workers([command] * hosts, workers_per_host, variables, pin, echo)


def read_results(outputs: Sequence[str]) -> list[Any]:
    """Return each worker's JSON result after the mark, by rank."""
    return [
        json.loads(next(line for line in text.splitlines() if line.startswith(MARK))[len(MARK) :]) for text in outputs
    ]


def interface_bytes() -> tuple[int, int]:
    """Return the bytes that this host's interface has received and sent, with headers."""
    with open("/proc/self/net/dev") as lines:
        fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(fields[0]), int(fields[8])


def clean() -> list[str]:
    """Remove the namespaces of labs whose process has ended, kill their processes, and return their names."""
    names = [entry["name"] for entry in json.loads(_run("ip", "-j", "netns", "list") or "[]")]
    labs = [re.fullmatch(rf"{PREFIX}-(\d+)-\d+-\w+", name) for name in names]
    abandoned = [lab[0] for lab in labs if lab and not os.path.exists(f"/proc/{lab[1]}")]
    for name in abandoned:
        _remove(name)
    return abandoned


def _shape(device: str, rate: str | None) -> str:
    """Return a line for `tc` that shapes a device's outgoing traffic."""
    if rate is None:
        return f"qdisc replace dev {device} root noqueue"
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", rate):
        raise ValueError(f"Invalid {rate=}. Must be a number with the unit kbit, mbit or gbit, such as 1gbit.")
    bytes_per_second = float(rate[:-4]) * UNITS[rate[-4]] / 8
    burst = max(MIN_BURST_BYTES, int(BURST_SECONDS * bytes_per_second))
    return f"qdisc replace dev {device} root tbf rate {rate} burst {burst} limit {QUEUE_BYTES}"


def _read(process: subprocess.Popen[str], lines: list[str], label: str | None) -> None:
    with process.stdout as stream:
        for line in stream:
            lines.append(line)
            if label is not None:
                sys.stdout.write(f"{label}{line.rstrip()}\n")
                sys.stdout.flush()


def _configure(program: str, namespace: str, *lines: str) -> None:
    """Execute lines of `ip` or `tc` in a namespace."""
    _run(program, "-n", namespace, "-batch", "-", lines="\n".join(lines))


def _run(*command: str, lines: str = "") -> str:
    """Return the standard output of a command with `lines` as its input."""
    # In a new session, so that Ctrl-C does not reach the commands that clean up.
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {' '.join(done.stderr.split())} {lines}".rstrip())
    return done.stdout


def _remove(namespace: str) -> None:
    """Kill the processes in a namespace and remove it, if it exists."""
    with contextlib.suppress(RuntimeError):
        for process in _run("ip", "netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        _run("ip", "netns", "delete", namespace)


def _exit_on_sigterm(number: int, _: object) -> None:
    """Handle SIGTERM by leaving all blocks, as after Ctrl-C."""
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command on every host of a lab, or on loopback, and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--workers-per-host", type=int, default=1)
    parser.add_argument("--rate", help="rate of each direction of a link, such as 1gbit")
    parser.add_argument("--no-pin", action="store_true", help="let every worker use all processor cores")
    parser.add_argument("--clean", action="store_true", help="only remove the remains of killed labs")
    parser.add_argument("command", nargs="*", help="program and arguments, after --")
    options = parser.parse_args(arguments)
    if options.clean:
        print("\n".join(clean()) or "Nothing to remove.")
        return 0
    if not options.command:
        parser.error("the command is missing: give a program and its arguments after --")
    start = {"workers_per_host": options.workers_per_host, "pin": not options.no_pin, "echo": True}
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        if reason := NetworkLab.unavailable_reason():
            print(f"{reason} Running on loopback, unshaped.", file=sys.stderr)
            return start_on_loopback(options.command, options.hosts, **start).wait()
        with NetworkLab(options.hosts) as lab:
            lab.shape(options.rate)
            return lab.start(options.command, **start).wait()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
