"""PowerSGD as a callback, to compare sparsifiers with low-rank compression."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.sparsifiers.checks import require_count


class PowerSGD(Callback):
    """Replaces averaged gradients by PowerSGD's approximation, with error feedback.

    Use it with a dense strategy: ``ddp``, or simulated workers with ``Dense``. For the mean M of gradient plus error
    over all workers, PowerSGD averages two products of the workers' matrices, P = M Q and Q' = Mᵀ P. Both are linear,
    so n workers get the result of one worker with matrix M (Vogels et al., NeurIPS 2019, arXiv:1905.13727). This
    callback computes it from the dense average.

    Logs ``compressed_bytes`` in every step: the bytes that PowerSGD would send per worker.

    Args:
        rank: number of columns of P and Q. A matrix with m rows and n columns sends r (m + n) values. If that is more
            than half of its values, it is sent whole, as by torch's hook. Vectors are sent whole too.

    Raises:
        ValueError: the rank is not a whole number of at least 1, or the sparsifier is not Dense when training begins.
    """

    def __init__(self, rank: int = 4) -> None:
        require_count("rank", rank)
        self.rank = rank
        self._errors: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self._sent = 0

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sparsifier = getattr(trainer.strategy, "sparsifier", None)
        if sparsifier is not None and getattr(sparsifier, "threshold", None) != 0:
            raise ValueError(f"PowerSGD got the sparsifier {type(sparsifier).__name__}. Must be Dense, or use ddp.")
        self._errors.clear()
        self._factors.clear()

    @override
    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        generator = torch.Generator().manual_seed(0)  # equal on all workers
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is None or parameter not in own:
                continue
            matrix = parameter.grad.reshape(len(parameter), -1) if parameter.ndim > 1 else parameter.grad.reshape(1, -1)
            if 2 * self.rank * sum(matrix.shape) > matrix.numel():
                self._sent += matrix.nbytes
                continue
            if name not in self._factors:
                start = torch.randn(matrix.shape[1], self.rank, generator=generator)
                self._factors[name] = start.to(matrix)
                self._errors[name] = torch.zeros_like(matrix)
            compensated = matrix + self._errors[name]
            left, right = compress(compensated, self._factors[name])
            approximation = left @ right.T
            self._errors[name], self._factors[name] = compensated - approximation, right
            parameter.grad.copy_(approximation.view_as(parameter.grad))
            self._sent += left.nbytes + right.nbytes

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.log("compressed_bytes", float(self._sent), on_step=True, on_epoch=False, batch_size=1)
        self._sent = 0


def compress(matrix: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors P and Q' of a matrix after one step of power iteration.

    P Q'ᵀ approximates the matrix. P has orthonormal columns and shape (m, r), and Q' has shape (n, r).

    Args:
        matrix: shape (m, n).
        factor: Q of the previous step, shape (n, r).
    """
    left = torch.linalg.qr(matrix @ factor).Q
    return left, matrix.T @ left
