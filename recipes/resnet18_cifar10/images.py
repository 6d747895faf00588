"""Images and labels in memory: torchvision's CIFAR data sets, or scikit-learn's digits."""

import os
import tarfile
import tempfile
from math import ceil
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from torchvision.datasets import CIFAR10
from torchvision.datasets.utils import check_integrity

from recipes import MissingDataError
from recipes.download import fetch

IGNORED_LABEL = -100
"""Marks images that only fill a worker's share up; PyTorch's own default for what a loss leaves out."""


class ImageBatches(TensorDataset):
    """Images and labels of which a loader takes a whole batch by one indexing, and not image by image."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """Returns the images and the labels of a batch."""
        return self[torch.tensor(indices)]


def first(images: ImageBatches, number: int | None, name: str) -> ImageBatches:
    """Returns the first so many images, or all.

    Raises:
        ValueError: there are fewer; ``name`` is that of the argument at fault.
    """
    if number is None:
        return images
    if number > len(images):
        raise ValueError(f"Invalid {name}={number}. There are {len(images)}.")
    return ImageBatches(*(tensor[:number] for tensor in images.tensors))


def filled_up(images: ImageBatches, multiple: int) -> ImageBatches:
    """Returns the images and as few ignored ones as make their number a multiple of another."""
    missing = -len(images) % multiple
    pixels, labels = images.tensors
    return ImageBatches(
        torch.cat([pixels, pixels.new_zeros(missing, *pixels.shape[1:])]),
        torch.cat([labels, labels.new_full((missing,), IGNORED_LABEL)]),
    )


def slice_by_label(images: ImageBatches, worker: int, num_workers: int) -> ImageBatches:
    """Returns one worker's slice of the images in the order of their labels, as many for each worker.

    Every image is in a slice; the last slice has up to ``num_workers - 1`` of the images of the one before it too.

    Example:
        >>> images = ImageBatches(torch.arange(5), torch.tensor([1, 0, 1, 0, 1]))
        >>> [slice_by_label(images, worker, 2).tensors[0].tolist() for worker in (0, 1)]
        [[1, 3, 0], [0, 2, 4]]
    """
    pixels, labels = images.tensors
    length = ceil(len(labels) / num_workers)
    start = min(worker * length, len(labels) - length)
    own = labels.argsort(stable=True)[start : start + length]
    return ImageBatches(pixels[own], labels[own])


def unpack(dataset: type[CIFAR10], root: Path) -> None:
    """Makes sure that the data set's folder is there, whole or not at all; fetches the archive if need be.

    Raises:
        MissingDataError: the archive is not there and could not be fetched, or is not the right one.
    """
    folder = root / dataset.base_folder
    if folder.exists():
        return
    archive = fetch(dataset.url, root / dataset.filename, md5=dataset.tgz_md5)
    with tempfile.TemporaryDirectory(prefix=f"{dataset.base_folder}.", dir=root) as unfinished:
        with tarfile.open(archive) as content:
            content.extractall(unfinished, filter="data")
        try:
            os.rename(Path(unfinished) / dataset.base_folder, folder)
        except OSError:
            if not folder.exists():  # else another node with the same file system was faster
                raise


def read(dataset: type[CIFAR10], root: Path, title: str) -> tuple[ImageBatches, ImageBatches]:
    """Returns the images, uint8 of shape (number, 3, 32, 32), and int64 labels for training and for validation.

    Raises:
        MissingDataError: the data set is not there, or a file of it is missing or broken; the message names it.
    """
    folder = root.absolute() / dataset.base_folder
    source = f"{dataset.filename} from {dataset.url}"
    if not folder.exists():
        raise MissingDataError(f"{title} is not in {root.absolute()}. Put {source} there.")
    try:
        parts = (dataset(root, train=True), dataset(root, train=False))
    except RuntimeError:  # which does not say which file it is
        files = dict([*dataset.train_list, *dataset.test_list, (dataset.meta["filename"], dataset.meta["md5"])])
        path = next(folder / name for name, md5 in files.items() if not check_integrity(folder / name, md5))
        raise MissingDataError(
            f"{title}: {path} is {'broken' if path.exists() else 'missing'}. Delete the folder {folder} to have it "
            f"unpacked again from {source}."
        ) from None
    # The data set keeps (height, width, channels) as a view of what was read, (channels, height, width).
    train, val = (
        ImageBatches(torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))
        for part in parts
    )
    return train, val


def digits() -> tuple[ImageBatches, ImageBatches]:
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
    return ImageBatches(images[train], targets[train]), ImageBatches(images[val], targets[val])
