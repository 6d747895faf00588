"""A corpus of words in columns that every worker reads on its own."""

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
    builtin_corpus,
    fetch_wikitext2,
    read_wikitext2,
)
from recipes.lstm_wikitext2.topics import by_topic
from recipes.missing_data import failing_together, fetch_error

IGNORED = -100
"""The target of a position that is not in the text; torch's cross-entropy leaves it out."""


class WikiText2DataModule(LightningDataModule):
    """Windows of text for truncated backpropagation through time: inputs, and targets one word further on.

    Both are int64 of shape (time, columns). Training text is cut into ``num_workers * columns`` columns of equal
    length, of which each worker has ``columns``; the remainder, shorter than the number of columns, is left out.
    Validation and test text is cut in the same way into ``num_workers * eval_columns`` columns, and nothing is left
    out: every word is a target of one worker, once, and places without a word have the target ``IGNORED``.

    Every worker has as many windows as the others. The windows' order matters, so there is no sampler and no shuffling.

    Args:
        root: folder of the data sets; WikiText-2 is fetched into ``<root>/wikitext-2`` unless it is there.
        source: ``wikitext2``, or ``builtin``: 240,000 words of a Markov chain, whose best perplexity is known.
        columns: columns of training text per worker.
        bptt: words of a window.
        eval_columns: columns of validation and test text per worker. The model begins each without a past, so that
            fewer columns give a slightly lower perplexity and take longer.
        tokenizer: ``wikitext`` takes the words as the files have them, separated by blanks. ``basic_english`` is
            torchtext's: lower case, without most punctuation; its perplexity is another and not to be compared.
        vocabulary_size: keep so many of the most frequent words of the training split; the others become ``<unk>``.
            All of them by default.
        train_share: train on this share of the training split, from its beginning; the vocabulary is the whole's.
        heterogeneous: orders the articles to train on by topic first, so that workers, whose columns follow one
            another, read about different things. Needs WikiText's words as they are, titles between ``=``.

    Attributes:
        corpus: the text, from ``setup`` on.

    Raises:
        ValueError: a number that is out of range.
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
                f"Invalid {heterogeneous=} with {source=} and {tokenizer=}. Only WikiText's own words mark where "
                "articles begin; leave source and tokenizer at wikitext2 and wikitext."
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
        """How many words there are: the model needs at least as many. Known from ``setup`` on."""
        assert self.corpus is not None
        return self.corpus.vocabulary_size

    @override
    def prepare_data(self) -> None:
        """Fetches WikiText-2 unless its files are there; Lightning calls this on one process per node."""
        if self.source == "wikitext2":
            self._failure = fetch_error("WikiText-2", lambda: fetch_wikitext2(self.root))

    @override
    def setup(self, stage: str) -> None:
        """Reads the text; collective where there is a process group.

        Raises:
            MissingDataError: a file is not there, on this worker or another one.
            CorpusError: a file is empty, is not UTF-8, or is too short for so many columns.
        """
        if self.corpus is not None:
            return
        with failing_together():
            corpus = self._read()
        self.corpus = corpus

    def _read(self) -> Corpus:
        if self.source == "builtin":
            corpus = builtin_corpus()
        else:
            try:
                corpus = read_wikitext2(self.root / FOLDER, self.tokenizer, self.max_vocabulary_size)
            except CorpusError:
                raise
            except MissingDataError:
                if self._failure is None:
                    raise
                # Why it is missing says more than that it is.
                raise MissingDataError(f"{self._failure} Or try the recipe with --data.source=builtin.") from None
        used = round(self.train_share * len(corpus.train))
        all_columns = self.columns * self._num_workers
        if used < 2 * all_columns:
            raise CorpusError(
                f"{self.root / FOLDER / FILES['train']} has {used:,} words to train on, too few for {all_columns:,} "
                "columns of at least two. Lower --data.columns or raise --data.train_share."
            )
        train = corpus.train[:used]
        if self.heterogeneous:
            try:
                train = by_topic(train, corpus.end_of_line, corpus.heading)
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
        """Returns where in the epoch the training is, so that a resumed run goes on with the next window."""
        if self.trainer is None or self._train_windows is None:
            return {"position": 0}
        ready = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return {"position": int(ready % max(self.trainer.num_training_batches, 1))}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Lightning would hand it to the windows themselves, but not once the schedule has asked for their number.
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
    """One worker's windows in order, as a data loader; torchtext's BPTTIterator cuts them.

    Not a DataLoader: Lightning would give that a DistributedSampler. A resumed training begins its first epoch at the
    window that ``load_state_dict`` names.

    Args:
        columns: the text, int64, shape (columns, length).
        bptt: words of a window; the last one of an epoch may be shorter.
    """

    def __init__(self, columns: Tensor, bptt: int) -> None:
        # The words are numbers already; without a vocabulary the field hands IGNORED on like any other.
        field = Field(use_vocab=False, pad_token=None)
        fields = [("text", field)]
        text = Dataset([Example.fromlist([columns.flatten().tolist()], fields)], fields)
        self._iterator = BPTTIterator(text, len(columns), bptt, train=True, shuffle=False, sort=False)
        self._resume_at = 0
        self._position = 0

    def __len__(self) -> int:
        return len(self._iterator)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields inputs and targets, int64 of shape (time, columns), targets with ``IGNORED`` where there is none."""
        begin, self._resume_at = self._resume_at, 0
        for index, window in enumerate(self._iterator):
            if index >= begin:
                self._position = index + 1
                yield window.text.clamp(min=0), window.target

    def state_dict(self) -> dict[str, int]:
        """Returns how many windows of the running epoch were handed out."""
        return {"position": self._position % max(len(self), 1)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Makes the next epoch begin at a window other than the first."""
        self._resume_at = state_dict["position"]


def training_columns(tokens: Tensor, columns: int, worker: int, num_workers: int) -> Tensor:
    """Returns one worker's columns of the training text, shape (columns, length); the remainder is left out.

    Example:
        >>> [training_columns(torch.arange(9), 2, worker, 2).tolist() for worker in (0, 1)]
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    """
    length = len(tokens) // (columns * num_workers)
    first = worker * columns * length
    return tokens[first : first + columns * length].view(columns, length)


def evaluation_columns(tokens: Tensor, before: int, columns: int, worker: int, num_workers: int) -> Tensor:
    """Returns one worker's columns of a text of which every word is predicted once, shape (columns, length + 1).

    Each column begins with the word before its first target; the last ones may end in ``IGNORED``.

    Args:
        tokens: the text, int64, one-dimensional.
        before: the word that precedes the text.
        columns: columns of a worker.
        worker: which worker.
        num_workers: how many there are.

    Example:
        >>> [evaluation_columns(torch.arange(1, 6), 0, 1, worker, 2).tolist() for worker in (0, 1)]
        [[[0, 1, 2, 3]], [[3, 4, 5, -100]]]
    """
    length = ceil(len(tokens) / (columns * num_workers))
    padding = columns * num_workers * length - len(tokens)
    text = torch.cat([torch.tensor([before]), tokens, torch.full((padding,), IGNORED)])
    return text.unfold(0, length + 1, length)[worker * columns : (worker + 1) * columns]
