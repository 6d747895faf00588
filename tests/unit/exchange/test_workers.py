"""Workers: devices of messages and objects, threads as workers, and reused buffers."""

import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_sparse.engine.grouping import require_one_device
from lightning_sparse.exchange.buffers import STEPS_BEFORE_FREE, Buffers
from lightning_sparse.exchange.in_process import ThreadWorkers
from lightning_sparse.exchange.workers import Workers
from lightning_sparse.gradients.comm_hook import sparse_hook

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ("cpu:gloo,cuda:gloo", CPU),  # Gloo's send takes no pointer to a GPU's memory
        ("cpu:gloo,cuda:nccl", CPU),
        ("cuda:nccl", torch.device("cuda", 3)),
    ],
)
def test_the_backend_decides_the_device_of_a_message(backends, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(Workers, "_backends", backends)
    assert Workers(None, 0, 2).message_device == expected


def test_rank_0_moves_its_own_gpu_tensors_to_the_cpu():
    with FakeTensorMode():
        own = {"state": [{0: {"step": 3, "exp_avg": torch.ones(4, device=GPU)}}], "kept": torch.ones(2)}
        (held,) = Workers(None, 0, 1).gather_objects_to_first(own)
        assert held["state"][0][0]["exp_avg"].device == CPU
        assert held["state"][0][0]["step"] == 3


def test_parameters_of_a_process_share_a_device():
    require_one_device({"a": torch.empty(1), "b": torch.empty(2)})
    on_two = {"a": torch.empty(1), "b": torch.empty(2, device="meta"), "c": torch.empty(2, device="meta")}
    with pytest.raises(ValueError, match=r"several devices: 'a' on cpu, 'b' on meta\. Put all"):
        require_one_device(on_two)


def test_the_hook_rejects_cuda_graph_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    buffer = SimpleNamespace(device=GPU)
    bucket, state = SimpleNamespace(index=lambda: 0, buffer=lambda: buffer), SimpleNamespace(receive=pytest.fail)
    with pytest.raises(RuntimeError, match=r"cannot be part of a CUDA graph.*make_graphed_callables"):
        sparse_hook(state, bucket)


@pytest.fixture
def threads():
    made = ThreadWorkers(3)
    yield made
    made._barrier.abort()  # if a thread still waits, the test fails and does not hang


def test_collectives_of_threads_equal_those_of_a_process_group(threads):
    def collectives(rank):
        worker = threads.workers[rank]
        gathered, turned = torch.zeros(6), torch.zeros(6)
        total = torch.tensor([1e8, -1e8, 1.0][rank : rank + 1])  # the sum is 0 if the last term comes first
        worker.all_gather(gathered, torch.full((2,), float(rank))).wait()
        worker.all_to_all(turned, torch.arange(6.0) + 10 * rank).wait()
        worker.all_reduce(total).wait()
        assert not torch.is_grad_enabled()
        return gathered.tolist(), turned.tolist(), total.tolist()

    results = threads.run(collectives)
    assert [gathered for gathered, *_ in results] == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 3
    assert [turned for _, turned, _ in results] == [
        [0.0, 1.0, 10.0, 11.0, 20.0, 21.0],
        [2.0, 3.0, 12.0, 13.0, 22.0, 23.0],
        [4.0, 5.0, 14.0, 15.0, 24.0, 25.0],
    ]
    assert [total for *_, total in results] == [[1.0]] * 3


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, SystemExit])
def test_an_exception_of_one_thread_ends_all_threads(threads, kind):
    def adds(rank, raises=True):
        if rank == 1 and raises:
            raise kind
        total = torch.ones(1)
        threads.workers[rank].all_reduce(total).wait()
        return total.item()

    for _ in range(2):
        with pytest.raises(kind):
            threads.run(adds)
    if kind is KeyError:
        assert threads.run(partial(adds, raises=False)) == [3.0] * 3


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all"])
def test_no_thread_changes_its_part_before_the_slowest_has_read_it(threads, collective, monkeypatch):
    gather_parts = threads.gather_parts

    @contextmanager
    def slowly(rank, part):
        with gather_parts(rank, part) as found:
            time.sleep(0.1 * rank)
            yield found

    def gives(rank):
        out, part = torch.zeros(3), torch.full((1 if collective == "all_gather" else 3,), rank + 1.0)
        getattr(threads.workers[rank], collective)(out, part).wait()
        part.fill_(-1.0)
        return out.tolist()

    monkeypatch.setattr(threads, "gather_parts", slowly)
    assert threads.run(gives) == [[1.0, 2.0, 3.0]] * 3


def held_bytes(buffers):
    return sum(held.nbytes for held in buffers._held.values())


def test_buffers_reuse_grow_and_release_memory():
    buffers = Buffers()

    def take(numel):
        return buffers.take("name", numel, torch.float32, CPU)

    first = take(100)
    assert take(100).data_ptr() == take(60).data_ptr() == first.data_ptr()
    assert take(1000).numel() == 1000
    assert held_bytes(buffers) == 4 * 1500
    assert take(1500).data_ptr() == take(1400).data_ptr()
    other = buffers.take("other", 50, torch.float32, CPU)

    def steps(numel, count):
        for _ in range(count):
            take(numel)
            buffers.end_step()

    steps(100, STEPS_BEFORE_FREE - 1)
    take(400)  # not so small
    buffers.end_step()
    assert held_bytes(buffers) == 4 * (1500 + 50)
    del other
    steps(400, STEPS_BEFORE_FREE)
    assert held_bytes(buffers) == 4 * 1500  # nobody took the other buffer for so long
    steps(100, STEPS_BEFORE_FREE)
    assert held_bytes(buffers) == 0
    assert take(100).numel() == 100
    buffers.forget()
    assert held_bytes(buffers) == 0
