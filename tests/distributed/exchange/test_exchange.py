"""Every route of the exchange against plain sums, for n = 1 to 4 workers and densities that jump."""

import os
import subprocess
import sys
import time
import weakref
import zlib
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.torch_version import TorchVersion

from lightning_sparse.exchange import save_barrier
from lightning_sparse.exchange.exchange import FIRST_CAPACITY, Exchange
from lightning_sparse.exchange.groups import is_one_node
from lightning_sparse.exchange.payload import PayloadFormat, aligned
from lightning_sparse.exchange.routes import gather
from lightning_sparse.exchange.save_barrier import SaveBarrier
from lightning_sparse.exchange.wire import Wire
from lightning_sparse.exchange.workers import LostWorkerError, Pending, Workers
from lightning_sparse.selection.statistics import FIXED_FIELDS
from lightning_sparse.sparsifiers.protocol import Selection
from tests.integration.faults.unwatched_workers import wait_until
from tests.workers import on_workers, run_workers

FLOAT32, FLOAT8, INT8 = Wire(torch.float32), Wire(torch.float8_e4m3fn, 2.0**-6), Wire(torch.int8, 2.0**-5)
# Over Gloo, a gather of two workers takes a message from each.
COLLECTIVES = ("all_gather_into_tensor", "all_gather", "all_reduce", "all_to_all_single", "isend")


