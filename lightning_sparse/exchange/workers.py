"""The workers of a process group and their collectives."""

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_sparse.exchange.agreement import gather_objects

MESSAGE_BYTES = 2**26
"""Of tensors that are gathered for a checkpoint: enough for a network to be busy, and little beside a model."""
TAG = 0x5EA5
"""The tag of our messages between two workers, so that none meets a program's own in the same group, with tag 0."""
SMALL_MESSAGE_BYTES = 2**16
"""Readiness to receive may be sent after a message of so many bytes without being late: 2.6 ms at 200 Mbit/s."""
GLOO_THREAD = b"gloo_tcp_loop"
"""The name of Gloo's threads in torch 2.15; that of 2.8 gives them no name, and they are left alone."""
_abandoned: list[list[tuple[dist.Work, int | None]]] = []
"""Works of exchanges that were broken off: a few small objects, and their payloads, for each. The messages still arrive
there, so that they do not hold up later messages on the same connections."""


class LostWorkerError(RuntimeError):
    """A message or collective failed, most likely because another worker ended.

    Args:
        peer: the other worker's global rank; None where several take part and torch does not tell which one failed.
        cause: the error that torch raised.
    """

    def __init__(self, peer: int | None, cause: BaseException) -> None:
        who = "another rank" if peer is None else f"rank {peer}"
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        super().__init__(f"{who} ended, stopped or took another step: {reason}")


class Pending:
    """Messages or collectives under way. They still arrive if the object is deleted before they end.

    Args:
        works: the works to wait for.
        peers: of each work, the global rank of the worker at its other end; None where all take part.
    """

    def __init__(self, works: Sequence[dist.Work | None], peers: Sequence[int | None] = ()) -> None:
        peers = peers or [None] * len(works)
        self._works = [(work, peer) for work, peer in zip(works, peers, strict=True) if work is not None]

    def __del__(self, abandoned: list[list[tuple[dist.Work, int | None]]] = _abandoned) -> None:
        # Gloo's connection stands still for ever where a message arrives whose receiver is gone.
        if works := getattr(self, "_works", None):  # a copy that was broken off has none
            abandoned.append(works)

    def wait(self) -> None:
        """Wait until all have ended; on a GPU make the current stream wait. A second call returns at once.

        Raises:
            LostWorkerError: a work failed.
        """
        works, self._works = self._works, []
        for work, peer in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise LostWorkerError(peer, error) from error


