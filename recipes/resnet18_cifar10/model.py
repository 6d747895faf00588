"""Image classification with the paper's networks, its optimizer and its learning-rate schedule."""

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from recipes.learning_rate import scheduled_by_epoch
from recipes.resnet18_cifar10.architectures import PAPER_WIDTH, Architecture, build_network, group_normalised
from recipes.resnet18_cifar10.images import IGNORED_LABEL


class LoggedClassifier(LightningModule):
    """Cross-entropy training of a network on images, with the metrics that recipes.compare reads.

    Logs ``train/loss``, ``train/accuracy``, ``val/loss`` and ``val/accuracy`` (``test/…`` likewise) once an epoch,
    over all workers, and ``train/local_loss``, the first worker's, every step. In validation and test images labelled
    ``IGNORED_LABEL`` are not counted. A subclass configures the optimizer.

    Args:
        network: returns logits, shape (batch, num_classes).
        num_classes: classes of the data.
        label_smoothing: share of each target that is spread over all classes, in the loss of all stages.

    Raises:
        ValueError: on all workers before training, data of another number of classes.
    """

    def __init__(self, network: nn.Module, num_classes: int, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.network = network
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORED_LABEL, reduction="sum", label_smoothing=label_smoothing)
        self.train_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro", ignore_index=IGNORED_LABEL)
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro", ignore_index=IGNORED_LABEL)
        self.val_loss = MeanLoss()
        self.test_loss = MeanLoss()

    @override
    def setup(self, stage: str) -> None:
        # The data module is set up first; on a GPU a label out of range would end in an assertion without a name.
        num_classes = getattr(getattr(self.trainer, "datamodule", None), "num_classes", None)
        if num_classes not in (None, self.hparams["num_classes"]):
            raise ValueError(
                f"The data has {num_classes} classes, the model {self.hparams['num_classes']}. Add "
                f"--model.num_classes={num_classes}."
            )

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Returns logits, shape (batch, classes), for images of shape (batch, 3, height, width)."""
        logits: Tensor = self.network(images)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss: Tensor = self.loss(logits, labels) / len(labels)
        self.train_accuracy.update(logits, labels)
        # Not synchronised: Lightning would add a barrier and a collective to every step, which is what is measured.
        self.log("train/local_loss", loss, on_step=True, on_epoch=False, prog_bar=True)
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(labels))
        # Lightning computes and resets a metric object at the end of the epoch, over all workers.
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val", self.val_loss, self.val_accuracy)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test", self.test_loss, self.test_accuracy)

    def _evaluate(
        self, batch: tuple[Tensor, Tensor], stage: str, loss: "MeanLoss", accuracy: MulticlassAccuracy
    ) -> None:
        images, labels = batch
        logits = self(images)
        loss.update(self.loss(logits, labels), (labels != IGNORED_LABEL).sum())
        accuracy.update(logits, labels)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True)
        self.log(f"{stage}/accuracy", accuracy, on_step=False, on_epoch=True, prog_bar=True)


class ImageClassifier(LoggedClassifier):
    """Image classification under the paper's hyper-parameters, which are the defaults.

    Args:
        architecture: the network: ``resnet18``, ``googlenet`` or ``senet18``.
        num_classes: classes of the data.
        width: channels of the first stage of the network; GoogLeNet's are fixed.
        learning_rate: the rate after the warm-up, for the batch of all workers together.
        warmup_from: the rate of the first step.
        warmup_epochs: epochs over which the rate grows linearly from the one to the other.
        milestones: epochs from which on the rate is a tenth of what it was. Scale them with ``max_epochs``.
        momentum: Nesterov momentum.
        weight_decay: of all parameters but those of normalisation.
        normalisation: ``batch``, the networks' own, or ``group``, which needs no statistics of a batch and is for
            workers that see other classes.

    Raises:
        ValueError: a network that cannot be built, an unknown normalisation.
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
    ) -> None:
        network = build_network(architecture, num_classes, width)
        if normalisation == "group":
            group_normalised(network)
        elif normalisation != "batch":
            raise ValueError(f"Invalid {normalisation=}. Must be batch or group.")
        super().__init__(network, num_classes)
        self.save_hyperparameters()

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        options = self.hparams
        optimizer = torch.optim.SGD(
            parameter_groups(self, options["weight_decay"]),
            lr=options["learning_rate"],
            momentum=options["momentum"],
            nesterov=options["momentum"] > 0,
        )
        return scheduled_by_epoch(self, optimizer)


class MeanLoss(Metric):
    """The mean loss of all images of all workers, each counted once.

    Lightning's own mean over workers is off where these have different numbers of images: it divides by the mean of
    these numbers, rounded down.
    """

    total: Tensor
    num_counted: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("num_counted", torch.tensor(0), dist_reduce_fx="sum")

    @override
    def update(self, total: Tensor, num_counted: Tensor) -> None:
        """Adds the sum of the losses of so many images, 0-d tensors; a batch may hold none that counts."""
        self.total += total
        self.num_counted += num_counted

    @override
    def compute(self) -> Tensor:
        """Returns the mean loss."""
        return self.total / self.num_counted


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the optimizer's groups: ``decayed``, and ``normalisation`` (scale and shift) without."""
    normalisation = {
        parameter
        for layer in module.modules()
        if isinstance(layer, (_BatchNorm, nn.GroupNorm))
        for parameter in layer.parameters(recurse=False)
    }
    decayed = [parameter for parameter in module.parameters() if parameter not in normalisation]
    # In the model's order and not in the set's, which differs between workers.
    exempt = [parameter for parameter in module.parameters() if parameter in normalisation]
    return [
        {"params": decayed, "weight_decay": weight_decay, "name": "decayed"},
        {"params": exempt, "weight_decay": 0.0, "name": "normalisation"},
    ]
