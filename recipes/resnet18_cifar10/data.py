"""CIFAR-10 with the usual augmentation, or scikit-learn's digits, which need no download."""

from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.datasets import CIFAR10
from torchvision.transforms import v2
from typing_extensions import override

from recipes import MissingDataError

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)
"""Per channel over the 50,000 training images, pixels in 0…1."""


class CIFAR10DataModule(LightningDataModule):
    """Images of ten classes for training and validation.

    ``cifar10``: 50,000 training images, cropped to 32 x 32 at random after padding by 4 and flipped at random, and the
    10,000 test images for both validation and test, as is usual for this benchmark. ``builtin``: the 1,797 digits that
    come with scikit-learn, 8 x 8 pixels, repeated to three channels and split 1,437 to 360, for trying things out.

    No training image is dropped: on several workers a few are seen twice in an epoch, so that all workers have
    batches of the same size.

    Args:
        root: folder of the data sets; CIFAR-10 is fetched into it unless it is there.
        source: which images.
        batch_size: images per worker and step.
        num_workers: processes that load and augment, per worker; 0 does so in the worker itself.
    """

    def __init__(
        self,
        root: str = "data/",
        source: Literal["cifar10", "builtin"] = "cifar10",
        batch_size: int = 256,
        num_workers: int = 4,
    ) -> None:
        super().__init__()
        self.root = Path(root)
        self.source = source
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.train_images: Dataset[Any] | None = None
        self.val_images: Dataset[Any] | None = None

    @override
    def prepare_data(self) -> None:
        """Fetches CIFAR-10 unless torchvision finds it whole; Lightning calls this on one process per node."""
        if self.source != "cifar10":
            return
        try:
            CIFAR10(str(self.root), download=True)
        except (OSError, RuntimeError) as error:  # URLError is an OSError; a damaged file is a RuntimeError
            # Raised here it would leave the other workers waiting; setup fails on all of them, and says what to do.
            rank_zero_warn(f"CIFAR-10 could not be fetched: {error}")

    @override
    def setup(self, stage: str) -> None:
        """Opens the images.

        Raises:
            MissingDataError: CIFAR-10 is not there, or not whole.
        """
        if self.source == "builtin":
            self.train_images, self.val_images = digits()
            return
        try:
            self.train_images = CIFAR10(str(self.root), train=True, transform=transform(augment=True))
            self.val_images = CIFAR10(str(self.root), train=False, transform=transform(augment=False))
        except RuntimeError:
            raise MissingDataError(
                f"CIFAR-10 is not in {self.root.absolute()} and could not be fetched. Put {CIFAR10.filename} from "
                f"{CIFAR10.url} there, or try the recipe with --data.source=builtin."
            ) from None

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train_images, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val_images)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val_images)

    def _loader(self, images: Dataset[Any] | None, *, shuffle: bool = False) -> DataLoader[Any]:
        # Lightning adds a DistributedSampler, which is what makes the batches of all workers equal in size.
        assert images is not None
        return DataLoader(
            images,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
        )


def transform(*, augment: bool) -> v2.Compose:
    """Returns the way from a PIL image to a normalised float32 tensor of shape (3, 32, 32)."""
    augmentation = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()] if augment else []
    return v2.Compose(
        [
            v2.ToImage(),
            *augmentation,
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(CIFAR10_MEAN, CIFAR10_STD),
        ]
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns scikit-learn's digits for training and for validation, always the same split.

    Images are float32 of shape (3, 8, 8), about zero mean and unit deviation; labels are int64.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8).expand(-1, 3, -1, -1)
    images = (images - images.mean()) / images.std()
    train, val = train_test_split(range(len(labels)), test_size=360, random_state=0, stratify=labels)
    targets = torch.tensor(labels, dtype=torch.int64)
    return TensorDataset(images[train], targets[train]), TensorDataset(images[val], targets[val])
