"""The workers of a process group, and the two collectives that sparse routes need of them."""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _world

from lightning_sparse.exchange.pending import LostWorkerError, Pending, lost_worker

MESSAGE_BYTES = 2**26
"""Of tensors that are gathered for a checkpoint: enough for a network to be busy, and little beside a model."""
TAG = 0x5EA5
"""Of messages between two workers, so that a program's own in the same group, which have 0, meet none of them."""
SMALL_MESSAGE_BYTES = 2**16
"""Readiness to receive goes behind a message of so many bytes without being late: 2.6 ms at 200 Mbit/s."""


@dataclass(frozen=True)
class Workers:
    """The process group of an exchange and what follows from it.

    Over Gloo both gathers are made of messages: every worker first says that it is ready to receive from all others,
    then sends; small messages it sends first, so that nothing arrives meanwhile
    (``lightning_sparse.exchange.gloo_threads``). Gloo's own all-gather is a ring of n − 1 rounds, and a neighbour's
    readiness waits behind the data that goes its way: at 100 Mbit/s 8 MB took two workers 1.5 times as long as their
    links allow, and twice as long with Gloo's all-to-all (benchmarks/scaling.py).

    Attributes:
        group: None is the default group.
        rank: of this worker in the group.
        num_workers: n.
    """

    group: dist.ProcessGroup | None
    rank: int
    num_workers: int

    def all_gather(self, out: Tensor, part: Tensor) -> Pending:
        """Starts gathering equal parts into out, in rank order. Collective.

        Args:
            out: shape (n · m,).
            part: shape (m,), the same dtype and device.
        """
        places = out.view(self.num_workers, -1).unbind()
        if self.sends_messages(out):
            return self._exchange_messages(places, [part] * self.num_workers)
        if out.device.type != "cpu" and dist.get_backend(self.group) == "gloo":
            return Pending([dist.all_gather(list(places), part, group=self.group, async_op=True)], [self._only_other])
        return Pending([dist.all_gather_into_tensor(out, part, group=self.group, async_op=True)], [self._only_other])

    def all_to_all(self, out: Tensor, parts: Tensor) -> Pending:
        """Starts sending the j-th of n equal parts to worker j; what worker i sent becomes the i-th of out. Collective.

        Args:
            out: shape (n · m,).
            parts: shape (n · m,), the same dtype and device.
        """
        if self.sends_messages(out):
            return self._exchange_messages(
                out.view(self.num_workers, -1).unbind(), parts.view(self.num_workers, -1).unbind()
            )
        return Pending([dist.all_to_all_single(out, parts, group=self.group, async_op=True)], [self._only_other])

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Starts summing a tensor over the workers, in place. Collective."""
        return Pending([dist.all_reduce(tensor, group=self.group, async_op=True)], [self._only_other])

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replaces tensors by their mean over the workers, the same bits on all. Collective.

        Args:
            tensors: floating-point or complex, of the same shapes and dtypes on every worker.
        """
        if self.num_workers == 1:
            return
        for some in _messages([_as_real(tensor) for tensor in tensors]):
            flat = torch.cat([tensor.flatten() for tensor in some])
            flat = flat if flat.dtype == torch.float64 else flat.float()
            with lost_worker(self._only_other):
                dist.all_reduce(flat, group=self.group)
            flat.div_(self.num_workers)
            for tensor, mean in zip(some, torch.split(flat, [tensor.numel() for tensor in some]), strict=True):
                tensor.copy_(mean.view(tensor.shape))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Replaces tensors by the first worker's. Collective."""
        if self.num_workers == 1:
            return
        for some in _messages([_as_real(tensor) for tensor in tensors]):
            flat = torch.cat([tensor.flatten() for tensor in some])
            dist.broadcast(flat, self._global_ranks[0], group=self.group)
            for tensor, first in zip(some, torch.split(flat, [tensor.numel() for tensor in some]), strict=True):
                tensor.copy_(first.view(tensor.shape))

    def broadcast_object(self, objects: list[Any]) -> None:
        """Replaces the list's content by the first worker's, on all. Collective."""
        dist.broadcast_object_list(objects, self._global_ranks[0], group=self.group)

    def first_object(self, own: Any) -> Any:
        """Returns the first worker's object that is not None, in rank order; the same on all. Collective."""
        gathered = [None] * self.num_workers
        dist.all_gather_object(gathered, own, group=self.group)
        return next((content for content in gathered if content is not None), None)

    def apart(self, name: str) -> "Workers":
        """Returns the same workers in a new group, with connections of its own. Collective.

        Args:
            name: see ``new_group``.
        """
        made = Workers(new_group(self.group, self._global_ranks, name), self.rank, self.num_workers)
        if not made.is_over_gloo:
            # NCCL connects a group in its first operation, which all must take part in: messages are for two at a time.
            made.all_reduce(torch.zeros(1, device=made.message_device(torch.device("cpu")))).wait()
        return made

    def gather_objects_to_first(self, one: Any) -> list[Any]:
        """Returns what every worker gave, in rank order, on the first worker; an empty list on others. Collective.

        One rank at a time, so the first worker needs the memory of all results and of one more.

        Args:
            one: plain containers and tensors, which ``torch.load(weights_only=True)`` reads.

        Returns:
            What has all tensors on the CPU.
        """
        held = [move_data_to_device(one, torch.device("cpu"))] if self.rank == 0 else []
        for source in range(1, self.num_workers):
            if self.rank == source:
                file = io.BytesIO()
                torch.save(one, file)
                content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
                self._send_to_first(torch.tensor([content.numel()]))
                for part in torch.split(content, MESSAGE_BYTES):
                    self._send_to_first(part)
            elif self.rank == 0:
                content = torch.empty(int(self._receive(source, 1, torch.tensor([0]))), dtype=torch.uint8)
                for part in torch.split(content, MESSAGE_BYTES):
                    part.copy_(self._receive(source, part.numel(), part))
                held.append(torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True))
        return held

    def sum_on_first(self, tensor: Tensor) -> None:
        """Sums a tensor over the workers, in place on the first one; what others have then is undefined. Collective.

        Wherever it is, on each worker for itself.
        """
        if self.num_workers > 1:
            dist.reduce(there := tensor.to(self.message_device(tensor.device)), self._global_ranks[0], group=self.group)
            if there is not tensor:
                tensor.copy_(there)

    def _send_to_first(self, tensor: Tensor) -> None:
        tensor = tensor.to(self.message_device(tensor.device))
        if self.is_over_gloo:
            dist.send(tensor, self._global_ranks[0], group=self.group, tag=TAG)
        else:
            self._in_a_batch(dist.isend, tensor, 0)

    def _receive(self, source: int, numel: int, like: Tensor) -> Tensor:
        """Returns what that rank sends to the first worker, on the CPU: shape (numel,)."""
        place = torch.empty(numel, dtype=like.dtype, device=self.message_device(like.device))
        if self.is_over_gloo:
            dist.recv(place, self._global_ranks[source], group=self.group, tag=TAG)
        else:
            self._in_a_batch(dist.irecv, place, source)
        return place.cpu()

    def _in_a_batch(self, direction: Callable[..., Any], tensor: Tensor, other: int) -> None:
        # A message of its own would have NCCL make a communicator for these two ranks; a batch takes the group's.
        operation = dist.P2POp(direction, tensor, self._global_ranks[other], group=self.group)
        Pending(dist.batch_isend_irecv([operation])).wait()

    def message_device(self, device: torch.device) -> torch.device:
        """Returns where a tensor of a device must be to be sent to one worker: Gloo takes none of a GPU, NCCL only."""
        if self.is_over_gloo:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device()) if device.type == "cpu" else device

    def sends_messages(self, tensor: Tensor) -> bool:
        """Returns whether such a tensor is gathered by messages from each worker to each."""
        return tensor.device.type == "cpu" and "cpu:gloo" in self._backends

    @property
    def is_over_gloo(self) -> bool:
        """Whether messages go over Gloo, as they do where a group takes tensors of a CPU at all."""
        return "cpu:" in self._backends

    @cached_property
    def _backends(self) -> str:
        return dist.get_backend_config(self.group)

    @cached_property
    def _global_ranks(self) -> list[int]:
        if self.group is None:
            return list(range(self.num_workers))
        return [dist.get_global_rank(self.group, rank) for rank in range(self.num_workers)]

    @cached_property
    def _only_other(self) -> int | None:
        """The global rank of the other worker, where there is one."""
        return self._global_ranks[1 - self.rank] if self.num_workers == 2 else None

    def _exchange_messages(self, places: Sequence[Tensor], parts: Sequence[Tensor]) -> Pending:
        # Each begins with its right neighbour, so that not all send to the same worker first.
        others = [(self.rank + distance) % self.num_workers for distance in range(1, self.num_workers)]

        sources = others[::-1]

        def receive() -> list[dist.Work | None]:
            return [self._message(dist.irecv, places[other], other) for other in sources]

        def send() -> list[dist.Work | None]:
            return [self._message(dist.isend, parts[other], other) for other in others]

        small = parts[0].nbytes <= SMALL_MESSAGE_BYTES
        works = [*send(), *receive()] if small else [*receive(), *send()]
        places[self.rank].copy_(parts[self.rank])
        return Pending(
            works, [self._global_ranks[other] for other in (others + sources if small else sources + others)]
        )

    def _message(self, direction: Callable[..., dist.Work | None], tensor: Tensor, other: int) -> dist.Work | None:
        peer = self._global_ranks[other]
        try:  # not ``lost_worker``: this runs for each message
            return direction(tensor, peer, group=self.group, tag=TAG)
        except RuntimeError as error:
            raise LostWorkerError(peer, error) from error


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def new_group(parent: dist.ProcessGroup | None, global_ranks: list[int], name: str) -> dist.ProcessGroup:
    """Returns a new group of these ranks with the timeout of another group. Collective for these ranks alone.

    Args:
        parent: the other group.
        global_ranks: the ranks.
        name: the same on all of them, and one that no group had before: the group's keys in the store begin with it.
    """
    world = dist.group.WORLD
    assert world is not None
    backend, store = _world.pg_map[world]
    # Up to torch 2.14 (pull request 189073) a group has the keys of one of the same ranks that ended before. Workers
    # would find there at which address each listened then, and wait for each other for ever.
    _world.pg_map[world] = (backend, PrefixStore(name, store))
    try:
        made = dist.new_group(global_ranks, timeout=timeout_of(parent), use_local_synchronization=True)
    finally:
        _world.pg_map[world] = (backend, store)
    assert isinstance(made, dist.ProcessGroup)  # a non-member would get a number
    return made


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """Returns the timeout of a group's operations; None, for torch's default, where torch does not tell it."""
    group = group or dist.group.WORLD
    for device in ("cuda", "cpu"):
        if group is not None and torch.device(device) in group._device_types:
            options = getattr(group._get_backend(torch.device(device)), "options", None)
            timeout: timedelta | None = getattr(options, "_timeout", None)
            return timeout
    return None


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that follow each other and go together: of one dtype, and of MESSAGE_BYTES at most if several."""
    some: list[Tensor] = []
    for tensor in tensors:
        together = sum(held.nbytes for held in some) + tensor.nbytes
        if some and (tensor.dtype != some[0].dtype or together > MESSAGE_BYTES):
            yield some
            some = []
        some.append(tensor)
    if some:
        yield some
