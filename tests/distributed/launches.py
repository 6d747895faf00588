"""Counts what a step would launch on a GPU and how often it would wait for it, on a machine that has none.

Tensors are PyTorch's fake ones, which say that they are on a GPU and hold nothing: whoever asks for a number of theirs
is caught. Kernels of ours are counted instead of launched. What an operator of PyTorch launches is counted as one,
though some launch more (a sort, a scan), and views and allocations as none.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse import HardThreshold
from lightning_sparse.engine import Engine, FlatBucket
from lightning_sparse.engine.state import memory
from lightning_sparse.engine.transport_options import TransportOptions
from lightning_sparse.exchange import ExchangeMode, buffers, exchange
from lightning_sparse.exchange.pending import Pending
from lightning_sparse.exchange.routes import adding, gather
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.gradients import buckets as ddp_buckets
from lightning_sparse.gradients import sparse_state
from lightning_sparse.gradients.options import ExchangeOptions
from lightning_sparse.selection import extraction, fused_threshold
from lightning_sparse.selection.bucket import Residual
from lightning_sparse.sparsifiers import LayerLayout, Sparsifier

GPU = torch.device("cuda", 0)
NO_LAUNCH = {
    *("empty", "empty_strided", "empty_like", "new_empty", "view", "slice", "split", "split_with_sizes", "select"),
    *("as_strided", "unsqueeze", "squeeze", "expand", "t", "transpose", "unbind", "detach", "alias", "_unsafe_view"),
    *("permute", "lift_fresh", "view_as_real", "device"),
}
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim", "_unique2"}


@dataclass
class Counts:
    """What one step did.

    Attributes:
        launches: by what it is.
        of_buckets: how many each bucket brought, in order.
        waits: names of what would wait for the device.
        collectives: how many.
    """

    launches: dict[str, int] = field(default_factory=dict)
    of_buckets: list[int] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    collectives: int = 0

    @property
    def total(self) -> int:
        return sum(self.launches.values())

    def launch(self, name: str) -> None:
        self.launches[name] = self.launches.get(name, 0) + 1


class _Counter(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        device = kwargs.get("device")
        is_on_gpu = any(one.device.type == "cuda" for one in tensors) or getattr(device, "type", device) == "cuda"
        if is_on_gpu and name in WAITS:
            self.counts.waits.append(name)
            if name == "nonzero":
                return tensors[0].new_empty((8, 1), dtype=torch.int64)
            if name == "_local_scalar_dense":
                return 8
        if is_on_gpu and name in ("copy_", "_to_copy") and not kwargs.get("non_blocking"):
            result = func(*args, **kwargs)
            if {one.device.type for one in (*tensors, result)} == {"cpu", "cuda"}:
                self.counts.waits.append(name)  # of memory that is not pinned
            self.counts.launch(name)
            return result
        if is_on_gpu and name not in NO_LAUNCH:
            self.counts.launch(name)
        return func(*args, **kwargs)


class _Workers(Workers):
    """Workers whose collectives are counted and do nothing."""

    def all_gather(self, out, part):
        return self._count()

    def all_to_all(self, out, parts):
        return self._count()

    def all_reduce(self, tensor):
        return self._count()

    def _count(self):
        _now.counts.collectives += 1
        return Pending([])


class _Now:
    counts: Counts
    headers: torch.Tensor
    leave_fake: Callable[[], None]


_now = _Now()


def _copy_to_host(table, buffers):
    """In place of the copy to the host: after its wait numbers are real."""
    _now.counts.launch("copy to the host")

    def wait():
        _now.counts.waits.append("headers")
        _now.leave_fake()
        return _now.headers[: table.shape[1]].expand(table.shape)

    return wait


def measure(
    sparsifier: Sparsifier,
    *,
    mode: ExchangeMode = "gather",
    per_layer: bool = False,
    has_notes: bool = False,
    num_workers: int = 8,
    num_buckets: int = 17,
    num_layers: int = 150,
    dtype: torch.dtype = torch.float32,
    scaled: bool = False,
    has_kernels: bool = True,
    steps: int = 3,
) -> Counts:
    """Returns the counts of the last of some steps; in a process group of one, which is said to have more workers."""
    _pretend(num_workers, has_kernels=has_kernels)
    engine = Engine(sparsifier, TransportOptions(exchange=mode), per_layer_stats=per_layer)
    engine.begin_epoch(0, [0.1])
    layouts = []
    for place in range(num_buckets):
        names = tuple(f"{place}.{layer}" for layer in range(place, num_layers, num_buckets))
        layouts.append(LayerLayout(names, (100_000,) * len(names)))
    headers: list[float] = []
    for layout in layouts:
        of_layers = 2 * len(layout.names) * (per_layer + has_notes)
        headers += [100.0, 20.0, 0.0, 1.0, 1.0] + [1.0 + place for place in range(of_layers)]
    _now.headers = torch.tensor(headers + [30.0] * num_buckets, dtype=torch.float64)  # and what sizes there are
    for _ in range(steps):
        _let_go(engine)
        _step(engine, layouts, dtype, scaled, has_notes)
    return _now.counts


def measure_door(
    *,
    has_unused: bool = False,
    scaled: bool = False,
    num_workers: int = 8,
    num_buckets: int = 17,
    num_layers: int = 150,
) -> Counts:
    """Returns the counts of the last of some steps through DDP's door: residuals, unused layers, the way back."""
    ddp_buckets.torch.futures.Future = lambda devices=None: SimpleNamespace(set_result=lambda value: None)
    buffers.let_go = memory.let_go = lambda tensor: None
    _pretend(8, has_kernels=True)
    names = [[f"{place}.{layer}" for layer in range(place, num_layers, num_buckets)] for place in range(num_buckets)]
    parameters = {name: torch.nn.Parameter(torch.zeros(1000)) for some in names for name in some}
    counts = _now.counts = Counts()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        scale = torch.empty(1, device=GPU) if scaled else None
        gradients = [torch.empty(1000 * len(some), device=GPU) for some in names]
    state = sparse_state.SparseState(
        HardThreshold(threshold=0.1),
        ExchangeOptions(exchange="gather"),
        {one: name for name, one in parameters.items()},
        allows_unused_parameters=has_unused,
        loss_scale=lambda: scale,
    )
    headers: list[float] = []
    for place, some in enumerate(names):
        used = [float(not has_unused or place % 2 == 0)] * len(some) + [0.0] * len(some)
        headers += [100.0, 20.0, 0.0, 1.0, 1.0] + used * has_unused
    _now.headers = torch.tensor(headers, dtype=torch.float64)
    for _ in range(3):
        counts = _now.counts = Counts()
        counter = _Counter(counts)

        def leave_fake(counter: _Counter = counter) -> None:
            counter.__exit__(None, None, None)
            fake.__exit__(None, None, None)
            counter.__enter__()

        _now.leave_fake = leave_fake
        if has_unused:
            state._use._used |= {name for place, some in enumerate(names) for name in some if place % 2 == 0}
        fake.__enter__()
        counter.__enter__()
        for place, (some, gradient) in enumerate(zip(names, gradients, strict=True)):
            layers = [parameters[name] for name in some]
            grad_bucket = SimpleNamespace(
                index=partial(int, place),
                buffer=lambda gradient=gradient: gradient,
                parameters=partial(list, layers),
                is_last=partial(bool, place == num_buckets - 1),
            )
            state.receive(grad_bucket)
        counter.__exit__(None, None, None)
        state.commit()
    return counts


