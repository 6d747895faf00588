"""Packs values and 16-bit indices of a selection into bytes and back.

A payload has four parts in the machine's byte order. Block ends are padded to 8 bytes, values to 2::

    | header: H x float64 | block ends: B x int32 | values: c | offsets: c x 16 bit |

An index is an offset of 16 bits inside its block of 65,536 elements. Indices ascend, so the ends of the blocks
determine each coordinate's block. This takes 2 bytes per index and 4 bytes per block instead of 8 bytes per index.

A payload has a capacity of c coordinates. Block ends count all k selected coordinates, so the last end is k. If k < c,
the positions after the first k are unused; if k > c, the payload holds only the first c. Gathers over Gloo leave
unused capacity out (``shortened``). NCCL's collectives need equal sizes on all workers and send it.
"""

from ctypes import c_int32, memmove
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.exchange.wire import Wire
from lightning_sparse.sparsifiers.protocol import Selection

BLOCK_ELEMENTS = 65_536
CAPACITY_STEP = 8
"""Capacities are multiples of this, so that payloads are a multiple of 8 bytes for every wire."""


class PayloadParts(NamedTuple):
    """The parts of a payload, as views of its bytes."""

    header: Tensor  # float64, shape (H,)
    ends: Tensor  # int32, shape (B,): selected coordinates up to the end of each block of 65,536 elements
    values: Tensor  # encoded, shape (c,)
    offsets: Tensor  # int16, shape (c,): 16 unsigned bits each


