"""The paper's LSTM language model with its optimizer, learning-rate schedule and recurrent state."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MeanMetric
from typing_extensions import override

from recipes.learning_rate import schedule_by_epoch
from recipes.lstm_wikitext2.data import IGNORED
from recipes.mean_loss import MeanLoss, Perplexity

WIKITEXT2_VOCABULARY_SIZE = 33_278
PAPER_HIDDEN_SIZE = 650
PAPER_NUM_LAYERS = 3
"""Sizes of the paper's network, with WikiText-2's vocabulary."""

Stage = Literal["train", "val", "test"]
Hidden = tuple[Tensor, Tensor]
"""Output and cell state of the LSTM, each of shape (layers, columns, hidden_size)."""


class TiedLSTM(nn.Module):
    """A word embedding, an LSTM of equal width, and a decoder that shares the embedding's weight.

    Dropout acts on the embedded words, between the layers and on the output.

    Args:
        vocabulary_size: number of words.
        hidden_size: dimensions of the embedding and of each layer.
        num_layers: layers of the LSTM.
        dropout: dropout probability, in [0, 1).

    Raises:
        ValueError: a size is below 1, or the dropout is out of range.
    """

    def __init__(
        self,
        vocabulary_size: int = WIKITEXT2_VOCABULARY_SIZE,
        hidden_size: int = PAPER_HIDDEN_SIZE,
        num_layers: int = PAPER_NUM_LAYERS,
        dropout: float = 0.4,
    ) -> None:
        super().__init__()
        sizes = {"vocabulary_size": vocabulary_size, "hidden_size": hidden_size, "num_layers": num_layers}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"Invalid {name}={size}. Must be at least 1.")
        if not 0 <= dropout < 1:
            raise ValueError(f"Invalid {dropout=}. Must be within [0, 1).")
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary_size, hidden_size)
        # torch warns about dropout between layers if there is only one layer.
        self.lstm = nn.LSTM(hidden_size, hidden_size, num_layers, dropout=dropout if num_layers > 1 else 0.0)
        self.decoder = nn.Linear(hidden_size, vocabulary_size)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.decoder.weight = self.embedding.weight

    @override
    def forward(self, words: Tensor, hidden: Hidden | None = None) -> tuple[Tensor, Hidden]:
        """Return logits of the next words, shape (time, columns, vocabulary_size), and the final state.

        Args:
            words: int64, shape (time, columns).
            hidden: the initial state; None for zeros.
        """
        output, hidden = self.lstm(self.dropout(self.embedding(words)), hidden)
        return self.decoder(self.dropout(output)), hidden


class LSTMLanguageModel(LightningModule):
    """A module that trains a word-level LSTM, with the paper's hyper-parameters as defaults.

    Logs ``loss`` and ``perplexity`` under ``train/``, ``val/`` and ``test/`` once per epoch, over all words of all
    workers. Logs rank 0's ``train/local_loss`` in every step. ``val/perplexity_mean_of_windows`` is the paper's metric,
    the mean over windows of exp(mean cross-entropy of a window). It is larger than ``val/perplexity``.

    The LSTM's state carries over between windows, without its gradient, and starts at zero in every epoch. Each worker
    has its own state, and a checkpoint holds all states. You can resume in the middle of an epoch with as many workers.

    Args:
        vocabulary_size: number of words; at least the vocabulary size of the data.
        hidden_size: dimensions of the embedding and of each layer.
        num_layers: layers of the LSTM.
        dropout: dropout probability.
        learning_rate: the rate after the warmup.
        momentum: of SGD.
        warmup_from: the rate of the first step.
        warmup_epochs: epochs of linear growth from ``warmup_from`` to ``learning_rate``.
        milestones: epochs at which the rate drops to a tenth. Scale them with ``max_epochs``.
    """

    def __init__(
        self,
        vocabulary_size: int = WIKITEXT2_VOCABULARY_SIZE,
        hidden_size: int = PAPER_HIDDEN_SIZE,
        num_layers: int = PAPER_NUM_LAYERS,
        dropout: float = 0.4,
        learning_rate: float = 20.0,
        momentum: float = 0.0,
        warmup_from: float = 1.25,
        warmup_epochs: float = 5.0,
        milestones: tuple[float, ...] = (60.0, 80.0),
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = TiedLSTM(vocabulary_size, hidden_size, num_layers, dropout)
        self.hidden: dict[Stage, Hidden | None] = {"train": None, "val": None, "test": None}
        self.train_perplexity = Perplexity()
        self.val_perplexity = Perplexity()
        self.test_perplexity = Perplexity()
        self.val_loss = MeanLoss()
        self.test_loss = MeanLoss()
        self.val_mean_of_windows = MeanMetric()
        self.test_mean_of_windows = MeanMetric()

    @override
    def setup(self, stage: str) -> None:
        """Compare the vocabularies of model and data.

        Raises:
            ValueError: the data have a larger vocabulary than the model.
        """
        known = self.hparams["vocabulary_size"]
        given = getattr(getattr(self.trainer, "datamodule", None), "vocabulary_size", known)
        if given > known:
            raise ValueError(
                f"The data have {given:,} words, but the model has {known:,}. Add --model.vocabulary_size={given} or "
                f"--data.vocabulary_size={known}."
            )
        if given < known:
            rank_zero_warn(
                f"The data have {given:,} words, but the model has {known:,}. It works, but "
                f"--model.vocabulary_size={given} is faster."
            )

    @override
    def forward(self, words: Tensor, hidden: Hidden | None = None) -> tuple[Tensor, Hidden]:
        """Return logits, shape (time, columns, vocabulary_size), and the final state."""
        return self.network(words, hidden)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        summed_loss, num_words = self._summed_loss(batch, batch_idx, "train")
        loss = summed_loss / num_words
        self.train_perplexity.update(summed_loss, num_words)
        # Not synchronised, because Lightning would add a barrier and a collective to the measured step.
        self.log("train/local_loss", loss, on_step=True, on_epoch=False, prog_bar=True, batch_size=1)
        size = batch[1].numel()
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=size)
        self.log("train/perplexity", self.train_perplexity, on_step=False, on_epoch=True, batch_size=size)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "val", self.val_perplexity, self.val_loss, self.val_mean_of_windows)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "test", self.test_perplexity, self.test_loss, self.test_mean_of_windows)

    def _evaluate(
        self,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
        stage: Stage,
        perplexity: Perplexity,
        loss: MeanLoss,
        mean_of_windows: MeanMetric,
    ) -> None:
        summed_loss, num_words = self._summed_loss(batch, batch_idx, stage)
        window_loss = summed_loss / num_words.clamp(min=1)
        perplexity.update(summed_loss, num_words)
        loss.update(summed_loss, num_words)
        mean_of_windows.update(window_loss.exp(), num_words > 0)
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": 1}
        self.log(f"{stage}/loss", loss, **options)
        self.log(f"{stage}/perplexity", perplexity, prog_bar=True, **options)
        self.log(f"{stage}/perplexity_mean_of_windows", mean_of_windows, **options)

    def _summed_loss(self, batch: tuple[Tensor, Tensor], batch_idx: int, stage: Stage) -> tuple[Tensor, Tensor]:
        words, targets = batch
        # Reset by batch index, because Lightning does not call on_train_epoch_start in every resumed run.
        hidden = None if batch_idx == 0 else self.hidden[stage]
        if hidden is not None and hidden[0].shape[1] != words.shape[1]:
            rank_zero_warn(
                f"The checkpoint's LSTM state has {hidden[0].shape[1]} columns, but the text has {words.shape[1]}. The "
                "LSTM starts with an empty state."
            )
            hidden = None
        if hidden is not None:
            # The checkpoint was loaded before the model moved to its device.
            hidden = (hidden[0].to(words.device), hidden[1].to(words.device))
        logits, (output, cell) = self(words, hidden)
        self.hidden[stage] = (output.detach(), cell.detach())
        summed_loss = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return summed_loss, (targets != IGNORED).sum()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the LSTM state of every worker to the checkpoint; every rank calls this."""
        hidden = self.hidden["train"]
        if hidden is None:
            return
        state = torch.stack(hidden).to(self.device)
        states = [torch.empty_like(state) for _ in range(self.trainer.world_size)]
        if dist.is_available() and dist.is_initialized():
            dist.all_gather(states, state)
        else:
            states = [state]
        checkpoint["hidden"] = torch.stack(states).cpu()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore this worker's state if as many workers wrote the checkpoint, else start from zeros."""
        self.hidden["train"] = None
        states = checkpoint.get("hidden")
        if states is None or self._trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return
        if len(states) != self.trainer.world_size:
            rank_zero_warn(
                f"The checkpoint holds LSTM states of {len(states)} workers, but this run has "
                f"{self.trainer.world_size}. All workers start with an empty state."
            )
            return
        output, cell = states[self.trainer.global_rank]
        self.hidden["train"] = (output, cell)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        options = self.hparams
        optimizer = torch.optim.SGD(self.parameters(), lr=options["learning_rate"], momentum=options["momentum"])
        return schedule_by_epoch(self, optimizer)