@dataclass(frozen=True)
class Workers:
    """The process group of an exchange and its collectives.

    Over Gloo, gather and all-to-all are made of messages: every worker first says that it is ready to receive from all
    others, then sends. It sends small messages first, so that nothing arrives meanwhile (``let_senders_finish``).
    Gloo's own all-gather is a ring of n − 1 rounds, and a neighbour's readiness waits behind the data that goes its
    way. At 100 Mbit/s two workers took 1.5 times as long for 8 MB as their links allow, and twice as long with Gloo's
    all-to-all (benchmarks/scaling.py).

    Attributes:
        group: None is the default group.
        rank: of this worker in the group.
        num_workers: n.
    """

    group: dist.ProcessGroup | None
    rank: int
    num_workers: int

    def all_gather(self, out: Tensor, part: Tensor) -> Pending:
        """Start gathering parts of shape (m,) into out, of shape (n · m,), in rank order. Collective."""
        places = out.view(self.num_workers, -1).unbind()
        if self.sends_messages(out):
            return self._exchange_messages(places, [part] * self.num_workers)
        if out.device.type != "cpu" and dist.get_backend(self.group) == "gloo":
            return self._pending(dist.all_gather(list(places), part, group=self.group, async_op=True))
        return self._pending(dist.all_gather_into_tensor(out, part, group=self.group, async_op=True))

    def all_to_all(self, out: Tensor, parts: Tensor) -> Pending:
        """Start sending the j-th of n equal parts to worker j; the part from worker i becomes out's i-th. Collective.

        Both tensors have the shape (n · m,).
        """
        if self.sends_messages(out):
            places, given = (tensor.view(self.num_workers, -1).unbind() for tensor in (out, parts))
            return self._exchange_messages(places, given)
        return self._pending(dist.all_to_all_single(out, parts, group=self.group, async_op=True))

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Start summing a tensor over the workers, in place. Collective."""
        return self._pending(dist.all_reduce(tensor, group=self.group, async_op=True))

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace floating-point or complex tensors by their mean, the same bits on all workers. Collective."""

        def mean(flat: Tensor) -> Tensor:
            flat = flat if flat.dtype == torch.float64 else flat.float()
            self.all_reduce(flat).wait()
            return flat.div_(self.num_workers)

        if self.num_workers > 1:
            _replace(tensors, mean)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by the first worker's. Collective."""

        def first(flat: Tensor) -> Tensor:
            dist.broadcast(flat, self.global_ranks[0], group=self.group)
            return flat

        if self.num_workers > 1:
            _replace(tensors, first)

    def first_object(self, own: Any) -> Any:
        """Return the first worker's object that is not None, in rank order; the same on all. Collective."""
        return next((given for given in gather_objects(own, self.group) if given is not None), None)

    def gather_numbers(self, numbers: Sequence[float], device: torch.device) -> Tensor:
        """Return all workers' numbers in rank order: float64, shape (n, numbers), on the CPU. Collective.

        The numbers travel from ``device``, on which the group works.
        """
        own = torch.tensor(numbers, dtype=torch.float64)
        if self.num_workers == 1:
            return own.view(1, -1)
        own = own.to(device)
        everyone = own.new_empty(self.num_workers * own.numel())
        self.all_gather(everyone, own).wait()
        return everyone.view(self.num_workers, -1).cpu()

    def gather_objects_to_first(self, own: Any) -> list[Any]:
        """Return the objects of all workers, in rank order, on the first worker; an empty list on others. Collective.

        One rank sends at a time, so the first worker needs the memory of all results and of one more. Objects are plain
        containers and tensors, which ``torch.load(weights_only=True)`` reads; all tensors of the result are on the CPU.
        """
        held = [move_data_to_device(own, torch.device("cpu"))] if self.rank == 0 else []
        for source in range(1, self.num_workers):
            if self.rank == source:
                file = io.BytesIO()
                torch.save(own, file)
                content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
                for part in (torch.tensor([content.numel()]), *torch.split(content, MESSAGE_BYTES)):
                    self._transfer(part, source)
            elif self.rank == 0:
                size = torch.zeros(1, dtype=torch.int64)
                self._transfer(size, source)
                content = torch.empty(int(size), dtype=torch.uint8)
                for part in torch.split(content, MESSAGE_BYTES):
                    self._transfer(part, source)
                held.append(torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True))
        return held

    def sum_on_first(self, tensor: Tensor) -> None:
        """Sum a tensor of any device over the workers, in place on the first; undefined on the others. Collective."""
        if self.num_workers > 1:
            total = tensor.to(self.message_device(tensor.device))
            dist.reduce(total, self.global_ranks[0], group=self.group)
            if total is not tensor:
                tensor.copy_(total)

    def message_device(self, device: torch.device) -> torch.device:
        """Return where a tensor of a device must be to be sent: Gloo takes none of a GPU, NCCL nothing else."""
        if self.is_over_gloo:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device()) if device.type == "cpu" else device

    def sends_messages(self, tensor: Tensor) -> bool:
        """Return whether the workers gather such a tensor by messages from each worker to each."""
        return tensor.device.type == "cpu" and "cpu:gloo" in self._backends

    @property
    def is_over_gloo(self) -> bool:
        """Whether messages go over Gloo, as they do where a group takes tensors of a CPU at all."""
        return "cpu:" in self._backends

    @cached_property
    def _backends(self) -> str:
        return dist.get_backend_config(self.group)

    @cached_property
    def global_ranks(self) -> list[int]:
        """The global rank of each worker."""
        return list(range(self.num_workers)) if self.group is None else dist.get_process_group_ranks(self.group)

    def _pending(self, work: dist.Work | None) -> Pending:
        # Of two workers, the other is the one that is lost.
        return Pending([work], [self.global_ranks[1 - self.rank] if self.num_workers == 2 else None])

    def _exchange_messages(self, places: Sequence[Tensor], parts: Sequence[Tensor]) -> Pending:
        # Each begins with its right neighbour, so that not all send to the same worker first.
        others = [(self.rank + distance) % self.num_workers for distance in range(1, self.num_workers)]
        sent = [(dist.isend, parts[other], self.global_ranks[other]) for other in others]
        received = [(dist.irecv, places[other], self.global_ranks[other]) for other in reversed(others)]
        messages = sent + received if parts[0].nbytes <= SMALL_MESSAGE_BYTES else received + sent
        works = []
        for start, tensor, peer in messages:
            try:
                works.append(start(tensor, peer, group=self.group, tag=TAG))
            except RuntimeError as error:
                raise LostWorkerError(peer, error) from error
        places[self.rank].copy_(parts[self.rank])
        return Pending(works, [peer for *_, peer in messages])

    def _transfer(self, tensor: Tensor, source: int) -> None:
        """Send a tensor of the CPU from that worker to the first one, which receives it in place."""
        device, sends = self.message_device(tensor.device), self.rank == source
        part = tensor.to(device) if sends else torch.empty_like(tensor, device=device)
        peer = self.global_ranks[0 if sends else source]
        if self.is_over_gloo:
            (dist.send if sends else dist.recv)(part, peer, group=self.group, tag=TAG)
        else:
            # A message of its own would have NCCL make a communicator for these two ranks; a batch takes the group's.
            operation = dist.P2POp(dist.isend if sends else dist.irecv, part, peer, group=self.group)
            Pending(dist.batch_isend_irecv([operation])).wait()
        if not sends:
            tensor.copy_(part)


