"""CIFAR-10 and CIFAR-100 with the usual augmentation, or scikit-learn's digits, which need no download.

The images lie in memory as bytes and are cut, flipped and normalised a batch at a time::

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
from recipes.resnet18_cifar10.images import ImageBatches, digits, filled_up, first, read, slice_by_label, unpack

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

    ``cifar10`` and ``cifar100``: 50,000 training images, cropped to 32 x 32 at random after padding by 4 and flipped
    at random, and the 10,000 test images for both validation and test, as is usual for these benchmarks. ``builtin``:
    the 1,797 digits that come with scikit-learn, 8 x 8 pixels, repeated to three channels and split 1,437 to 360, for
    trying things out.

    In training no image is dropped: on several workers a few are seen twice in an epoch, so that all workers have
    batches of the same size. In validation and test none is counted twice: the shares of the workers are filled up
    with images labelled ``IGNORED_LABEL``.

    Args:
        root: folder of the data sets; CIFAR is fetched into it unless it is there.
        source: which images.
        batch_size: images per worker and step.
        num_workers: processes that load and augment, per worker; 0 does so in the worker itself.
        device_augmentation: augment and normalise on the device, to which the images then go as bytes. For workers
            that wait for their images.
        num_train_images: train on only so many, the first ones; the order of CIFAR is random. All if not given.
        num_val_images: validate and test on only so many.
        heterogeneous: gives each worker a slice of the training images ordered by label, the same in every epoch, in
            place of a share that is drawn anew. Two workers then see five of ten classes each. Use it with a model
            that keeps no running statistics (``normalisation="group"``): they would be those of the first worker's
            classes.

    Raises:
        ValueError: a number of images below 1, or, from ``setup``, above what there is.
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
                raise ValueError(f"Invalid {name}={number}. Must be at least 1; leave it out for all.")
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
        """How many classes the images have."""
        return NUM_CLASSES[self.source]

    @override
    def prepare_data(self) -> None:
        """Fetches and unpacks CIFAR unless it is there; Lightning calls this on one process per node."""
        if self.source != "builtin":
            self._failure = fetch_error(TITLES[self.source], lambda: unpack(DATASETS[self.source], self.root))

    @override
    def setup(self, stage: str) -> None:
        """Reads the images; collective where there is a process group.

        Raises:
            MissingDataError: CIFAR is not there and could not be fetched, or a file is broken, on any worker;
                the message names it.
            ValueError: more images asked for than there are.
        """
        with failing_together():
            train, val = self._read()
        self.train_images = first(train, self.num_train_images, "num_train_images")
        self.val_images = first(val, self.num_val_images, "num_val_images")

    def _read(self) -> tuple["ImageBatches", "ImageBatches"]:
        if self._failure is not None:
            raise self._failure
        if self.source == "builtin":
            return digits()
        return read(DATASETS[self.source], self.root, TITLES[self.source])

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        assert self.train_images is not None
        if not self.heterogeneous or self.trainer is None or self.trainer.world_size == 1:
            # Lightning adds a DistributedSampler, which is what makes the batches of all workers equal in size.
            return self._loader(self.train_images, augment=True, shuffle=True)
        own = slice_by_label(self.train_images, self.trainer.global_rank, self.trainer.world_size)
        # Lightning leaves a DistributedSampler as it is, and tells it the epoch; any other it would replace.
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        sampler = DistributedSampler(own, num_replicas=1, rank=0, shuffle=True, seed=seed)
        return self._loader(own, augment=True, sampler=sampler)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        assert self.val_images is not None
        if self.trainer is None or self.trainer.world_size == 1:
            return self._loader(self.val_images, augment=False)
        # Every worker has the same number of batches: in the first of them DDP broadcasts the statistics of batch
        # normalisation, and without it a worker would wait for ever. Lightning's sampler repeats images to that end.
        world_size = self.trainer.world_size
        images = filled_up(self.val_images, world_size)
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
        return transformed(batch, self.source, augment=self.trainer.training)

    def _loader(self, images: "ImageBatches", *, augment: bool, **options: Any) -> DataLoader[Any]:
        # Not a method of this object, which processes that are not forked would be sent as a whole.
        in_loader = partial(transformed, source=self.source, augment=augment)
        return DataLoader(
            images,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=_as_it_is if self.device_augmentation else in_loader,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            **options,
        )


def _as_it_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def transformed(batch: tuple[Tensor, Tensor], source: Source, *, augment: bool) -> tuple[Tensor, Tensor]:
    """Returns a batch of a source as the model takes it, its images augmented or not; the built-in ones never are."""
    images, labels = batch
    if source == "builtin":
        return batch
    if augment:
        images = flip_each(crop_each(images, padding=4))
    return normalised(images, MEANS[source], DEVIATIONS[source]), labels


def crop_each(images: Tensor, padding: int, padding_mode: str = "constant") -> Tensor:
    """Returns each image cut out of itself, padded, at a place of its own, drawn at random.

    v2.RandomCrop cuts all images of a batch at the same place.

    Args:
        images: shape (batch, channels, height, width), any dtype and device.
        padding: pixels on each side; the shape of the result is that of the images.
        padding_mode: ``"constant"`` pads with black, ``"reflect"`` with the mirrored image.
    """
    height, width = images.shape[-2:]
    # Views: every place at which the padded images can be cut, (batch, channels, places, places, height, width).
    places = v2.functional.pad(images, [padding], padding_mode=padding_mode).unfold(2, height, 1).unfold(3, width, 1)
    top, left = torch.randint(2 * padding + 1, (2, len(images)), device=images.device)
    return places[torch.arange(len(images), device=images.device), :, top, left]


def flip_each(images: Tensor) -> Tensor:
    """Returns each image of a batch (…, width) mirrored with a probability of one half, each for itself."""
    mirrored = torch.rand(len(images), device=images.device) < 0.5
    return torch.where(mirrored[:, None, None, None], v2.functional.horizontal_flip(images), images)


def normalised(images: Tensor, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Tensor:
    """Returns bytes as float32 with the given mean and deviation of each channel at zero and one."""
    return v2.functional.normalize(
        v2.functional.to_dtype(images, torch.float32, scale=True), list(mean), list(deviation)
    )
