"""Measures the table of bytes per parameter in docs/evidence/performance.md."""

import gc
import re
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse import (
    DriftOptions,
    GradientOptions,
    HardThreshold,
    ShardGradientAverager,
    SparseModelAverager,
    TopK,
    register_comm_hook,
)
from lightning_sparse.exchange import buffers
from tests.markdown import PROJECT
from tests.workers import run_workers

DOCS = PROJECT / "docs/evidence/performance.md"
ONE_PERCENT, TEN_PERCENT = (HardThreshold(density=density) for density in (0.01, 0.1))
THIRTY = {"steps": 30, "exchange": "gather"}
ROWS = {
    'hard threshold, `exchange="gather"`': (ONE_PERCENT, THIRTY),
    '`exchange="dense"`': (ONE_PERCENT, THIRTY | {"exchange": "dense"}),
    '`exchange="reduce_scatter"`': (ONE_PERCENT, THIRTY | {"exchange": "reduce_scatter", "steps": 70}),
    '10 % in place of 1 %, `"gather"`': (TEN_PERCENT, THIRTY),
    '`exchange="dense"`, a loss scale (16-mixed)': (ONE_PERCENT, THIRTY | {"exchange": "dense", "is_scaled": True}),
    "parameters in bfloat16": (ONE_PERCENT, THIRTY | {"dtype": torch.bfloat16}),
    "`TopK`": (TopK(0.01), {}),
    "local training (`SparseModelAverager`)": (None, {}),
    "local training, `keep_drift=False`": (None, {"keep_drift": False}),
}
ON_A_CPU = ("`TopK`", "local training (`SparseModelAverager`)")


WIDTH, LAYERS = 256, 16
PARAMETERS = WIDTH * WIDTH * LAYERS


class _OnTheCpu(TorchDispatchMode):
    """Counts the memory that operations allocate until their tensors are freed."""

    def __init__(self):
        super().__init__()
        self.held = self.peak = 0
        self._known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._follow((args, kwargs), counts=False)  # a bucket of DDP, which allocates it elsewhere
        result = func(*args, **(kwargs or {}))
        self._follow(result, counts=True)
        return result

    def _follow(self, tree, counts):
        for leaf in torch.utils._pytree.tree_leaves(tree):
            if not isinstance(leaf, torch.Tensor) or (key := leaf.untyped_storage()._cdata) in self._known:
                continue
            storage = leaf.untyped_storage()
            size = storage.nbytes() if counts else 0
            self._known[key] = weakref.ref(storage, partial(self._forget, key, size))
            self.held += size
            self.peak = max(self.peak, self.held)

    def _forget(self, key, size, _):
        self.held -= size
        del self._known[key]

    def begin(self):
        self.peak = self.held


class _OnTheGpu:
    """Reads the statistics of the allocator, which exclude memory allocated outside."""

    def __init__(self):
        self.held = self.peak = 0

    def begin(self):
        self.peak = self.held

    def __enter__(self):
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def __exit__(self, *_):
        self.peak = max(self.peak, self.held + torch.cuda.max_memory_allocated() - self._before)
        self.held += torch.cuda.memory_allocated() - self._before


def measure(sparsifier, device, options):
    """Return bytes per parameter: after a usual step, its peak, and the peak of the first two steps."""
    buffers.STEPS_BEFORE_FREE = 10  # steps instead of 100
    options = {"dtype": torch.float32, "steps": 6, "is_scaled": False} | options
    dtype, steps, is_scaled = (options.pop(name) for name in ("dtype", "steps", "is_scaled"))
    torch.manual_seed(dist.get_rank())
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    module = torch.nn.Sequential(*layers).to(device, dtype)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, enabled=is_scaled)
    count = _OnTheCpu() if device == "cpu" else _OnTheGpu()
    gc.collect()
    gc.disable()  # memory that is freed late counts as used
    if sparsifier is None:
        count.begin()
        with count:
            model = module
            averager = SparseModelAverager(module, HardThreshold(threshold=0.003), DriftOptions(**options))
    else:
        model = DistributedDataParallel(module, bucket_cap_mb=1, gradient_as_bucket_view=True)
        state = register_comm_hook(model, sparsifier, GradientOptions(**options), grad_scaler=scaler)
        receive = state.receive

        def counted(bucket):
            with count:
                return receive(bucket)

        state.receive = counted
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # keeps densities constant
    peaks, held = [], []
    for _ in range(steps):
        count.begin()
        inputs, directions = torch.randn(2, 8, WIDTH, device=device, dtype=dtype)
        scaler.scale(model(inputs).mul(directions).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if sparsifier is None:
            with count:
                averager.step()
        peaks.append(count.peak / PARAMETERS)
        held.append(count.held / PARAMETERS)
    return held[-1], peaks[-1], max(peaks[:2])


@pytest.mark.parametrize("name", ROWS)
def test_bytes_per_parameter(name):
    check(name, "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in ROWS if name not in ON_A_CPU])
def test_bytes_per_parameter_on_a_gpu(name):
    check(name, "cuda", within=1.0)  # work space of the kernels, and the allocator's blocks


def measure_shards(drifts):
    """Return bytes per parameter of a rank's shard after a usual step."""
    buffers.STEPS_BEFORE_FREE = 10
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    fully_shard(module, mesh=mesh["shard"])
    count = _OnTheCpu()
    gc.collect()
    gc.disable()
    with count:
        if drifts:
            options = DriftOptions(keep_drift=False)
            averager = SparseModelAverager(module, ONE_PERCENT, options, group=mesh["replicate"])
        else:
            averager = ShardGradientAverager(module, ONE_PERCENT, group=mesh["replicate"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.001 if drifts else 0.0)
    for _ in range(30):
        inputs, directions = torch.randn(2, 8, WIDTH)
        module(inputs).mul(directions).sum().backward()
        if not drifts:
            with count:
                averager.average_gradients()
        optimizer.step()
        if drifts:
            with count:
                averager.step()
        optimizer.zero_grad()
    return count.held / PARAMETERS


@pytest.mark.parametrize(("drifts", "expected"), [(False, 4), (True, 12)])
def test_bytes_per_parameter_of_a_shard(drifts, expected):
    for measured in run_workers(measure_shards, 2, drifts, new=True):
        assert expected <= measured < expected + 1  # payloads and their buffers


def check(name, device, within=0.5):
    (row,) = re.findall(rf"^\| {re.escape(name)} \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", DOCS.read_text(), re.M)
    written = [float(number) for number in row]
    sparsifier, options = ROWS[name]
    for measured in run_workers(measure, 2, sparsifier, device, options):
        assert measured == pytest.approx(written, abs=within)
