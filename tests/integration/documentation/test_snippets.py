"""Run the Python and YAML blocks of the README and of docs/ on two workers, and train with the objects they make.

A block may use everything public, ``torch``, ``nn``, ``Trainer``, ``DistributedDataParallel``, a ``model``, its
``optimizer``, a ``loader``, ``loss_of``, a launched ``fabric``, and names from earlier blocks of its page. Both sides
of a diff run, each with new objects. The test then trains with every Trainer, strategy, sparsifier and DDP module that
the block makes. After ``<!-- not run: why -->`` it only checks names and arguments. test_examples.py runs included
files.
"""

import ast
import inspect
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch
import pytest
import torch
import yaml
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import Strategy
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse
from lightning_sparse import DDPGradientAverager, SimulatedWorkersStrategy, SparseDDPStrategy, Sparsifier
from tests.integration.models import QUIET, Classifier, data
from tests.integration.programs.loops import loss_of
from tests.markdown import PAGES, after, before, blocks
from tests.workers import run_workers

LANGUAGES = ("python", "diff", "yaml")
TRAINS = [page for page in PAGES if blocks(page.read_text(), *LANGUAGES)]
STEPS = 30
"""The longest interval between exchanges in any snippet."""


@pytest.mark.parametrize("page", TRAINS, ids=lambda page: page.name)
def test_snippets_run_and_their_trainers_train(page: Path) -> None:
    run_workers(run_page, 2, str(page))


WRONG = (
    ("python", "DDPHardThresholdStrategy(densty=0.1)", "'densty'.*'density'"),
    ("python", "Trainer(devices=2, strategie='ddp')", "unexpected keyword argument 'strategie'"),
    ("diff", "-trainer = 1\n+trainer = Trainer(strategy='ddp_topp')", "invalid strategy name.*ddp_topp"),
    (
        "yaml",
        "trainer: {strategy: {class_path: lightning_sparse.SparseDDPStrategy, init_args: {x: 1}}}",
        "ArgumentError.*x",
    ),
)


def test_wrong_snippets_are_detected(tmp_path: Path) -> None:
    page = tmp_path / "wrong.md"
    for language, code, error in WRONG:
        page.write_text(f"```{language}\n{code}\n```\n")
        with pytest.raises(AssertionError, match=error):
            run_workers(run_page, 2, str(page))


def test_names_and_arguments_are_checked_without_a_run() -> None:
    check_names("DDPHardThresholdStrategy(density=0.1, timeout=t); lightning_sparse.TopK(0.1); print(unknown(1))")
    for code, error in (
        ("TopK(densty=0.1)", "densty"),
        ("lightning_sparse.HardThreshold(1, 2, 3, 4, 5)", "too many"),
        ("from lightning_sparse import TopQ", "TopQ"),
        ("lightning_sparse.topk(1)", "topk"),
        ("DDPHardThresholdStrategy(densty=0.1)", "densty"),
    ):
        with pytest.raises((TypeError, AttributeError), match=error):
            check_names(code)


def run_page(path: str) -> None:
    """Run every block of a page in order, each in a temporary folder. Every worker calls this."""
    text = Path(path).read_text()
    given = provided()
    for block in blocks(text, *LANGUAGES):
        comment = text.splitlines()[max(0, block.line - 3) : block.line - 2]
        try:
            if block.language == "yaml":
                use(trainer_of(block.code), given)
            elif comment and comment[0].startswith("<!-- not run: "):
                check_names(after(block.code) if block.language == "diff" else block.code)
            else:
                with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patches:
                    patches.chdir(folder)
                    if block.language == "diff":
                        for side in (before, after):
                            run(side(block.code), provided())
                    else:
                        run(block.code, given)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{path}, line {block.line}: {error!r}\n{block.code}") from error


def provided() -> dict[str, Any]:
    """Return the names that every snippet may use."""
    torch.manual_seed(0)
    model = Classifier()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return {
        **{name: getattr(lightning_sparse, name) for name in lightning_sparse.__all__},
        "lightning_sparse": lightning_sparse,
        "torch": torch,
        "nn": torch.nn,
        "Trainer": SmallTrainer,
        "DistributedDataParallel": DistributedDataParallel,
        "model": model,
        "loader": data(),
        "loss_of": loss_of,
        "fabric": fabric,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }


