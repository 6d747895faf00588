"""What tests read out of Markdown: blocks of code, headings and links."""

import re
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parents[1]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
"""The pages about the package, whose code readers copy."""

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n)+")
_LINK = re.compile(r"\[[^\]\[]*(?:\[[^\]]*\])?[^\]\[]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """Code between fences: in which language, what, and on which line of the page it begins."""

    language: str
    code: str
    line: int


def blocks(text: str, *languages: str) -> list[Block]:
    """Returns the fenced blocks in these languages, in order."""
    found = [Block(match[1], match[2], text.count("\n", 0, match.start(2)) + 1) for match in _FENCE.finditer(text)]
    return [block for block in found if block.language in languages]


def indented(text: str) -> list[str]:
    """Returns the blocks that are set off by four spaces."""
    return [match[0] for match in _INDENTED.finditer(_FENCE.sub("", text))]


def links(text: str) -> list[str]:
    """Returns where links and pictures lead, outside of code."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))
    return _LINK.findall(_INDENTED.sub("", text))


def anchors(text: str) -> set[str]:
    """Returns what headings are called in links."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def after(diff: str) -> str:
    """Returns what the lines of a diff come to."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))
