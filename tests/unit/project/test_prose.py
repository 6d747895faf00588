"""Checks mechanical rules of plain English in pages, docstrings and comments of recipes."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import lightning_sparse
from tests.markdown import PAGES, PROJECT

FOLDERS = (Path(lightning_sparse.__file__).parent, *(PROJECT / name for name in ("recipes", "benchmarks", "release")))
READMES, RECIPES = (sorted((PROJECT / "recipes").rglob(name)) for name in ("README.md", "*.yaml"))
MAX_WORDS_OF_A_SENTENCE = 40
MAX_NUMBERS_OF_A_SENTENCE = 4
MAX_WORDS = {
    "README.md": 900,
    "quickstart.md": 600,
    "choose.md": 1000,
    "compare.md": 800,
    "two-nodes.md": 800,
    "paper.md": 800,
    "results.md": 3000,
    "results-appendix.md": 4000,
    "reliability.md": 2000,
    "performance.md": 1500,
    "theory.md": 1500,
    "how-it-works.md": 1500,
}
UNLIMITED = {"troubleshooting.md", "changelog.md", "contributing.md"}
MAX_WORDS_OF_A_GUIDE = 1200
FORBIDDEN = (
    r"\b(?:came|comes|come) to\b",
    r"\blikewise\b",
    r"\bas above\b",
    r"\bthe one before\b",
    r"\bfor one in\b",
    r"\bwhoever\b",
    r"\b(?:a|an) (?:step|worker|bucket|parameter|coordinate|layer|element|second)(?= (?:and|or) (?:a|an)? ?worker\b)",
    r"\b(?:bytes|numbers|messages|collectives|launches|coordinates|ms|milliseconds|MB) an? "
    r"(?:step|worker|bucket|parameter|coordinate|layer|element|node|host)\b",
    r"\bonce an? (?:step|epoch|group|bucket)\b",
    r"\bthe second door\b|\bthe same door\b|\bconvoy\b|\bunderstudy\b",
    r"\bof (?:today|now)\b",
)


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs and list items of a page without code, tables, headings and comments."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if not line.strip() or line.startswith(("|", "#", "    ", "![")):
            found.append([])
        elif re.match(r"\s*(?:[-*>]|\d+\.) ", line):
            found.append([re.sub(r"^\s*(?:[-*>]|\d+\.) ", "", line)])
        else:
            found[-1].append(line.strip())
    return [" ".join(lines) for lines in found if lines]


def sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph; code and targets of links count as one word."""
    plain = re.sub(r"\]\([^)]*\)", "]", paragraph)
    plain = re.sub(r"`+[^`]+`+", "code", plain)
    return re.split(r"(?<=[.!?:])[)*_]*\s+(?=[*_(\[]*[A-Z0-9Σλ‖c])", plain)


def problems(sentence: str) -> list[str]:
    """Return the rules that a sentence breaks."""
    words = [word for word in sentence.split() if re.search(r"[^\W\d_]", word)]
    # A value with its spread counts as a single number, as does a date.
    values = re.sub(r" ± [\d.]+|(?<=\d) (?:\w+ 20\d\d)", "", sentence)
    numbers = re.findall(r"(?<![\w.\-@*/√])\d[\d,.]*(?!\w)", values)
    found = [f"{len(words)} words"] if len(words) > MAX_WORDS_OF_A_SENTENCE else []
    found += [f"{len(numbers)} numbers"] if len(numbers) > MAX_NUMBERS_OF_A_SENTENCE else []
    found += [match[0] for rule in FORBIDDEN for match in re.finditer(rule, sentence, re.IGNORECASE)]
    return found


def refused(paragraph: str) -> list[tuple[str, list[str]]]:
    """Return the sentences of a paragraph that have problems."""
    return [(sentence, found) for sentence in sentences(paragraph) if (found := problems(sentence))]


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_a_page_reads_easily(page: Path) -> None:
    assert not [hit for paragraph in paragraphs(page.read_text()) for hit in refused(paragraph)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_becomes_a_list_or_a_comment(page: Path) -> None:
    """A number with a full stop, or a percent sign, at the start of a line of a paragraph."""
    lines = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).splitlines()
    assert not [line for line in lines if line.lstrip().startswith("%")]
    assert not [
        line for before, line in pairwise(lines) if re.match(r"[A-Za-z*`(]", before) and re.match(r"\d+\. ", line)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_no_longer_than_planned(page: Path) -> None:
    words = [word for word in page.read_text().split() if re.search(r"[A-Za-z]", word)]
    assert page.name in UNLIMITED or len(words) <= MAX_WORDS.get(page.name, MAX_WORDS_OF_A_GUIDE)


def docstring_paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring, and each argument's text, without examples."""
    text = re.sub(r"::\n(?:\n|    .*\n?)+", ".\n\n", text)
    text = re.sub(r"^(?:Args|Attributes|Raises|Returns|Yields):$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^    (?=\S)", "- ", text, flags=re.MULTILINE)  # an argument
    text = re.sub(r"^ {6,}(?=\S)", "", text, flags=re.MULTILINE)  # its further lines
    for paragraph in paragraphs(re.sub(r"^[ -]*>>> .*\n(?:.+\n?)*", "", text, flags=re.MULTILINE)):
        yield re.sub(r"^\*{0,2}[\w.]+: ", "", paragraph)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_comments_of_a_recipe_read_easily(path: Path) -> None:
    comments = re.sub(r"^ *(?:#(.*)|.*)$", r"\1", path.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^ +", "", re.sub(r"^ (?=[A-Z]\w+  )", "- ", comments, flags=re.MULTILINE), flags=re.MULTILINE)
    assert not [hit for paragraph in paragraphs(text) for hit in refused(paragraph)]


@pytest.mark.parametrize(
    "path",
    [path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_docstrings_read_easily(path: Path) -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
    hits = [hit for text in texts if text for paragraph in docstring_paragraphs(text) for hit in refused(paragraph)]
    assert not hits
