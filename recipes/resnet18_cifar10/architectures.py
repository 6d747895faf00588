"""Adapts torchvision networks to images of 32 x 32 pixels, as in the paper's table.

torchvision's networks expect 224 x 224 pixels and would reduce small images to nothing in their first layers. These
networks keep the resolution up to the second stage, like the paper's (github.com/kuangliu/pytorch-cifar).
"""

from math import gcd
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torchvision.models.googlenet import GoogLeNet, Inception
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.ops import SqueezeExcitation
from typing_extensions import override

Architecture = Literal["resnet18", "googlenet", "senet18"]

PAPER_WIDTH = 64


def build_network(architecture: Architecture, num_classes: int = 10, width: int = PAPER_WIDTH) -> nn.Module:
    """Return an untrained network that maps images to logits, shape (batch, num_classes).

    Args:
        architecture: name of the network.
        num_classes: number of logits.
        width: channels of the first stage of ResNet-18 and SENet18. The other stages have 2, 4 and 8 times as many.

    Raises:
        ValueError: an unknown name, no class, a width below 1, or a width for GoogLeNet.
    """
    if architecture not in get_args(Architecture):
        raise ValueError(f"Invalid {architecture=}. Must be one of {', '.join(get_args(Architecture))}.")
    if num_classes < 1:
        raise ValueError(f"Invalid {num_classes=}. Must be at least 1.")
    if width < 1:
        raise ValueError(f"Invalid {width=}. Must be at least 1; the paper's is {PAPER_WIDTH}.")
    if architecture == "googlenet":
        if width != PAPER_WIDTH:
            raise ValueError(
                f"Invalid {width=} for googlenet. Must be {PAPER_WIDTH}, because its channels are fixed. Use resnet18 "
                f"or senet18 for a narrower network."
            )
        return SmallImageGoogLeNet(num_classes)
    block = BasicBlock if architecture == "resnet18" else PreActivationBlock
    return SmallImageResNet(block, num_classes, width)


def use_group_norm(network: nn.Module) -> None:
    """Replace batch normalisation by group normalisation in place.

    Groups have four channels, or more if four does not divide the number of channels. Use it if workers have different
    data. Their batch statistics then differ, and validation would use rank 0's running statistics (Hsieh et al., *The
    non-IID data quagmire of decentralized machine learning*, ICML 2020).
    """
    for name, child in network.named_children():
        if isinstance(child, nn.BatchNorm2d):
            channels = child.num_features
            setattr(network, name, nn.GroupNorm(gcd(max(1, channels // 4), channels), channels))
        else:
            use_group_norm(child)


class SmallImageResNet(ResNet):
    """torchvision's ResNet-18 with a 3 x 3 stem of stride 1, no max-pool and any width."""

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
        # torchvision calls this with 64, 128, 256 and 512 planes, in this order, after a stem of 64.
        if planes == 64:
            self.inplanes = self._width
        return super()._make_layer(block, planes * self._width // 64, *args, **kwargs)


class PreActivationBlock(nn.Module):
    """SENet18's residual block, with normalisation before convolution, and squeeze and excitation.

    Its signature is that of torchvision's blocks. It ignores the arguments of grouped and dilated convolutions.
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
        # torchvision's shortcut is convolution and normalisation; here bn1 normalises before both branches.
        self.shortcut = None if downsample is None else downsample[0]

    @override
    def forward(self, x: Tensor) -> Tensor:
        activated = self.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(activated)
        out = self.conv2(self.relu(self.bn2(self.conv1(activated))))
        return self.excitation(out) + shortcut


class SmallImageGoogLeNet(GoogLeNet):
    """torchvision's GoogLeNet with a 3 x 3 stem of stride 1, no dropout and no auxiliary heads."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            num_classes,
            aux_logits=False,
            init_weights=False,  # PyTorch's initialisation; True draws from a narrow normal, and slowly
            blocks=[_convolution, FactorisedInception, nn.Identity],
            dropout=0.0,
        )
        self.conv1 = _convolution(3, 192, kernel_size=3, padding=1)
        self.maxpool1 = self.conv2 = self.conv3 = self.maxpool2 = nn.Identity()
        self.maxpool3 = nn.MaxPool2d(3, stride=2, padding=1)
        self.maxpool4 = nn.MaxPool2d(3, stride=2, padding=1)


class FactorisedInception(Inception):
    """torchvision's Inception module with two 3 x 3 convolutions instead of a 5 x 5 convolution.

    torchvision uses a single 3 x 3 convolution, for compatibility with its checkpoints.
    """

    def __init__(self, *channels: int) -> None:
        super().__init__(*channels, conv_block=_convolution)
        ch5x5 = channels[5]
        self.branch3.append(_convolution(ch5x5, ch5x5, kernel_size=3, padding=1))


def _convolution(in_channels: int, out_channels: int, **options: Any) -> nn.Sequential:
    # The normalisation cancels the bias, but the published number of parameters includes it.
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, **options), nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)
    )
