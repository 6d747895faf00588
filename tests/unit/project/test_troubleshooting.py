"""Headings of docs/troubleshooting.md quote messages of the sources word by word, and no message is missing."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

import lightning_sparse
from tests.markdown import PROJECT

PAGE = PROJECT / "docs" / "troubleshooting.md"
GAP = "\0"
"""Stands for a value that a source inserts."""


def messages_of(page: str) -> list[tuple[str, str]]:
    """Return the sections and the messages that head their entries: `message` or `` message with `words` ``."""
    found, section = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif heading := re.fullmatch(r"### (`+)(.+)\1", line):
            found.append((section, heading[2].strip() if len(heading[1]) > 1 else heading[2]))
    return found


def texts_of(node: ast.AST) -> str | None:
    """Return the string that a node builds, with gaps for its values, or None if it is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(texts_of(value) or GAP for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (texts_of(node.left) or GAP) + (texts_of(node.right) or GAP)
    return None


@cache
def strings_of(package: Path) -> list[str]:
    """Return all strings in the sources of a package; a concatenation or f-string is a single string."""
    files = package.rglob("*.py")
    return [text for path in files for node in ast.walk(ast.parse(path.read_text())) if (text := texts_of(node))]


MESSENGERS = {"rank_zero_warn", "rank_zero_info", "_warn", "_report", "ValueError", "TypeError", "RuntimeError"}
"""Functions and exceptions whose longest string is a message to the user."""
WITHOUT_ENTRY = {
    "lightning_sparse: …. See docs/….md.": "a frame of messages that have entries",
    "Got …=…. ….": "a frame of messages that have entries",
    "Exchange … failed: …": "a frame of messages that have entries",
    "Got … names for … sizes. Give one size per name.": "an internal check",
}


def told_by(package: Path) -> list[str]:
    """Return the messages of a package's errors and warnings, with `…` for each value."""
    nodes = [node for path in package.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    calls = [(node, node.func) for node in nodes if isinstance(node, ast.Call)]
    named = [call for call, of in calls if getattr(of, "id", getattr(of, "attr", "")) in MESSENGERS]
    texts = [[text for argument in call.args if (text := texts_of(argument))] for call in named]
    return [max(found, key=len).replace(GAP, "…") for found in texts if any(" " in text for text in found)]


def occurs(message: str, strings: list[str]) -> bool:
    """Return whether a string has the parts of a message in order, with a gap for each `…`."""
    parts = [part for part in message.split("…") if part.strip()]
    # Beside a gap there may be words that other messages of the same kind lack.
    pattern = re.compile(f".*{GAP}.*".join(re.escape(part.strip(" ")) for part in parts), re.DOTALL)
    return any(pattern.search(text) for text in strings)


def sources_of(section: str) -> list[Path]:
    if section != "Messages from Lightning":
        return [Path(lightning_sparse.__file__).parent]
    names = ("lightning.pytorch", "lightning.fabric", "jsonargparse")
    specs = [importlib.util.find_spec(name) for name in names]
    return [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None]


MESSAGES = [entry for entry in messages_of(PAGE.read_text()) if entry[0] != "Messages from torch and Gloo"]


@pytest.mark.parametrize(("section", "message"), MESSAGES, ids=[message[:40] for _, message in MESSAGES])
def test_the_sources_contain_each_message_of_the_page(section: str, message: str) -> None:
    assert any(occurs(message, strings_of(package)) for package in sources_of(section))


@pytest.mark.parametrize("text", sorted({*told_by(Path(lightning_sparse.__file__).parent)}), ids=lambda text: text[:40])
def test_the_page_has_each_message_of_the_package(text: str) -> None:
    patterns = [".*".join(re.escape(part.strip()) for part in message.split("…")) for _, message in MESSAGES]
    has_entry = any(re.search(pattern, text, re.DOTALL) for pattern in patterns)
    assert has_entry != (text in WITHOUT_ENTRY)


def test_occurs_rejects_a_message_that_no_source_contains() -> None:
    strings = strings_of(Path(lightning_sparse.__file__).parent)
    assert occurs("Got both threshold=… and density=…. Give one, …", strings)
    assert not occurs("Got both density=… and threshold=…. Give one, …", strings)
    assert not occurs("Got both threshold=… or density=…. Give one, …", strings)


def test_messages_of_reads_the_page() -> None:
    sections = {section for section, _ in MESSAGES}
    assert {"Messages from Lightning", "Argument errors", "Checkpoint messages"} <= sections
    assert messages_of("## A\n### `one: …`\n### plain\n### `` two `words` ``") == [
        ("A", "one: …"),
        ("A", "two `words`"),
    ]
