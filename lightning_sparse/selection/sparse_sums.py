"""The threshold on sums: each worker sums one slice of a bucket, and keeps small sums in its own residual.

The worker of a slice adds its own residual to the sum without a selection, because that needs no message::

    s = ((1/n) Σ_{i ≠ j} out_i) + p_j / n      of worker j, in its slice
    a = s where |s| >= λ / √n                  goes to all workers, as the average
    e_j = n (s − a)

So nothing is lost: Σ_i e_i + n a equals Σ_i p_i in every step. The mean of all workers' unsent values is below
λ (1 + 1 / √n), and a worker receives as many bytes from 1,000 workers as from 10.

The mean of n independent residuals below λ is of the size λ / √n. A smaller threshold would send that noise, and a
larger one would delay the signal.
"""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from lightning_sparse.exchange.routes.reduce_scatter import ReduceScatterTransfer
from lightning_sparse.selection.bucket import FlatBucket
from lightning_sparse.sparsifiers.hard_threshold import ThresholdRun
from lightning_sparse.sparsifiers.protocol import Selection


def keep_small_sums(
    bucket: FlatBucket, transfer: ReduceScatterTransfer, runs: Sequence[ThresholdRun], averages: Tensor, most: int
) -> Tensor:
    """Complete the sums of this worker's slice; keep small ones as residuals.

    Args:
        bucket: its residual holds p and receives e'.
        transfer: the exchange of the bucket.
        runs: neighbouring runs that together cover the bucket.
        averages: (1/n) Σ_{i ≠ j} out_i, padded with zeros. Becomes a.
        most: the most coordinates to send.

    Returns:
        The number of averages of at least λ / √n, one element, without a wait for the device.
    """
    (start, end), n = transfer.own_slice, transfer.workers.num_workers
    after, averages = bucket.residual.after[start:end], averages[: end - start]
    # An unused layer's residual is never rolled back and so must not change: send all its sums.
    left_out = [slice(max(first - start, 0), max(last - start, 0)) for first, last in bucket.left_out]
    own = after.clone()
    after.zero_()
    for part in left_out:
        after[part], own[part] = own[part], 0
    sums = averages + own / n
    is_small = torch.empty_like(sums, dtype=torch.bool)
    for threshold, run_start, run_end, _ in runs:
        part = slice(max(run_start - start, 0), max(run_end - start, 0))
        torch.lt(sums[part].abs(), threshold / sqrt(n), out=is_small[part])
    for part in left_out:
        is_small[part] = sums[part] == 0
    is_large = is_small.logical_not_()
    num_large = is_large.count_nonzero()
    is_sent = is_large & (is_large.cumsum(0) <= most)
    averages.copy_(torch.where(is_sent, sums, 0))
    after.add_(sums.masked_fill_(is_sent, 0).nan_to_num_(0.0, 0.0, 0.0), alpha=n)
    return num_large


def put_back(residual: Tensor, selection: Selection) -> None:
    """Add finite values to a residual at unique indices."""
    residual.index_add_(0, selection.indices, selection.values.nan_to_num(0.0, 0.0, 0.0))
