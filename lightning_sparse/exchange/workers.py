"""The workers of a process group and their collectives."""

import atexit
import contextlib
import io
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch._utils import _take_tensors, _unflatten_dense_tensors
from torch.distributed.utils import _sync_params_and_buffers

MESSAGE_BYTES = 2**26
"""Bytes per message when a checkpoint gathers tensors: large for a network, and small relative to a model."""
TAG = 0x5EA5
"""The tag of our messages between two workers, which separates them from a program's messages with tag 0."""
SMALL_MESSAGE_BYTES = 2**16
"""Up to this size, receives are posted after sends; the delay is at most 2.6 ms at 200 Mbit/s."""
GLOO_THREAD = b"gloo_tcp_loop"
"""The name of Gloo's threads in torch 2.15. In torch 2.8 they have no name and are not changed."""
SECONDS_AT_EXIT = 0.1
"""How long Python's end waits for Gloo's threads."""
_abandoned: list[list[tuple[dist.Work | None, int | None]]] = []
"""Works of interrupted exchanges. While they and their payloads exist, their messages arrive and do not block later
messages on the same connections."""


def as_real(tensor: Tensor) -> Tensor:
    """Return a view with real numbers; complex tensors get a last dimension of two."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class LostWorkerError(RuntimeError):
    """A message or collective failed, most likely because another worker ended.

    Args:
        peer: the other worker's global rank; None if several take part and torch does not name the failed worker.
        cause: the error of torch.
    """

    def __init__(self, peer: int | None, cause: BaseException) -> None:
        who = "another rank" if peer is None else f"rank {peer}"
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        super().__init__(f"{who} ended, stopped or took another step: {reason}")


class Pending:
    """Pending messages or collectives, which still arrive if this object is deleted.

    Args:
        works: the works to wait for, each with the global rank of the other worker; None if all workers take part.
    """

    def __init__(self, works: Sequence[tuple[dist.Work | None, int | None]] = ()) -> None:
        self._works = [(work, peer) for work, peer in works if work is not None]

    def __del__(self, abandoned: list[list[Any]] = _abandoned) -> None:
        # A message without a receiver would block Gloo's connection forever.
        if works := getattr(self, "_works", None):  # an incomplete copy has no works
            abandoned.append(works)

    def wait(self) -> None:
        """Wait until all works have ended; on a GPU, the current stream waits.

        After success, a second call returns at once.

        Raises:
            LostWorkerError: a work failed.
        """
        while self._works:
            work, peer = self._works[0]
            try:
                work.wait()
            except RuntimeError as error:
                raise LostWorkerError(peer, error) from error
            del self._works[0]


@dataclass(frozen=True)
class Workers:
    """The process group of an exchange and its collectives.

    Over Gloo on CPUs, all-gather and all-to-all consist of messages between pairs. A worker posts its receives before
    it sends; with small messages it sends first, so that none arrives meanwhile (``use_batch_scheduling``). Gloo's own
    all-gather is a ring of n − 1 rounds, in which a posted receive waits behind data in its direction. At 100 Mbit/s,
    8 MB between two workers took 1.5 times the link's time with Gloo's all-gather, and twice with its all-to-all
    (benchmarks/scaling.py).

    Attributes:
        group: the process group; None is the default group.
        rank: rank of this worker in the group.
        num_workers: n.
    """

    group: dist.ProcessGroup | None
    rank: int
    num_workers: int
    reads_averages: ClassVar[bool] = True
    """Whether this worker's averages are read. Of simulated workers, only those of rank 0 are."""

    def all_gather(self, out: Tensor, part: Tensor) -> Pending:
        """Start gathering parts of shape (m,) into out, of shape (n · m,), in rank order. Collective.

        Over Gloo's TCP transport, parts may be shorter than m and differ in length. The rest of out's row is kept.
        """
        outputs = out.view(self.num_workers, -1).unbind()
        if self.sends_messages(out):
            return self._exchange_messages(outputs, [part] * self.num_workers)
        if out.device.type != "cpu" and dist.get_backend(self.group) == "gloo":
            return self._make_pending(dist.all_gather(list(outputs), part, group=self.group, async_op=True))
        return self._make_pending(dist.all_gather_into_tensor(out, part, group=self.group, async_op=True))

    def all_to_all(self, out: Tensor, parts: Tensor) -> Pending:
        """Start an all-to-all of tensors of shape (n · m,). Collective.

        Part j of ``parts`` goes to worker j; part i of ``out`` is from worker i.
        """
        if self.sends_messages(out):
            outputs, given = (tensor.view(self.num_workers, -1).unbind() for tensor in (out, parts))
            return self._exchange_messages(outputs, given)
        return self._make_pending(dist.all_to_all_single(out, parts, group=self.group, async_op=True))

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Start summing a tensor over the workers, in place. Collective."""
        return self._make_pending(dist.all_reduce(tensor, group=self.group, async_op=True))

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their mean, and integers and booleans by those of rank 0. Collective.

        All workers get the same bits.
        """
        if self.num_workers == 1:
            return
        filled = [*map(as_real, filter(Tensor.numel, tensors))]  # torch 2.8 loses empty shapes
        floating = [tensor for tensor in filled if tensor.is_floating_point()]
        if len(floating) < len(filled):
            self.broadcast([tensor for tensor in filled if not tensor.is_floating_point()])
        for batch in _take_tensors(floating, MESSAGE_BYTES):  # type: ignore[no-untyped-call]
            flat = torch.cat([tensor.flatten() for tensor in batch])
            flat = flat if flat.dtype == torch.float64 else flat.float()
            self.all_reduce(flat).wait()
            means = _unflatten_dense_tensors(flat.div_(self.num_workers), batch)  # type: ignore[no-untyped-call]
            torch._foreach_copy_(batch, means)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of rank 0. Collective."""
        group = self.group or dist.group.WORLD
        if self.num_workers > 1 and group is not None:
            _sync_params_and_buffers(group, [*map(as_real, tensors)], MESSAGE_BYTES, src=0)

    def gather_numbers(self, numbers: Sequence[float], device: torch.device) -> Tensor:
        """Return all workers' numbers in rank order: float64, shape (n, numbers), on the CPU. Collective.

        ``device`` is a device on which the group can communicate.
        """
        local_value = torch.tensor(numbers, dtype=torch.float64)
        if self.num_workers == 1:
            return local_value.view(1, -1)
        local_value = local_value.to(device)
        gathered = local_value.new_empty(self.num_workers * local_value.numel())
        self.all_gather(gathered, local_value).wait()
        return gathered.view(self.num_workers, -1).cpu()

    def gather_objects_to_first(self, local_value: Any) -> list[Any]:
        """Return all workers' objects on rank 0, else an empty list. Collective.

        The list is in rank order, with tensors on the CPU. Only one rank sends at a time, so rank 0 needs the memory of
        all objects and one more. ``torch.load(weights_only=True)`` must be able to read the objects.
        """
        objects = [move_data_to_device(local_value, torch.device("cpu"))] if self.rank == 0 else []
        for source in range(1, self.num_workers):
            if self.rank == source:
                file = io.BytesIO()
                torch.save(local_value, file)
                content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
                for part in (torch.tensor([content.numel()]), *torch.split(content, MESSAGE_BYTES)):
                    self._send_or_receive(part, source)
            elif self.rank == 0:
                size = torch.zeros(1, dtype=torch.int64)
                self._send_or_receive(size, source)
                content = torch.empty(int(size), dtype=torch.uint8)
                for part in torch.split(content, MESSAGE_BYTES):
                    self._send_or_receive(part, source)
                objects.append(torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True))
        return objects

    @property
    def message_device(self) -> torch.device:
        """The device for sending a CPU tensor: the CPU for Gloo, a GPU for NCCL."""
        return torch.device("cpu") if self.is_over_gloo else torch.device("cuda", torch.cuda.current_device())

    def sends_messages(self, tensor: Tensor) -> bool:
        """Return whether workers gather this tensor by messages between all pairs."""
        return tensor.device.type == "cpu" and "cpu:gloo" in self._backends

    @property
    def is_over_gloo(self) -> bool:
        """Whether messages use Gloo, which is true for every group that supports CPU tensors."""
        return "cpu:" in self._backends

    @cached_property
    def _backends(self) -> str:
        return dist.get_backend_config(self.group)

    @cached_property
    def global_ranks(self) -> list[int]:
        """The global rank of each worker."""
        return list(range(self.num_workers)) if self.group is None else dist.get_process_group_ranks(self.group)

    def _make_pending(self, work: dist.Work | None) -> Pending:
        # With two workers, the lost worker is the other one.
        return Pending([(work, self.global_ranks[1 - self.rank] if self.num_workers == 2 else None)])

    def _exchange_messages(self, outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> Pending:
        # Each worker starts with its right neighbour, so that not all send to the same worker first.
        others = [(self.rank + distance) % self.num_workers for distance in range(1, self.num_workers)]
        sent = [(dist.isend, parts[other], self.global_ranks[other]) for other in others]
        received = [(dist.irecv, outputs[other], self.global_ranks[other]) for other in reversed(others)]
        messages = sent + received if parts[0].nbytes <= SMALL_MESSAGE_BYTES else received + sent
        works: list[tuple[dist.Work | None, int | None]] = []
        try:
            for start, tensor, peer in messages:
                works.append((start(tensor, peer, group=self.group, tag=TAG), peer))
        except BaseException as error:
            _abandoned.append(works)  # these messages still arrive
            if isinstance(error, RuntimeError):
                raise LostWorkerError(peer, error) from error
            raise
        own = parts[self.rank]
        outputs[self.rank][: own.numel()].copy_(own)
        return Pending(works)

    def _send_or_receive(self, tensor: Tensor, source: int) -> None:
        """Send a CPU tensor from worker ``source`` to rank 0, which receives it in place."""
        device, sends = self.message_device, self.rank == source
        part = tensor.to(device) if sends else torch.empty_like(tensor, device=device)
        peer = self.global_ranks[0 if sends else source]
        if self.is_over_gloo:
            (dist.send if sends else dist.recv)(part, peer, group=self.group, tag=TAG)
        else:
            # For a single message, NCCL would create a communicator of two ranks; a batch uses the group's.
            operation = dist.P2POp(dist.isend if sends else dist.irecv, part, peer, group=self.group)
            Pending([(work, peer) for work in dist.batch_isend_irecv([operation])]).wait()
        if not sends:
            tensor.copy_(part)


def use_batch_scheduling() -> None:
    """Prevent Gloo's receiving threads from preempting sending threads. On Linux, without privileges.

    A receiving thread polls for the lock of a sender to the same worker (``Pair::handleEvents``,
    gloo/transport/tcp/pair.cc), and the kernel lets a waking thread preempt a computing one. So on a single core, an
    arrival stops the sender for the rest of the kernel's time slice: 2 to 3 ms per message of any size. A thread of the
    class ``SCHED_BATCH`` (sched(7)) has the same share of the cores and does not preempt others when it wakes. Threads
    with another scheduling class keep it.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for folder in Path("/proc/self/task").glob("*"):  # empty on other systems
        with contextlib.suppress(OSError):  # the thread has ended, or the kernel forbids it
            is_gloo = (folder / "comm").read_bytes().strip() == GLOO_THREAD
            if is_gloo and os.sched_getscheduler(int(folder.name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(folder.name), os.SCHED_BATCH, os.sched_param(0))


@cache
def wait_for_threads_at_exit() -> None:
    """Give Gloo's threads time to release tensors before Python ends; once per process.

    With torch 2.15, a thread that waits for Python's lock when Python ends aborts the process, with status 134
    (pytorch/pytorch#190489).
    """
    atexit.register(time.sleep, SECONDS_AT_EXIT)
