"""Counts kernel launches of a step on a GPU and waits of the host, on a machine without a GPU.

Tensors are PyTorch's fake ones: they claim a GPU and hold nothing. Code that asks for a number of theirs
is caught. Kernels of ours are counted instead of launched. What an operator of PyTorch launches is counted as one,
though some launch more (a sort, a scan), and views and allocations as none.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse import (
    Accordion,
    GaussianK,
    HardThreshold,
    RandomK,
    ScaledIntegerRounding,
    StochasticRounding,
    TopK,
)
from lightning_sparse.engine import residuals
from lightning_sparse.engine.options import GradientOptions
from lightning_sparse.exchange import buffers
from lightning_sparse.exchange import exchange as exchange_module
from lightning_sparse.exchange.exchange import ExchangeMode
from lightning_sparse.exchange.routes import adding, gather
from lightning_sparse.exchange.workers import Pending, Workers
from lightning_sparse.gradients import buckets as ddp_buckets
from lightning_sparse.gradients import ddp_averager
from lightning_sparse.selection import extraction, fused_threshold
from lightning_sparse.sparsifiers.protocol import Sparsifier
from tests.workers import run_workers

pytestmark = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 11), reason=f"torch {torch.__version__} asks for a GPU where tensors are fake"
)
BUCKETS, LAYERS = 4, 36
THRESHOLD = HardThreshold(threshold=0.1)
MODEL_TOP_K = TopK(0.01, granularity="model")
LAYERWISE = HardThreshold(threshold=0.1, layer_thresholds={"*.2": 0.2})
BFLOAT16 = {"dtype": torch.bfloat16}


GPU, SIZE = torch.device("cuda", 0), 100_000
NO_LAUNCH = {
    *("empty", "empty_strided", "empty_like", "new_empty", "view", "slice", "split", "split_with_sizes", "select"),
    *("as_strided", "unsqueeze", "squeeze", "expand", "t", "transpose", "unbind", "detach", "alias", "_unsafe_view"),
    *("permute", "lift_fresh", "view_as_real", "device"),
}
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim", "_unique2"}


@dataclass
class Counts:
    """Launches of a step, and names of operations that wait for the device."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: list[str] = field(default_factory=list)


