"""Loads WikiText-2 as word indices, or the text of a Markov chain without a download."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchtext.data import Field
from torchtext.datasets import LanguageModelingDataset

from recipes import MissingDataError
from recipes.download import fetch, md5_of, opened_zip, write_atomically
from recipes.lstm_wikitext2.markov_chain import MarkovChain

# The address in torchtext no longer works.
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
    """Raised if a file of the corpus is invalid; the message names the file and the position."""


@dataclass(frozen=True)
class Corpus:
    """The three splits as word indices, int64 and one-dimensional, and the vocabulary."""

    train: Tensor
    val: Tensor
    test: Tensor
    vocabulary_size: int
    end_of_line: int
    """Index of the word that precedes each split."""
    heading: int = -1
    """Index of ``=``, which encloses titles of articles; -1 without titles."""


def read_wikitext2(folder: Path, tokenizer: str = "wikitext", vocabulary_size: int | None = None) -> Corpus:
    """Return the three files as word indices, in descending frequency in the training split.

    Raises:
        MissingDataError: a file is missing.
        CorpusError: a file is empty or not UTF-8.
    """
    for name in FILES.values():
        _check(folder / name)
    # No padding token, so that 33,278 words are 33,278 rows of the embedding.
    field = Field(tokenize=None if tokenizer == "wikitext" else tokenizer, pad_token=None)
    texts = {split: LanguageModelingDataset(str(folder / name), field)[0].text for split, name in FILES.items()}
    # torchtext's limit does not count <unk>.
    field.build_vocab([texts["train"]], max_size=None if vocabulary_size is None else vocabulary_size - 1)
    numbers = {split: field.numericalize([text]).flatten() for split, text in texts.items()}
    words = field.vocab.stoi
    return Corpus(
        **numbers, vocabulary_size=len(field.vocab), end_of_line=words[END_OF_LINE], heading=words.get(HEADING, -1)
    )


def make_builtin_corpus() -> Corpus:
    """Return a fixed text of a Markov chain with 200,000, 20,000 and 20,000 words."""
    chain = MarkovChain()
    train, val, test = (chain.sample(number, seed) for seed, number in enumerate((200_000, 20_000, 20_000)))
    return Corpus(train, val, test, vocabulary_size=len(chain.transitions), end_of_line=0)


def fetch_wikitext2(root: Path) -> None:
    """Download the missing files of WikiText-2 to ``<root>/wikitext-2``.

    Raises:
        MissingDataError: the archive could not be downloaded, or its checksum is wrong.
    """
    folder = root / FOLDER
    missing = []
    for name in FILES.values():
        if not (folder / name).exists():
            missing.append(name)
        elif md5_of(folder / name) != MD5[name]:
            rank_zero_warn(f"{folder / name} differs from WikiText-2's {name} and is used anyway.")
    if not missing:
        return
    # Check the files and not the archive, because servers may compress the files differently.
    archive = fetch(URL, root / Path(URL).name)
    folder.mkdir(parents=True, exist_ok=True)
    with opened_zip(archive) as files:
        for name in missing:
            with write_atomically(folder / name) as part:
                part.write_bytes(files.read(f"{FOLDER}/{name}"))
                if (found := md5_of(part)) != MD5[name]:
                    raise zipfile.BadZipFile(f"its {name} has md5 {found}, expected {MD5[name]}")


def _check(path: Path) -> None:
    # torchtext would accept an empty file and report an invalid byte by its offset in a buffer.
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
            f"{path.absolute()} is empty: {len(content):,} bytes without a word. Delete it to download it again."
        )
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise CorpusError(
            f"{path.absolute()}, line {line:,}: the byte 0x{content[error.start]:02x} at offset {error.start:,} is not "
            f"UTF-8 ({error.reason}). Convert the file to UTF-8, or delete it to download it again."
        ) from None
