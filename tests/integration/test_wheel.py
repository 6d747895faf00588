"""The wheel and the sdist: contents, version, and a training in a separate environment."""

from pathlib import Path

import pytest

from lightning_sparse import __version__
from release import smoke
from release.__main__ import find_changelog_faults
from release.distributions import (
    IN_THE_SDIST,
    PROJECT,
    Environment,
    build,
    find_sdist_faults,
    find_wheel_faults,
    list_sdist,
    list_wheel,
)

pytestmark = pytest.mark.xdist_group("wheel")  # built once per group


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"), is_isolated=False)


def test_the_wheel_contains_only_the_package(built: tuple[Path, Path]) -> None:
    names = list_wheel(built[0])
    assert find_wheel_faults(names) == []
    assert find_wheel_faults([*names, "tests/__init__.py"]) == ["tests does not belong in the wheel."]
    assert find_wheel_faults([*names, "lightning_sparse/a.pyc"]) == ["lightning_sparse/a.pyc is a leftover."]
    for missing in ("py.typed", "kernels/native.c"):
        rest = [name for name in names if name != f"lightning_sparse/{missing}"]
        assert find_wheel_faults(rest) == [f"lightning_sparse/{missing} is missing."]


def test_the_sdist_contains_tests_docs_and_recipes(built: tuple[Path, Path]) -> None:
    names = list_sdist(built[1])
    assert find_sdist_faults(names) == []
    for missing in IN_THE_SDIST:
        assert find_sdist_faults([name for name in names if name != missing]) == [f"{missing} is missing."]


def test_the_sdist_is_compared_with_the_repository() -> None:
    tracked = [*IN_THE_SDIST, ".gitignore", "tests/unit/test_theory.py"]
    names = [*IN_THE_SDIST, "tests/unit/test_theory.py"]
    assert find_sdist_faults(names, tracked) == []
    assert find_sdist_faults([*names, "docs/draft.md"], tracked) == ["docs/draft.md is not in the repository."]
    assert find_sdist_faults(names[:-1], tracked) == ["tests/unit/test_theory.py is missing."]


def test_the_version_matches_the_changelog() -> None:
    assert find_changelog_faults((PROJECT / "CHANGELOG.md").read_text(), __version__) == []
    [fault] = find_changelog_faults("# Changelog\n\n## [0.0.9] - 2026-01-01\n\n## [0.1.0]", "0.1.0")
    assert "0.0.9" in fault
    assert find_changelog_faults("# Changelog", "0.1.0") != []


@pytest.mark.slow
def test_the_wheel_trains_in_a_separate_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    # The environment of the tests provides the dependencies (gigabytes).
    environment = Environment(tmp_path.resolve() / "environment", is_lent=True)
    environment.install(str(built[0]), PROJECT / "requirements" / "constraints.txt")
    result = smoke.train(environment, tmp_path / "training")
    assert smoke.find_faults(result, environment, __version__) == []
    assert len(smoke.find_faults({**result, "hook": None, "spread": 1e-9}, environment, __version__)) == 2