class _Counter(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = kwargs.get("device")
        is_on_gpu = any(tensor.device.type == "cuda" for tensor in tensors) or getattr(device, "type", device) == "cuda"
        if is_on_gpu and name in WAITS:
            self.counts.waits.append(name)
            if name == "nonzero":
                return tensors[0].new_empty((8, 1), dtype=torch.int64)
            if name == "_local_scalar_dense":
                return 8
        if is_on_gpu and name in ("copy_", "_to_copy") and not kwargs.get("non_blocking"):
            result = func(*args, **kwargs)
            if {tensor.device.type for tensor in (*tensors, result)} == {"cpu", "cuda"}:
                self.counts.waits.append(name)  # the memory is not pinned
            self.counts.launches[name] += 1
            return result
        if is_on_gpu and name not in NO_LAUNCH:
            self.counts.launches[name] += 1
        return func(*args, **kwargs)


class _Workers(Workers):
    """Workers whose collectives do nothing."""

    def all_gather(self, out, part):
        return Pending()

    all_to_all = all_gather

    def all_reduce(self, tensor):
        return Pending()


_now = SimpleNamespace()
"""The counts and headers of the present step, and a function that leaves the mode of fake tensors."""


def _copy_to_host(table):
    """Replace the copy to the host; its wait returns real numbers."""
    _now.counts.launches["copy to the host"] += 1

    def wait():
        _now.counts.waits.append("headers")
        _now.leave_fake()
        return _now.headers[: table.shape[1]].expand(table.shape)

    return wait


def measure(
    sparsifier: Sparsifier,
    *,
    dtype: torch.dtype = torch.float32,
    per_layer: bool = False,
    has_unused: bool = False,
    scaled: bool = False,
    has_kernels: bool = True,
    exchange: ExchangeMode = "gather",
) -> Counts:
    """Return the counts of the third step of the hook in a process that pretends to have more workers.

    If layers may be unused, those of every other bucket are.
    """
    _replace_kernels_and_workers(8, has_kernels=has_kernels)
    names = [[f"{place}.{layer}" for layer in range(place, LAYERS, BUCKETS)] for place in range(BUCKETS)]
    parameters = {name: torch.nn.Parameter(torch.empty(SIZE, dtype=dtype)) for some in names for name in some}
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        scale = torch.empty(1, device=GPU) if scaled else None
        gradients = [torch.empty(SIZE * len(some), device=GPU, dtype=dtype) for some in names]
    state = ddp_averager.DDPGradientAverager(
        sparsifier,
        GradientOptions(exchange=exchange),
        {parameter: name for name, parameter in parameters.items()},
        per_layer_stats=per_layer,
        allows_unused_parameters=has_unused,
        loss_scale=lambda: scale,
    )
    state.begin_epoch(0, [0.1])
    used = {name for place, some in enumerate(names) for name in some if place % 2 == 0 or not has_unused}
    headers: list[float] = []
    for some in names:
        headers += [100.0, 20.0, 0.0, 1.0, 1.0] + [1.0 + place for place in range(2 * len(some) * per_layer)]
        headers += [float(name in used) for name in some] * has_unused + [0.0] * len(some) * has_unused
    _now.headers = torch.tensor(headers + [30.0] * BUCKETS, dtype=torch.float64)  # then the sizes of payloads
    for _ in range(3):
        counts = _now.counts = Counts()
        counter = _Counter(counts)

        def leave_fake(counter: _Counter = counter) -> None:
            counter.__exit__(None, None, None)
            fake.__exit__(None, None, None)
            counter.__enter__()

        _now.leave_fake = leave_fake
        if has_unused:
            state._use._used |= used
        fake.__enter__()
        counter.__enter__()
        for place, (some, gradient) in enumerate(zip(names, gradients, strict=True)):
            grad_bucket = SimpleNamespace(
                index=partial(int, place),
                buffer=lambda gradient=gradient: gradient,
                parameters=partial(list, [parameters[name] for name in some]),
                is_last=partial(bool, place == BUCKETS - 1),
            )
            state.receive(grad_bucket)
        counter.__exit__(None, None, None)
        state.commit()
    return counts


def _replace_kernels_and_workers(num_workers: int, *, has_kernels: bool) -> None:
    """Replace kernels and workers by functions that return at once."""
    torch.Tensor.pin_memory = lambda self: self  # needs a driver
    ddp_buckets.torch.futures.Future = lambda devices=None: SimpleNamespace(set_result=lambda value: None)
    buffers.record_current_stream = residuals.record_current_stream = lambda tensor: None
    for module in (adding, gather, extraction):
        module.is_available = lambda device: has_kernels
    for module in (fused_threshold, adding):
        module.launch = lambda kernel, *arguments, **constants: _now.counts.launches.update([kernel.fn.__name__])
    exchange_module.Workers = lambda group, rank, size: _Workers(group, rank, num_workers)
    exchange_module.copy_to_host = _copy_to_host


@pytest.mark.parametrize(
    ("sparsifier", "options", "of_bucket", "of_layer", "of_step"),
    [
        # walk, summarise, pack, and the addition; a collective adds a kernel of NCCL. For all buckets together:
        # headers into the last payload (2), out of all payloads (1), to the host (1).
        (THRESHOLD, {}, 4, 0, 4),
        (THRESHOLD, {"exchange": "auto"}, 4, 0, 4),
        (THRESHOLD, {"scaled": True}, 5, 0, 4),  # the average is multiplied by S
        (THRESHOLD, BFLOAT16, 6, 0, 4),  # the average does not fit the gradient: its memory is cleared
        # Marks to the device and into the header, and unused gradients set to zero.
        (THRESHOLD, {"has_unused": True}, 7, 0, 4),
        (THRESHOLD, {"per_layer": True}, 9, 0, 4),
        (THRESHOLD, {"exchange": "dense"}, 2, 0, 2),
        (THRESHOLD, {"exchange": "dense", "per_layer": True}, 7, 0, 2),
        (LAYERWISE, {}, 4, 0, 4),
        (THRESHOLD, {"exchange": "reduce_scatter"}, 49, 0, 6),
        (TopK(0.01), {}, 52, 2, 6),
        (TopK(0.01), {"exchange": "dense"}, 41, 2, 4),
        (TopK(0.01), {"exchange": "reduce_scatter"}, 100, 2, 6),
        (MODEL_TOP_K, {}, 71, 0, 10),  # 22 of them to look at p twice more, and to find the k-th
        (RandomK(0.01), {}, 70, 2, 6),
        (GaussianK(0.01), {}, 84, 11, 6),
        (Accordion(0.001, 0.01), {}, 54, 2, 6),
        (ScaledIntegerRounding(0.01), {}, 61, 0, 6),
        (StochasticRounding(0.01), {}, 107, 0, 6),
    ],
)
def test_a_step_has_these_launches_and_waits(sparsifier, options, of_bucket, of_layer, of_step):
    (counts,) = run_workers(partial(measure, sparsifier, **options), 1)
    assert counts.waits == ["headers"]
    assert counts.launches.total() <= BUCKETS * of_bucket + LAYERS * of_layer + of_step, counts.launches


def test_only_addition_waits_without_kernels():
    (dense,) = run_workers(partial(measure, THRESHOLD, has_kernels=False, exchange="dense"), 1)
    assert dense.waits == ["headers"]
    (gathered,) = run_workers(partial(measure, THRESHOLD, has_kernels=False), 1)
    assert gathered.waits.count("headers") == 1
    assert len(gathered.waits) > BUCKETS
