import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("wheel")  # which is built once


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(PROJECT)]
    subprocess.run(command, check=True, capture_output=True)
    [path] = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"lightning_sparse"}
    assert "lightning_sparse/py.typed" in names
    assert "lightning_sparse/callbacks/density_monitor.py" in names


def test_the_wheel_works_in_an_environment_of_its_own(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    script = """
import lightning_sparse
from lightning.pytorch import Trainer
print(lightning_sparse.__file__)
print(type(Trainer(strategy="ddp_hardthreshold", accelerator="cpu", devices=2, logger=False).strategy).__name__)
"""
    # The dependencies (gigabytes) are lent by the environment that runs the tests. On PYTHONPATH its .pth files are
    # not read, so that its own editable install of the package is out of sight.
    lent = {"PYTHONPATH": sysconfig.get_path("purelib"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=lent, check=False)
    assert done.returncode == 0, done.stderr
    location, strategy = done.stdout.strip().splitlines()[-2:]
    assert Path(location).is_relative_to(tmp_path / "venv")
    assert strategy == "DDPHardThresholdStrategy"
