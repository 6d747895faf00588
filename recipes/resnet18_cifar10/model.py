"""Classifies images with the paper's networks, optimizer and learning-rate schedule."""

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from recipes.learning_rate import schedule_by_epoch
from recipes.mean_loss import MeanLoss
from recipes.resnet18_cifar10.architectures import PAPER_WIDTH, Architecture, build_network, use_group_norm
from recipes.resnet18_cifar10.images import IGNORED_LABEL


class LoggedClassifier(LightningModule):
    """Trains a network on images with cross-entropy; a subclass configures the optimizer.

    Logs ``loss`` and ``accuracy`` under ``train/``, ``val/`` and ``test/`` once per epoch, over all workers. Logs rank
    0's ``train/local_loss`` in every step. Validation and test ignore images labelled ``IGNORED_LABEL``.

    Args:
        network: returns logits, shape (batch, num_classes).
        num_classes: classes of the data.
        label_smoothing: share of each target that is spread over all classes, in the loss of all stages.

    Raises:
        ValueError: before training on all workers, a wrong number of classes.
    """

    def __init__(self, network: nn.Module, num_classes: int, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.network = network
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORED_LABEL, reduction="sum", label_smoothing=label_smoothing)
        # Without validate_args, which would make the host wait for the GPU in every step.
        options: dict[str, Any] = {"average": "micro", "ignore_index": IGNORED_LABEL, "validate_args": False}
        self.train_accuracy = MulticlassAccuracy(num_classes, **options)
        self.val_accuracy = MulticlassAccuracy(num_classes, **options)
        self.test_accuracy = MulticlassAccuracy(num_classes, **options)
        self.val_loss = MeanLoss()
        self.test_loss = MeanLoss()

    @override
    def setup(self, stage: str) -> None:
        # The data module is set up first. On a GPU, a label out of range would raise an unspecific assertion.
        num_classes = getattr(getattr(self.trainer, "datamodule", None), "num_classes", None)
        if num_classes not in (None, self.hparams["num_classes"]):
            raise ValueError(
                f"The data has {num_classes} classes, the model {self.hparams['num_classes']}. Add "
                f"--model.num_classes={num_classes}."
            )

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return logits, shape (batch, classes), for images of shape (batch, 3, height, width)."""
        return self.network(images)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss: Tensor = self.loss(logits, labels) / len(labels)
        self.train_accuracy.update(logits, labels)
        # Not synchronised, because Lightning would add a barrier and a collective to the measured step.
        self.log("train/local_loss", loss, on_step=True, on_epoch=False, prog_bar=True)
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(labels))
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val", self.val_loss, self.val_accuracy)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test", self.test_loss, self.test_accuracy)

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str, loss: MeanLoss, accuracy: MulticlassAccuracy) -> None:
        images, labels = batch
        logits = self(images)
        loss.update(self.loss(logits, labels), (labels != IGNORED_LABEL).sum())
        accuracy.update(logits, labels)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True)
        self.log(f"{stage}/accuracy", accuracy, on_step=False, on_epoch=True, prog_bar=True)


class ImageClassifier(LoggedClassifier):
    """Classifies images, with the paper's hyper-parameters as defaults.

    Args:
        architecture: the network: ``resnet18``, ``googlenet`` or ``senet18``.
        num_classes: classes of the data.
        width: channels of the first stage of the network; GoogLeNet's are fixed.
        learning_rate: the rate after the warmup, for the batch of all workers together.
        warmup_from: the rate of the first step.
        warmup_epochs: epochs of linear growth from ``warmup_from`` to ``learning_rate``.
        milestones: epochs at which the rate drops to a tenth. Scale them with ``max_epochs``.
        momentum: Nesterov momentum.
        weight_decay: of all parameters except those of normalisation layers.
        normalisation: ``batch``, or ``group`` for workers with different classes, which uses no batch statistics.
        channels_last: stores images and filters with channels last, which was faster on a GPU (H200). Below a width of
            8, torch 2.15 crashes with it on CPUs without AVX-512.

    Raises:
        ValueError: an invalid network or normalisation.
    """

    def __init__(
        self,
        architecture: Architecture = "resnet18",
        num_classes: int = 10,
        width: int = PAPER_WIDTH,
        learning_rate: float = 1.6,
        warmup_from: float = 0.1,
        warmup_epochs: float = 5.0,
        milestones: tuple[float, ...] = (150.0, 250.0),
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        normalisation: Literal["batch", "group"] = "batch",
        channels_last: bool = False,
    ) -> None:
        network = build_network(architecture, num_classes, width)
        if normalisation == "group":
            use_group_norm(network)
        elif normalisation != "batch":
            raise ValueError(f"Invalid {normalisation=}. Must be batch or group.")
        layout = torch.channels_last if channels_last else torch.contiguous_format
        super().__init__(network.to(memory_format=layout), num_classes)
        self.save_hyperparameters()

    @override
    def forward(self, images: Tensor) -> Tensor:
        if self.hparams["channels_last"]:
            images = images.contiguous(memory_format=torch.channels_last)
        return super().forward(images)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        options = self.hparams
        optimizer = torch.optim.SGD(
            parameter_groups(self, options["weight_decay"]),
            lr=options["learning_rate"],
            momentum=options["momentum"],
            nesterov=options["momentum"] > 0,
        )
        return schedule_by_epoch(self, optimizer)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the optimizer's groups: ``decayed``, and ``normalisation`` (scale and shift) without decay."""
    normalisation = {
        parameter
        for layer in module.modules()
        if isinstance(layer, (_BatchNorm, nn.GroupNorm))
        for parameter in layer.parameters(recurse=False)
    }
    decayed = [parameter for parameter in module.parameters() if parameter not in normalisation]
    # In the model's order, because the order of the set differs between workers.
    exempt = [parameter for parameter in module.parameters() if parameter in normalisation]
    return [
        {"params": decayed, "weight_decay": weight_decay, "name": "decayed"},
        {"params": exempt, "weight_decay": 0.0, "name": "normalisation"},
    ]
