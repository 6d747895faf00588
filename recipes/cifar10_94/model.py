"""A narrow convolutional network that learns CIFAR-10 in a dozen epochs, with its optimizer and schedule.

Network and hyperparameters follow airbench94 (github.com/KellerJordan/cifar10-airbench; Jordan, arXiv:2404.00498).
Three changes are for small batches per worker: slow running statistics of batch normalisation, no lookahead, and a
learning rate that ends at zero.
"""

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from recipes.learning_rate import schedule_by_step
from recipes.resnet18_cifar10.data import DEVIATIONS, MEANS, normalise
from recipes.resnet18_cifar10.model import LoggedClassifier

WARMUP_FROM, WARMUP_SHARE = 0.2, 0.23
"""The learning rate of the first step as a multiple of the largest, and the share of steps until the largest."""


class ShortTrainingClassifier(LoggedClassifier):
    """Image classification in a dozen epochs with Nesterov SGD, label smoothing and a whitening first layer.

    Validation and test average the logits of each image and its mirror image.

    Args:
        num_classes: classes of the data.
        widths: channels of the three blocks.
        learning_rate: the largest rate, for the batch of all workers together.
        momentum: Nesterov momentum.
        weight_decay: of all parameters.
        label_smoothing: share of each target that is spread over all classes.

    Raises:
        ValueError: the data have another number of classes; raised on all workers before training.
    """

    def __init__(
        self,
        num_classes: int = 10,
        widths: tuple[int, int, int] = (64, 256, 256),
        learning_rate: float = 0.3,
        momentum: float = 0.85,
        weight_decay: float = 1.33e-3,
        label_smoothing: float = 0.2,
    ) -> None:
        network = ShortTrainingNetwork(num_classes, widths).to(memory_format=torch.channels_last)
        super().__init__(network, num_classes, label_smoothing)
        self.save_hyperparameters()

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = getattr(self.trainer, "datamodule", None)
        if stage == "fit" and data is not None:
            images = data.train_images.tensors[0][:5000]
            if not images.is_floating_point():
                images = normalise(images, MEANS[data.source], DEVIATIONS[data.source])
            self.network.whitening.fit(images)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return logits, float32 of shape (batch, classes), for images of shape (batch, 3, 32, 32)."""
        images = images.contiguous(memory_format=torch.channels_last)
        logits: Tensor = self.network(images).float()
        if not self.training:
            logits = (logits + self.network(images.flip(-1)).float()) / 2
        return logits

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        options = self.hparams
        optimizer = torch.optim.SGD(
            self.parameters(),
            lr=options["learning_rate"],
            momentum=options["momentum"],
            weight_decay=options["weight_decay"],
            nesterov=True,
        )
        num_steps = self.trainer.estimated_stepping_batches
        return schedule_by_step(optimizer, lambda step: relative_learning_rate(step / num_steps))


def relative_learning_rate(progress: float) -> float:
    """Return the learning rate as a multiple of the largest: linear warmup, then linear decay to zero.

    Args:
        progress: share of all steps that are done.

    Example:
        >>> [round(relative_learning_rate(progress), 2) for progress in (0.0, 0.115, 0.23, 0.615, 1.0)]
        [0.2, 0.6, 1.0, 0.5, 0.0]
    """
    if progress < WARMUP_SHARE:
        return WARMUP_FROM + (1 - WARMUP_FROM) * progress / WARMUP_SHARE
    return max(0.0, (1 - progress) / (1 - WARMUP_SHARE))


class ShortTrainingNetwork(nn.Module):
    """Whitening, three blocks of two convolutions each, and a linear layer whose logits are divided by nine."""

    def __init__(self, num_classes: int, widths: tuple[int, int, int]) -> None:
        super().__init__()
        self.whitening = Whitening()
        channels = (self.whitening.num_filters, *widths)
        self.blocks = nn.Sequential(*map(_block, channels, channels[1:]))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return logits, shape (batch, num_classes), for images of shape (batch, 3, 32, 32)."""
        features = self.blocks(functional.gelu(self.whitening(images)))
        return self.head(features.amax(dim=(2, 3))) / 9


def _block(in_channels: int, out_channels: int) -> nn.Sequential:
    block = nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.MaxPool2d(2),
        ShiftNorm(out_channels),
        nn.GELU(),
        nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
        ShiftNorm(out_channels),
        nn.GELU(),
    )
    for convolution in (block[0], block[4]):
        # The first filters start as the identity, so that the deep network begins like a shallow one.
        nn.init.dirac_(convolution.weight[: convolution.in_channels])
    return block


class Whitening(nn.Module):
    """A convolution with fixed filters that decorrelates patches of 2 x 2 pixels; only its bias is trained.

    The filters are a buffer: no optimizer trains them, and checkpoints contain them.
    """

    filters: Tensor

    def __init__(self, patch_size: int = 2) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.num_filters = 2 * 3 * patch_size**2
        self.register_buffer("filters", torch.randn(self.num_filters, 3, patch_size, patch_size))
        self.bias = nn.Parameter(torch.zeros(self.num_filters))

    @torch.no_grad()
    def fit(self, images: Tensor, epsilon: float = 5e-4) -> None:
        """Set the filters to the scaled principal components of the images' patches, each with both signs.

        Args:
            images: as the network takes them, shape (number, 3, height, width).
            epsilon: added to the variances, so that components without variance get bounded filters.
        """
        patches = functional.unfold(images, self.patch_size).transpose(0, 1).flatten(1)
        variances, components = torch.linalg.eigh(patches @ patches.T / patches.shape[1])
        half = (components / (variances + epsilon).sqrt()).T.view(-1, *self.filters.shape[1:])
        self.filters.copy_(torch.cat([half, -half]))

    @override
    def forward(self, images: Tensor) -> Tensor:
        return functional.conv2d(images, self.filters, self.bias)


class ShiftNorm(nn.BatchNorm2d):
    """Batch normalisation without a scale, and with a shift of eight times its parameter.

    With SGD, the factor of 8 equals a learning rate 64 times as high for the shifts. All parameters keep one learning
    rate, so one threshold suits all gradients.

    Running statistics average over about fifty batches, because rank 0's batches are small.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, momentum=0.02, affine=False)
        self.bias = nn.Parameter(torch.zeros(num_features))

    @override
    def forward(self, input: Tensor) -> Tensor:
        # Add the shift separately: on GPUs, torch's backward fails for a shift without a scale.
        normalised = functional.batch_norm(
            input, self.running_mean, self.running_var, None, None, self.training, self.momentum, self.eps
        )
        return normalised + (8 * self.bias).to(normalised.dtype).view(1, -1, 1, 1)
