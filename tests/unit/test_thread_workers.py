"""Workers that are threads of one process."""

import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from lightning_sparse.exchange import ThreadWorkers


@pytest.fixture
def threads():
    made = ThreadWorkers(3)
    yield made
    made._barrier.abort()  # if one still waits, the test fails and does not hang
    made.close()


def test_collectives_give_what_a_process_groups_do(threads):
    def collectives(rank):
        worker = threads.workers[rank]
        gathered, turned = torch.zeros(6), torch.zeros(6)
        total = torch.tensor([1e8, -1e8, 1.0][rank : rank + 1])  # with the last one first the sum would be 0
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
def test_what_one_raises_is_raised_and_nobody_waits_for_it_ever(threads, kind):
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
def test_nobody_changes_its_part_before_the_slowest_has_read_it(threads, collective, monkeypatch):
    swap = threads.swap

    @contextmanager
    def slowly(rank, part):
        with swap(rank, part) as found:
            time.sleep(0.1 * rank)
            yield found

    def gives(rank):
        out, part = torch.zeros(3), torch.full((1 if collective == "all_gather" else 3,), rank + 1.0)
        getattr(threads.workers[rank], collective)(out, part).wait()
        part.fill_(-1.0)
        return out.tolist()

    monkeypatch.setattr(threads, "swap", slowly)
    assert threads.run(gives) == [[1.0, 2.0, 3.0]] * 3
