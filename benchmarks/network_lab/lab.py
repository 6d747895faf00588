"""Hosts as network namespaces on a bridge, with links whose rate can be changed and cut."""

import atexit
import contextlib
import itertools
import json
import os
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.network_lab.namespaces import PREFIX, configure, remove, run, shape_line
from benchmarks.network_lab.workers import Workers

INTERFACE = "uplink"
# Longest frame of TCP. The kernel would cut a frame longer than the burst into 1500 bytes, which takes CPU time.
FRAME_BYTES = 16_384
# Opcodes of classic BPF, because few kernels include tc's netem.
LOAD_RANDOM, JUMP_IF_GREATER, RETURN = "32 0 0 4294963256", "37 1 0", "6 0 0"
LOST, PASSED = 2, 0
_numbers = itertools.count()


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
            run("ip", "netns", "add", probe)
            configure("ip", probe, "link add name a type veth peer name b", "link add name c type bridge")
            configure("tc", probe, "qdisc add dev a root tbf rate 1gbit burst 100000 limit 100000")
        except RuntimeError as error:
            return f"This machine does not support network namespaces: {error}."
        finally:
            remove(probe)
        return None

    def __enter__(self) -> "NetworkLab":
        if reason := self.unavailable_reason():
            raise RuntimeError(reason)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, exit_on_sigterm)
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
            self._cleanup.callback(remove, namespace)
            run("ip", "netns", "add", namespace)
        configure("ip", self._bridge, "link add name bridge type bridge", "link set bridge addrgenmode none up")
        for host, namespace in enumerate(namespaces):
            # No IPv6 address, because its packets would count. Linux's default congestion control on any machine.
            configure(
                "ip",
                namespace,
                "link set lo up",
                f"link add name {INTERFACE} type veth peer name port{host} netns {self._bridge}",
                f"link set {INTERFACE} addrgenmode none gso_max_size {FRAME_BYTES} up",
                f"address add {self.address(host)}/24 dev {INTERFACE} noprefixroute",
                f"route add 10.77.0.0/24 dev {INTERFACE} congctl cubic",
            )
            configure("ip", self._bridge, f"link set port{host} master bridge addrgenmode none up")
            # New connections must not reuse TCP metrics of a link with another rate.
            run(*self.on_host(host, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save"]))

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
            configure("tc", self.namespace(host), shape_line(INTERFACE, rate))
            configure("tc", self._bridge, shape_line(f"port{host}", rate))

    def lose(self, share: float) -> None:
        """Drop a share of the frames (up to 16 kB) that each host receives.

        Raises:
            RuntimeError: The kernel does not support BPF in tc.
        """
        for host in range(self.hosts):
            program = f"4,{LOAD_RANDOM},{JUMP_IF_GREATER} {int(2**32 * share)},{RETURN} {LOST},{RETURN} {PASSED}"
            configure(
                "tc",
                self.namespace(host),
                f"qdisc add dev {INTERFACE} clsact",
                f"filter add dev {INTERFACE} ingress bpf da bytecode {program!r}",
            )

    def link_down(self, host: int) -> None:
        """Disconnect a host: its interface loses the carrier and all packets are lost."""
        configure("ip", self._bridge, f"link set port{host} down")

    def link_up(self, host: int) -> None:
        """Reconnect a host; the link keeps its rate."""
        configure("ip", self._bridge, f"link set port{host} up")

    def bytes_sent(self, host: int) -> int:
        """Return the bytes that a host has sent since the start, with headers once per frame of TCP."""
        return self._counter(host, "tx")

    def bytes_received(self, host: int) -> int:
        """Return the bytes that a host has received since the start, with headers as in `bytes_sent`."""
        return self._counter(host, "rx")

    def _counter(self, host: int, direction: str) -> int:
        report = run("ip", "-n", self.namespace(host), "-j", "-s", "link", "show", "dev", INTERFACE)
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


def interface_bytes() -> tuple[int, int]:
    """Return the bytes that this host's interface has received and sent, with headers."""
    with open("/proc/self/net/dev") as lines:
        fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(fields[0]), int(fields[8])


def exit_on_sigterm(number: int, _: object) -> None:
    """Handle SIGTERM by leaving all blocks, as after Ctrl-C."""
    raise SystemExit(128 + number)
