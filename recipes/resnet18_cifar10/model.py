"""The paper's ResNet-18 for small images, its optimizer and its learning-rate schedule."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models.resnet import BasicBlock, ResNet
from typing_extensions import override

NUM_CLASSES = 10
PAPER_WIDTH = 64
PAPER_NUM_PARAMETERS = 11_173_962


class SmallImageResNet18(ResNet):
    """torchvision's ResNet-18 with the stem that suits images of 32 x 32 pixels: 3 x 3, stride 1, no max-pool.

    Args:
        width: channels of the first stage; the others have 2, 4 and 8 times as many. 64 in the paper.

    Raises:
        ValueError: a width below 1.
    """

    def __init__(self, width: int = PAPER_WIDTH) -> None:
        if width < 1:
            raise ValueError(f"Invalid {width=}. Must be at least 1; the paper's is {PAPER_WIDTH}.")
        self._width = width
        super().__init__(BasicBlock, [2, 2, 2, 2], num_classes=NUM_CLASSES)
        self.conv1 = nn.Conv2d(3, width, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity()
        self.fc = nn.Linear(8 * width, NUM_CLASSES)
        num_parameters = sum(parameter.numel() for parameter in self.parameters())
        assert width != PAPER_WIDTH or num_parameters == PAPER_NUM_PARAMETERS, num_parameters

    @override
    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        # torchvision asks for 64, 128, 256 and 512 planes, in this order, after a stem of 64.
        if planes == 64:
            self.inplanes = self._width
        return super()._make_layer(block, planes * self._width // 64, *args, **kwargs)


class ResNet18Classifier(LightningModule):
    """Image classification with ResNet-18 under the paper's hyper-parameters, which are the defaults.

    Logs ``train/loss``, ``train/accuracy``, ``val/loss`` and ``val/accuracy`` (``test/…`` likewise) once an epoch,
    over all workers, and ``train/local_loss``, the first worker's, every step.

    Args:
        width: channels of the first stage of the network.
        learning_rate: the rate after the warm-up, for the batch of all workers together.
        warmup_from: the rate of the first step.
        warmup_epochs: epochs over which the rate grows linearly from the one to the other.
        milestones: epochs from which on the rate is a tenth of what it was. Scale them with ``max_epochs``.
        momentum: Nesterov momentum.
        weight_decay: of all parameters but those of batch normalisation.
    """

    def __init__(
        self,
        width: int = PAPER_WIDTH,
        learning_rate: float = 1.6,
        warmup_from: float = 0.1,
        warmup_epochs: float = 5.0,
        milestones: tuple[float, ...] = (150.0, 250.0),
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = SmallImageResNet18(width)
        self.loss = nn.CrossEntropyLoss()
        self.train_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.test_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Returns logits, shape (batch, 10), for images of shape (batch, 3, height, width)."""
        logits: Tensor = self.network(images)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch, "train", self.train_accuracy)
        # Not synchronised: Lightning would add a barrier and a collective to every step, which is what is measured.
        self.log("train/local_loss", loss, on_step=True, on_epoch=False, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._loss(batch, "val", self.val_accuracy)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._loss(batch, "test", self.test_accuracy)

    def _loss(self, batch: tuple[Tensor, Tensor], stage: str, accuracy: MulticlassAccuracy) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss: Tensor = self.loss(logits, labels)
        accuracy.update(logits, labels)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(labels))
        # Lightning computes and resets a metric object at the end of the epoch, over all workers.
        self.log(f"{stage}/accuracy", accuracy, on_step=False, on_epoch=True, prog_bar=stage != "train")
        return loss

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        options = self.hparams
        optimizer = torch.optim.SGD(
            parameter_groups(self, options["weight_decay"]),
            lr=options["learning_rate"],
            momentum=options["momentum"],
            nesterov=options["momentum"] > 0,
        )
        rate = partial(
            relative_learning_rate,
            warmup_from=options["warmup_from"] / options["learning_rate"],
            warmup_epochs=options["warmup_epochs"],
            milestones=options["milestones"],
        )
        steps_per_epoch = self._steps_per_epoch()
        schedule = LambdaLR(optimizer, lambda step: rate(step / steps_per_epoch))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _steps_per_epoch(self) -> int:
        # Reading it makes the Trainer load the training data, without which num_training_batches is still infinite.
        _ = self.trainer.estimated_stepping_batches
        return ceil(self.trainer.num_training_batches / self.trainer.accumulate_grad_batches)


def relative_learning_rate(
    epoch: float, *, warmup_from: float, warmup_epochs: float, milestones: Sequence[float]
) -> float:
    """Returns the learning rate at a point of the training, as a multiple of the rate after the warm-up.

    Args:
        epoch: epochs since the start, with fractions.
        warmup_from: the multiple at the start.
        warmup_epochs: epochs until the multiple is 1.
        milestones: epochs from which on it is a tenth of what it was, in rising order.

    Example:
        >>> schedule = dict(warmup_from=1 / 16, warmup_epochs=5, milestones=(150, 250))
        >>> [round(1.6 * relative_learning_rate(epoch, **schedule), 4) for epoch in (0, 2.5, 5, 149.9, 150, 250)]
        [0.1, 0.85, 1.6, 1.6, 0.16, 0.016]
    """
    if epoch < warmup_epochs:
        return warmup_from + (1 - warmup_from) * epoch / warmup_epochs
    return float(0.1 ** bisect_right(milestones, epoch))


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the optimizer's groups: ``decayed``, and ``normalisation`` (scale and shift of batch norms) without."""
    normalisation = {
        parameter
        for one in module.modules()
        if isinstance(one, _BatchNorm)
        for parameter in one.parameters(recurse=False)
    }
    decayed = [parameter for parameter in module.parameters() if parameter not in normalisation]
    # In the model's order and not in the set's, which differs between workers.
    exempt = [parameter for parameter in module.parameters() if parameter in normalisation]
    return [
        {"params": decayed, "weight_decay": weight_decay, "name": "decayed"},
        {"params": exempt, "weight_decay": 0.0, "name": "normalisation"},
    ]