def _pretend(num_workers: int, *, has_kernels: bool) -> None:
    """Has this process's package believe in kernels, and in workers that answer at once."""
    torch.Tensor.pin_memory = lambda self: self  # there is no driver that could
    for module in (adding, gather, extraction):
        module.is_available = lambda device: has_kernels
    for module in (fused_threshold, adding):
        module.launch = lambda kernel, *arguments, **constants: _now.counts.launch(kernel.fn.__name__)
    exchange.Workers = lambda group, rank, size: _Workers(group, rank, num_workers)
    exchange.copy_to_host = _copy_to_host


def _step(engine: Engine, layouts: list[LayerLayout], dtype: torch.dtype, scaled: bool, has_notes: bool) -> None:
    counts = _now.counts = Counts()
    counter, fake = _Counter(counts), FakeTensorMode(allow_non_fake_inputs=True)

    def leave_fake() -> None:
        counter.__exit__(None, None, None)
        fake.__exit__(None, None, None)
        counter.__enter__()

    _now.leave_fake = leave_fake
    fake.__enter__()
    scale = torch.empty(1, device=GPU) if scaled else None
    notes = {layout: torch.empty(2 * len(layout.names), dtype=torch.float64, device=GPU) for layout in layouts}
    counter.__enter__()
    engine.begin()
    buckets = []
    for place, layout in enumerate(layouts):
        gradient = torch.empty(layout.num_elements, dtype=dtype, device=GPU)
        residual = Residual(*torch.empty(2, layout.num_elements, device=GPU).unbind())
        bucket = FlatBucket(place, layout, gradient, residual, place == len(layouts) - 1, loss_scale=scale)
        bucket.notes = notes[layout] if has_notes else None
        buckets.append(bucket)
    engine.survey(buckets)
    for bucket in buckets:
        before = counts.total
        engine.add(bucket)
        counts.of_buckets.append(counts.total - before)
    engine.finish()
    counter.__exit__(None, None, None)
    engine.account()


def _let_go(engine: Engine) -> None:
    """Lets go of what belongs to the last step's fake device, so that what is made once is counted in each step."""
    engine._exchange._buffers._held.clear()
    engine._averages._held.clear()
    engine._extraction._fused._space._held.clear()
    fused_threshold._threshold_tables.cache_clear()
    fused_threshold._edge_tables.cache_clear()