def let_senders_finish() -> None:
    """Have the threads in which Gloo handles arrivals wait for those that send. On Linux, without privileges.

    Such a thread polls for the lock that a sender to the same worker holds (``Pair::handleEvents``,
    gloo/transport/tcp/pair.cc), and the kernel gives a thread that wakes the core of one that computes. So on a single
    core arrivals stop the sender until the kernel's time slice is over: 2 to 3 ms per message of any size. A thread of
    the class ``SCHED_BATCH`` (sched(7)) has the same share of the cores and preempts no other thread when it wakes.
    Threads that were given a scheduling class already keep it.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for folder in Path("/proc/self/task").glob("*"):  # none elsewhere
        with contextlib.suppress(OSError):  # it has ended, or the kernel forbids it
            is_gloo = (folder / "comm").read_bytes().strip() == GLOO_THREAD
            if is_gloo and os.sched_getscheduler(int(folder.name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(folder.name), os.SCHED_BATCH, os.sched_param(0))


def _replace(tensors: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> None:
    """Replace tensors by the results of a collective on several of them at once, flat."""
    for some in _messages([torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]):
        flat = change(torch.cat([tensor.flatten() for tensor in some]))
        for tensor, new in zip(some, torch.split(flat, [tensor.numel() for tensor in some]), strict=True):
            tensor.copy_(new.view(tensor.shape))


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors that follow each other: of the same dtype, and of at most MESSAGE_BYTES if they are several."""
    some: list[Tensor] = []
    for tensor in tensors:
        together = sum(held.nbytes for held in some) + tensor.nbytes
        if some and (tensor.dtype != some[0].dtype or together > MESSAGE_BYTES):
            yield some
            some = []
        some.append(tensor)
    if some:
        yield some
