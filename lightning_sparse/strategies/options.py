"""Options of strategies, shown by every strategy that takes them, and checks of the arguments for Lightning's."""

import difflib
import inspect
import re
from collections.abc import Collection, Iterable
from inspect import Parameter, Signature
from typing import Any, ClassVar, TypeVar

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

Options = TypeVar("Options")
SECTION = re.compile(r"[A-Z]\w+:$")
_REPLACED_ARGUMENTS = {
    "ddp_comm_hook": "The sparse exchange is the communication hook, and DDP has only one. Use value_dtype='bfloat16' "
    "to compress values further, or Lightning's DDPStrategy for another hook",
    "ddp_comm_state": "The sparse exchange keeps its own state. Read it from strategy.state",
    "ddp_comm_wrapper": "The sparse exchange is not wrapped. Use value_dtype='bfloat16' or 'float8' to send values in "
    "half precision",
    "model_averaging_period": "Gradients are exchanged in every step, so there are no models to average. Use "
    "Lightning's DDPStrategy for post-local SGD",
    "mixed_precision": "DDP's own mixed precision brings a communication hook of its own. Use "
    "Trainer(precision='bf16-mixed')",
    "sharding_strategy": "Every worker has the whole model here, and there are no shards. Use "
    "strategy='hsdp_hardthreshold', or Lightning's FSDPStrategy, with its own exchange",
    "skip_all_reduce_unused_params": "The hook must see every bucket. Leave it out: a hard threshold sends nothing for "
    "unused parameters",
}

_DDP_STRATEGY = dict(inspect.signature(DDPStrategy).parameters)
_DDP = dict(inspect.signature(DistributedDataParallel).parameters)
_MODEL_PARALLEL = dict(inspect.signature(ModelParallelStrategy).parameters)


class TakesOptions(Strategy):
    """Shows every option in a subclass's signature and docstring, also those that it passes on as ``**kwargs``."""

    _takes: ClassVar[tuple[type, ...]] = ()
    """Classes whose parameters the ``__init__`` beside this attribute takes as ``**kwargs``."""
    _leaves_out: ClassVar[frozenset[str]] = frozenset()
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
        cls.__doc__ = _documentation(cls, signature.parameters.values())

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


def _documentation(cls: type, parameters: Iterable[Parameter]) -> str:
    """Return a class's docstring with the entries of all its parameters, and the errors of a base if it has none."""
    sections = _sections(vars(cls)["_own_doc"])
    entries: dict[str, list[str]] = {}
    for base in _classes(cls):
        taken = [source for options in vars(base).get("_takes", ()) for source in reversed(options.__mro__)]
        own_doc = vars(base).get("_own_doc", "")
        for doc in (own_doc, *(source.__doc__ for source in taken)):
            entries = _entries(doc or "") | entries
        if "Raises:" in (inherited := _sections(own_doc)):
            sections.setdefault("Raises:", inherited["Raises:"])
    names = [f"**{each.name}" if each.kind is Parameter.VAR_KEYWORD else each.name for each in parameters]
    arguments = [line for name in names for line in entries.get(name, [])]
    parts = {"": sections.pop(""), "Args:": arguments} | {name: sections[name] for name in sections if name != "Args:"}
    return "\n\n".join("\n".join([title, *lines]).strip() for title, lines in parts.items())


def _sections(docstring: str) -> dict[str, list[str]]:
    """Return the lines of each section by its title, and those before the first section without a title."""
    title = ""
    sections: dict[str, list[str]] = {title: []}
    for line in inspect.cleandoc(docstring).splitlines():
        if SECTION.match(line):
            title, sections[line] = line, []
        else:
            sections[title].append(line)
    return sections


def _entries(docstring: str) -> dict[str, list[str]]:
    """Return the lines of each entry of a docstring's ``Args`` section by parameter name."""
    entries: dict[str, list[str]] = {}
    name = ""
    for line in _sections(docstring).get("Args:", []):
        if line[4:5].strip():
            name = line.strip().partition(":")[0]
        if line.strip():
            entries.setdefault(name, []).append(line)
    return entries


def ddp_arguments(strategy: Strategy, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for ``DDPStrategy``.

    Raises:
        ValueError: an argument that a sparse exchange cannot honour; says what to use instead.
        TypeError: an unknown argument; names a similar one, of Lightning's or of the strategy.
    """
    for name, advice in _REPLACED_ARGUMENTS.items():
        if arguments.get(name):
            raise ValueError(f"Got {name}={arguments[name]!r}. {advice}.")
    known = {*_DDP_STRATEGY, *_DDP} - {"module", "kwargs", "device_ids"}
    takers = f"Lightning's DDPStrategy nor DistributedDataParallel of torch {torch.__version__}"
    require_arguments(strategy, arguments, known, takers)
    return arguments


def process_group_arguments(strategy: Strategy, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``DDPStrategy`` that apply without a DDP module.

    A command line passes on every argument; those of a DDP module that have their default value are left out.

    Raises:
        ValueError: an argument that concerns DDP's own exchange.
        TypeError: an unknown argument; names a similar one, of Lightning's or of the strategy.
    """
    own = _DDP_STRATEGY.keys() - {"kwargs"} - _REPLACED_ARGUMENTS.keys()
    of_a_module = {**_DDP, **_DDP_STRATEGY}
    require_arguments(strategy, arguments.keys() - of_a_module.keys(), own, "Lightning's DDPStrategy")
    for name, value in arguments.items():
        # Without a DDP module any parameter may stay unused.
        if name not in own and name != "find_unused_parameters" and value is not of_a_module[name].default:
            raise ValueError(
                f"Got {name}={value!r}, which concerns a DDP module's exchange of gradients. Local training has "
                "none: leave it out."
            )
    return {name: value for name, value in arguments.items() if name in own}


def model_parallel_arguments(strategy: Strategy, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``ModelParallelStrategy`` that apply to several replicas.

    Raises:
        ValueError: the size of a replica.
        TypeError: an unknown argument; names a similar one, of Lightning's or of the strategy.
    """
    size = arguments.get("data_parallel_size", "auto")
    if size != "auto":
        raise ValueError(
            f"Got data_parallel_size={size!r}. A replica has as many ranks as remain: say how many replicas there are, "
            "replicas=…"
        )
    known = _MODEL_PARALLEL.keys() - {"tensor_parallel_size"}
    require_arguments(strategy, arguments, known, "Lightning's ModelParallelStrategy")
    return {name: value for name, value in arguments.items() if name != "data_parallel_size"}


def require_arguments(strategy: Strategy, names: Collection[str], known: Collection[str], takers: str) -> None:
    """Raise TypeError for a name that is not known; the message names a similar one."""
    for name in names:
        if name not in known:
            own = set(inspect.signature(type(strategy)).parameters) - {"kwargs"}
            close = difflib.get_close_matches(name, own.union(known), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"Unknown argument {name!r}: neither this strategy nor {takers} takes it.{hint}")
