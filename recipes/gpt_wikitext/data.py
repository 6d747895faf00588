"""Loads windows of WikiText-2 as bytes or words, of Python's source code, or of a Markov chain."""

import sysconfig
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from recipes import MissingDataError
from recipes.lstm_wikitext2.corpus import (
    FILES,
    FOLDER,
    CorpusError,
    fetch_wikitext2,
    make_builtin_corpus,
    read_wikitext2,
)
from recipes.missing_data import failing_together, fetch_error

NUM_BYTES = 256


def windows_of(tokens: Tensor, length: int) -> TensorDataset:
    """Cut a text, a vector of integers, into windows of inputs and of targets that are one token later.

    Example:
        >>> [(inputs.tolist(), targets.tolist()) for inputs, targets in windows_of(torch.arange(8), 3)]
        [([0, 1, 2], [1, 2, 3]), ([3, 4, 5], [4, 5, 6])]
    """
    end = (len(tokens) - 1) // length * length
    return TensorDataset(tokens[:end].view(-1, length), tokens[1 : end + 1].view(-1, length))


def read_python_source() -> dict[str, Tensor]:
    """Return the source code of Python's standard library as bytes by split: uint8, one-dimensional.

    Of ten consecutive files in the order of their paths, one is for validation and one for the test. Tests of the
    library are left out.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests"}
    paths = [path for path in sorted(folder.rglob("*.py")) if not left_out & {*path.relative_to(folder).parts}]
    val, test = paths[::10], paths[1::10]
    files = {"train": sorted({*paths} - {*val, *test}), "val": val, "test": test}
    texts = {split: b"".join(path.read_bytes() for path in chosen) for split, chosen in files.items()}
    return {split: torch.frombuffer(bytearray(text), dtype=torch.uint8) for split, text in texts.items()}


class GPTDataModule(LightningDataModule):
    """Batches of inputs and of targets shifted by a token, integers of shape (batch_size, length).

    Args:
        root: folder of the data sets; WikiText-2 is downloaded to ``<root>/wikitext-2`` unless it exists.
        source: ``wikitext2``; or, without a download, ``python`` for the source code of Python's standard library, as
            bytes, and ``builtin`` for 240,000 words of a Markov chain, with ``tokenizer="words"``.
        tokenizer: ``bytes`` for 256 tokens, or ``words`` for torchtext's vocabulary of the training split.
        vocabulary_size: number of most frequent words to keep; other words become ``<unk>``. None keeps all, as
            ``builtin`` always does.
        length: tokens per window.
        batch_size: windows per worker and training step; four times as many in evaluation.

    Raises:
        ValueError: a number is out of range, or the tokenizer does not fit the source or the vocabulary size.
    """

    def __init__(
        self,
        root: str = "data/",
        source: Literal["wikitext2", "python", "builtin"] = "wikitext2",
        tokenizer: Literal["bytes", "words"] = "bytes",
        vocabulary_size: int | None = None,
        length: int = 64,
        batch_size: int = 8,
    ) -> None:
        super().__init__()
        for name, number in {"length": length, "batch_size": batch_size}.items():
            if number < 1:
                raise ValueError(f"Invalid {name}={number}. Must be at least 1.")
        if vocabulary_size is not None and vocabulary_size < 2:
            raise ValueError(f"Invalid {vocabulary_size=}. Must be at least 2, or None for all words.")
        if vocabulary_size is not None and tokenizer == "bytes":
            raise ValueError(f"Got {vocabulary_size=} with tokenizer='bytes', which has 256 tokens. Omit it.")
        needed = {"builtin": "words", "python": "bytes"}.get(source, tokenizer)
        if tokenizer != needed:
            raise ValueError(f"Got {source=} with {tokenizer=}. Add --data.tokenizer={needed}.")
        self.root = Path(root)
        self.source, self.tokenizer, self.max_vocabulary_size = source, tokenizer, vocabulary_size
        self.length, self.batch_size = length, batch_size
        self.vocabulary_size = NUM_BYTES
        self._texts: dict[str, Tensor] = {}
        self._failure: MissingDataError | None = None

    @override
    def prepare_data(self) -> None:
        """Download WikiText-2 unless its files exist; Lightning calls this on one process per node."""
        if self.source == "wikitext2":
            self._failure = fetch_error("WikiText-2", lambda: fetch_wikitext2(self.root))

    @override
    def setup(self, stage: str) -> None:
        """Read the text; with a process group, every rank calls this.

        Raises:
            MissingDataError: a file is missing on any worker.
        """
        if self._texts:
            return
        with failing_together():
            try:
                texts = self._read()
            except MissingDataError as error:
                raise (self._failure or error) from None
        self._texts = texts

    def _read(self) -> dict[str, Tensor]:
        if self.source == "python":
            texts = read_python_source()
        elif self.tokenizer == "bytes":
            texts = {}
            for split, name in FILES.items():
                path = self.root / FOLDER / name
                if not path.exists():
                    raise MissingDataError(f"{name} of WikiText-2 is not in {path.parent.absolute()}.")
                texts[split] = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        else:
            corpus = (
                make_builtin_corpus()
                if self.source == "builtin"
                else read_wikitext2(self.root / FOLDER, vocabulary_size=self.max_vocabulary_size)
            )
            self.vocabulary_size = corpus.vocabulary_size
            texts = {"train": corpus.train, "val": corpus.val, "test": corpus.test}
        for split, text in texts.items():
            if len(text) <= self.length:
                raise CorpusError(f"The {split} text has {len(text):,} tokens, too few for a window of {self.length}.")
        return texts

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("train", shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("val")

    @override
    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("test")

    def _loader(self, split: str, *, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        windows = windows_of(self._texts[split], self.length)
        batch_size = self.batch_size if shuffle else 4 * self.batch_size
        return DataLoader(windows, batch_size, shuffle=shuffle, drop_last=shuffle)
