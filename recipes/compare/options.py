"""What a comparison is asked for, by the command line and a file: read and looked through before anything runs."""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from recipes.compare.runs import folder_name
from recipes.compare.variants import Grid, Variant, expanded, labelled, parsed_grid
from recipes.demo import REPOSITORY

OWN = ("--seed_everything", "--config", "--trainer.logger")
"""Arguments that a comparison sets itself, for each run, and those below them."""


class Asked(NamedTuple):
    """What is to be done.

    Attributes:
        options: as ``argparse`` has them.
        variants: those that are compared.
        grid: of an argument, if there is one.
        common: arguments of all runs.
    """

    options: argparse.Namespace
    variants: list[Variant]
    grid: Grid | None
    common: list[str]


def asked(description: str, given: Sequence[str]) -> Asked:
    """Returns what is asked for; ends with a message where it cannot be.

    Args:
        description: what ``--help`` says.
        given: of the command line.
    """
    parser, given = _parser(description), [*given, "--"]
    own_end = given.index("--")
    first, common = parser.parse_args(given[:own_end]), given[own_end + 1 : -1]
    listed, defaults = _read_file(first.variants)
    if unknown := defaults.keys() - vars(first).keys():
        parser.error(f"Unknown keys {sorted(unknown)} beside the variants of {first.variants}.")
    parser.set_defaults(**defaults)
    options = parser.parse_args(given[:own_end])
    try:
        _check(options)
        grid = None if options.grid is None else parsed_grid(options.grid, options.mode or "max")
        pairs = [*map(labelled, options.given_variants), *listed.items()]
        if several := _several([label for label, _ in pairs]):
            raise ValueError(f"Variants {several} are given more than once. Give each a label of its own.")
        variants = _only(expanded(dict(pairs), options.densities), options)
        _check_variants(variants, common)
    except ValueError as error:
        parser.error(str(error))
    return Asked(options, variants, grid, common)


def _check(options: argparse.Namespace) -> None:
    if not options.config.is_file():
        raise ValueError(
            f"There is no recipe {options.config}. Give its YAML, such as recipes/ncf_movielens/laptop.yaml."
        )
    if options.mode not in ("min", "max", None):
        raise ValueError(f"Invalid mode {options.mode!r}. Must be min or max.")
    if not isinstance(options.metric, str):
        raise ValueError(f"Got metric {options.metric!r}. Give a --metric, as it is logged: val/accuracy.")
    if options.mode is None and options.grid is not None and re.search("loss|perplexity|error", options.metric):
        raise ValueError(f"What is best of {options.metric}? Say --mode min, or max.")
    for name, kinds in (("seeds", int), ("densities", (int, float))):
        some = getattr(options, name)
        are_numbers = isinstance(some, list) and all(isinstance(number, kinds) for number in some)
        if not are_numbers or any(isinstance(number, bool) for number in some):
            raise ValueError(f"Invalid {name} {some!r}. Must be a list of numbers: [1, 2, 3].")
        if several := _several(some):
            raise ValueError(f"The {name} {several} are given more than once: a run that counts twice proves nothing.")
    if not 1 <= options.grid_seeds <= len(options.seeds):
        raise ValueError(f"Invalid --grid-seeds {options.grid_seeds}. Must be 1 to the number of seeds.")


def _only(variants: list[Variant], options: argparse.Namespace) -> list[Variant]:
    labels = {variant.label for variant in variants} | {variant.name for variant in variants}
    if unknown := set(options.only or ()) - labels:
        known = ", ".join(variant.label for variant in variants)
        raise ValueError(f"Unknown variants {sorted(unknown)}. There are {known}.")
    if options.only is not None:
        variants = [variant for variant in variants if {variant.label, variant.name} & set(options.only)]
    if not variants:
        raise ValueError("There is nothing to compare: give a --variant or a file of --variants.")
    return variants


def _check_variants(variants: list[Variant], common: Sequence[str]) -> None:
    if several := _several([folder_name(variant.label) for variant in variants]):
        told = ", ".join(repr(variant.label) for variant in variants if folder_name(variant.label) in several)
        raise ValueError(f"The runs of {told} would be kept in one folder. Give them labels of other words.")
    for arguments in (common, *(variant.arguments for variant in variants)):
        for argument in arguments:
            name = argument.partition("=")[0]
            if any(name == own or name.startswith(f"{own}.") for own in OWN):
                raise ValueError(
                    f"Got {argument!r}, which is set for each run. Use --seeds, --output, or another recipe."
                )


def _several(some: Sequence[Any]) -> list[Any]:
    return [value for value, count in Counter(some).items() if count > 1]


class _OneOfEach(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
            raise yaml.YAMLError("a key is no text")
        if several := _several([key.value for key, _ in node.value]):
            raise yaml.YAMLError(f"{several} are given more than once")
        return super().construct_mapping(node, deep)


def _read_file(path: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns variants, and options that take the place of those of the command line which are not given."""
    if path is None:
        return {}, {}
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _OneOfEach)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        sys.exit(f"{path} cannot be read: {error}")
    if not isinstance(content, dict) or not all(isinstance(label, str) for label in content):
        sys.exit(f"{path} must hold label: arguments, or variants: with such lines in it.")
    if isinstance(content.get("variants"), dict):
        listed = content.pop("variants")
        return listed, content
    return content, {}


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.compare", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--metric", help="as it is logged, for example val/accuracy")
    parser.add_argument("--variant", action="append", default=[], metavar="'LABEL: ARGUMENTS'", dest="given_variants")
    parser.add_argument("--variants", type=Path, metavar="FILE", help="YAML with label: arguments")
    parser.add_argument("--only", nargs="+", metavar="LABEL", help="of the variants")
    parser.add_argument("--densities", nargs="+", type=float, default=[], help="for {density} and {tuned}")
    parser.add_argument("--grid", metavar="NAME=VALUE,VALUE", help="every variant takes what is best for it")
    parser.add_argument("--grid-seeds", type=int, default=1, help="the grid is tried with so many of the seeds")
    parser.add_argument("--mode", choices=["min", "max"], help="what is best of the metric: max if not said")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "comparison")
    parser.epilog = "Arguments of all runs follow after --"
    return parser
