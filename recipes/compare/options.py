"""Reads and checks the command line and the variants file of a comparison before anything runs."""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from recipes.compare.runs import make_folder_name
from recipes.compare.variants import Grid, Variant, expand_variants, parse_grid, parse_variant
from recipes.demo import REPOSITORY

RESERVED = ("--seed_everything", "--config", "--trainer.logger", "--trainer.log_every_n_steps")
"""Arguments that the comparison sets for each run; variants must not set them or their children."""


class Comparison(NamedTuple):
    """A checked request for a comparison.

    Attributes:
        options: the parsed command line.
        variants: the variants to compare.
        grid: values of an argument to choose from; None without ``--grid``.
        common: arguments of all runs.
    """

    options: argparse.Namespace
    variants: list[Variant]
    grid: Grid | None
    common: list[str]


def parse_options(description: str, given: Sequence[str]) -> Comparison:
    """Return the requested comparison; exit with a message if it is invalid.

    Args:
        description: the text of ``--help``.
        given: the command-line arguments.
    """
    parser, given = _parser(description), [*given, "--"]
    separator = given.index("--")
    first, common = parser.parse_args(given[:separator]), given[separator + 1 : -1]
    listed, defaults = read_variants_file(first.variants)
    if unknown := defaults.keys() - vars(first).keys():
        parser.error(f"Unknown keys {sorted(unknown)} in {first.variants}. Use the names of options and 'variants'.")
    parser.set_defaults(**defaults)
    options = parser.parse_args(given[:separator])
    try:
        _check(options)
        grid = None if options.grid is None else parse_grid(options.grid, options.mode or "max")
        pairs = [*map(parse_variant, options.given_variants), *listed.items()]
        if duplicates := _duplicates([label for label, _ in pairs]):
            raise ValueError(f"Variants {duplicates} are given more than once. Give each variant a different label.")
        variants = _select(expand_variants(dict(pairs), options.densities), options)
        _check_variants(variants, common)
    except ValueError as error:
        parser.error(str(error))
    return Comparison(options, variants, grid, common)


def _check(options: argparse.Namespace) -> None:
    if not options.config.is_file():
        raise ValueError(
            f"There is no recipe {options.config}. Give a YAML file, for example recipes/ncf_movielens/laptop.yaml."
        )
    if options.mode not in ("min", "max", None):
        raise ValueError(f"Invalid mode {options.mode!r}. Must be min or max.")
    if not isinstance(options.metric, str):
        raise ValueError(f"Got metric {options.metric!r}. Give a logged metric, for example --metric val/accuracy.")
    if options.mode is None and options.grid is not None and re.search("loss|perplexity|error", options.metric):
        raise ValueError(f"The best value of {options.metric} is unclear. Give --mode min or --mode max.")
    for name, kinds in (("seeds", int), ("densities", (int, float))):
        values = getattr(options, name)
        are_numbers = isinstance(values, list) and all(isinstance(number, kinds) for number in values)
        if not are_numbers or any(isinstance(number, bool) for number in values):
            raise ValueError(f"Invalid {name} {values!r}. Must be a list of numbers: [1, 2, 3].")
        if duplicates := _duplicates(values):
            raise ValueError(f"The {name} {duplicates} are given more than once. Give each value once.")
    if not options.seeds:
        raise ValueError("Got no seeds. Give at least one, as in seeds: [1].")
    if not isinstance(options.only, list | None):
        raise ValueError(f"Invalid only {options.only!r}. Must be a list of variants: [dense].")
    if not 1 <= options.grid_seeds <= len(options.seeds):
        raise ValueError(f"Invalid --grid-seeds {options.grid_seeds}. Must be within [1, {len(options.seeds)}].")


def _select(variants: list[Variant], options: argparse.Namespace) -> list[Variant]:
    if not variants:
        raise ValueError("Got no variants. Give a --variant or a file of --variants.")
    labels = {variant.label for variant in variants} | {variant.name for variant in variants}
    if unknown := set(options.only or ()) - labels:
        known = ", ".join(repr(variant.label) for variant in variants)
        raise ValueError(f"Unknown variants {sorted(unknown)}. Use some of: {known}.")
    if options.only is not None:
        variants = [variant for variant in variants if {variant.label, variant.name} & set(options.only)]
    return variants


def _check_variants(variants: list[Variant], common: Sequence[str]) -> None:
    if duplicates := _duplicates([make_folder_name(variant.label) for variant in variants]):
        labels = ", ".join(repr(variant.label) for variant in variants if make_folder_name(variant.label) in duplicates)
        raise ValueError(f"The runs of {labels} would share one folder. Use different words in their labels.")
    for arguments in (common, *(variant.arguments for variant in variants)):
        for argument in arguments:
            name = argument.partition("=")[0]
            if any(name == reserved or name.startswith(f"{reserved}.") for reserved in RESERVED):
                raise ValueError(
                    f"Got {argument!r}, which the comparison sets itself. Use --seeds, --output or another recipe."
                )
    for argument, variant in product(common, variants):
        if any(argument.startswith(f"{own.partition('=')[0]}.") for own in variant.arguments):
            raise ValueError(
                f"Got {argument!r} for all runs, which the class of the variant {variant.label!r} would discard. Add "
                "it to the variant, after the class."
            )


def _duplicates(values: Sequence[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]


class _UniqueKeyLoader(yaml.SafeLoader):
    """A loader that refuses duplicate keys, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
            raise yaml.YAMLError("a key is not text")
        if duplicates := _duplicates([key.value for key, _ in node.value]):
            raise yaml.YAMLError(f"{duplicates} are given more than once")
        return super().construct_mapping(node, deep)


def read_variants_file(path: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return variants, and defaults for options that the command line omits.

    Exits with a message if the file is invalid.
    """
    if path is None:
        return {}, {}
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        sys.exit(f"{path} cannot be read: {error}")
    if not isinstance(content, dict) or not all(isinstance(label, str) for label in content):
        sys.exit(f"{path} must hold lines 'label: arguments', at the top level or under 'variants:'.")
    if isinstance(content.get("variants"), dict):
        listed = content.pop("variants")
        return listed, content
    return content, {}


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.compare", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--metric", help="name of a logged metric, for example val/accuracy")
    parser.add_argument("--variant", action="append", default=[], metavar="'LABEL: ARGUMENTS'", dest="given_variants")
    parser.add_argument("--variants", type=Path, metavar="FILE", help="YAML file with lines 'label: arguments'")
    parser.add_argument("--only", nargs="+", metavar="LABEL", help="run these variants only")
    parser.add_argument(
        "--densities", nargs="+", type=float, default=[], help="values of {density}, and target densities for {tuned}"
    )
    parser.add_argument("--grid", metavar="NAME=VALUE,VALUE", help="choose the best value for each variant")
    parser.add_argument("--grid-seeds", type=int, default=1, help="number of seeds for the grid search")
    parser.add_argument("--mode", choices=["min", "max"], help="whether the lowest or highest metric is best (max)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "comparison")
    parser.epilog = "Arguments after -- apply to all runs."
    return parser
