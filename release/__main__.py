"""Builds the wheel and the sdist, and says what is wrong with them: `make release-check`.

    python -m release                # each in an environment that begins empty; gigabytes, twice unpacked
    python -m release --lent         # dependencies are those of this environment

What passed lies in dist/.
"""

import argparse
import platform
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from lightning_sparse import __version__
from release import smoke
from release.distributions import (
    PROJECT,
    Environment,
    build,
    names_in_sdist,
    names_in_wheel,
    run,
    sdist_faults,
    tracked_files,
    wheel_faults,
)
from release.import_time import measure


def changelog_faults(changelog: str, version: str) -> list[str]:
    """Returns what is wrong with the first heading of the changelog, a sentence each."""
    heading = re.search(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    found = heading[1] if heading else "nothing"
    return (
        [] if found == version else [f"CHANGELOG.md begins with {found}, lightning_sparse/_version.py has {version}."]
    )


class Verdicts:
    """Prints a line for everything that was looked at, and counts what is not right."""

    def __init__(self) -> None:
        self.num_failed = 0

    def add(self, what: str, faults: list[str], seen: str = "") -> None:
        """Prints what was looked at, what was seen, and the faults."""
        self.num_failed += bool(faults)
        print(f"{'FAILED' if faults else 'ok':<8}{what}{': ' if seen else ''}{seen}", flush=True)
        for fault in faults:
            print(f"        {fault}")


def check(folder: Path, constraints: Path, *, is_lent: bool) -> int:
    """Prints all verdicts and returns how many are bad. `folder` is outside of the project, and the caller's."""
    verdicts = Verdicts()
    verdicts.add("version", changelog_faults((PROJECT / "CHANGELOG.md").read_text(), __version__), __version__)
    wheel, sdist = build(folder / "dist", is_isolated=not is_lent)
    verdicts.add("built", [], f"{wheel.name}, {wheel.stat().st_size:,} bytes; {sdist.name}, {sdist.stat().st_size:,}")
    if is_lent:
        print("skipped metadata: twine is not lent")
    else:
        verdicts.add("metadata", metadata_faults([wheel, sdist], folder / "twine", constraints), "twine check --strict")
    names = names_in_wheel(wheel)
    verdicts.add("contents of the wheel", wheel_faults(names), f"{len(names)} files")
    names, tracked = names_in_sdist(sdist), tracked_files()
    compared = "" if tracked is None else ", compared with the repository's"
    verdicts.add("contents of the sdist", sdist_faults(names, tracked), f"{len(names)} files{compared}")
    for kind, distribution in (("wheel", wheel), ("sdist", sdist)):
        home = folder / kind
        home.mkdir()
        environment = Environment(home / "environment", is_lent=is_lent)
        try_out(kind, distribution, environment, constraints, verdicts)
        if kind == "wheel" and not verdicts.num_failed:
            print(f"        {measure(environment.python, home, environment.variables)}", flush=True)
        shutil.rmtree(environment.folder)
    if not verdicts.num_failed:
        (PROJECT / "dist").mkdir(exist_ok=True)
        for distribution in (wheel, sdist):
            shutil.copy(distribution, PROJECT / "dist")
    return verdicts.num_failed


def metadata_faults(distributions: list[Path], folder: Path, constraints: Path) -> list[str]:
    """Returns what twine has to say against the metadata and the page that is made from the README.

    It has an environment of its own: it brings `rich`, and where that is Lightning has other progress bars.
    """
    environment = Environment(folder, is_lent=False)
    try:
        environment.install("twine", constraints)
        command = [environment.python, "-m", "twine", "--no-color", "check", "--strict"]
        run([*command, *map(str, distributions)], variables=environment.variables)
    except RuntimeError as error:
        return str(error).splitlines()
    return []


def try_out(kind: str, distribution: Path, environment: Environment, constraints: Path, verdicts: Verdicts) -> None:
    """Installs a wheel or sdist, lets pip look for what is missing, and trains."""
    where = "an environment with lent dependencies" if environment.is_lent else "an empty environment"
    begin = time.monotonic()
    try:
        environment.install(str(distribution), constraints)
        seconds = time.monotonic() - begin
        if not environment.is_lent:
            run([environment.python, "-m", "pip", "check"], variables=environment.variables)
        told = smoke.train(environment, environment.folder.parent / "training")
    except RuntimeError as error:
        verdicts.add(f"{kind} in {where}", str(error).splitlines())
        return
    first, last = told["losses"]
    seen = (
        f"installed in {seconds:.0f} s; torch {told['torch']}; {told['workers']} workers, {told['steps']} steps, "
        f"loss {first:.2f} → {last:.2f}, {told['density']:.2%} sent in the last step"
    )
    verdicts.add(f"{kind} in {where}", smoke.faults(told, environment, __version__), seen)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__.partition("\n")[0])
    parser.add_argument("--lent", action="store_true", help="take the dependencies of this environment; no download")
    parser.add_argument(
        "--constraint",
        type=Path,
        default=PROJECT / "requirements" / "constraints.txt",
        help="versions to install; default: those of make setup, so that pip's cache has them",
    )
    arguments = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    with tempfile.TemporaryDirectory(prefix="release-check-") as folder:
        num_failed = check(Path(folder).resolve(), arguments.constraint.resolve(), is_lent=arguments.lent)
    print("Not fit for a release." if num_failed else "Fit for a release: dist/ has both.")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
