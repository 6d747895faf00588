"""The structure of the package: imports, collectives, docstrings, requirements."""

import ast
import doctest
import importlib
import importlib.metadata
import re
import sys
from collections import Counter

import pytest

from tests.markdown import PACKAGE, PROJECT, SOURCES

LEVELS = (
    *({"_version", "sparsifiers"}, {"theory"}, {"kernels"}, {"exchange"}, {"selection"}, {"engine"}),
    *({"gradients", "drift"}, {"checkpointing"}, {"strategies"}, {"callbacks", "doctor"}),
)
LEVEL_OF = {layer: level for level, layers in enumerate(LEVELS) for layer in layers}
COLLECTIVES = {
    *("all_gather", "all_gather_object", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "send", "recv", "isend", "irecv", "monitored_barrier"),
}
OF_TENSORS = {"full_tensor", "redistribute"}
"""Collectives that are methods of distributed tensors."""


def layer_of(path):
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def test_every_module_has_a_layer():
    assert {layer_of(path) for path in SOURCES} == {*LEVEL_OF, "__init__"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_lower_layers(path):
    layer = layer_of(path)
    if layer == "__init__":
        return
    for module in imported_modules(path):
        assert module != "lightning_sparse", "import from the module that defines the name"
        if module.startswith("lightning_sparse."):
            other = module.split(".")[1]
            assert LEVEL_OF[other] < LEVEL_OF[layer] or other == layer, f"{layer} imports {other}"
        if layer == "sparsifiers":
            assert not module.startswith(("torch.distributed", "lightning.")), f"{path.name} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_exchange_communicates(path):
    if layer_of(path) in ("exchange", "doctor"):  # the doctor measures the link before any training
        return
    nodes = list(ast.walk(ast.parse(path.read_text())))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    modules = ("dist", "distributed", "distributed_c10d")
    called = {node.attr for node in attributes if ast.unparse(node.value).rpartition(".")[2] in modules}
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    called |= {alias.name for node in imports if node.module.startswith("torch.distributed") for alias in node.names}
    assert not called & COLLECTIVES
    assert not {node.attr for node in attributes} & OF_TENSORS
    assert not any(module.startswith("torch.distributed.checkpoint.state_dict_") for module in imported_modules(path))
    assert "torch.distributed.checkpoint" not in imported_modules(path)


def test_a_module_has_at_most_300_lines():
    folders = [PACKAGE, *(PROJECT / name for name in ("recipes", "benchmarks", "release"))]
    modules = [path for folder in folders for path in folder.rglob("*.py")]
    assert [path for path in modules if len(path.read_text().splitlines()) > 300] == []


def test_a_folder_has_at_most_14_modules_or_pages():
    folders = [PACKAGE, *(PROJECT / name for name in ("recipes", "benchmarks", "release", "tests", "docs"))]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md")]
    counts = Counter(path.parent for path in files if path.name not in ("__init__.py", "README.md"))
    assert {folder: count for folder, count in counts.items() if count > 14} == {}


def test_the_examples_in_docstrings_pass():
    modules = [path for path in (*SOURCES, *(PROJECT / "recipes").rglob("*.py")) if ">>> " in path.read_text()]
    for path in modules:
        name = ".".join(path.relative_to(PROJECT).with_suffix("").parts)
        failed, attempted = doctest.testmod(importlib.import_module(name))
        assert (failed, attempted > 0) == (0, True), name
    assert len(modules) >= 10


def test_the_package_requires_all_modules_it_imports():
    required = {
        re.match(r"[\w.-]+", line)[0].lower().replace("-", "_")
        for line in importlib.metadata.requires("lightning-sparse")
        if "extra ==" not in line
    }
    # torch brings typing_extensions, and triton on Linux. The package works without triton and matplotlib.
    provided = required | {"lightning_sparse", "typing_extensions", "triton", "matplotlib"}
    for path in SOURCES:
        for module in imported_modules(path):
            assert module.split(".")[0] in provided | sys.stdlib_module_names, f"{path.name} imports {module}"
