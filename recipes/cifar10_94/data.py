"""CIFAR-10 with the light augmentation of a short training: alternating flips and shifts by up to two pixels."""

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from typing_extensions import override

from recipes.resnet18_cifar10.data import (
    DEVIATIONS,
    MEANS,
    CIFARDataModule,
    Source,
    crop_randomly,
    normalise,
    transform,
)
from recipes.resnet18_cifar10.images import ImageBatches


class ShortTrainingDataModule(CIFARDataModule):
    """CIFAR images that are shifted at random and mirrored in every other epoch.

    Half of the training images, drawn by the seed, are mirrored in even epochs and the other half in odd ones. Two
    consecutive epochs thus show each image both ways, unlike random flips (Jordan, arXiv:2404.00498, section 3.6).
    Images go to the device as bytes and are augmented and normalised there. ``builtin`` images are enlarged to 32 x 32
    pixels and not augmented.

    Args:
        root: folder of the data sets; CIFAR is downloaded to it unless it exists.
        source: the data set.
        batch_size: images per worker and step.
        num_train_images: trains on the first images only. None takes all images.
        num_val_images: validates and tests on the first images only.

    Raises:
        ValueError: a number of images is below 1, or, from ``setup``, larger than the data set.
    """

    def __init__(
        self,
        root: str = "data/",
        source: Source = "cifar10",
        batch_size: int = 25,
        num_train_images: int | None = None,
        num_val_images: int | None = None,
    ) -> None:
        super().__init__(
            root,
            source,
            batch_size,
            num_workers=0,
            device_augmentation=True,
            num_train_images=num_train_images,
            num_val_images=num_val_images,
        )

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        assert self.train_images is not None
        if self.source != "builtin":
            # With a separate generator, the halves depend on the seed only and are equal on all workers.
            generator = torch.Generator().manual_seed(torch.initial_seed())
            images, labels = self.train_images.tensors
            mirrored = torch.rand(len(images), generator=generator) < 0.5
            self.train_images = ImageBatches(
                torch.where(mirrored[:, None, None, None], images.flip(-1), images), labels
            )

    @override
    def _read(self) -> tuple[ImageBatches, ImageBatches]:
        train, val = super()._read()
        if self.source != "builtin":
            return train, val
        # The network is for 32 x 32 pixels; scikit-learn's digits have 8 x 8.
        enlarged = [(interpolate(part.tensors[0], scale_factor=4.0), part.tensors[1]) for part in (train, val)]
        return ImageBatches(*enlarged[0]), ImageBatches(*enlarged[1])

    @override
    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        assert self.trainer is not None
        if self.source == "builtin" or not self.trainer.training:
            return transform(batch, self.source, augment=False)
        images, labels = batch
        images = crop_randomly(images, padding=2, padding_mode="reflect")
        if self.trainer.current_epoch % 2 == 1:
            images = images.flip(-1)
        return normalise(images, MEANS[self.source], DEVIATIONS[self.source]), labels
