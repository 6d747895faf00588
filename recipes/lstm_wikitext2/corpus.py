"""WikiText-2 as numbers of words: its files, fetched and checked, or a Markov chain's text, which needs no download."""

import hashlib
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchtext.data import Field
from torchtext.datasets import LanguageModelingDataset

from recipes import MissingDataError
from recipes.download import fetch
from recipes.lstm_wikitext2.markov_chain import MarkovChain

# torchtext's own address of this file is dead.
URL = "https://wikitext.smerity.com/wikitext-2-v1.zip"
FOLDER = "wikitext-2"
FILES = {"train": "wiki.train.tokens", "val": "wiki.valid.tokens", "test": "wiki.test.tokens"}
MD5 = {
    "wiki.train.tokens": "34a77ebe59551b3a3b3d8c0a2797c976",
    "wiki.valid.tokens": "d756d22ab2310e7e60c094bea5c5a8eb",
    "wiki.test.tokens": "781c9418ab9414bd09e4aad825aae752",
}
END_OF_LINE = "<eos>"
HEADING = "="


class CorpusError(MissingDataError):
    """A file of the corpus is there but cannot be used; the message names it and says where it is wrong."""


@dataclass(frozen=True)
class Corpus:
    """The three splits as numbers of words, int64 and one-dimensional, and what they are numbers of."""

    train: Tensor
    val: Tensor
    test: Tensor
    vocabulary_size: int
    end_of_line: int
    """The word that is taken to precede each split."""
    heading: int = -1
    """The word ``=`` around titles of articles; -1 where there is none."""


def read_wikitext2(folder: Path, tokenizer: str = "wikitext", vocabulary_size: int | None = None) -> Corpus:
    """Returns the three files as numbers; the vocabulary is the training split's, the most frequent word first.

    Raises:
        MissingDataError: a file is not there.
        CorpusError: a file is empty or not UTF-8.
    """
    for name in FILES.values():
        _check(folder / name)
    # No token for padding: nothing is padded, and 33,278 words are 33,278 rows of the embedding.
    field = Field(tokenize=None if tokenizer == "wikitext" else tokenizer, pad_token=None)
    texts = {split: LanguageModelingDataset(str(folder / name), field)[0].text for split, name in FILES.items()}
    # torchtext does not count <unk> among the words that it limits.
    field.build_vocab([texts["train"]], max_size=None if vocabulary_size is None else vocabulary_size - 1)
    numbers = {split: field.numericalize([text]).flatten() for split, text in texts.items()}
    words = field.vocab.stoi
    return Corpus(
        **numbers, vocabulary_size=len(field.vocab), end_of_line=words[END_OF_LINE], heading=words.get(HEADING, -1)
    )


def builtin_corpus() -> Corpus:
    """Returns a Markov chain's text, always the same: 200,000 words to train on, 20,000 for each of the others."""
    chain = MarkovChain()
    train, val, test = (chain.sample(number, seed) for seed, number in enumerate((200_000, 20_000, 20_000)))
    return Corpus(train, val, test, vocabulary_size=len(chain.transitions), end_of_line=0)


def fetch_wikitext2(root: Path) -> None:
    """Makes ``<root>/wikitext-2`` hold the three files: those that are there stay, the others are fetched.

    Raises:
        MissingDataError: the archive could not be fetched, or is not the right one.
    """
    folder = root / FOLDER
    missing = []
    for name in FILES.values():
        if not (folder / name).exists():
            missing.append(name)
        elif _md5((folder / name).read_bytes()) != MD5[name]:
            rank_zero_warn(f"{folder / name} is not WikiText-2's file of that name; it is used as it is.")
    if not missing:
        return
    # What is unpacked is checked, so that it does not matter which packing of the same files a server has.
    archive = fetch(URL, root / Path(URL).name)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(archive) as files:
            for name in missing:
                _write_whole(folder / name, files.read(f"{FOLDER}/{name}"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise MissingDataError(
            f"{archive.absolute()} is damaged: {error}. Delete it to have it fetched again."
        ) from error


def _write_whole(path: Path, content: bytes) -> None:
    found = _md5(content)
    if found != MD5[path.name]:
        raise zipfile.BadZipFile(f"its {path.name} has md5 {found}, expected {MD5[path.name]}")
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _check(path: Path) -> None:
    # torchtext would report a wrong byte by its offset within a buffer, and take an empty file.
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise MissingDataError(
            f"{path.name} of WikiText-2 is not in {path.parent.absolute()} and could not be fetched. Put "
            f"{Path(URL).name} from {URL} into {path.parent.parent.absolute()}, or the file itself at "
            f"{path.absolute()}, or try the recipe with --data.source=builtin."
        ) from None
    except OSError as error:
        raise CorpusError(f"{path.absolute()} cannot be read: {error.strerror}.") from error
    if not content.strip():
        raise CorpusError(
            f"{path.absolute()} is empty: {len(content):,} bytes and no word. Delete it to have it fetched."
        )
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise CorpusError(
            f"{path.absolute()}, line {line:,}: the byte 0x{content[error.start]:02x} at offset {error.start:,} is not "
            f"UTF-8 ({error.reason}). Convert the file to UTF-8, or delete it to have it fetched."
        ) from None
