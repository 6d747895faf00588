"""Reads torchvision's CIFAR data sets or scikit-learn's digits into memory."""

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
"""Label of padding images; PyTorch's default ``ignore_index``."""


class ImageBatches(TensorDataset):
    """Images and labels from which a loader takes a batch with a single indexing operation."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """Return the images and the labels of a batch."""
        return self[torch.tensor(indices)]


def take_first(images: ImageBatches, number: int | None, name: str) -> ImageBatches:
    """Return the first ``number`` images, or all images for None.

    Raises:
        ValueError: ``number`` is too large; the message calls it ``name``.
    """
    if number is None:
        return images
    if number > len(images):
        raise ValueError(f"Invalid {name}={number}. Must be at most {len(images)}, the size of the data set.")
    return ImageBatches(*(tensor[:number] for tensor in images.tensors))


def pad_to_multiple(images: ImageBatches, multiple: int) -> ImageBatches:
    """Return the images, padded with ignored images to a multiple of ``multiple``."""
    missing = -len(images) % multiple
    pixels, labels = images.tensors
    return ImageBatches(
        torch.cat([pixels, pixels.new_zeros(missing, *pixels.shape[1:])]),
        torch.cat([labels, labels.new_full((missing,), IGNORED_LABEL)]),
    )


def slice_by_label(images: ImageBatches, worker: int, num_workers: int) -> ImageBatches:
    """Return a worker's slice of the images in the order of their labels.

    All slices have equal length. The last slice repeats up to ``num_workers - 1`` images of the previous slice.

    Example:
        >>> images = ImageBatches(torch.arange(5), torch.tensor([1, 0, 1, 0, 1]))
        >>> [slice_by_label(images, worker, 2).tensors[0].tolist() for worker in (0, 1)]
        [[1, 3, 0], [0, 2, 4]]
    """
    pixels, labels = images.tensors
    length = ceil(len(labels) / num_workers)
    start = min(worker * length, len(labels) - length)
    selected = labels.argsort(stable=True)[start : start + length]
    return ImageBatches(pixels[selected], labels[selected])


def unpack(dataset: type[CIFAR10], root: Path) -> None:
    """Download and unpack a data set unless its folder exists; the folder appears only when complete.

    Raises:
        MissingDataError: the archive could not be downloaded, or its checksum is wrong.
    """
    folder = root / dataset.base_folder
    if folder.exists():
        return
    archive = fetch(dataset.url, root / dataset.filename, md5=dataset.tgz_md5)
    with tempfile.TemporaryDirectory(prefix=f"{dataset.base_folder}.", dir=root) as unfinished:
        with tarfile.open(archive) as content:
            content.extraction_filter = getattr(tarfile, "data_filter", None)  # absent before Python 3.10.12 and 3.11.4
            content.extractall(unfinished)
        try:
            os.rename(Path(unfinished) / dataset.base_folder, folder)
        except OSError:
            if not folder.exists():  # otherwise another node has unpacked it to a shared file system
                raise


def read(dataset: type[CIFAR10], root: Path, title: str) -> tuple[ImageBatches, ImageBatches]:
    """Return training and validation images, uint8 of shape (number, 3, 32, 32), with int64 labels.

    Raises:
        MissingDataError: a file of the data set is missing or damaged; the message names it.
    """
    folder = root.absolute() / dataset.base_folder
    source = f"{dataset.filename} from {dataset.url}"
    if not folder.exists():
        raise MissingDataError(f"{title} is not in {root.absolute()}. Put {source} there.")
    try:
        parts = (dataset(root, train=True), dataset(root, train=False))
    except RuntimeError:  # torchvision's error does not name the file
        files = dict([*dataset.train_list, *dataset.test_list, (dataset.meta["filename"], dataset.meta["md5"])])
        path = next(folder / name for name, md5 in files.items() if not check_integrity(folder / name, md5))
        raise MissingDataError(
            f"{title}: {path} is {'broken' if path.exists() else 'missing'}. Delete the folder {folder} to have it "
            f"unpacked again from {source}."
        ) from None
    # torchvision stores (height, width, channels) as a view of (channels, height, width).
    train, val = (
        ImageBatches(torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))
        for part in parts
    )
    return train, val


def read_digits() -> tuple[ImageBatches, ImageBatches]:
    """Return scikit-learn's digits in a fixed split for training and validation.

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
