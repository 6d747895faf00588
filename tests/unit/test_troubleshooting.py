"""The messages that head docs/troubleshooting.md are those that the sources have, word by word."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

import lightning_sparse

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
GAP = "\0"
"""Where a source puts a value in."""


def messages_of(page: str) -> list[tuple[str, str]]:
    """Returns the sections and the messages that head their entries: `message` or `` message with `words` ``."""
    found, section = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif heading := re.fullmatch(r"### (`+)(.+)\1", line):
            found.append((section, heading[2].strip() if len(heading[1]) > 1 else heading[2]))
    return found


def texts_of(node: ast.AST) -> str | None:
    """Returns a string that a source puts together, with gaps; None for what is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(texts_of(one) or GAP for one in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (texts_of(node.left) or GAP) + (texts_of(node.right) or GAP)
    return None


@cache
def strings_of(package: Path) -> list[str]:
    """Returns all strings in the sources of a package, those that are put together as one."""
    files = package.rglob("*.py")
    return [text for path in files for node in ast.walk(ast.parse(path.read_text())) if (text := texts_of(node))]


def occurs(message: str, strings: list[str]) -> bool:
    """Whether a string has the parts of a message between its `…`, in their order and with gaps where it has `…`."""
    parts = [part for part in message.split("…") if part.strip()]
    # Between two parts there is a gap, beside it perhaps words that another message of the same kind has not.
    pattern = re.compile(f".*{GAP}.*".join(re.escape(part.strip(" ")) for part in parts), re.DOTALL)
    return any(pattern.search(text) for text in strings)


def sources_of(section: str) -> list[Path]:
    if section != "Of Lightning":
        return [Path(lightning_sparse.__file__).parent]
    names = ("lightning.pytorch", "lightning.fabric", "jsonargparse")
    specs = [importlib.util.find_spec(name) for name in names]
    return [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None]


MESSAGES = [one for one in messages_of(PAGE.read_text()) if one[0] != "Of torch and Gloo"]


@pytest.mark.parametrize(("section", "message"), MESSAGES, ids=[message[:40] for _, message in MESSAGES])
def test_a_message_on_the_page_is_one_of_the_sources(section: str, message: str) -> None:
    assert any(occurs(message, strings_of(package)) for package in sources_of(section))


def test_a_message_that_nobody_says_is_found_out() -> None:
    strings = strings_of(Path(lightning_sparse.__file__).parent)
    assert occurs("Got both threshold=… and density=…. Give one: …", strings)
    assert not occurs("Got both density=… and threshold=…. Give one: …", strings)
    assert not occurs("Got both threshold=… or density=…. Give one: …", strings)


def test_the_page_is_read() -> None:
    sections = {section for section, _ in MESSAGES}
    assert {"Of Lightning", "Refused: arguments", "Of checkpoints"} <= sections
    assert messages_of("## A\n### `one: …`\n### plain\n### `` two `words` ``") == [
        ("A", "one: …"),
        ("A", "two `words`"),
    ]
