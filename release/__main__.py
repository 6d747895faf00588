"""Builds the wheel and the sdist, and reports their faults: `make release-check`.

    python -m release                # tries each in an empty environment; unpacks gigabytes twice
    python -m release --lent         # uses the dependencies of this environment

Distributions without faults go to dist/.
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
    find_sdist_faults,
    find_wheel_faults,
    list_sdist,
    list_tracked_files,
    list_wheel,
    run,
)
from release.import_time import measure_import_time


def find_changelog_faults(changelog: str, version: str) -> list[str]:
    """Return a sentence for each fault in the changelog's first heading."""
    heading = re.search(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    found = heading[1] if heading else "nothing"
    return (
        [] if found == version else [f"CHANGELOG.md starts with {found}, lightning_sparse/_version.py has {version}."]
    )


class Verdicts:
    """Prints a line for every check and counts the failures."""

    def __init__(self) -> None:
        self.num_failed = 0

    def add(self, what: str, faults: list[str], details: str = "") -> None:
        """Print the name of a check, its details and its faults."""
        self.num_failed += bool(faults)
        print(f"{'FAILED' if faults else 'ok':<8}{what}{': ' if details else ''}{details}", flush=True)
        for fault in faults:
            print(f"        {fault}")


def check(folder: Path, constraints: Path, *, is_lent: bool) -> int:
    """Print all verdicts and return the number of failures; `folder` is a temporary folder of the caller."""
    verdicts = Verdicts()
    verdicts.add("version", find_changelog_faults((PROJECT / "CHANGELOG.md").read_text(), __version__), __version__)
    wheel, sdist = build(folder / "dist", is_isolated=not is_lent)
    verdicts.add("built", [], f"{wheel.name}, {wheel.stat().st_size:,} bytes; {sdist.name}, {sdist.stat().st_size:,}")
    if is_lent:
        print("skipped metadata: twine is not part of this environment")
    else:
        verdicts.add(
            "metadata", find_metadata_faults([wheel, sdist], folder / "twine", constraints), "twine check --strict"
        )
    names = list_wheel(wheel)
    verdicts.add("contents of the wheel", find_wheel_faults(names), f"{len(names)} files")
    names, tracked = list_sdist(sdist), list_tracked_files()
    compared = "" if tracked is None else ", compared with the repository's"
    verdicts.add("contents of the sdist", find_sdist_faults(names, tracked), f"{len(names)} files{compared}")
    for kind, distribution in (("wheel", wheel), ("sdist", sdist)):
        home = folder / kind
        home.mkdir()
        environment = Environment(home / "environment", is_lent=is_lent)
        try_out(kind, distribution, environment, constraints, verdicts)
        if kind == "wheel" and not verdicts.num_failed:
            print(f"        {measure_import_time(environment.python, home, environment.variables)}", flush=True)
        shutil.rmtree(environment.folder)
    if not verdicts.num_failed:
        (PROJECT / "dist").mkdir(exist_ok=True)
        for distribution in (wheel, sdist):
            shutil.copy(distribution, PROJECT / "dist")
    return verdicts.num_failed


def find_metadata_faults(distributions: list[Path], folder: Path, constraints: Path) -> list[str]:
    """Return twine's complaints about the metadata and the README's page.

    Twine runs in a separate environment, because it installs `rich`, which changes Lightning's progress bars.
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
    """Install a wheel or sdist, check its requirements with pip, and train."""
    where = "an environment with existing dependencies" if environment.is_lent else "an empty environment"
    begin = time.monotonic()
    try:
        environment.install(str(distribution), constraints)
        seconds = time.monotonic() - begin
        if not environment.is_lent:
            run([environment.python, "-m", "pip", "check"], variables=environment.variables)
        result = smoke.train(environment, environment.folder.parent / "training")
    except RuntimeError as error:
        verdicts.add(f"{kind} in {where}", str(error).splitlines())
        return
    first, last = result["losses"]
    details = (
        f"installed in {seconds:.0f} s; torch {result['torch']}; {result['workers']} workers, {result['steps']} steps, "
        f"loss {first:.2f} → {last:.2f}, {result['density']:.2%} sent in the last step"
    )
    verdicts.add(f"{kind} in {where}", smoke.find_faults(result, environment, __version__), details)


def main() -> int:
    """Run the check and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__.partition("\n")[0])
    parser.add_argument("--lent", action="store_true", help="use the dependencies of this environment")
    parser.add_argument(
        "--constraint",
        type=Path,
        default=PROJECT / "requirements" / "constraints.txt",
        help="versions to install (default: the versions of make setup, which pip has cached)",
    )
    arguments = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    with tempfile.TemporaryDirectory(prefix="release-check-") as folder:
        num_failed = check(Path(folder).resolve(), arguments.constraint.resolve(), is_lent=arguments.lent)
    print("Not ready for release." if num_failed else "Ready for release: dist/ holds wheel and sdist.")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