def selection_of(seed, rank, size, density, dtype=torch.float32, wire=FLOAT32):
    """Return the selection of a worker, equal in every process."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    share = density if rank % 2 == 0 else density * (0.0 if seed % 5 == 0 else 1.0)  # sometimes nothing
    indices = (torch.rand(size, generator=generator) < share).nonzero().squeeze(1)
    values = torch.randn(indices.numel(), generator=generator, dtype=dtype)
    if seed % 7 == 3 and values.numel() > 1:
        values[0], values[1] = float("nan"), float("inf")
    return Selection(indices, wire.rounded(values))


def header_of(selection, size, slices):
    header = torch.arange(FIXED_FIELDS, dtype=torch.float64) + dist.get_rank()
    elements = -(-size // slices)
    header[0] = selection.indices.numel()
    header[1] = max((int(((selection.indices // elements) == j).sum()) for j in range(slices)), default=0)
    return header


def exchange_once(
    exchange, selections, sizes, dtype=torch.float32, wire=FLOAT32, between=lambda: None, by_senders=False
):
    """Exchange several buckets in a step; return the averages, the headers, the bytes and the dense elements.

    What is ``between`` happens once all buckets are there and before the exchange ends.
    """
    outs = [torch.full((size,), 3.0, dtype=dtype) for size in sizes]
    slices = exchange.workers.num_workers
    headers = [header_of(selection, size, slices) for selection, size in zip(selections, sizes, strict=True)]
    exchange.begin()
    for bucket, (selection, out, header) in enumerate(zip(selections, outs, headers, strict=True)):
        is_last = bucket == len(sizes) - 1
        transfer = exchange.new_transfer(bucket, wire, header.numel(), out, is_last=is_last, by_senders=by_senders)
        if transfer.payload is None:
            out.zero_()
            out[selection.indices] = selection.values / transfer.divisor
        else:
            transfer.format.fill(transfer.payload, selection)
            room = transfer.format.capacity(transfer.payload.numel())
            transfer.overflow = lambda s=selection, c=room: Selection(s.indices[c:], s.values[c:])
        exchange.start(transfer, header)
    between()
    gathered, sent_bytes, dense_elements = exchange.finish()
    for header, all_headers in zip(headers, gathered, strict=True):
        assert torch.equal(all_headers[dist.get_rank()], header)
    return outs, gathered, sent_bytes, dense_elements


def plain_average(of_workers, size, dtype, by_senders):
    """Return the mean of the sent values, added in rank order and divided once."""
    out, senders = torch.zeros(2, size, dtype=dtype)
    for indices, values in of_workers:
        out.index_add_(0, indices, values)
        senders.index_add_(0, indices, (values != 0).to(dtype))
    return (out / (senders.clamp(min=1) if by_senders else len(of_workers))).nan_to_num(nan=123.0)


def _run(modes, cases):
    """Run cases of (sizes, densities, dtype, wire, seed) on every route; return checksums of all averages."""
    checksums = []
    for sizes, densities, dtype, wire, seed in cases:
        by_senders = seed % 2 == 1
        gather.FULL_BYTES = (0, 3000, 2**16)[seed % 3]
        steps = []
        for step, density in enumerate(densities):
            of_workers = [
                [
                    selection_of(seed + 10 * step + bucket, rank, size, density, dtype, wire)
                    for rank in range(dist.get_world_size())
                ]
                for bucket, size in enumerate(sizes)
            ]
            plains = [
                plain_average(some, size, dtype, by_senders) for some, size in zip(of_workers, sizes, strict=True)
            ]
            steps.append(([some[dist.get_rank()] for some in of_workers], plains))  # once for all routes
        for mode in modes:
            is_exact = mode in ("gather", "reduce_scatter") or wire.is_quantised
            exchange = Exchange(mode)
            for step, (selections, plains) in enumerate(steps):
                outs, *_ = exchange_once(exchange, selections, sizes, dtype, wire, by_senders=by_senders)
                for plain, out in zip(plains, outs, strict=True):
                    out = out.nan_to_num(nan=123.0)
                    if is_exact:
                        assert torch.equal(plain, out), (mode, sizes, densities, step)
                    else:
                        torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-6)
                    checksums.append(zlib.crc32(out.numpy().tobytes()))
    return checksums


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.sampled_from([0, 1, 3, 17, 1000, 65_536, 70_000]), min_size=1, max_size=3))
    densities = draw(st.lists(st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]), min_size=2, max_size=6))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    wire = draw(st.sampled_from([Wire(dtype), Wire(torch.bfloat16), FLOAT8, INT8]))
    return sizes, densities, dtype, wire, draw(st.integers(0, 10_000))


ALWAYS = [
    ([70_000, 17], [0.01, 1.0, 0.001], torch.float32, FLOAT8, 3),
    ([1000, 1], [0.01, 1.0, 0.3], torch.float32, INT8, 3),
    ([70_000, 17], [0.0, 1.0, 0.0, 0.001, 1.0, 0.3, 0.0], torch.float32, FLOAT32, 3),
    ([1], [1.0, 0.0, 1.0], torch.float32, Wire(torch.bfloat16), 1),
    ([0, 17, 0], [1.0, 0.01, 1.0], torch.float64, FLOAT32, 5),
]


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@settings(max_examples=4)
@given(drawn=st.lists(cases(), min_size=3, max_size=3))
@example(drawn=ALWAYS)
def test_every_route_gives_the_plain_average(num_workers, drawn):
    """Sparse routes agree to the last bit, all-reduces up to the order of summation, and replicas exactly."""
    ranks = run_workers(_run, num_workers, ["gather", "reduce_scatter", "auto", "dense"], drawn)
    assert ranks[0]
    assert all(checksums == ranks[0] for checksums in ranks)


@pytest.mark.parametrize(("wire", "of_values", "of_sums"), [(INT8, 1, 2), (FLOAT8, 1, 4)])
@on_workers(3)
def test_dense_multiples_need_the_bytes_of_values_and_sums(wire, of_values, of_sums):
    selection = selection_of(1, 2 * dist.get_rank(), 30_000, 0.5, torch.float32, wire)
    _, _, sent, _ = exchange_once(Exchange("dense"), [selection], [30_000], torch.float32, wire)
    header_bytes = 8 * FIXED_FIELDS
    assert sent == 30_000 * of_values + 10_000 * of_sums + header_bytes


@on_workers(3)
def test_a_slice_fuller_than_its_forecast_loses_nothing():
    exchange, size = Exchange("reduce_scatter"), 30_000
    for step in (100, 100, 1, 1):
        selection = Selection(torch.arange(300) * step, torch.full((300,), dist.get_rank() + 1.0))
        average = exchange_once(exchange, [selection], [size])[0][0]
        assert average.nonzero().squeeze(1).tolist() == list(range(0, 300 * step, step))
        assert average.sum() == 300 * 2.0


def _count_collectives(mode, densities, full_bytes=gather.FULL_BYTES, link_gbit_s=None):
    gather.FULL_BYTES = full_bytes
    calls = []
    for name in COLLECTIVES:
        original = getattr(dist, name)

        def counted(*args, _name=name, _original=original, **kwargs):
            calls.append(_name)
            return _original(*args, **kwargs)

        setattr(dist, name, counted)
    exchange, sizes = Exchange(mode, None, link_gbit_s), [70_000, 20_000, 70_000]
    per_step = []
    for step, density in enumerate(densities):
        calls.clear()
        selections = [selection_of(10 * step + bucket + 1, 0, size, density) for bucket, size in enumerate(sizes)]
        _, _, sent_bytes, _ = exchange_once(exchange, selections, sizes)
        per_step.append((list(calls), sent_bytes))
    return per_step


@pytest.mark.parametrize(
    ("full_bytes", "link_gbit_s", "messages"),
    [(0, None, 3), (5000, None, 2), (gather.FULL_BYTES, None, 1), (0, 0.001, 3), (0, 0.025, 2), (0, 10.0, 1)],
)
def test_small_payloads_of_several_buckets_share_a_message(full_bytes, link_gbit_s, messages):
    # About 4.6, 1.4 and 4.6 kB.
    for steps in run_workers(_count_collectives, 2, "auto", [0.01] * 4, full_bytes, link_gbit_s):
        first, *usual = steps
        assert first[0] == ["all_reduce"] * 3 + ["isend"]  # no history: dense, and headers
        for calls, _ in usual:
            assert calls == ["isend"] * messages


def test_an_overflow_costs_a_second_round_for_its_bucket_only():
    for steps in run_workers(_count_collectives, 2, "gather", [0.01, 0.01, 0.2, 0.2, 0.2]):
        # At a density of a fifth, the first payload is large enough for a separate message.
        assert [len(calls) for calls, _ in steps[1:]] == [1, 1 + 3, 2, 2]


@on_workers(2)
def test_the_last_bucket_starts_all_pending_messages():
    calls, isend = [], dist.isend
    dist.isend = lambda *args, **kwargs: (calls.append(None), isend(*args, **kwargs))[1]
    selections = [selection_of(1, 0, 3000, 0.1)] * 2
    counts = []
    exchange_once(Exchange("gather"), selections, [3000] * 2, between=lambda: counts.append(len(calls)))
    assert [*counts, len(calls)] == [1, 1]


@pytest.mark.parametrize("full_bytes", [0, gather.FULL_BYTES])
@on_workers(3)
def test_messages_leave_unused_capacity_out(full_bytes):
    gather.FULL_BYTES = full_bytes
    sizes, counts = [70_000, 3000], [[0, 8, 400], [16, 0, 3]]
    bytes_of_rank = [
        sum(
            PayloadFormat(size, FLOAT32, fields).payload_bytes(aligned(of_bucket[rank]))
            for size, of_bucket, fields in zip(sizes, counts, (0, 2 * FIXED_FIELDS), strict=True)
        )
        for rank in range(3)
    ]
    messages, isend = [], dist.isend
    dist.isend = lambda part, *args, **kwargs: (messages.append(part.numel()), isend(part, *args, **kwargs))[1]
    exchange, rank = Exchange("gather"), dist.get_rank()
    for _ in range(3):
        messages.clear()
        selections = [Selection(torch.arange(k[rank]), torch.ones(k[rank])) for k in counts]
        outs, _, sent_bytes, _ = exchange_once(exchange, selections, sizes)
        assert sum(messages) == 2 * bytes_of_rank[rank]  # to two workers
        assert sent_bytes == pytest.approx(sum(bytes_of_rank) / 3, abs=2)
        assert [int(out.count_nonzero()) for out in outs] == [max(k) for k in counts]


@on_workers(3)
def test_second_rounds_leave_unused_capacity_out():
    size, counts = 70_000, [0, FIRST_CAPACITY + 8, 5000]
    message, second = PayloadFormat(size, FLOAT32, FIXED_FIELDS), PayloadFormat(size, FLOAT32)
    bytes_of_rank = [
        message.payload_bytes(min(k, FIRST_CAPACITY)) + second.payload_bytes(max(k - FIRST_CAPACITY, 0)) for k in counts
    ]
    sent, isend, rank = [], dist.isend, dist.get_rank()
    dist.isend = lambda part, *args, **kwargs: (sent.append(part.numel()), isend(part, *args, **kwargs))[1]
    selection = Selection(torch.arange(counts[rank]), torch.ones(counts[rank]))
    (out,), _, sent_bytes, _ = exchange_once(Exchange("gather"), [selection], [size])
    assert sum(sent) == 2 * bytes_of_rank[rank]  # to two workers
    assert sent_bytes == pytest.approx(sum(bytes_of_rank) / 3, abs=2)
    assert int(out.count_nonzero()) == max(counts)


@on_workers(2)
def test_payloads_of_an_aborted_step_are_dropped():
    exchange, sizes = Exchange("gather"), [3000, 2000]
    selections = [selection_of(bucket + 1, 0, size, 0.1) for bucket, size in enumerate(sizes)]
    if dist.get_rank() == 0:  # the backward of rank 1 failed before this bucket was ready
        exchange.begin()
        transfer = exchange.new_transfer(0, FLOAT32, FIXED_FIELDS, torch.zeros(sizes[0]), is_last=False)
        transfer.format.fill(transfer.payload, selections[0])
        exchange.start(transfer, header_of(selections[0], sizes[0], 2))
    outs, *_ = exchange_once(exchange, selections, sizes)
    for out, selection in zip(outs, selections, strict=True):
        assert torch.equal(out[selection.indices], selection.values)


def test_auto_takes_the_dense_route_if_sparse_costs_more():
    densities = [1.0, 1.0, 0.001, 0.001, 1.0, 1.0]
    for steps in run_workers(_count_collectives, 2, "auto", densities):
        dense_bytes = 4 * (70_000 + 20_000 + 70_000)
        routes = ["dense" if "all_reduce" in calls else "gather" for calls, _ in steps]
        assert routes == ["dense", "dense", "dense", "gather", "dense", "dense"]
        for route, (_, sent_bytes) in zip(routes, steps, strict=True):
            assert dense_bytes <= sent_bytes < 1.02 * dense_bytes if route == "dense" else sent_bytes < 5000
        # After the jump, the discarded gather is small.
        assert steps[4][0] == ["isend"] + ["all_reduce"] * 3


@pytest.mark.parametrize("num_nodes", [1, 2])
@on_workers(3)
def test_all_workers_agree_whether_they_share_a_node(num_nodes):
    os.environ["NODE_RANK"] = str(dist.get_rank() % num_nodes)
    assert is_one_node(Exchange("gather").workers) == Exchange("auto")._is_one_node == (num_nodes == 1)
    assert not Exchange("auto", None, 10.0)._is_one_node


def _gather_in_batches():
    """Gather in batches, as over NCCL; Gloo supports batches too."""
    Workers.is_over_gloo = False
    Workers.message_device = torch.device("cpu")
    return gather_to_first("cpu")


def gather_to_first(device):
    rank = dist.get_rank()
    barrier = SaveBarrier(Workers(None, rank, dist.get_world_size()))
    tensors = [torch.full((3,), rank + 0.5, device=device), torch.full((2,), rank, device=device)]
    with mock.patch.object(save_barrier, "new_workers", wraps=save_barrier.new_workers) as made:
        for failing in (0, 1, "close", None):  # the others do not notice a failure
            assert barrier.wait({}, 60.0) is None
            gathered = barrier.saving_workers().gather_objects_to_first({"rank": rank, "tensors": tensors})
            if rank == failing:
                barrier.saving_failed()
            elif failing == "close":
                barrier.close()
    # Up to torch 2.14, a second group of the same name may wait forever.
    assert len({call.args[2] for call in made.mock_calls}) == len(made.mock_calls) == (dist.get_world_size() > 1) * 4
    return gathered


def assert_gathered(first, *others):
    assert others == ([],) * len(others)
    for rank, of_worker in enumerate(first):
        assert of_worker["rank"] == rank
        assert [tensor.tolist() for tensor in of_worker["tensors"]] == [[rank + 0.5] * 3, [rank] * 2]
        assert all(tensor.device.type == "cpu" for tensor in of_worker["tensors"])
    assert len(first) == 1 + len(others)


@on_workers(2)
def test_a_save_barrier_names_the_different_points_of_workers():
    rank = dist.get_rank()
    reason = SaveBarrier(Workers(None, rank, 2)).wait({"progress": rank}, 60.0)
    assert reason == "workers are at different points: rank 0 at {'progress': 0}, rank 1 at {'progress': 1}"


@pytest.mark.parametrize("leaves", ["after its patience", "by an interrupt"])
@on_workers(3)
def test_a_save_does_not_count_a_worker_that_has_left(leaves):
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    barrier = SaveBarrier(Workers(None, rank, 3))
    left = f"left {barrier._name}"
    if rank == 1 and leaves == "after its patience":
        assert "rank 0 did not reach the save" in str(barrier.wait({}, 0.2))
    elif rank == 1:
        interrupted = mock.patch.object(save_barrier.time, "sleep", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            barrier.wait({}, 30.0)
    if rank == 1:
        barrier._store.wait(["rank 0 waits"])
        time.sleep(0.5)  # rank 0 has read the first attempt
        store.set(left, "")
    elif rank == 2:
        store.wait([left])
    assert barrier.wait({}, 30.0) is None  # of rank 1, its second attempt


@on_workers(3)
def test_a_worker_stays_while_rank_0_waits_for_others():
    rank = dist.get_rank()
    barrier = SaveBarrier(Workers(None, rank, 3))
    if rank == 2:
        time.sleep(5.0)
    assert barrier.wait({}, 4.0 if rank == 1 else 30.0) is None


@on_workers(1)
def test_saving_waits_less_for_workers_that_may_be_missing():
    class EarlierError(Exception):
        pass

    try:
        raise EarlierError
    except EarlierError as error:
        earlier = weakref.ref(error)
        barrier = SaveBarrier(Workers(None, 0, 1))
        assert barrier.patience(None) == 300
        try:
            raise KeyError
        except KeyError:
            assert barrier.patience(None) == 15
    assert barrier.patience(None) == 300  # training has gone on after the exception
    assert earlier() is None  # it would keep the memory of a failed fit
    timeouts = (None, timedelta(seconds=40), timedelta(seconds=3))
    assert [barrier.patience(timeout) for timeout in timeouts] == [300, 40, 3]
    assert [barrier.patience(timeout, is_exchanging=True) for timeout in timeouts] == [15, 15, 3]


def test_works_after_a_failed_one_are_kept():
    class Work:
        def __init__(self, fails):
            self.fails = fails

        def wait(self):
            if self.fails:
                raise RuntimeError("Connection closed by peer")

    works = [(Work(False), 1), (Work(True), 2), (Work(False), 3)]
    pending = Pending(works)
    with pytest.raises(LostWorkerError, match="rank 2 ended"):
        pending.wait()
    abandoned = []
    pending.__del__(abandoned)
    assert abandoned == [works[1:]]


def test_batched_messages_gather_the_same_tensors_on_rank_0():
    assert_gathered(*run_workers(_gather_in_batches, 3))


@pytest.mark.parametrize("num_bytes", [100, 2**17])
@on_workers(3)
def test_messages_of_the_user_in_the_same_group_do_not_mix_with_ours(num_bytes):
    rank = dist.get_rank()
    others = [other for other in range(3) if other != rank]
    mine, arrived = (
        torch.full((num_bytes,), 100 + rank, dtype=torch.uint8),
        torch.zeros(3, num_bytes, dtype=torch.uint8),
    )
    works = [dist.irecv(arrived[other], other) for other in others]  # posted before the gather, sent after it
    out = torch.empty(3 * num_bytes, dtype=torch.uint8)
    Workers(None, rank, 3).all_gather(out, torch.full((num_bytes,), rank, dtype=torch.uint8)).wait()
    works += [dist.isend(mine, other) for other in others]
    for work in works:
        work.wait()
    assert out.view(3, -1)[:, 0].tolist() == [0, 1, 2]
    assert [int(arrived[other, -1]) for other in others] == [100 + other for other in others]


@pytest.mark.parametrize("num_bytes", [100, 2**17])
@on_workers(2, timeout=40)
def test_dropped_messages_still_arrive_and_block_no_later_ones(num_bytes):
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    workers, part = Workers(None, rank, 2), torch.full((num_bytes // 4,), float(rank))
    gathered = torch.empty(2 * len(part))
    pending = workers.all_gather(gathered, part) if rank == 0 else None
    if rank == 0:
        del pending  # before rank 1 sends
        store.set("dropped", b"")
    else:
        store.wait(["dropped"])
        workers.all_gather(gathered, part).wait()
    workers.all_gather(later := torch.empty(2 * len(part)), part + 2).wait()
    assert later.unique().tolist() == [2, 3]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux's classes of scheduling")
@pytest.mark.parametrize(("own_class", "expected"), [("SCHED_OTHER", "SCHED_BATCH"), ("SCHED_IDLE", "SCHED_IDLE")])
@on_workers(2, new=True)
def test_threads_of_gloo_run_as_batch_unless_the_user_chose_a_class(own_class, expected):
    threads = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "gloo_tcp_loop\n"]
    assert threads or TorchVersion(torch.__version__) < (2, 15)  # Gloo of earlier versions may not name its threads
    for thread in threads:
        os.sched_setscheduler(int(thread.name), getattr(os, own_class), os.sched_param(0))
    Exchange("gather")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER  # only Gloo's threads change
    found = {os.sched_getscheduler(int(thread.name)) for thread in threads}
    assert found <= {getattr(os, expected)}


SLOW_RELEASES = """
import os, sys, tempfile, time
import torch, torch.distributed as dist
from lightning_sparse.exchange import save_barrier
from lightning_sparse.exchange.exchange import Exchange

