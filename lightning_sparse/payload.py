"""How a selection is packed: statistics, values and 16-bit indices in one buffer of bytes, and back.

The layout of a payload, every part in the machine's byte order::

    | header: H x float64 | block counts: B x int32, padded to 8 bytes | values: k | offsets: k x 16 bit |

An index is an offset of 16 bits inside its block of 65,536 elements. Indices ascend, so a count per block is all that
is needed to recover the block: 2 bytes an index and 4 bytes a block instead of 8 bytes an index.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_sparse.sparsifiers import Selection

BLOCK_ELEMENTS = 65_536
ValueDtype = Literal["float32", "bfloat16", "float16"]
VALUE_DTYPES: tuple[ValueDtype, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class PayloadFormat:
    """What both ends must know to pack and unpack a bucket's payload.

    Args:
        num_elements: elements of the bucket.
        header_fields: H, the number of statistics in the header.
        wire_dtype: dtype in which values travel.
    """

    num_elements: int
    header_fields: int
    wire_dtype: torch.dtype

    @property
    def num_blocks(self) -> int:
        """B: blocks of 65,536 elements that cover the bucket."""
        return -(-self.num_elements // BLOCK_ELEMENTS)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a payload that has no coordinates."""
        return 8 * self.header_fields + 8 * -(-self.num_blocks // 2)

    def payload_bytes(self, num_selected: int) -> int:
        """Bytes of a payload of so many coordinates."""
        return self.fixed_bytes + num_selected * (self.wire_dtype.itemsize + 2)

    def num_selected(self, payload_bytes: int) -> int:
        """The number of coordinates in a payload of so many bytes."""
        return (payload_bytes - self.fixed_bytes) // (self.wire_dtype.itemsize + 2)

    def pack(self, header: Tensor, selection: Selection) -> Tensor:
        """Returns the payload: uint8, shape (payload_bytes(k),), on the selection's device.

        Args:
            header: float64, shape (header_fields,).
            selection: k coordinates; their values must be exact in wire_dtype (see :func:`round_to_wire`).
        """
        indices, values = selection
        payload = torch.zeros(self.payload_bytes(indices.numel()), dtype=torch.uint8, device=indices.device)
        header_part, counts_part, values_part, offsets_part = self._parts(payload)
        header_part.copy_(header)
        block_ends = torch.arange(1, self.num_blocks + 1, device=indices.device) * BLOCK_ELEMENTS
        counts_part.copy_(torch.searchsorted(indices, block_ends).diff(prepend=block_ends.new_zeros(1)))
        values_part.copy_(values)
        # 16 unsigned bits, kept in an int16: 32,768 and above wrap to negative and are unwrapped when unpacked.
        offsets_part.copy_(indices.bitwise_and(BLOCK_ELEMENTS - 1).to(torch.int16))
        return payload

    def unpack(self, payload: Tensor, dtype: torch.dtype) -> Selection:
        """Returns the selection in a payload, its values in the given dtype."""
        _, counts, values, offsets = self._parts(payload)
        starts = torch.arange(self.num_blocks, device=payload.device) * BLOCK_ELEMENTS
        starts = starts.repeat_interleave(counts.long(), output_size=offsets.numel())
        return Selection(starts + offsets.long().bitwise_and_(BLOCK_ELEMENTS - 1), values.to(dtype))

    def header(self, payload: Tensor) -> Tensor:
        """Returns the header of a payload: float64, shape (header_fields,), a view."""
        return payload[: 8 * self.header_fields].view(torch.float64)

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        selected = self.num_selected(payload.numel())
        counts_start = 8 * self.header_fields
        values_start = self.fixed_bytes
        offsets_start = values_start + selected * self.wire_dtype.itemsize
        return (
            self.header(payload),
            payload[counts_start : counts_start + 4 * self.num_blocks].view(torch.int32),
            payload[values_start:offsets_start].view(self.wire_dtype),
            payload[offsets_start:].view(torch.int16),
        )


def wire_dtype(value_dtype: ValueDtype, residual_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values travel: ``"float32"`` sends them as the residual holds them.

    So a float64 model is exchanged in float64 unless bfloat16 or float16 is asked for.
    """
    return {"float32": residual_dtype, "bfloat16": torch.bfloat16, "float16": torch.float16}[value_dtype]


def round_to_wire(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values rounded to a wire dtype and back, in their own dtype; the rest stays in the residual.

    A finite value beyond the range of the wire dtype (65,504 for float16) becomes the largest finite one: infinity
    would look like an overflow to every worker, and what is cut off goes out in the steps that follow.
    """
    if dtype == values.dtype:
        return values
    limit = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-limit, limit), values).to(dtype).to(values.dtype)
