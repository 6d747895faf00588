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
import signal
import sys
from collections.abc import Sequence

from benchmarks.network_lab.lab import NetworkLab, exit_on_sigterm
from benchmarks.network_lab.namespaces import clean
from benchmarks.network_lab.workers import start_on_loopback


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command on every host of a lab, or on loopback, and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network_lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    signal.signal(signal.SIGTERM, exit_on_sigterm)
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
