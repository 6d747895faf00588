"""What other thresholds would have sent of gradients that were recorded."""

import torch
from torch import Tensor

REPLAYED_STEPS = 512


def replayed_densities(
    recorded: Tensor, thresholds: Tensor, generator: torch.Generator, *, own: Tensor | None = None
) -> Tensor:
    """Returns how often each coordinate would be sent with each λ, if gradients went on as they were recorded.

    The recorded steps are gone through again and again, with error feedback, for every λ at once. A residual begins
    where a random walk that restarts from 0 at ±λ is found in the long run, so that few passes do. Each pass changes
    the signs of a coordinate at random: what N steps sum up to is taken for noise, of variance N σ², and not for a
    drift that would go on, of which so few steps know nothing. For Gaussian noise this comes to (λ/σ + 0.583)^−2;
    unlike the formula it knows of heavy tails, of coordinates that are rarely touched, and of correlated steps.

    Args:
        recorded: shape (N, m), finite: the gradients of N steps at m coordinates.
        thresholds: λ ≥ 0, shape (K,), in the same units.
        generator: of random numbers, on the same device.
        own: shape (m,): λ of coordinates with one of their own, NaN for the others.

    Returns:
        Shape (K, m), in 0…1.
    """
    num_steps, num_coordinates = recorded.shape
    limits = thresholds.to(recorded.dtype).unsqueeze(1).expand(-1, num_coordinates)
    if own is not None:
        limits = torch.where(own.isnan(), limits, own.to(recorded.dtype))
    shape = (len(thresholds), num_coordinates)
    uniform = torch.rand(shape, generator=generator, dtype=recorded.dtype, device=recorded.device)
    side = torch.rand(shape, generator=generator, dtype=recorded.dtype, device=recorded.device) - 0.5
    residual = limits * (1 - uniform.sqrt()) * side.sign()
    sent = torch.zeros_like(residual)
    passes = max(1, REPLAYED_STEPS // num_steps)
    for _ in range(passes):
        signs = torch.randint(2, (num_coordinates,), generator=generator, device=recorded.device) * 2 - 1
        for gradient in recorded * signs:
            residual += gradient
            is_sent = residual.abs() >= limits
            sent += is_sent
            residual.masked_fill_(is_sent, 0.0)
    return sent / (passes * num_steps)


def first_densities(recorded: Tensor, thresholds: Tensor, weights: Tensor, skipped: int) -> Tensor:
    """Returns the share that each λ sends of steps that were recorded, if residuals are 0 before the first.

    Args:
        recorded: shape (N, m), finite.
        thresholds: λ ≥ 0, shape (K,), in the same units.
        weights: shape (m,): for how many elements each coordinate stands.
        skipped: how many of the first steps do not count, less than N.

    Returns:
        Shape (K,), in 0…1.
    """
    limits = thresholds.to(recorded.dtype).unsqueeze(1)
    residual = recorded.new_zeros(len(thresholds), recorded.shape[1])
    sent = torch.zeros_like(residual)
    for number, gradient in enumerate(recorded):
        residual += gradient
        is_sent = residual.abs() >= limits
        sent += is_sent * (number >= skipped)
        residual.masked_fill_(is_sent, 0.0)
    return sent.double() @ weights.double() / (weights.double().sum() * (len(recorded) - skipped))
