"""Memory that is used again: it grows at once and shrinks late."""

import torch

from lightning_sparse.exchange.buffers import PATIENCE, Buffers

CPU = torch.device("cpu")


def held_bytes(buffers):
    return sum(held.nbytes for held in buffers._held.values())


def test_memory_is_used_again_grows_and_is_given_back_after_a_burst():
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

    steps(100, PATIENCE - 1)
    take(400)  # not so small
    buffers.end_step()
    assert held_bytes(buffers) == 4 * (1500 + 50)
    del other
    steps(400, PATIENCE)
    assert held_bytes(buffers) == 4 * 1500  # the other was not taken for so long
    steps(100, PATIENCE)
    assert held_bytes(buffers) == 0
    assert take(100).numel() == 100
    buffers.forget()
    assert held_bytes(buffers) == 0


def test_names_and_dtypes_have_memory_of_their_own():
    buffers = Buffers()
    some = [buffers.take(name, 8, dtype, CPU) for name in "ab" for dtype in (torch.float32, torch.int32)]
    assert len({one.data_ptr() for one in some}) == 4
