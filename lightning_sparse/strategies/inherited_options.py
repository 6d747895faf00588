"""Signatures and docstrings that show every option, also those that a class passes on as ``**kwargs``."""

import inspect
import re
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any

from lightning_sparse.strategies.sparse_strategy import SparseStrategy

PACKAGE = __name__.partition(".")[0]
SECTION = re.compile(r"^[A-Z]\w+:$")


def _own_classes(cls: type) -> Iterator[type]:
    return (base for base in cls.__mro__ if base.__module__.startswith(PACKAGE) and "__init__" in vars(base))


def _parameters(cls: type) -> list[Parameter]:
    """Return the parameters of a class and of the classes to which it passes ``**kwargs`` on."""
    found: dict[str, Parameter] = {}
    for base in _own_classes(cls):
        function: Callable[..., None] = vars(base)["__init__"]
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            # A class that takes no sparsifier makes it itself.
            if parameter.kind is Parameter.KEYWORD_ONLY or (not found and parameter.kind is not Parameter.VAR_KEYWORD):
                found.setdefault(parameter.name, parameter)
    return [*found.values(), Parameter("kwargs", Parameter.VAR_KEYWORD, annotation=Any)]


def _documentation(cls: type, names: list[str]) -> str:
    """Return a class's docstring with the entries of all its parameters in the ``Args`` section."""
    lines = inspect.cleandoc(vars(cls).get("__doc__") or "").splitlines()
    entries: dict[str, list[str]] = {}
    for base in cls.__mro__:
        if base.__module__.startswith(PACKAGE):
            own = vars(base).get("_own_doc", vars(base).get("__doc__"))
            for name, entry in _entries(own or "").items():
                entries.setdefault(name, entry)
    names = [*names[:-1], "**kwargs"]
    section = ["Args:", *(line for name in names for line in entries.get(name, []))]
    start = lines.index("Args:") if "Args:" in lines else None
    if start is None:
        start = next((place for place, line in enumerate(lines) if SECTION.match(line)), len(lines))
        section = [*section, ""] if start < len(lines) else ["", *section]
        end = start
    else:
        end = next((place for place in range(start + 1, len(lines)) if lines[place][:1].strip()), len(lines))
        section = [*section, ""] if end < len(lines) else section
    return "\n".join([*lines[:start], *section, *lines[end:]])


def _entries(docstring: str) -> dict[str, list[str]]:
    """Return the lines of each entry of a docstring's ``Args`` section by parameter name."""
    lines = inspect.cleandoc(docstring).splitlines()
    entries: dict[str, list[str]] = {}
    name = ""
    for line in lines[lines.index("Args:") + 1 :] if "Args:" in lines else []:
        if line[:1].strip():
            break
        if line[:4] == "    " and line[4:5].strip():
            name = line.strip().partition(":")[0]
            entries[name] = []
        if line.strip():
            entries[name].append(line)
    return entries


class WithInheritedOptions(SparseStrategy):
    """Gives every subclass a signature and an ``Args`` section with the options that it passes on as ``**kwargs``."""

    _own_doc: str | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._own_doc = vars(cls).get("__doc__")
        parameters = _parameters(cls)
        cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        cls.__doc__ = _documentation(cls, [parameter.name for parameter in parameters])
