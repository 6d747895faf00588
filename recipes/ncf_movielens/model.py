"""NeuMF with its optimizer and ranking metrics."""

from itertools import pairwise
from math import sqrt

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import MeanMetric
from typing_extensions import override

from recipes.ncf_movielens.metrics import hits_and_gains

PAPER_FACTORS = 64
PAPER_MLP_SIZES = (256, 256, 128, 64)
ML_20M_USERS, ML_20M_ITEMS = 138_493, 26_744


class NeuMF(nn.Module):
    """Neural matrix factorisation (He et al., WWW 2017): a product of factors and a multi-layer perceptron.

    The initialisation follows the published code: embeddings N(0, 0.01²), hidden layers after Glorot and the output
    after LeCun, both uniform, and PyTorch's biases.

    Args:
        num_users: number of users.
        num_items: number of items.
        factors: size of the multiplied embeddings.
        mlp_sizes: size of the perceptron's input, half for the user and half for the item, then of its layers.
        dropout: dropout after each hidden layer.

    Raises:
        ValueError: a size is below 1, the perceptron's input is odd, or the dropout is outside [0, 1).
    """

    def __init__(
        self,
        num_users: int,
        num_items: int,
        factors: int = PAPER_FACTORS,
        mlp_sizes: tuple[int, ...] = PAPER_MLP_SIZES,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        for name, size in (("num_users", num_users), ("num_items", num_items), ("factors", factors)):
            if size < 1:
                raise ValueError(f"Invalid {name}={size}. Must be at least 1.")
        if not mlp_sizes or min(mlp_sizes) < 1 or mlp_sizes[0] % 2:
            raise ValueError(
                f"Invalid {mlp_sizes=}. Must be positive and begin with an even size, as in {PAPER_MLP_SIZES}."
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"Invalid {dropout=}. Must be within [0, 1).")
        self.user_factors = nn.Embedding(num_users, factors)
        self.item_factors = nn.Embedding(num_items, factors)
        self.mlp_users = nn.Embedding(num_users, mlp_sizes[0] // 2)
        self.mlp_items = nn.Embedding(num_items, mlp_sizes[0] // 2)
        self.mlp = nn.Sequential()
        for inputs, outputs in pairwise(mlp_sizes):
            self.mlp += nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout))
        self.output = nn.Linear(factors + mlp_sizes[-1], 1)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.01)
            elif isinstance(module, nn.Linear) and module is not self.output:
                nn.init.xavier_uniform_(module.weight)
        bound = sqrt(3 / self.output.in_features)
        nn.init.uniform_(self.output.weight, -bound, bound)

    @override
    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return logits, float32 of shape (pairs,), for integer users and items of that shape."""
        product = self.user_factors(users) * self.item_factors(items)
        hidden = self.mlp(torch.cat([self.mlp_users(users), self.mlp_items(items)], dim=1))
        return self.output(torch.cat([product, hidden], dim=1)).squeeze(1)


class NCFRecommender(LightningModule):
    """A module that recommends items with NeuMF, with the paper's hyper-parameters as defaults.

    Logs ``hr10`` and ``ndcg10`` under ``val/`` and ``test/`` over all users of all workers. Logs ``train/loss`` once
    per epoch over all workers, and rank 0's ``train/local_loss`` in every step.

    Args:
        factors: size of the multiplied embeddings.
        mlp_sizes: size of the perceptron's input, half for the user and half for the item, then of its layers.
        dropout: dropout after each hidden layer.
        learning_rate: Adam's constant learning rate.
        betas: Adam's betas.
        num_users: number of users; None takes it from the checkpoint or the data module.
        num_items: number of items; None takes it from the checkpoint or the data module.
    """

    def __init__(
        self,
        factors: int = PAPER_FACTORS,
        mlp_sizes: tuple[int, ...] = PAPER_MLP_SIZES,
        dropout: float = 0.5,
        learning_rate: float = 0.0045,
        betas: tuple[float, float] = (0.25, 0.5),
        num_users: int | None = None,
        num_items: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network: NeuMF | None = None
        self.loss = nn.BCEWithLogitsLoss()
        self.val_hr10, self.val_ndcg10 = MeanMetric(), MeanMetric()
        self.test_hr10, self.test_ndcg10 = MeanMetric(), MeanMetric()
        if num_users is not None and num_items is not None:
            self.configure_model()

    @override
    def configure_model(self) -> None:
        # Lightning calls this after the data module knows the numbers of users and items.
        if self.network is not None:
            return
        for name in ("num_users", "num_items"):
            if self.hparams[name] is None:
                datamodule = getattr(self.trainer, "datamodule", None)
                if not hasattr(datamodule, name):
                    raise RuntimeError(f"{name} is unknown. Pass it, or use a MovieLensDataModule.")
                self.hparams[name] = getattr(datamodule, name)
        self.network = NeuMF(
            **{name: self.hparams[name] for name in ("num_users", "num_items", "factors", "dropout")},
            mlp_sizes=tuple(self.hparams["mlp_sizes"]),
        )

    @override
    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return logits, shape (pairs,), for users and items of that shape."""
        assert self.network is not None
        return self.network(users, items)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        users, items, labels = batch
        loss: Tensor = self.loss(self(users, items), labels)
        # Not synchronised, because Lightning would add a barrier and a collective to the measured step.
        self.log("train/local_loss", loss, on_step=True, on_epoch=False, prog_bar=True, batch_size=len(labels))
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(labels))
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._rank(batch, "val", self.val_hr10, self.val_ndcg10)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._rank(batch, "test", self.test_hr10, self.test_ndcg10)

    def _rank(self, batch: tuple[Tensor, Tensor], stage: str, hit_rate: MeanMetric, ndcg: MeanMetric) -> None:
        users, candidates = batch
        scores = self(users[:, None].expand_as(candidates).flatten(), candidates.flatten()).view_as(candidates)
        for metric, values in zip((hit_rate, ndcg), hits_and_gains(scores), strict=True):
            metric.update(values)
        self.log(f"{stage}/hr10", hit_rate, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(users))
        self.log(f"{stage}/ndcg10", ndcg, on_step=False, on_epoch=True, batch_size=len(users))

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"], betas=self.hparams["betas"])
