"""The hosts on which workers of a benchmark run."""

import argparse
import json
import sys
from typing import Any

from benchmarks.network_lab.lab import NetworkLab
from benchmarks.network_lab.workers import read_results, start_on_loopback

UNSHAPED = "unshaped"
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_TOP_PAD_": "67108864"}


class Hosts:
    """Hosts of the network lab, or processes on loopback without a lab or with GPUs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.count, self.on_gpus = options.hosts, options.device == "cuda"
        reason = "GPUs are on one machine." if self.on_gpus else NetworkLab.unavailable_reason()
        self.lab = None if reason else NetworkLab(options.hosts)
        if reason:
            print(f"{reason} Running on loopback, unshaped.", file=sys.stderr)

    def __enter__(self) -> "Hosts":
        if self.lab is not None:
            self.lab.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.lab is not None:
            self.lab.close()

    def run(self, task: dict[str, Any], rate: str, timeout: float) -> dict[str, Any]:
        """Run a task on new workers over links of a rate and return its result.

        Raises:
            RuntimeError: a worker failed; the message ends with its output.
            TimeoutError: the workers exceeded the timeout.
        """
        command = [sys.executable, "-m", "benchmarks.step_time.worker", json.dumps(task)]
        if self.lab is not None:
            self.lab.shape(None if rate == UNSHAPED else rate)
            return read_results(self.lab.run(command, timeout, env=KEEP_MEMORY)[:1])[0]
        hosts, each = (1, self.count) if self.on_gpus else (self.count, 1)
        workers = start_on_loopback(command, hosts, each, KEEP_MEMORY, pin=not self.on_gpus)
        return read_results(workers.outputs(timeout)[:1])[0]