children = []
while len(children) < 3 and (child := os.fork()): children.append(child)
if len(children) == 3:
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
Exchange("gather")
for _ in range(10):
    tensor = torch.ones(10)
    tensor.slow = type("Slow", (), {"__del__": lambda self, sleep=time.sleep: sleep(0.01)})()
    dist.all_reduce(tensor, async_op=True)
    del tensor
time.sleep(0.02)
"""


def test_python_ends_while_threads_of_gloo_release_tensors():
    done = subprocess.run([sys.executable, "-c", SLOW_RELEASES], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("routes", [("dense", "dense"), ("dense", "gather")])
@on_workers(2)
def test_a_failed_sum_raises_before_the_hook_waits_for_others(routes, tmp_path):
    # As in plain DDP: if the connection of a worker breaks, the message of another may never come.
    # The sum fails on rank 1 in a step without rank 0.
    seen, exchange, sizes = tmp_path / "seen", Exchange("auto"), [400, 300]
    exchange._route = lambda key, *_, **__: routes[key[0]]
    selections = [selection_of(bucket + 1, 0, size, 0.1) for bucket, size in enumerate(sizes)]
    exchange_once(exchange, selections, sizes)
    if dist.get_rank() == 0:
        wait_until(seen.exists, "the other raises without this worker")
        return
    start = Workers.all_reduce

    def failing(self, tensor):
        pending = start(self, tensor)
        pending.wait = lambda: exec("raise RuntimeError('the sum has failed')")
        return pending

    Workers.all_reduce = failing
    with pytest.raises(RuntimeError, match="the sum has failed"):
        exchange_once(exchange, selections, sizes)
    seen.touch()
