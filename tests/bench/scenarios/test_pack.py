"""`bench pack` on a few samples: the record, what is left behind, and what it finds wrong."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cli import bench as bench_command
from bench.engine.run import run_scenario
from bench.scenarios.fetch_client import find_curl
from bench.scenarios.pack import PACKER_NAMES, PREFIX, PackScenario, run_packer
from dali_pipes.errors import PipesError
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from tests.sources import write_pets

needs_programs = pytest.mark.skipif(find_curl() is None or shutil.which("tar") is None, reason="no curl or tar in PATH")


@pytest.fixture
def pets_made(tmp_path: Path) -> Path:
    return write_pets(tmp_path / "pets", {"Abyssinian_1": 1, "beagle_1": 5, "boxer_1": 9})


@needs_programs
def test_pack_writes_a_record_for_each_packer_and_leaves_nothing(tmp_path: Path, pets_made: Path) -> None:
    """All leave objects of the sizes that were planned: the same members."""
    out, cache = tmp_path / "pack.json", tmp_path / "cache"
    cache.mkdir()
    arguments = ["pack", "--pets", str(pets_made), "--samples", "40", "--max-bytes", "100kB", "--repeats", "2"]
    arguments += ["--jobs", "2", "--cache", str(cache), "--json", str(out)]
    done = CliRunner().invoke(bench_command, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[2:5]] == list(PACKER_NAMES)
    assert "of the speed of tar+curl" in done.stdout
    report = json.loads(out.read_text())
    assert [record["packer"] for record in report["records"]] == list(PACKER_NAMES)
    for record in report["records"]:
        assert len(record["repeats"]) == 2
        for figure in ("samples_per_s", "mib_per_s", "cpu_s_per_gib"):
            low, high = record["spread"][figure]
            assert 0 < low <= record[figure] <= high
    assert (report["num_samples"], report["jobs"], report["source"]) == (40, 2, "own server")
    assert report["num_shards"] > 1
    assert report["environment"]["versions"]["aistore"]
    assert list(cache.iterdir()) == []


@needs_programs
def test_pack_to_a_cluster_makes_and_destroys_its_bucket(tmp_path: Path, pets_made: Path) -> None:
    with embedded_node.start(tmp_path / "server") as server:
        store = AisStore(server.endpoint, PREFIX)
        scenario = PackScenario(pets=pets_made, num_samples=5, repeats=1, work=tmp_path, endpoint=server.endpoint)
        assert "tar+curl" in PackScenario.table(run_scenario(scenario))
        assert not store.exists()
        store.create()
        with pytest.raises(ValueError, match=f"bucket 'ais://{PREFIX}' is there already at {server.endpoint}"):
            run_scenario(scenario)
        assert store.exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("dali-pipes-bench")]


def test_packer_that_fails_is_named() -> None:
    with pytest.raises(PipesError, match=r"packer 'tar\+curl' failed: no such thing"):
        run_packer("tar+curl", ["bash", "-c", "echo no such thing >&2; exit 3"])


@needs_programs
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"jobs": 0}, "jobs must be at least 1, got 0"),
        ({"work": Path("/nowhere")}, "--cache '/nowhere': no such directory"),
    ],
)
def test_pack_bad_options_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackScenario(**{"pets": tmp_path, "work": tmp_path, **options})  # type: ignore[arg-type]
