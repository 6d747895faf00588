"""Loads CIFAR-10 and CIFAR-100 with the usual augmentation, or scikit-learn's digits without a download.

The images stay in memory as bytes. The loader crops, flips and normalises one batch at a time::

    images, uint8 --index--> batch, uint8 --crop, flip--> uint8 --normalise--> float32 --> model
                                             in the loader, or with device_augmentation on the device
"""

import os
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.transforms import v2
from typing_extensions import override

from recipes import MissingDataError
from recipes.missing_data import failing_together, fetch_error
from recipes.resnet18_cifar10.images import (
    ImageBatches,
    pad_to_multiple,
    read,
    read_digits,
    slice_by_label,
    take_first,
    unpack,
)

Source = Literal["cifar10", "cifar100", "builtin"]

TITLES: dict[Source, str] = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
DATASETS: dict[Source, type[CIFAR10]] = {"cifar10": CIFAR10, "cifar100": CIFAR100}
NUM_CLASSES: dict[Source, int] = {"cifar10": 10, "cifar100": 100, "builtin": 10}
MEANS: dict[Source, tuple[float, ...]] = {"cifar10": (0.4914, 0.4822, 0.4465), "cifar100": (0.5071, 0.4865, 0.4409)}
DEVIATIONS: dict[Source, tuple[float, ...]] = {
    "cifar10": (0.2470, 0.2435, 0.2616),
    "cifar100": (0.2673, 0.2564, 0.2762),
}
"""Per channel over the 50,000 training images, pixels in 0…1."""


class CIFARDataModule(LightningDataModule):
    """Images of 10 or 100 classes for training, validation and test.

    ``cifar10`` and ``cifar100`` have 50,000 training images, padded by 4, cropped to 32 x 32 at random and flipped at
    random. Their 10,000 test images serve for validation and test, as is usual for these benchmarks. ``builtin`` has
    scikit-learn's 1,797 digits of 8 x 8 pixels, repeated to three channels. Of these, 360 serve for validation.

    Training uses every image. With several workers, an epoch repeats a few images so that all batches have equal size.
    Validation and test count every image once: images labelled ``IGNORED_LABEL`` pad the workers' shares.

    Args:
        root: folder of the data sets; CIFAR is downloaded to it unless it exists.
        source: the data set.
        batch_size: images per worker and step.
        num_workers: loader processes per worker; 0 loads in the worker itself.
        device_augmentation: sends bytes to the device and augments and normalises there. Use it if workers wait for
            their images.
        num_train_images: trains on the first images only; CIFAR's order is random. None takes all images.
        num_val_images: validates and tests on the first images only.
        heterogeneous: gives each worker a fixed slice of the training images, ordered by label, instead of a random
            share per epoch. With two workers, each has five of ten classes. Use a model without running statistics
            (``normalisation="group"``), because validation would use those of rank 0's classes.

    Raises:
        ValueError: a number of images is below 1, or, from ``setup``, larger than the data set.
    """

    def __init__(
        self,
        root: str = "data/",
        source: Source = "cifar10",
        batch_size: int = 256,
        num_workers: int = 4,
        device_augmentation: bool = False,
        num_train_images: int | None = None,
        num_val_images: int | None = None,
        heterogeneous: bool = False,
    ) -> None:
        super().__init__()
        for name, number in (("num_train_images", num_train_images), ("num_val_images", num_val_images)):
            if number is not None and number < 1:
                raise ValueError(f"Invalid {name}={number}. Must be at least 1. Omit it to use all images.")
        self.root = Path(root)
        self.source = source
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.device_augmentation = device_augmentation
        self.num_train_images = num_train_images
        self.num_val_images = num_val_images
        self.heterogeneous = heterogeneous
        self.train_images: ImageBatches | None = None
        self.val_images: ImageBatches | None = None
        self._failure: MissingDataError | None = None

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return NUM_CLASSES[self.source]

    @override
    def prepare_data(self) -> None:
        """Download and unpack CIFAR unless it exists; Lightning calls this on one process per node."""
        if self.source != "builtin":
            self._failure = fetch_error(TITLES[self.source], lambda: unpack(DATASETS[self.source], self.root))

    @override
    def setup(self, stage: str) -> None:
        """Read the images; with a process group, every rank calls this.

        Raises:
            MissingDataError: on any worker, CIFAR is missing and could not be downloaded, or a file is damaged.
            ValueError: a requested number of images is larger than the data set.
        """
        with failing_together():
            train, val = self._read()
        self.train_images = take_first(train, self.num_train_images, "num_train_images")
        self.val_images = take_first(val, self.num_val_images, "num_val_images")

    def _read(self) -> tuple[ImageBatches, ImageBatches]:
        if self._failure is not None:
            raise self._failure
        if self.source == "builtin":
            return read_digits()
        return read(DATASETS[self.source], self.root, TITLES[self.source])

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        assert self.train_images is not None
        if not self.heterogeneous or self.trainer is None or self.trainer.world_size == 1:
            # Lightning adds a DistributedSampler, which gives all workers batches of equal size.
            return self._loader(self.train_images, augment=True, shuffle=True)
        own = slice_by_label(self.train_images, self.trainer.global_rank, self.trainer.world_size)
        # Lightning sets the epoch of a DistributedSampler and would replace any other sampler.
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        sampler = DistributedSampler(own, num_replicas=1, rank=0, shuffle=True, seed=seed)
        return self._loader(own, augment=True, sampler=sampler)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        assert self.val_images is not None
        if self.trainer is None or self.trainer.world_size == 1:
            return self._loader(self.val_images, augment=False)
        # All workers need equally many batches: DDP broadcasts the statistics of batch normalisation in the first
        # batch, and a worker without a batch would never join. Lightning's sampler repeats images for this reason.
        world_size = self.trainer.world_size
        images = pad_to_multiple(self.val_images, world_size)
        shard = DistributedSampler(images, num_replicas=world_size, rank=self.trainer.global_rank, shuffle=False)
        return self._loader(images, augment=False, sampler=shard)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    @override
    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        if not self.device_augmentation:
            return batch
        assert self.trainer is not None
        return transform(batch, self.source, augment=self.trainer.training)

    def _loader(self, images: ImageBatches, *, augment: bool, **options: Any) -> DataLoader[Any]:
        # Not a method, because spawned loader processes would receive a copy of this object and its images.
        in_loader = partial(transform, source=self.source, augment=augment)
        return DataLoader(
            images,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=_identity if self.device_augmentation else in_loader,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            **options,
        )


