"""The three networks of the paper's table, made from torchvision's: for images of 32 x 32 pixels, without a checkpoint.

torchvision's are made for 224 x 224 pixels and would shrink these to nothing in the first layers. These keep the
resolution up to the second stage, as the implementations that the paper uses (github.com/kuangliu/pytorch-cifar) do.
"""

from math import gcd
from typing import Any, Literal

from torch import Tensor, nn
from torchvision.models.googlenet import GoogLeNet, Inception
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.ops import SqueezeExcitation
from typing_extensions import override

Architecture = Literal["resnet18", "googlenet", "senet18"]

PAPER_WIDTH = 64
PAPER_NUM_PARAMETERS: dict[Architecture, int] = {"resnet18": 11_173_962, "googlenet": 6_166_250, "senet18": 11_260_354}
"""With ten classes; the paper's table names its models by them."""


def build_network(architecture: Architecture, num_classes: int = 10, width: int = PAPER_WIDTH) -> nn.Module:
    """Returns a freshly initialised network that makes logits, shape (batch, num_classes), of a batch of images.

    Args:
        architecture: which of the three.
        num_classes: how many logits.
        width: channels of the first stage of ResNet-18 and SENet18, whose other stages have 2, 4 and 8 times as many.

    Raises:
        ValueError: an unknown name, no class, a width below 1, or a width for GoogLeNet.
    """
    if architecture not in PAPER_NUM_PARAMETERS:
        raise ValueError(f"Invalid {architecture=}. Must be one of {', '.join(PAPER_NUM_PARAMETERS)}.")
    if num_classes < 1:
        raise ValueError(f"Invalid {num_classes=}. Must be at least 1.")
    if width < 1:
        raise ValueError(f"Invalid {width=}. Must be at least 1; the paper's is {PAPER_WIDTH}.")
    network: nn.Module
    if architecture == "googlenet":
        if width != PAPER_WIDTH:
            raise ValueError(
                f"Invalid {width=} for googlenet, whose channels are fixed. Leave it at {PAPER_WIDTH}; resnet18 and "
                f"senet18 can be made narrower."
            )
        network = SmallImageGoogLeNet(num_classes)
    else:
        block = BasicBlock if architecture == "resnet18" else PreActivationBlock
        network = SmallImageResNet(block, num_classes, width)
    if (num_classes, width) == (10, PAPER_WIDTH):
        num_parameters = sum(parameter.numel() for parameter in network.parameters())
        assert num_parameters == PAPER_NUM_PARAMETERS[architecture], num_parameters
    return network


def group_normalised(network: nn.Module) -> nn.Module:
    """Returns the network, changed in place, with group normalisation in place of batch normalisation.

    Groups are of four channels, and larger where four do not divide their number. For workers whose data differ: the
    statistics of a batch are then those of other images on each worker, and the running ones, which validation takes,
    the first worker's (Hsieh et al., *The non-IID data quagmire of decentralized machine learning*, ICML 2020).
    """
    for name, child in network.named_children():
        if isinstance(child, nn.BatchNorm2d):
            channels = child.num_features
            setattr(network, name, nn.GroupNorm(gcd(max(1, channels // 4), channels), channels))
        else:
            group_normalised(child)
    return network


class SmallImageResNet(ResNet):
    """torchvision's ResNet of 18 layers with a stem of 3 x 3, stride 1, no max-pool, and a first stage of any width."""

    def __init__(self, block: Any, num_classes: int, width: int) -> None:
        self._width = width
        super().__init__(block, [2, 2, 2, 2], num_classes=num_classes)
        self.conv1 = nn.Conv2d(3, width, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity()
        self.fc = nn.Linear(8 * width, num_classes)

    @override
    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        # torchvision asks for 64, 128, 256 and 512 planes, in this order, after a stem of 64.
        if planes == 64:
            self.inplanes = self._width
        return super()._make_layer(block, planes * self._width // 64, *args, **kwargs)


class PreActivationBlock(nn.Module):
    """SENet18's residual block: normalisation before convolution, squeeze and excitation before the sum.

    It is called as torchvision's ResNet calls its blocks, whose grouped and dilated convolutions it does not have.
    """

    expansion = 1

    def __init__(
        self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Sequential | None = None, *_: Any, **__: Any
    ) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inplanes)
        self.conv1 = nn.Conv2d(inplanes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.excitation = SqueezeExcitation(planes, max(1, planes // 16))
        # torchvision's shortcut is a convolution and a normalisation; here the latter comes first, and is shared.
        self.shortcut = None if downsample is None else downsample[0]

    @override
    def forward(self, x: Tensor) -> Tensor:
        activated = self.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(activated)
        out = self.conv2(self.relu(self.bn2(self.conv1(activated))))
        total: Tensor = self.excitation(out) + shortcut
        return total


class SmallImageGoogLeNet(GoogLeNet):
    """torchvision's GoogLeNet with one 3 x 3 convolution of stride 1 for a stem, no dropout and no auxiliary heads."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            num_classes,
            aux_logits=False,
            init_weights=False,  # as every layer initialises itself; True draws from a narrow normal, and slowly
            blocks=[_convolution, FactorisedInception, nn.Identity],
            dropout=0.0,
        )
        self.conv1 = _convolution(3, 192, kernel_size=3, padding=1)
        self.maxpool1 = self.conv2 = self.conv3 = self.maxpool2 = nn.Identity()
        self.maxpool3 = nn.MaxPool2d(3, stride=2, padding=1)
        self.maxpool4 = nn.MaxPool2d(3, stride=2, padding=1)


class FactorisedInception(Inception):
    """torchvision's Inception module, with two convolutions of 3 x 3 where the original has one of 5 x 5.

    torchvision has a single one of 3 x 3 there, which it keeps for the sake of its checkpoints.
    """

    def __init__(self, *channels: int) -> None:
        super().__init__(*channels, conv_block=_convolution)
        ch5x5 = channels[5]
        self.branch3.append(_convolution(ch5x5, ch5x5, kernel_size=3, padding=1))


def _convolution(in_channels: int, out_channels: int, **options: Any) -> nn.Sequential:
    # With a bias, which the normalisation makes idle, but which is in the published number of parameters.
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, **options), nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)
    )
