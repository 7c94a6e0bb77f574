"""The wheel, as a user installs it: built, unpacked into a folder of its own, and run from an empty folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.shards import make_samples, write_shards

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("dali_pipes", "prep", "bench")

TRAIN = """
import sys
from pathlib import Path
import dali_pipes as dp
site = Path(sys.argv[1])
assert Path(dp.__file__).parent == site / "dali_pipes", dp.__file__
with dp.loader("shards", dp.segmentation(crop=64), batch_size=4, device="cpu") as loader:
    print(sum(loader.num_valid for _ in loader))
assert not [name for name in sys.modules if name.partition(".")[0] in ("prep", "bench", "tests")]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing of an earlier build gets in."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, source / package, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("dali_pipes-*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's packages alone; what they depend on is this environment's."""
    folder = tmp_path_factory.mktemp("site")
    _pip("install", "--no-deps", "--no-compile", "--target", str(folder), str(wheel))
    return folder


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    for kinds in ((".py",), (".css", ".html", ".js")):
        files = {file for package in PACKAGES for file in (REPOSITORY / package).rglob("*") if file.suffix in kinds}
        assert {name for name in names if name.endswith(kinds)} == {str(file.relative_to(REPOSITORY)) for file in files}
        assert files
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_installed_loader_trains_in_an_empty_folder(site: Path, tmp_path: Path) -> None:
    """Index by the command line, batches by the library."""
    for command in ("prep", "bench"):
        run = _run(site, tmp_path, "-m", "dali_pipes", command, "--help")
        assert run.returncode == 0, run.stderr
    write_shards(tmp_path / "shards", make_samples([(80, 72)] * 10), per_shard=4, index=False)
    indexed = _run(site, tmp_path, "-m", "dali_pipes", "prep", "index", "shards")
    assert indexed.stdout.startswith("indexed 3 shards, 10 samples"), indexed.stderr
    (tmp_path / "train.py").write_text(TRAIN)
    trained = _run(site, tmp_path, "train.py", str(site))
    assert (trained.returncode, trained.stdout) == (0, "10\n"), trained.stderr


def _run(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(site)}, "capture_output": True}
    return subprocess.run([sys.executable, *arguments], text=True, timeout=120, check=False, **options)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
