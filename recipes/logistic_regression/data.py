"""Loads two-class data sets of LIBSVM, and MADELON of scikit-feature, as dense matrices."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.io
import torch
from scipy.io.matlab import MatReadError
from sklearn.datasets import load_svmlight_file
from sklearn.preprocessing import minmax_scale, scale
from torch import Tensor

from recipes import MissingDataError
from recipes.download import fetch

LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary"
SCIKIT_FEATURE = "https://jundongl.github.io/scikit-feature/files/datasets"
URLS = {
    "a9a": f"{LIBSVM}/a9a",
    "gisette": f"{LIBSVM}/gisette_scale.bz2",
    "madelon": f"{SCIKIT_FEATURE}/madelon.mat",
    "madelon_unit": f"{SCIKIT_FEATURE}/madelon.mat",
    "mushrooms": f"{LIBSVM}/mushrooms",
}


def make_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that choose the data."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {prog}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path("data"), help="parent folder of libsvm/")
    parser.add_argument("--dataset", choices=URLS, default="gisette")
    return parser


class Examples(NamedTuple):
    """A data set of two classes.

    Attributes:
        features: float64, shape (examples, d).
        labels: -1.0 or 1.0, float64, shape (examples,); 1 is the higher of the file's labels.
    """

    features: Tensor
    labels: Tensor


def load(root: Path, dataset: str) -> Examples:
    """Return a data set of ``<root>/libsvm``, downloaded unless its file exists.

    Features of a9a and mushrooms are 0 or 1, and those of gisette are within -1 and 1. Features of madelon are
    standardised to mean 0 and variance 1. Features of madelon_unit range from 0 to 1; their common mean makes f much
    steeper in that direction.

    Raises:
        MissingDataError: the file could not be downloaded or read.
        ValueError: an unknown name.
    """
    if dataset not in URLS:
        raise ValueError(f"Invalid {dataset=}. Must be one of {', '.join(URLS)}.")
    path = fetch(URLS[dataset], root / "libsvm" / URLS[dataset].rsplit("/", 1)[1])
    read: Callable[[Path], tuple[np.ndarray, np.ndarray]] = _read_mat if path.suffix == ".mat" else _read_svmlight
    try:
        features, labels = read(path)
        classes = np.unique(labels)
        if len(classes) != 2:
            raise ValueError(f"it has {len(classes)} classes instead of two")
    except (ValueError, TypeError, LookupError, EOFError, OSError, MatReadError) as error:
        raise MissingDataError(
            f"{path.absolute()} cannot be read: {' '.join(str(error).split())}. Delete it to download it again, or "
            f"replace it by the file from {URLS[dataset]}."
        ) from error
    if path.suffix == ".mat":
        features = minmax_scale(features) if dataset.endswith("_unit") else scale(features)
    return Examples(torch.from_numpy(features), torch.from_numpy(np.where(labels == classes[1], 1.0, -1.0)))


def _read_svmlight(path: Path) -> tuple[np.ndarray, np.ndarray]:
    features, labels = load_svmlight_file(str(path))
    return features.toarray(), labels


def _read_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    content = scipy.io.loadmat(path)
    return content["X"].astype(np.float64), content["Y"].ravel()
