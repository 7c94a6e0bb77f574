"""A training script runs beside modules of the user's own that are called as this project's packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dali_pipes.store.cluster.ais import AisStore
from tests.shards import fill_bucket

ROOT = Path(__file__).resolve().parents[2]
# Some raise when they are imported, the others define something else.
OWN_MODULES = {
    "prep": "raise RuntimeError('the own prep.py was imported')",
    "bench": "raise RuntimeError('the own bench.py was imported')",
    "tests": "index_shards = 3",
    "examples": "raise RuntimeError('the own examples.py was imported')",
    "utils": "loader = 'another thing'",
    "conftest": "raise RuntimeError('the own conftest.py was imported')",
}

READ = """
import sys
import dali_pipes as dp

for shards in sys.argv[1:]:
    with dp.loader(shards, dp.segmentation(crop=16), batch_size=5, device="cpu") as loader:
        print("read", sum(len(batch["label"]) for (batch,) in loader))
"""

RANKS = """
import sys
import torch
import torch.distributed as dist
import dali_pipes as dp

dist.init_process_group("gloo")
with dp.loader(sys.argv[1], dp.segmentation(crop=16), batch_size=4, device="cpu") as loader:
    num_read = torch.tensor(0)
    for (batch,) in loader:
        num_read += loader.num_valid
    dist.all_reduce(num_read)
    if dist.get_rank() == 0:
        print("read", int(num_read), "on", dist.get_world_size())
dist.destroy_process_group()
"""


@pytest.fixture(params=["PYTHONPATH", pytest.param("installed", marks=pytest.mark.nightly)])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """As a user's shell has it: the package is installed, or its folder is named."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if request.param == "PYTHONPATH":
        return environment | {"PYTHONPATH": str(ROOT)}
    where = [sys.executable, "-c", "import dali_pipes; print(dali_pipes.__path__[0])"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout.strip()
    if found != str(ROOT / "dali_pipes"):
        pytest.skip(f"this checkout is not the one that is installed: {found or 'none is'}")
    return environment


def run(folder: Path, program: str, shards: list[object], environment: dict[str, str], *launcher: str) -> list[str]:
    """The words that ``train.py`` printed in a folder that has `OWN_MODULES`, too."""
    for name, text in OWN_MODULES.items():
        (folder / f"{name}.py").write_text(text + "\n")
    (folder / "train.py").write_text(program)
    command = [sys.executable, *launcher, "train.py", *map(str, shards)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [word for line in done.stdout.splitlines() if line.startswith("read") for word in line.split()]


def test_loader_over_a_directory_and_a_bucket(
    small_shards: Path, bucket: AisStore, tmp_path: Path, environment: dict[str, str]
) -> None:
    fill_bucket(bucket, small_shards)
    environment = environment | {"AIS_ENDPOINT": bucket.endpoint}
    assert run(tmp_path, READ, [small_shards, f"{bucket.url}/s-"], environment) == ["read", "23"] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("environment", ["PYTHONPATH"], indirect=True)
def test_ranks_of_torchrun_read_each_sample_once(
    small_shards: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert run(tmp_path, RANKS, [small_shards], environment, *launcher) == ["read", "23", "on", "2"]
