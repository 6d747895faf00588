"""Checks links, navigation and names of the documentation without building it. Integration tests run its snippets."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import lightning_sparse
import lightning_sparse.theory
from tests.markdown import PACKAGE, PAGES, PROJECT, SOURCES, anchors, blocks, indented, links

MARKDOWN = [
    *PAGES,
    *(PROJECT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((PROJECT / "recipes").rglob("*.md")),
]
DOCS = PROJECT / "docs"
COMMAND = re.compile(r"(?:^|[\s/])python (?:\S+=\S+ )*-m ([\w.]+)")
PUBLIC = {name: getattr(lightning_sparse, name) for name in lightning_sparse.__all__} | {
    name: value for name, value in vars(lightning_sparse.theory).items() if callable(value) and not name.startswith("_")
}
PYTHON_OR_YAML = re.compile(rf"^(?!.*python ).*\b(?:{'|'.join(PUBLIC)}|Trainer)\(|^\s*class_path:", re.MULTILINE)


def name_of(path: Path) -> str:
    return str(path.relative_to(PROJECT))


@pytest.mark.parametrize("page", MARKDOWN, ids=name_of)
def test_links_have_a_target_and_tables_a_head(page: Path) -> None:
    assert not re.search(r"^\|.*\n\n\|.*\n(?!\|[-|: ]+\n)", page.read_text(), re.MULTILINE)
    for link in links(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert DOCS not in page.parents or DOCS in target.resolve().parents, link  # Sphinx has only these
        assert not anchor or anchor in anchors(target.read_text()), link


def test_links_and_anchors_follow_the_rules_of_markdown() -> None:
    heading = "## What it costs, and [why](b.md) – 10 % more"
    text = f"# One\n\n{heading}\n\n[a](x.md#one) ![b](y.png) `[c](z.md)`\n\n    [d](w.md)\n"
    assert links(text) == ["b.md", "x.md#one", "y.png"]
    assert anchors(text) == {"one", "what-it-costs-and-why--10--more"}


def test_every_page_is_in_the_navigation_once() -> None:
    settings = ast.parse((DOCS / "conf.py").read_text())
    (sections,) = (
        ast.literal_eval(node.value)
        for node in settings.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NAVIGATION"
    )
    pages = [page.replace("Home <self>", "index") for section in sections.values() for page in section]
    assert sorted(pages) == sorted(str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md"))


def test_the_reference_lists_all_public_names() -> None:
    reference = (DOCS / "reference.md").read_text()
    named = re.findall(r"^\.\. auto(?:class|function):: lightning_sparse\.(\w+)$", reference, re.MULTILINE)
    assert sorted(named) == sorted(lightning_sparse.__all__)


def test_examples_that_pages_include_are_run() -> None:
    tested = (PROJECT / "tests" / "integration" / "documentation" / "test_examples.py").read_text()
    included = {
        name for page in PAGES for name in re.findall(r"\{literalinclude\} \S*examples/(\S+\.py)", page.read_text())
    }
    assert included == {path.name for path in (DOCS / "examples").glob("*.py")}
    assert all(f'"{name}"' in tested for name in included)


@pytest.mark.parametrize("page", MARKDOWN, ids=name_of)
def test_commands_name_modules_and_files_that_exist(page: Path) -> None:
    text = page.read_text()
    for code in [*indented(text), *(block.code for block in blocks(text, "", "bash", "sh", "console", "text"))]:
        for module in COMMAND.findall(code):
            assert importlib.util.find_spec(module), module
        for config in re.findall(r"--(?:config|variants)[ =](\S+\.yaml)", code):
            assert "<" in config or (PROJECT / config).exists(), config
        for target in re.findall(r"^ *(?:\S+=\S+ )*make ([\w-]+)", code, re.MULTILINE):
            assert re.search(rf"^{target}\b.*:", (PROJECT / "Makefile").read_text(), re.MULTILINE), target


def test_code_and_configurations_name_pages_that_exist() -> None:
    folders = (PACKAGE, *(PROJECT / name for name in ("recipes", "benchmarks", "release", "docs", "tests")))
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".c", ".yaml")]
    named = {name for path in paths for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())}
    assert len(named) > 10
    assert [name for name in sorted(named - {"docs/draft.md"}) if not (PROJECT / name).is_file()] == []


@pytest.mark.parametrize("page", MARKDOWN, ids=name_of)
def test_python_stands_between_fences(page: Path) -> None:
    for code in indented(page.read_text()):
        assert not PYTHON_OR_YAML.search(code), code


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_have_no_roles_and_single_backticks_name_public_objects(path: Path) -> None:
    assert not re.findall(r":[a-z:]+:`[^`]*`", path.read_text())
    for text, owner in docstrings(ast.parse(path.read_text())):
        for name in re.findall(r"(?<!`)`([^`]+)`(?!`)", text):
            assert is_public(name, owner), f"`{name}` in {owner}"


def test_is_public_rejects_other_names() -> None:
    (found,) = list(docstrings(ast.parse('class TopK:\n    def select(self):\n        "See `mark`, ``x``."')))
    assert found == ("See `mark`, ``x``.", "TopK")
    assert is_public("mark", "TopK")
    assert is_public("TopK.mark", None)
    assert not is_public("mark", None)
    assert not is_public("no_mark", "TopK")
    assert not is_public("TopK.no_mark", "TopK")
    assert not is_public("Engine", "TopK")


def docstrings(tree: ast.AST, owner: str | None = None):
    """Yield every string that is a statement, with the class around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value, owner
        else:
            yield from docstrings(node, node.name if isinstance(node, ast.ClassDef) else owner)


def is_public(name: str, owner: str | None) -> bool:
    head, _, member = name.partition(".")
    if head in PUBLIC:
        return not member or hasattr(PUBLIC[head], member)
    return owner in PUBLIC and not member and not name.startswith("_") and hasattr(PUBLIC[owner], name)
