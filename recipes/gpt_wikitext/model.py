"""A small GPT with its optimizer and schedule: a linear warmup, then a cosine to zero."""

from math import cos, pi
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from typing_extensions import override

from recipes.learning_rate import schedule_by_step


class GPT(nn.Module):
    """Token and position embeddings, pre-norm transformer layers with a causal mask, and a decoder.

    Args:
        vocabulary_size: number of tokens.
        length: largest number of tokens per window.
        width: dimensions of the embeddings and of each layer; the inner dimension of a layer is four times larger.
        num_layers: number of layers.
        num_heads: attention heads; must divide the width.

    Raises:
        ValueError: a size is below 1, or the width is not a multiple of the heads.
    """

    def __init__(
        self, vocabulary_size: int = 256, length: int = 64, width: int = 96, num_layers: int = 2, num_heads: int = 4
    ) -> None:
        super().__init__()
        sizes = {"vocabulary_size": vocabulary_size, "length": length, "width": width, "num_layers": num_layers}
        for name, size in (sizes | {"num_heads": num_heads}).items():
            if size < 1:
                raise ValueError(f"Invalid {name}={size}. Must be at least 1.")
        if width % num_heads:
            raise ValueError(f"Invalid {width=}. Must be a multiple of {num_heads=}.")
        self.tokens = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.decoder = nn.Linear(width, vocabulary_size, bias=False)
        # nn.TransformerEncoder copies a layer, so without this all layers would start with equal weights.
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next tokens, shape (batch, time, vocabulary_size).

        Args:
            tokens: int64, shape (batch, time).
        """
        length = tokens.shape[1]
        if length > len(self.positions.weight):
            raise ValueError(f"Got a window of {length} tokens, more than --model.length={len(self.positions.weight)}.")
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.decoder(self.layers(hidden, mask, is_causal=True))


class GPTLanguageModel(LightningModule):
    """A module that trains a small GPT as a language model.

    Logs rank 0's ``train/local_loss`` in every step. Logs ``val/loss`` and ``test/loss``, in nats per token, over all
    windows of all workers.

    Args:
        vocabulary_size: see ``GPT``; at least the vocabulary size of the data.
        length: see ``GPT``.
        width: see ``GPT``.
        num_layers: see ``GPT``.
        num_heads: see ``GPT``.
        learning_rate: the rate after the warmup.
        warmup_steps: optimizer steps of linear growth, from ``learning_rate / warmup_steps``.
        weight_decay: weight decay of the optimizer.
        optimizer: ``"adamw"`` or ``"sgd"``, which needs a larger learning rate, such as 0.3.
        momentum: of SGD; also the first beta of AdamW, whose second is 0.95.
        pretrained: path of a checkpoint of this module; ``fit`` begins with its weights and a new optimizer.

    Raises:
        ValueError: a number is out of range, or the optimizer is unknown.
    """

    def __init__(
        self,
        vocabulary_size: int = 256,
        length: int = 64,
        width: int = 96,
        num_layers: int = 2,
        num_heads: int = 4,
        learning_rate: float = 3e-3,
        warmup_steps: int = 50,
        weight_decay: float = 0.01,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        momentum: float = 0.9,
        pretrained: str | None = None,
    ) -> None:
        super().__init__()
        if learning_rate <= 0:
            raise ValueError(f"Invalid {learning_rate=}. Must be above 0.")
        if warmup_steps < 0:
            raise ValueError(f"Invalid {warmup_steps=}. Must be at least 0.")
        if optimizer not in ("adamw", "sgd"):
            raise ValueError(f"Invalid {optimizer=}. Must be adamw or sgd.")
        self.save_hyperparameters()
        self.network = GPT(vocabulary_size, length, width, num_layers, num_heads)

    @override
    def configure_model(self) -> None:
        """Shard every layer and the remaining parameters over a replica's ranks if the strategy shards."""
        if self.device_mesh is None or isinstance(self.network, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in self.network.layers.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.network, mesh=mesh)

    @override
    def setup(self, stage: str) -> None:
        """Read the pretrained weights; raise a ValueError if the data have a larger vocabulary than the model."""
        needed, have = getattr(self.trainer.datamodule, "vocabulary_size", 0), self.hparams["vocabulary_size"]
        if needed > have:
            raise ValueError(
                f"The data have {needed:,} tokens, but the model has {have:,}. Add --model.vocabulary_size={needed}."
            )
        if stage == "fit" and self.hparams["pretrained"] is not None:
            self.load_state_dict(torch.load(self.hparams["pretrained"], map_location="cpu")["state_dict"])

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/local_loss", loss, on_step=True, on_epoch=False, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), sync_dist=True, prog_bar=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test/loss", self._loss(batch), sync_dist=True)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = (part.long() for part in batch)
        return functional.cross_entropy(self.network(tokens).flatten(0, 1), targets.flatten())

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        options: dict[str, Any] = dict(self.hparams)
        rate, decay, momentum = options["learning_rate"], options["weight_decay"], options["momentum"]
        if options["optimizer"] == "sgd":
            optimizer = torch.optim.SGD(self.parameters(), rate, momentum=momentum, weight_decay=decay)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), rate, betas=(momentum, 0.95), weight_decay=decay)
        total, warmup = int(self.trainer.estimated_stepping_batches), options["warmup_steps"]
        return schedule_by_step(optimizer, lambda step: relative_learning_rate(step, warmup, total))


def relative_learning_rate(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate of a step as a fraction of the highest rate.

    Example:
        >>> [round(relative_learning_rate(step, 10, 110), 2) for step in (0, 4, 9, 10, 60, 109)]
        [0.1, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + cos(pi * (step - warmup_steps) / max(total_steps - warmup_steps, 1)))
