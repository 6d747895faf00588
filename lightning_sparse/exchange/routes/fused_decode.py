"""Adding up what all workers sent, in one GPU kernel a bucket, without knowing on the host how much that is.

The same bits as unpacking payload by payload, adding each to zeros, and dividing all by n. A program has one block of
the payload's 65,536 elements and goes through the workers in rank order; a bucket of 25 MB has 100 of them, one of
1 MB has 4. What a program does is a chain of reads from the second-level cache, three for each worker and tile of
TILE coordinates and four more for its quotients: a latency, not a matter of bandwidth, and independent of the number of
elements that nobody sent.
"""

from torch import Tensor

from lightning_sparse.exchange.payload import BLOCK_ELEMENTS, PayloadFormat
from lightning_sparse.kernels import launch
from lightning_sparse.kernels.decode import add_payloads

TILE = 1024
"""Coordinates at a time: 4 for each of 256 threads. A block has 655 of each worker at a density of 1 %."""


def decode(
    payload_format: PayloadFormat,
    payloads: Tensor,
    out: Tensor,
    *,
    quotients: Tensor | None = None,
    is_side_by_side: bool = False,
) -> None:
    """Adds payloads in rank order to zeros, and divides by their number. One kernel; nothing waits for the device.

    Of a payload that was too small for what its worker selected, what it holds is added.

    Args:
        payload_format: of each.
        payloads: uint8, shape (n, payload_bytes(c)), each contiguous, on a GPU.
        out: float32 or float64, shape (num_elements,) or all parts together, contiguous, all zeros: gets the average.
        quotients: work space of out's dtype, at least n · c elements; None leaves the sum undivided.
        is_side_by_side: whether the payloads are of neighbouring parts of out, each of num_elements, instead.
    """
    num_payloads, stride = len(payloads), payloads.stride(0)
    groups = num_payloads if is_side_by_side else 1
    _, ends, values, offsets = payload_format.parts(payloads[0])
    if not payload_format.num_blocks or not values.numel():
        return
    # Each part of the first payload, and how far it is from there to the next one's.
    rows = (stride // part.itemsize for part in (ends, values, offsets))
    launch(
        add_payloads,
        (payload_format.num_blocks, groups),
        *(out, quotients, ends, values, offsets, num_payloads // groups, values.numel(), *rows),
        payload_format.num_elements,
        payload_format.wire.scale,
        BLOCK=BLOCK_ELEMENTS,
        TILE=TILE,
        num_warps=8,
        enable_fp_fusion=False,
    )
