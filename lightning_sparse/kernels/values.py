"""Kernels for the sent value of a selected coordinate and the rest in its residual."""

# Annotations of the kernels stay strings, so that the module imports without triton.
from __future__ import annotations

from lightning_sparse.kernels.launching import jit, tl


@jit
def divide(values: tl.tensor, divisor: tl.tensor) -> tl.tensor:
    """Return the quotients, rounded to nearest."""
    # The / operator rounds to nearest in float64, but not in float32.
    return values / divisor if values.dtype == tl.float64 else tl.div_rn(values, tl.zeros_like(values) + divisor)


@jit
def _is_finite(values: tl.tensor) -> tl.tensor:
    return tl.abs(values) < float("inf")


@jit
def _to_wire(p: tl.tensor, scale: tl.tensor, WIRE: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    # Equals Wire.rounded and Wire.encoded; uint8 holds a float8.
    sent = p
    if tl.uint8 == WIRE:
        scaled = tl.minimum(tl.maximum(divide(p, scale), -LIMIT), LIMIT)
        sent = tl.where(_is_finite(p), _to_float8(scaled.to(tl.float32)), 0x7F).to(WIRE)
    elif p.dtype != WIRE:
        # Finite values stay finite. Like PyTorch, this rounds float64 via float32.
        clamped = tl.minimum(tl.maximum(p, -LIMIT), LIMIT)
        sent = tl.where(_is_finite(p), clamped, p).to(tl.float32).to(WIRE)
    return sent


@jit
def _to_float8(p: tl.tensor) -> tl.tensor:
    """Return the bits of the nearest e4m3 as an int32, up to 448, also on GPUs without this format."""
    bits = p.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # 1.5 times the smallest power of two at which this dtype has no fraction; the addition rounds half to even.
    steps = (tl.abs(p) * 512.0 + 12582912.0) - 12582912.0
    code = tl.where(tl.abs(p) < 0.015625, steps.to(tl.int32), normal)
    return code | ((bits >> 24) & 0x80)


@jit
def from_wire(sent: tl.tensor, scale: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the values that receivers decode, as in Wire.decoded."""
    value = sent.to(dtype)
    if sent.dtype == tl.int8:
        value = tl.where(sent == -128, float("nan"), value * scale)
    elif sent.dtype == tl.uint8:
        code = sent.to(tl.int32)
        magnitude = code & 0x7F
        small = (magnitude.to(tl.float32) / 512).to(tl.int32, bitcast=True)
        # The sign is a bit, because Triton before 3.9 computes -x as 0 - x, and so loses the sign of a zero.
        bits = tl.where(magnitude < 8, small, (magnitude << 20) + (120 << 23)) | (code & 0x80) << 24
        value = tl.where(magnitude == 0x7F, float("nan"), bits.to(tl.float32, bitcast=True))
        value = value.to(dtype) * scale
    return value


@jit
def sent_and_kept(
    p: tl.tensor, excess: tl.tensor, scale: tl.tensor, WIRE: tl.constexpr, LIMIT: tl.constexpr
) -> tl.tensor:
    """Return a selected value in the payload, its decoded value and the rest that is kept.

    The rule of a selected value for Triton. ``sent_and_kept`` in ``selection/bucket.py`` (tensors) and in ``native.c``
    give the same bits.
    """
    encoded = _to_wire(tl.where(p > 0, p + excess, p - excess), scale, WIRE, LIMIT)
    sent = from_wire(encoded, scale, p.dtype)
    kept = p - sent
    return encoded, sent, tl.where(_is_finite(kept), kept, 0.0)
