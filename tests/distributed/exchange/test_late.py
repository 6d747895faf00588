"""The package waits for a collective before it reads the result or writes the input.

A single process stands for n workers that all send the same values. On a CPU, a collective runs only in its wait. On
a GPU, it runs in a separate stream after a pause, as a collective of NCCL does if other ranks are late.
"""

from functools import cache

import pytest
import torch

from lightning_sparse import HardThreshold, TopK
from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.options import ExchangeOptions
from lightning_sparse.exchange import exchange
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.selection.bucket import FlatBucket, Residual
from lightning_sparse.sparsifiers.protocol import LayerLayout
from tests.workers import on_workers

PAUSE_CYCLES = 10_000_000
"""Some milliseconds: longer than the host needs for a step."""


class _Late:
    def __init__(self, run, device):
        self._run, self._event = run, None
        if device.type == "cuda":
            side = _side_stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                torch.cuda._sleep(PAUSE_CYCLES)
                run()
                self._event = side.record_event()

    def wait(self):
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        elif self._run is not None:
            self._run()
        self._run = None


class LateWorkers(Workers):
    def all_gather(self, out, part):
        places = out.view(self.num_workers, -1)
        out.fill_(77)
        return _Late(lambda: places[:, : part.numel()].copy_(part.expand(self.num_workers, -1)), out.device)

    def all_to_all(self, out, parts):
        raise NotImplementedError("one process does not stand for workers with different slices")

    def all_reduce(self, tensor):
        return _Late(lambda: tensor.mul_(self.num_workers), tensor.device)


@cache
def _side_stream(device):
    return torch.cuda.Stream(device)


def train(sparsifier, mode, num_workers, device, dtype, *, per_layer=False, in_side_stream=False):
    """Check sparse and full steps of several buckets against the formula; return densities."""
    exchange.Workers = lambda group, rank, size: LateWorkers(group, rank, num_workers)
    if in_side_stream:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            return train(sparsifier, mode, num_workers, device, dtype, per_layer=per_layer)
    engine = Engine(sparsifier, ExchangeOptions(exchange=mode), per_layer_stats=per_layer)
    layouts = [LayerLayout(("a", "b"), (60_000, 50_000)), LayerLayout(("c",), (70,)), LayerLayout(("d",), (9_000,))]
    kept = [torch.zeros(layout.num_elements) for layout in layouts]
    memory = [Residual(*torch.zeros(2, layout.num_elements, device=device).unbind()) for layout in layouts]
    generator, densities = torch.Generator().manual_seed(0), []
    for scale in (0.3, 0.3, 0.2, 3.0, 0.1, 0.3, 0.3):
        gradients = [(torch.randn(len(residual), generator=generator) * scale).to(dtype) for residual in kept]
        engine.begin()
        buckets = []
        for place, (layout, gradient) in enumerate(zip(layouts, gradients, strict=True)):
            bucket = FlatBucket(place, layout, gradient.to(device, copy=True), memory[place], place == len(layouts) - 1)
            engine.add(bucket)
            buckets.append(bucket)
        engine.finish()
        engine.end_step()
        for place, (layout, gradient) in enumerate(zip(layouts, gradients, strict=True)):
            compensated = kept[place] + gradient.float()
            # On the device, because Top-k on a GPU takes other ones of equal values than on a CPU.
            indices = sparsifier.select(compensated.to(device), layout).indices.cpu()
            sent = torch.zeros_like(compensated)
            sent[indices] = compensated[indices]
            kept[place] = compensated - sent
            total = torch.zeros_like(sent)
            for _ in range(num_workers):
                total += sent
            assert torch.equal(memory[place].after.cpu(), kept[place])
            torch.testing.assert_close(buckets[place].average.cpu(), total / num_workers, rtol=1e-6, atol=1e-30)
            memory[place] = Residual(memory[place].after, memory[place].before)
        densities.append(engine.last_step.density)
    return densities


@pytest.mark.parametrize("num_workers", [2, 8])
@pytest.mark.parametrize(
    ("device", "in_side_stream"),
    [
        ("cpu", False),
        pytest.param("cuda", False, marks=pytest.mark.cuda),
        pytest.param("cuda", True, marks=pytest.mark.cuda),
    ],
)
@on_workers(1)
def test_late_collectives_change_nothing(device, in_side_stream, num_workers):
    # Not a reduce-scatter, which "auto" may take from three workers on: its workers have different slices.
    for mode in ("gather", "dense", "auto")[: 3 if num_workers == 2 else 2]:
        for dtype in (torch.float32, torch.bfloat16):
            for sparsifier in (
                HardThreshold(threshold=0.9),
                HardThreshold(threshold=0.9, layer_thresholds={"a": 0.3}),
                TopK(0.01),
            ):
                for per_layer in (False, True):
                    options = {"per_layer": per_layer, "in_side_stream": in_side_stream}
                    densities = train(sparsifier, mode, num_workers, torch.device(device), dtype, **options)
                    if isinstance(sparsifier, HardThreshold):
                        assert min(densities) < 0.05 < 0.5 < max(densities)
