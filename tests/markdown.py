"""Extracts blocks of code, headings and links from Markdown."""

import re
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "lightning_sparse"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
"""The pages about the package, whose code readers copy."""

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n)+")
_LINK = re.compile(r"\[[^\]\[]*(?:\[[^\]]*\])?[^\]\[]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block of code, its language and its first line in the page."""

    language: str
    code: str
    line: int


def blocks(text: str, *languages: str) -> list[Block]:
    """Return the fenced blocks in these languages, in order."""
    found = [Block(match[1], match[2], text.count("\n", 0, match.start(2)) + 1) for match in _FENCE.finditer(text)]
    return [block for block in found if block.language in languages]


def indented(text: str) -> list[str]:
    """Return the blocks that are indented by four spaces."""
    return [match[0] for match in _INDENTED.finditer(_FENCE.sub("", text))]


def links(text: str) -> list[str]:
    """Return the targets of links and pictures outside code."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))
    return _LINK.findall(_INDENTED.sub("", text))


def anchors(text: str) -> set[str]:
    """Return the anchors of headings, as links name them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
    without_padding = [re.sub("`` (.*) ``", r"\1", heading) for heading in headings]
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in without_padding]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def before(diff: str) -> str:
    """Return the text before the change of a diff."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("+"))


def after(diff: str) -> str:
    """Return the text after the change of a diff."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))
