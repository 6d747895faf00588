"""Builds the wheel and the sdist, checks their files, and creates environments to try them."""

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
# A build can omit files that are not Python without an error.
IN_THE_WHEEL = ("py.typed", "kernels/native.c")
IN_THE_SDIST = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "PKG-INFO", "README.md", "pyproject.toml"),
    *("benchmarks/step_time/worker.py", "docs/index.md", "docs/examples/plain_ddp.py", "release/smoke_train.py"),
    *("lightning_sparse/kernels/native.c", "lightning_sparse/py.typed", "recipes/resnet18_cifar10/laptop.yaml"),
    *("requirements/constraints.txt", "tests/integration/test_wheel.py"),
)


def build(folder: Path, *, is_isolated: bool) -> tuple[Path, Path]:
    """Build the sdist from the project and the wheel from the sdist, and return both paths.

    Args:
        folder: the output folder.
        is_isolated: whether to install the build tools in a separate environment.
    """
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(PROJECT)]
    run(command if is_isolated else [*command, "--no-isolation"])
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def list_wheel(wheel: Path) -> list[str]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def list_sdist(sdist: Path) -> list[str]:
    """Return the files of an sdist, relative to its top folder."""
    with tarfile.open(sdist) as archive:
        return [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]


def find_wheel_faults(names: Collection[str]) -> list[str]:
    """Return a sentence for each fault in the files of a wheel."""
    folders = {name.partition("/")[0] for name in names}
    others = sorted(folder for folder in folders if folder != PACKAGE and not folder.endswith(".dist-info"))
    faults = [f"{folder} does not belong in the wheel." for folder in others]
    return faults + _find_missing([f"{PACKAGE}/{name}" for name in IN_THE_WHEEL], names) + _find_leftovers(names)


def find_sdist_faults(names: Collection[str], tracked: Collection[str] | None = None) -> list[str]:
    """Return a sentence for each fault in the files of an sdist.

    Args:
        names: files of the sdist.
        tracked: files of the repository, which the sdist must match; None skips this check.
    """
    faults = _find_missing(IN_THE_SDIST, names) + _find_leftovers(names)
    if tracked is not None:
        faults += [f"{name} is not in the repository." for name in sorted({*names} - {*tracked, "PKG-INFO"})]
        expected = [name for name in tracked if not name.startswith(".")]  # hidden files serve the repository only
        faults += _find_missing([name for name in expected if name not in IN_THE_SDIST], names)
    return faults


def _find_missing(expected: Collection[str], names: Collection[str]) -> list[str]:
    return [f"{name} is missing." for name in expected if name not in names]


def _find_leftovers(names: Collection[str]) -> list[str]:
    return [f"{name} is a leftover." for name in names if "__pycache__" in name or name.endswith((".so", ".pyc"))]


def list_tracked_files() -> list[str] | None:
    """Return the files that git tracks, or None without git or a repository."""
    if not (PROJECT / ".git").exists() or shutil.which("git") is None:
        return None
    return run(["git", "ls-files"], cwd=PROJECT).splitlines()


class Environment:
    """A virtual environment that contains only pip.

    Args:
        folder: folder of the environment.
        is_lent: whether to use pip and the dependencies of the current environment. This saves gigabytes, but does not
            prove that the package declares all its dependencies.
    """

    def __init__(self, folder: Path, *, is_lent: bool) -> None:
        venv.create(folder, with_pip=not is_lent)
        self.folder = folder
        self.is_lent = is_lent
        self.python = str(folder / "bin" / "python")

    def install(self, requirement: str, constraints: Path) -> None:
        """Install a wheel, an sdist or a package by name, with its dependencies unless they are lent."""
        command = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if self.is_lent:
            command += ["--no-deps", "--no-index", "--no-build-isolation"]
        else:
            command += ["--constraint", str(constraints)]
        run([*command, requirement], variables=self.variables)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables without those of a running training and of the project's path."""
        hidden = ("PYTHON", "COVERAGE", "LIGHTNING_SPARSE")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        inherited = {name: value for name, value in inherited.items() if not name.endswith(("RANK", "WORLD_SIZE"))}
        # Python ignores .pth files on PYTHONPATH, so the editable install of the current environment is not found.
        return {**inherited, "PYTHONPATH": sysconfig.get_path("purelib")} if self.is_lent else inherited


def run(command: list[str], cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
    """Return the standard output of a command.

    Raises:
        RuntimeError: the command fails; the message ends with its output.
    """
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        last_lines = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{last_lines}")
    return done.stdout