def _identity(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def transform(batch: tuple[Tensor, Tensor], source: Source, *, augment: bool) -> tuple[Tensor, Tensor]:
    """Return a batch ready for the model, augmented on request; built-in images are never augmented."""
    images, labels = batch
    if source == "builtin":
        return batch
    if augment:
        images = flip_randomly(crop_randomly(images, padding=4))
    return normalise(images, MEANS[source], DEVIATIONS[source]), labels


def crop_randomly(images: Tensor, padding: int, padding_mode: str = "constant") -> Tensor:
    """Return a random crop of each image after padding it.

    v2.RandomCrop would use one position for all images of a batch.

    Args:
        images: shape (batch, channels, height, width), any dtype and device.
        padding: pixels on each side; the shape of the result is that of the images.
        padding_mode: ``"constant"`` pads with black, ``"reflect"`` with the mirrored image.
    """
    height, width = images.shape[-2:]
    # Views of all possible crops, (batch, channels, top, left, height, width).
    crops = v2.functional.pad(images, [padding], padding_mode=padding_mode).unfold(2, height, 1).unfold(3, width, 1)
    top, left = torch.randint(2 * padding + 1, (2, len(images)), device=images.device)
    return crops[torch.arange(len(images), device=images.device), :, top, left]


def flip_randomly(images: Tensor) -> Tensor:
    """Return a batch (…, width) with each image flipped with a probability of one half."""
    is_flipped = torch.rand(len(images), device=images.device) < 0.5
    return torch.where(is_flipped[:, None, None, None], v2.functional.horizontal_flip(images), images)


def normalise(images: Tensor, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Tensor:
    """Return bytes as float32, shifted and scaled by each channel's mean and deviation."""
    return v2.functional.normalize(
        v2.functional.to_dtype(images, torch.float32, scale=True), list(mean), list(deviation)
    )