class SmallTrainer(Trainer):
    """Accepts all options of a Trainer, but trains a few steps on the CPU workers of the test."""

    made: list["SmallTrainer"] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        inspect.signature(Trainer).bind(**options)
        simulates = isinstance(options.get("strategy"), SimulatedWorkersStrategy)
        fixed = {"accelerator": "cpu", "devices": 1 if simulates else 2, "num_nodes": 1}
        super().__init__(**(QUIET | options | fixed | {"max_steps": STEPS, "max_epochs": -1}))
        self.made.append(self)


def run(code: str, given: dict[str, Any]) -> None:
    """Run a block with the names of earlier blocks, and use the objects that it makes."""
    known = dict(given)
    SmallTrainer.made.clear()
    tree = ast.parse(code)
    shown = []
    for index, statement in enumerate(tree.body):
        if isinstance(statement, ast.Expr):  # also uses the values of expressions
            tree.body[index] = ast.parse(f"_shown.append({ast.unparse(statement)})").body[0]
    given["_shown"] = shown
    with mock.patch.object(lightning.pytorch, "Trainer", SmallTrainer):
        exec(compile(ast.fix_missing_locations(tree), "snippet", "exec"), given)
    made = [value for name, value in given.items() if value is not known.get(name) and name != "_shown"]
    for thing in {id(thing): thing for thing in (*SmallTrainer.made, *shown, *made)}.values():
        use(thing, given)


def use(thing: Any, given: dict[str, Any]) -> None:
    """Train with an object of a block, unless it is of another type."""
    if isinstance(thing, Trainer):
        if thing.strategy.__class__.__module__.startswith("lightning_sparse"):
            if not thing.global_step:
                thing.fit(Classifier(), data())
            assert thing.global_step == STEPS
            assert 0 <= thing.callback_metrics["sparse/density"] <= 1
    elif isinstance(thing, Strategy) and thing not in [trainer.strategy for trainer in SmallTrainer.made]:
        use(SmallTrainer(strategy=thing), given)
    elif isinstance(thing, type) and issubclass(thing, Sparsifier):
        use(SparseDDPStrategy(thing()), given)
    elif isinstance(thing, Sparsifier):
        use(SparseDDPStrategy(thing), given)
    elif isinstance(thing, DDPGradientAverager):
        inputs, labels = next(iter(given["loader"]))
        torch.nn.functional.cross_entropy(given.get("ddp_model", given["model"])(inputs), labels).backward()
        given["optimizer"].step()
        assert 0 <= thing.last_step.density <= 1


def trainer_of(code: str) -> Trainer:
    """Return the Trainer that LightningCLI builds from a configuration."""
    options = yaml.safe_load(code)
    assert "trainer" in options, list(options)
    fixed = {"accelerator": "cpu", "devices": 2, "max_steps": STEPS, "max_epochs": -1}
    given = {"trainer": options["trainer"] | fixed | QUIET}
    raises = {"exit_on_error": False}
    return LightningCLI(Classifier, run=False, save_config_callback=None, args=given, parser_kwargs=raises).trainer


def check_names(code: str) -> None:
    """Check names and arguments of the package in a snippet without running it."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "lightning_sparse":
            for alias in node.names:
                getattr(lightning_sparse, alias.name)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "lightning_sparse":
            getattr(lightning_sparse, node.attr)
        if isinstance(node, ast.Call):
            name = re.sub(r"^lightning_sparse\.", "", ast.unparse(node.func))
            if name in lightning_sparse.__all__:
                check_call(getattr(lightning_sparse, name), node)


def check_call(function: Any, call: ast.Call) -> None:
    """Raise TypeError for invalid arguments; strategies also accept those of Lightning and DDP."""
    named = [keyword.arg for keyword in call.keywords if keyword.arg]
    inspect.signature(function).bind(*call.args, **dict.fromkeys(named))
    if inspect.isclass(function) and issubclass(function, Strategy):
        accepting = [*(base.__init__ for base in function.__mro__), DistributedDataParallel]
        unknown = {*named}.difference(*(inspect.signature(each).parameters for each in accepting))
        if unknown:
            raise TypeError(f"{function.__name__} has no {', '.join(sorted(unknown))}")
