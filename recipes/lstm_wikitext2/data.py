"""Cuts a corpus into columns and windows for each worker."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torchtext.data import BPTTIterator, Dataset, Example, Field
from typing_extensions import override

from recipes import MissingDataError
from recipes.lstm_wikitext2.corpus import (
    FILES,
    FOLDER,
    Corpus,
    CorpusError,
    fetch_wikitext2,
    make_builtin_corpus,
    read_wikitext2,
)
from recipes.lstm_wikitext2.topics import sort_by_topic
from recipes.missing_data import failing_together, fetch_error

IGNORED = -100
"""Target of a padding position; torch's cross-entropy ignores it."""


class WikiText2DataModule(LightningDataModule):
    """Windows of text for truncated backpropagation through time, with targets shifted by a word.

    Inputs and targets are int64 of shape (time, columns). The training text has ``num_workers * columns`` columns of
    equal length, without the remainder; each worker has ``columns`` of them. Validation and test text has
    ``num_workers * eval_columns`` columns. Every word of it is the target of exactly one worker, and padding has the
    target ``IGNORED``.

    All workers have equally many windows. The order of windows matters, so there is no sampler and no shuffling.

    Args:
        root: folder of the data sets; WikiText-2 is downloaded to ``<root>/wikitext-2`` unless it exists.
        source: ``wikitext2``, or ``builtin`` for 240,000 words of a Markov chain with a known best perplexity.
        columns: columns of training text per worker.
        bptt: words per window.
        eval_columns: columns of validation and test text per worker. The model starts each column with an empty state,
            so fewer columns give a slightly lower perplexity and take longer.
        tokenizer: ``wikitext`` splits at blanks. ``basic_english``, of torchtext, lowers the case and drops most
            punctuation. Their perplexities are not comparable.
        vocabulary_size: number of most frequent words of the training split to keep; other words become ``<unk>``. None
            keeps all, as ``builtin`` always does.
        train_share: share of the training split to train on, from its start. The vocabulary is that of the full split.
        heterogeneous: orders the training articles by topic, so that workers read different topics. Requires the
            ``wikitext`` tokenizer, because titles are between ``=``.

    Attributes:
        corpus: the text; available after ``setup``.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        root: str = "data/",
        source: Literal["wikitext2", "builtin"] = "wikitext2",
        columns: int = 128,
        bptt: int = 30,
        eval_columns: int = 10,
        tokenizer: Literal["wikitext", "basic_english"] = "wikitext",
        vocabulary_size: int | None = None,
        train_share: float = 1.0,
        heterogeneous: bool = False,
    ) -> None:
        super().__init__()
        for name, number in {"columns": columns, "bptt": bptt, "eval_columns": eval_columns}.items():
            if number < 1:
                raise ValueError(f"Invalid {name}={number}. Must be at least 1.")
        if vocabulary_size is not None and vocabulary_size < 2:
            raise ValueError(f"Invalid {vocabulary_size=}. Must be at least 2, or None for all words.")
        if not 0 < train_share <= 1:
            raise ValueError(f"Invalid {train_share=}. Must be within (0, 1].")
        if heterogeneous and (source, tokenizer) != ("wikitext2", "wikitext"):
            raise ValueError(
                f"Invalid {heterogeneous=} with {source=} and {tokenizer=}. Use source='wikitext2' and "
                "tokenizer='wikitext', because only that text marks titles of articles."
            )
        self.root = Path(root)
        self.source = source
        self.columns = columns
        self.bptt = bptt
        self.eval_columns = eval_columns
        self.tokenizer = tokenizer
        self.max_vocabulary_size = vocabulary_size
        self.train_share = train_share
        self.heterogeneous = heterogeneous
        self.corpus: Corpus | None = None
        self._failure: MissingDataError | None = None
        self._train_windows: Windows | None = None
        self._resume_at = 0

    @property
    def vocabulary_size(self) -> int:
        """The number of words, the minimum for the model; available after ``setup``."""
        assert self.corpus is not None
        return self.corpus.vocabulary_size

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
            CorpusError: a file is empty, is not UTF-8, or is too short for the number of columns.
        """
        if self.corpus is not None:
            return
        with failing_together():
            corpus = self._read()
        self.corpus = corpus

    def _read(self) -> Corpus:
        if self.source == "builtin":
            corpus = make_builtin_corpus()
        else:
            try:
                corpus = read_wikitext2(self.root / FOLDER, self.tokenizer, self.max_vocabulary_size)
            except CorpusError:
                raise
            except MissingDataError:
                if self._failure is None:
                    raise
                # The error of the download says more than the missing file.
                raise MissingDataError(f"{self._failure} Or try the recipe with --data.source=builtin.") from None
        used = round(self.train_share * len(corpus.train))
        all_columns = self.columns * self._num_workers
        if used < 2 * all_columns:
            raise CorpusError(
                f"{self.root / FOLDER / FILES['train']} has {used:,} words to train on, too few for {all_columns:,} "
                "columns of at least two words. Lower --data.columns or raise --data.train_share."
            )
        train = corpus.train[:used]
        if self.heterogeneous:
            try:
                train = sort_by_topic(train, corpus.end_of_line, corpus.heading)
            except ValueError as error:
                raise CorpusError(f"{self.root / FOLDER / FILES['train']}: {error}") from None
        return replace(corpus, train=train)

    @override
    def train_dataloader(self) -> "Windows":
        assert self.corpus is not None
        columns = training_columns(self.corpus.train, self.columns, self._worker, self._num_workers)
        self._train_windows = Windows(columns, self.bptt)
        self._train_windows.load_state_dict({"position": self._resume_at})
        self._resume_at = 0
        return self._train_windows

    @override
    def val_dataloader(self) -> "Windows":
        assert self.corpus is not None
        return self._evaluation_windows(self.corpus.val)

    @override
    def test_dataloader(self) -> "Windows":
        assert self.corpus is not None
        return self._evaluation_windows(self.corpus.test)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, so that a resumed run continues with the next window."""
        if self.trainer is None or self._train_windows is None:
            return {"position": 0}
        ready = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return {"position": int(ready % max(self.trainer.num_training_batches, 1))}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Lightning would call Windows.load_state_dict, but not after the schedule has read the number of windows.
        self._resume_at = int(state_dict["position"])

    def _evaluation_windows(self, tokens: Tensor) -> "Windows":
        assert self.corpus is not None
        before = self.corpus.end_of_line
        return Windows(
            evaluation_columns(tokens, before, self.eval_columns, self._worker, self._num_workers), self.bptt
        )

    @property
    def _worker(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_rank

    @property
    def _num_workers(self) -> int:
        return 1 if self.trainer is None else self.trainer.world_size


class Windows:
    """A data loader over a worker's windows in order, cut by torchtext's BPTTIterator.

    It is not a DataLoader, because Lightning would add a DistributedSampler. A resumed training starts its first epoch
    at the window that ``load_state_dict`` sets.

    Args:
        columns: the text, int64, shape (columns, length).
        bptt: words per window; the last window of an epoch may be shorter.
    """

    def __init__(self, columns: Tensor, bptt: int) -> None:
        # The words are indices already; without a vocabulary, the field passes IGNORED on unchanged.
        field = Field(use_vocab=False, pad_token=None)
        fields = [("text", field)]
        text = Dataset([Example.fromlist([columns.flatten().tolist()], fields)], fields)
        self._iterator = BPTTIterator(text, len(columns), bptt, train=True, shuffle=False, sort=False)
        self._resume_at = 0
        self._position = 0

    def __len__(self) -> int:
        return len(self._iterator)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets, int64 of shape (time, columns); padding has the target ``IGNORED``."""
        begin, self._resume_at = self._resume_at, 0
        for index, window in enumerate(self._iterator):
            if index >= begin:
                self._position = index + 1
                yield window.text.clamp(min=0), window.target

    def state_dict(self) -> dict[str, int]:
        """Return the number of windows yielded in the current epoch."""
        return {"position": self._position % max(len(self), 1)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Set the window at which the next epoch starts."""
        self._resume_at = state_dict["position"]


def training_columns(tokens: Tensor, columns: int, worker: int, num_workers: int) -> Tensor:
    """Return a worker's columns of the training text, shape (columns, length), without the remainder.

    Example:
        >>> [training_columns(torch.arange(9), 2, worker, 2).tolist() for worker in (0, 1)]
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    """
    length = len(tokens) // (columns * num_workers)
    first = worker * columns * length
    return tokens[first : first + columns * length].view(columns, length)


def evaluation_columns(tokens: Tensor, before: int, columns: int, worker: int, num_workers: int) -> Tensor:
    """Return a worker's columns of evaluation text, shape (columns, length + 1).

    Over all workers, every word is a target once. Each column starts with the word before its first target; the last
    columns may end in ``IGNORED``.

    Args:
        tokens: the text, int64, one-dimensional.
        before: the word that precedes the text.
        columns: columns per worker.
        worker: index of the worker.
        num_workers: number of workers.

    Example:
        >>> [evaluation_columns(torch.arange(1, 6), 0, 1, worker, 2).tolist() for worker in (0, 1)]
        [[[0, 1, 2, 3]], [[3, 4, 5, -100]]]
    """
    length = ceil(len(tokens) / (columns * num_workers))
    padding = columns * num_workers * length - len(tokens)
    text = torch.cat([torch.tensor([before]), tokens, torch.full((padding,), IGNORED)])
    return text.unfold(0, length + 1, length)[worker * columns : (worker + 1) * columns]
