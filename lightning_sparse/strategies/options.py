"""Options of strategies, declared and documented once, and shown by every strategy that takes them."""

import inspect
import re
from collections.abc import Iterable, Sequence
from inspect import Parameter, Signature
from typing import Any, ClassVar, TypeVar

from lightning.pytorch.strategies import Strategy

Options = TypeVar("Options")
SECTION = re.compile(r"[A-Z]\w+:$")


class TakesOptions(Strategy):
    """Shows every option in a subclass's signature and docstring, also those that it passes on as ``**kwargs``."""

    _takes: ClassVar[tuple[type, ...]] = ()
    """Classes whose parameters the ``__init__`` beside this attribute takes as ``**kwargs``."""
    _leaves_out: ClassVar[frozenset[str]] = frozenset({"is_sharded"})
    """Parameters of these classes that are not options of the strategy."""
    _own_doc: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._own_doc = vars(cls).get("__doc__") or ""
        if "_takes" in vars(cls):
            init: Any = vars(cls)["__init__"]
            shown = dict(inspect.signature(init).parameters)
            for options in cls._takes:
                for name, parameter in inspect.signature(options).parameters.items():
                    if name not in cls._leaves_out:
                        shown.setdefault(name, parameter.replace(kind=Parameter.KEYWORD_ONLY))
            init.__signature__ = _signature(shown.values())  # jsonargparse looks at the function
        signature = _signature(_parameters(cls))
        cls.__signature__ = signature  # type: ignore[attr-defined]
        cls.__doc__ = _documentation(cls, list(signature.parameters.values()))

    def _taken(self, options: type[Options], arguments: dict[str, Any], **others: Any) -> Options:
        """Make options of the arguments that they take, and remove these from the arguments."""
        names = inspect.signature(options).parameters.keys() - self._leaves_out
        return options(**others, **{name: arguments.pop(name) for name in names & arguments.keys()})


def _signature(parameters: Iterable[Parameter]) -> Signature:
    return Signature(sorted(parameters, key=lambda parameter: parameter.kind))


def _classes(cls: type) -> list[type[TakesOptions]]:
    return [base for base in cls.__mro__ if issubclass(base, TakesOptions)]


def _parameters(cls: type) -> list[Parameter]:
    """Return the parameters of a class and of the classes to which it passes ``**kwargs`` on."""
    found: dict[str, Parameter] = {}
    for init in (vars(base)["__init__"] for base in _classes(cls) if "__init__" in vars(base)):
        _, *parameters = inspect.signature(init).parameters.values()
        if found:  # a class that takes no sparsifier makes it itself
            parameters = [each for each in parameters if each.kind is Parameter.KEYWORD_ONLY]
        found |= {each.name: each for each in parameters if each.name not in found}
    return list(found.values())


def _documentation(cls: type, parameters: Sequence[Parameter]) -> str:
    """Return a class's docstring with the entries of all its parameters in the ``Args`` section."""
    entries: dict[str, list[str]] = {}
    for base in _classes(cls):
        taken = [source for options in vars(base).get("_takes", ()) for source in reversed(options.__mro__)]
        for doc in (vars(base).get("_own_doc", ""), *(source.__doc__ for source in taken)):
            entries = _entries(doc or "") | entries
    names = [f"**{each.name}" if each.kind is Parameter.VAR_KEYWORD else each.name for each in parameters]
    section = ["Args:", *(line for name in names for line in entries.get(name, []))]
    lines = inspect.cleandoc(vars(cls)["_own_doc"]).splitlines()
    places = [place for place, line in enumerate(lines) if SECTION.match(line)] + [len(lines)]
    start = end = lines.index("Args:") if "Args:" in lines else places[0]
    if "Args:" in lines:
        end = places[places.index(start) + 1]
    parts = (lines[:start], section, lines[end:])
    return "\n\n".join("\n".join(part).rstrip() for part in parts if part)


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