@dataclass(frozen=True)
class PayloadFormat:
    """Packs and unpacks a bucket's payloads.

    Args:
        num_elements: elements of the bucket.
        wire: the form of a value.
        header_fields: H, the number of header fields.
    """

    num_elements: int
    wire: Wire
    header_fields: int = 0

    @cached_property
    def num_blocks(self) -> int:
        """B, the number of blocks of 65,536 elements that cover the bucket."""
        return -(-self.num_elements // BLOCK_ELEMENTS)

    @property
    def coordinate_bytes(self) -> int:
        """Bytes per coordinate, for its value and its offset."""
        return self.wire.dtype.itemsize + 2

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes of a payload of capacity 0."""
        return 8 * self.header_fields + 8 * -(-self.num_blocks // 2)

    def payload_bytes(self, capacity: int) -> int:
        """Return the bytes of a payload of this capacity."""
        return self.starts(capacity)[-1] + 2 * capacity

    def capacity(self, payload_bytes: int) -> int:
        """Return the capacity of a payload with this number of bytes."""
        return (payload_bytes - self.fixed_bytes) // self.coordinate_bytes

    def num_selected_at(self, address: int) -> int:
        """Return k of a payload at this address, on the CPU; faster than operators on tensors."""
        last_end = address + 8 * self.header_fields + 4 * (self.num_blocks - 1)
        return c_int32.from_address(last_end).value

    def shortened(self, payload: Tensor) -> Tensor:
        """Return a payload without unused capacity, in the memory of the given payload, which becomes invalid.

        ``payload``: contiguous, on the CPU.
        """
        address, capacity = payload.data_ptr(), self.capacity(payload.numel())
        held = min(aligned(self.num_selected_at(address)), capacity)
        start, new_start = self.starts(capacity)[-1], self.starts(held)[-1]
        memmove(address + new_start, address + start, 2 * held)
        return payload[: self.payload_bytes(held)]

    def parts(self, payload: Tensor) -> PayloadParts:
        """Return views of the parts of payloads.

        ``payload``: uint8, shape (…, payload_bytes(c)), aligned to 8 bytes.
        """
        capacity = self.capacity(payload.shape[-1])
        ends_start, values_start, offsets_start = self.starts(capacity)
        return PayloadParts(
            payload[..., :ends_start].view(torch.float64),
            payload[..., ends_start : ends_start + 4 * self.num_blocks].view(torch.int32),
            payload[..., values_start : values_start + capacity * self.wire.dtype.itemsize].view(self.wire.storage),
            payload[..., offsets_start : offsets_start + 2 * capacity].view(torch.int16),
        )

    def starts(self, capacity: int) -> tuple[int, int, int]:
        """Return the positions of block ends, values and offsets in the bytes of a payload of this capacity."""
        values_end = self.fixed_bytes + capacity * self.wire.dtype.itemsize
        return 8 * self.header_fields, self.fixed_bytes, values_end + values_end % 2

    def fill(self, payload: Tensor, selection: Selection) -> None:
        """Write the first c coordinates of a selection, and the ends of all, into a payload of capacity c.

        Args:
            payload: uint8, shape (…, payload_bytes(c)); the header stays as it is.
            selection: k coordinates, with values from ``Wire.rounded``: shapes (…, k).
        """
        _, ends, values, offsets = self.parts(payload)
        indices = selection.indices
        block_ends = _block_starts(self.num_blocks, indices.device) + BLOCK_ELEMENTS
        ends.copy_(torch.searchsorted(indices, block_ends.expand(*indices.shape[:-1], -1).contiguous()))
        written = min(indices.shape[-1], values.shape[-1])
        values[..., :written].copy_(self.wire.encoded(selection.values[..., :written]))
        # 16 unsigned bits in an int16: 32,768 and above wrap to negative numbers, and unpacking reverses this.
        offsets[..., :written].copy_(indices[..., :written].bitwise_and(BLOCK_ELEMENTS - 1))

    def fill_marked(self, payload: Tensor, marks: Tensor, values: Tensor) -> None:
        """Write the first c marked values without a wait for the device; see ``fill``.

        Args:
            payload: uint8, shape (payload_bytes(c),).
            marks: nonzero or NaN at the coordinates to write, shape (num_elements,).
            values: from ``Wire.rounded``, shape (num_elements,).
        """
        # Unused positions get an index beyond all blocks, so no block counts them.
        beyond = self.num_blocks * BLOCK_ELEMENTS
        indices = torch.nonzero_static(marks, size=self.capacity(payload.numel()), fill_value=beyond).squeeze(1)
        self.fill(payload, Selection(indices, values.index_select(0, indices.clamp(max=self.num_elements - 1))))

    def unpack(self, payload: Tensor, dtype: torch.dtype, num_selected: int | None = None) -> Selection:
        """Return the coordinates in a payload.

        Args:
            payload: uint8, shape (payload_bytes(c),).
            dtype: dtype of the values returned.
            num_selected: k, known from a header; None reads it from the payload, which waits for the device.
        """
        _, ends, values, offsets = self.parts(payload)
        held = min(int(ends[-1:].sum()) if num_selected is None else num_selected, values.numel())
        ends = ends.clamp(max=held)  # k may be larger
        counts = ends.diff(prepend=ends.new_zeros(1))
        starts = _block_starts(self.num_blocks, payload.device).repeat_interleave(counts, output_size=held)
        return Selection(
            starts + offsets[:held].long().bitwise_and_(BLOCK_ELEMENTS - 1), self.wire.decoded(values[:held], dtype)
        )

    def unpack_padded(self, payload: Tensor, dtype: torch.dtype) -> Selection:
        """Return c coordinates without knowing k, and so without a wait for the device.

        Coordinates after the first k have the index num_elements and the value 0.
        """
        _, ends, values, offsets = self.parts(payload)
        places = torch.arange(values.numel(), device=payload.device)
        block = torch.searchsorted(ends, places, right=True)
        indices = (block * BLOCK_ELEMENTS).add_(offsets.long().bitwise_and_(BLOCK_ELEMENTS - 1))
        is_used = block < self.num_blocks
        values = self.wire.decoded(values, dtype)
        return Selection(torch.where(is_used, indices, self.num_elements), torch.where(is_used, values, 0))


@lru_cache(maxsize=256)
def _block_starts(num_blocks: int, device: torch.device) -> Tensor:
    return torch.arange(num_blocks, device=device) * BLOCK_ELEMENTS


def aligned(count: int) -> int:
    """Return the count rounded up to a multiple of CAPACITY_STEP."""
    return -(-count // CAPACITY_STEP) * CAPACITY_STEP
