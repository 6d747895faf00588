"""The wheel and the sdist: how they are built, what they must hold, and environments to try them in."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

PROJECT = Path(__file__).parents[1]
PACKAGE = "lightning_sparse"
# Files that are no Python, which a build could leave out unseen.
IN_THE_WHEEL = ("py.typed", "kernels/native.c", "callbacks/density_monitor.py")
IN_THE_SDIST = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "PKG-INFO", "README.md", "pyproject.toml"),
    *("benchmarks/step_time.py", "docs/index.md", "docs/examples/plain_ddp.py", "lightning_sparse/kernels/native.c"),
    *("lightning_sparse/py.typed", "recipes/resnet18_cifar10/laptop.yaml", "release/smoke_train.py"),
    *("requirements/constraints.txt", "tests/integration/test_wheel.py"),
)


def build(folder: Path, *, is_isolated: bool) -> tuple[Path, Path]:
    """Returns a wheel and an sdist, built into a folder: the sdist from the project, the wheel from the sdist.

    Args:
        folder: where they go.
        is_isolated: whether what builds them is installed for it alone, or that of this environment is used.
    """
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(PROJECT)]
    run(command if is_isolated else [*command, "--no-isolation"])
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def names_in_wheel(wheel: Path) -> list[str]:
    """Returns the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def names_in_sdist(sdist: Path) -> list[str]:
    """Returns the files of an sdist, without the folder in which all of them are."""
    with tarfile.open(sdist) as archive:
        return [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]


def wheel_faults(names: Collection[str]) -> list[str]:
    """Returns what is wrong with the files of a wheel, a sentence each."""
    folders = {name.partition("/")[0] for name in names}
    others = sorted(one for one in folders if one != PACKAGE and not one.endswith(".dist-info"))
    faults = [f"{one} does not belong into the wheel." for one in others]
    return faults + _missing([f"{PACKAGE}/{name}" for name in IN_THE_WHEEL], names) + _leftovers(names)


def sdist_faults(names: Collection[str], tracked: Collection[str] | None = None) -> list[str]:
    """Returns what is wrong with the files of an sdist, a sentence each.

    Args:
        names: its files.
        tracked: those that the repository knows. Nothing else may be there, and of its folders everything.
    """
    faults = _missing(IN_THE_SDIST, names) + _leftovers(names)
    if tracked is not None:
        faults += [f"{name} is not in the repository." for name in sorted({*names} - {*tracked, "PKG-INFO"})]
        wanted = [name for name in tracked if not name.startswith(".")]  # what does serves the repository alone
        faults += _missing([name for name in wanted if name not in IN_THE_SDIST], names)
    return faults


def _missing(wanted: Collection[str], names: Collection[str]) -> list[str]:
    return [f"{name} is missing." for name in wanted if name not in names]


def _leftovers(names: Collection[str]) -> list[str]:
    return [f"{name} is a leftover." for name in names if "__pycache__" in name or name.endswith((".so", ".pyc"))]


def tracked_files() -> list[str] | None:
    """Returns the files that git knows, None where the project is no repository or there is no git."""
    if not (PROJECT / ".git").exists() or shutil.which("git") is None:
        return None
    return run(["git", "ls-files"], cwd=PROJECT).splitlines()


class Environment:
    """A virtual environment with nothing in it but pip.

    Args:
        folder: where it is made.
        is_lent: whether gigabytes are saved: the dependencies are those of the environment that runs this, which is
            then no proof that the package names them all.
    """

    def __init__(self, folder: Path, *, is_lent: bool) -> None:
        venv.create(folder, with_pip=True)
        self.folder = folder
        self.is_lent = is_lent
        self.python = str(folder / "bin" / "python")

    def install(self, what: str, constraints: Path) -> None:
        """Installs a wheel, an sdist or a package by name, and unless they are lent its dependencies."""
        command = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if self.is_lent:
            command += ["--no-deps", "--no-index", "--no-build-isolation"]
        else:
            command += ["--constraint", str(constraints)]
        run([*command, what], variables=self.variables)

    @property
    def variables(self) -> dict[str, str]:
        """What its programs find in their environment: nothing of a training that runs, no way back to the project."""
        hidden = ("PYTHON", "COVERAGE", "LIGHTNING_SPARSE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        kept = {name: value for name, value in kept.items() if not name.endswith(("RANK", "WORLD_SIZE"))}
        # On PYTHONPATH the .pth files of the lender are not read: its own editable install is out of sight.
        return {**kept, "PYTHONPATH": sysconfig.get_path("purelib")} if self.is_lent else kept


def run(command: list[str], cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
    """Returns what a command wrote to stdout.

    Raises:
        RuntimeError: it failed; with what it wrote.
    """
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout
