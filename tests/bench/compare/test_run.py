"""`bench run` on tiny data: the record's structure, the order of runs, and what it refuses."""

import contextlib
import errno
import json
import multiprocessing
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from bench.cli import bench as bench_command
from bench.compare.outputs import OutputError
from bench.compare.run import LoaderScenario
from bench.compare.settings import TurnSetting
from bench.compare.turn import Drawn, LoaderTurn, RankTurn, TimedEpoch, TurnJob, run_turn
from bench.engine.scenario import run_scenario
from bench.loaders.protocol import ALL_PARTS, BenchBatch, LoaderOptions
from bench.loaders.registry import LoaderSpec, open_loader
from bench.reports.record import read_run
from dali_pipes.cli import main
from dali_pipes.errors import PipesError, StoreError
from dali_pipes.store.shard_set import ShardSet
from tests.bench.conftest import CROP, invoke, with_wrong_label

TINY = ["--batch-size", "5", "--num-threads", "2", "--crop", "64", "--device", "cpu"]


def never(*arguments: object, **keywords: object) -> None:
    raise AssertionError("started")


def made_up_turn(job: TurnJob, **keywords: object) -> LoaderTurn:
    """Return the result of a turn of 22 samples, without running it."""
    drawn = [
        Drawn(epochs=(TimedEpoch(num_samples, 1, (0.5,), 0, num_samples, 1, 0),), cpu_s=1.0)
        for num_samples in ([22] if job.setting.ranks == 1 else [21, 1])
    ]
    ranks = [
        RankTurn(first=one, steady=one, num_workers=0, decode="dali", device="cpu", gives=tuple(ALL_PARTS))
        for one in drawn
    ]
    return LoaderTurn(ranks=tuple(ranks), start_mib=1, peak_mib=2, shared_memory_mib=0)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[TurnJob]:
    """The jobs of all turns. No turn runs: the results are made up."""
    jobs: list[TurnJob] = []

    def turn(job: TurnJob, **keywords: object) -> LoaderTurn:
        jobs.append(job)
        return made_up_turn(job)

    monkeypatch.setattr("bench.compare.run.run_turn", turn)
    return jobs


def test_run_writes_a_record_for_each_loader(pets: ShardSet, tmp_path: Path) -> None:
    """The command compares, times, and writes a record that `bench report` shows as the command did."""
    out = tmp_path / "run.json"
    arguments = ["run", "--shards", pets.store.url, "--loaders", "dali,webloader:turbo", "--repeats", "1"]
    done = invoke(*arguments, "--epochs", "2", *TINY, "--json", out)
    report = json.loads(out.read_text())
    assert (report["format"], report["version"]) == ("dali-pipes-bench-run", 2)
    assert report["baseline"] == "webloader:turbo"
    assert [data["num_samples"] for data in report["data"]] == [22]
    assert 0 < report["data"][0]["needed_bytes"] < report["data"][0]["shard_bytes"]
    assert [(row["loader"], row["decode"]) for row in report["records"]] == [("dali", "dali"), ("webloader", "turbo")]
    for row in report["records"]:
        setting = row["setting"]
        assert (setting["batch_size"], setting["threads"], setting["ranks"], row["device"]) == (5, 2, 1, "cpu")
        assert row["outputs"]["num_samples"] == 22
        assert row["outputs"]["max_photo_difference"] <= 1e-6
        (repeat,) = row["repeats"]
        assert all(figure >= 0 for figure in repeat["figures"].values() if figure is not None)
        assert repeat["figures"]["fetched_ratio"] is None, "local files come from no server"
        assert repeat["figures"]["accelerator_utilisation"] is None, "no step was emulated"
        assert repeat["figures"]["peak_memory_mib"] >= repeat["figures"]["loader_memory_mib"]
    assert invoke("report", out).stdout == done.stdout


def test_run_indexes_shards_without_an_index_once_for_all(
    pets: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All our loaders use one index, no loader makes its own, and nothing is written beside the shards."""
    folders: set[Path] = set()

    def turn(job: TurnJob, **keywords: object) -> LoaderTurn:
        folders.update(Path(url).parent for url in job.urls)
        assert [*Path(job.urls[0]).parent.glob(".dali-pipes/*manifest.safetensors")]
        return made_up_turn(job)

    monkeypatch.setattr("bench.compare.run.run_turn", turn)
    for name in pets.names:
        (tmp_path / name).write_bytes(Path(pets.store.locate(name)).read_bytes())
    done = invoke("run", "--shards", tmp_path, "--loaders", "dali,memory,synthetic", "--repeats", 1, *TINY)
    assert len(folders - {tmp_path}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(pets.names)
    assert "no manifest beside the shards" not in done.stderr + caplog.text


def test_sweep_in_ranks_from_afar_counts_and_waits(pets: ShardSet, tmp_path: Path) -> None:
    """Two ranks, cold, a bucket a millisecond away, an emulated step: every figure is there, and each sample once."""
    out = tmp_path / "sweep.json"
    arguments = ["sweep", "--shards", pets.store.url, "--loaders", "dali", "--repeats", "1", *TINY]
    arguments += ["--num-threads", "1", "--over", "ranks=1,2", "--over", "cache=cold", "--latency-ms", "1"]
    arguments += ["--compute-ms", "2", "--num-shards", "4", "--photo-side", "40", "--json", str(out)]
    invoke(*arguments)
    report = json.loads(out.read_text())
    assert [(row["setting"]["ranks"], row["loader"]) for row in report["records"]] == [(1, "dali"), (2, "dali")]
    for row in report["records"]:
        (repeat,) = row["repeats"]
        figures = repeat["figures"]
        assert figures["fetched_ratio"] > 0, (
            "from a cold cache; what came before the first batch was asked for is not counted"
        )
        assert 0 < figures["accelerator_utilisation"] <= 1
        assert 0 < figures["wait_share"] < 1
        assert figures["time_to_first_batch_s"] >= 0.002, "two requests from a millisecond away"
        assert row["outputs"]["num_samples"] == 22


def test_run_bad_options_are_refused_first(pets: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compared or timed whose figures would mislead, or whose record could not be written."""
    monkeypatch.setattr("bench.compare.run.compare_outputs", never)
    monkeypatch.setattr("bench.compare.run.fork_server", never)
    for arguments, message in (
        (["run", "--ranks", "4"], "each rank needs a shard, got ranks=4 with 3 shards; .*--num-shards 4"),
        (["run", "--direct", "--latency-ms", "1"], "--direct and a latency exclude each other: the gateway"),
        (["run", "--json", str(tmp_path)], f"--json '{tmp_path}': expected a file, found a directory"),
        (["run", "--json", str(tmp_path / "none" / "run.json")], "--json '.*none/run.json': no such directory"),
        (["run", "--json", "/proc/self/run.json"], "--json '/proc/self/run.json': cannot be written"),  # nor by root
        (["sweep", "--over", "threads=1,1"], "--over: name threads once, and each of its values once"),
    ):
        with pytest.raises(ValueError, match=message):
            invoke(*arguments, "--shards", pets.store.url)


def test_run_prints_the_table_even_if_the_disk_fills_up(
    turns: list[TurnJob], pets: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal shows the minutes of timing, and the earlier record is still whole."""
    out = tmp_path / "run.json"
    out.write_text("earlier")

    rename = Path.rename

    def full(path: Path, target: Path) -> Path:
        if Path(target).name == out.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    arguments = ["run", "--shards", pets.store.url, "--loaders", "memory", "--repeats", "1"]
    arguments += ["--crop", "8", "--device", "cpu", "--json", str(out)]
    done = CliRunner().invoke(bench_command, arguments)
    assert done.stdout.splitlines()[2].startswith("memory")
    assert isinstance(done.exception, StoreError)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert out.read_text() == "earlier"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),  # Ctrl-C
        (SystemExit(143), 143),  # what `dali-pipes` makes of SIGTERM
        (PipesError("rank 0 of loader 'dali' ended"), 1),
    ],
)
def test_run_that_is_stopped_keeps_its_whole_rounds(
    pets: ShardSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    """The command is stopped in its third round, after one turn: the record holds two rounds and can be compared."""
    made = 0

    def stopped(job: TurnJob, **keywords: object) -> LoaderTurn:
        nonlocal made
        made += 1
        if made == 6:
            raise error
        return made_up_turn(job)

    monkeypatch.setattr("bench.compare.run.run_turn", stopped)
    out = tmp_path / "run.json"
    arguments = ["bench", "run", "--shards", pets.store.url, "--loaders", "memory,dali", "--repeats", "3", *TINY]
    with contextlib.suppress(SystemExit):
        assert main([*arguments, "--json", str(out)]) == code
    told = capfd.readouterr()
    assert f"kept: 2 whole rounds, in '{out}'" in told.err
    found = read_run(out)
    assert (found["complete"], found["num_rounds"]) == (False, 2)
    assert [len(row["repeats"]) for row in found["records"]] == [2, 2]
    assert main(["bench", "compare", str(out), str(out)]) == 0


def test_run_wrong_loader_is_found_before_anything_is_timed(
    pets: ShardSet, options: LoaderOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader with one wrong label stops the run; no clock was started."""

    def wrong(name: str, *arguments: Any, **keywords: Any) -> Any:
        return with_wrong_label(open_loader("memory", *arguments, **keywords), "animals/pet_007")

    monkeypatch.setattr("bench.compare.outputs.open_loader", wrong)
    monkeypatch.setattr("bench.compare.run.run_turn", never)
    with pytest.raises(OutputError, match=r"loader 'webloader:pil', key 'animals/pet_007': label differs: .* found 99"):
        run_scenario(LoaderScenario(shards=pets, loaders=[LoaderSpec(name="webloader")], options=options))


@pytest.mark.parametrize("when", ["compared", "timed"])
def test_run_goes_on_without_a_peer_that_fails(
    pets: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], when: str
) -> None:
    """The others are compared and timed; table, record and exit code name the peer and its error."""

    def turn(job: TurnJob, **keywords: object) -> LoaderTurn:
        if when == "timed" and job.spec.name == "webloader":
            raise PipesError("no answer\x1b[2J")
        return made_up_turn(job)

    def opened(name: str, *arguments: Any, **keywords: Any) -> Any:
        if when == "compared" and name == "webloader":
            raise PipesError("no answer\x1b[2J")
        return open_loader(name, *arguments, **keywords)

    monkeypatch.setattr("bench.compare.outputs.open_loader", opened)
    monkeypatch.setattr("bench.compare.run.run_turn", turn)
    out = tmp_path / "run.json"
    arguments = ["bench", "run", "--shards", pets.store.url, "--loaders", "webloader,memory", "--repeats", "2", *TINY]
    assert main([*arguments, "--json", str(out)]) == 1
    told = capfd.readouterr()
    assert "failed, and left out of the table: 'webloader:pil'" in told.err
    assert re.search(r"webloader.* failed, and is left out: no answer\\x1b\[2J", told.out)
    found = read_run(out)
    assert (found["complete"], found["num_rounds"]) == (True, 2)
    assert [row["loader"] for row in found["records"]] == ["memory"]
    assert [(row["loader"], row["error"]) for row in found["failed"]] == [("webloader:pil", "no answer\\x1b[2J")]


def test_run_loader_that_hangs_in_the_comparison_is_ended(
    pets: ShardSet, options: LoaderOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken loader hangs first in the command's own process, before any turn."""

    def epoch() -> Iterator[BenchBatch]:
        assert signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2, "pytest's own would end it later"
        threading.Event().wait()
        yield {}

    @contextlib.contextmanager
    def hanging(name: str, shards: ShardSet, **keywords: object) -> Iterator[Any]:
        yield SimpleNamespace(num_workers=0, decode="pil", device="cpu", epoch=epoch)

    monkeypatch.setattr("bench.compare.outputs.open_loader", hanging)
    handler = signal.getsignal(signal.SIGALRM)
    expected = r"the outputs of loader 'spdl:pil' \(threads .*, batch 5, .*\) were not compared within 0.2 s: it hangs"
    with pytest.raises(PipesError, match=expected):
        run_scenario(LoaderScenario(shards=pets, loaders=[LoaderSpec(name="spdl")], options=options, timeout_s=0.2))
    assert signal.getsignal(signal.SIGALRM) == handler, "it is pytest's again"


def test_turn_says_what_went_wrong_in_a_rank(pets: ShardSet, options: LoaderOptions) -> None:
    """An error of a rank, here a missing shard, is raised unchanged. No process is left."""
    missing = TurnJob(
        spec=LoaderSpec(name="dali"),
        urls=(pets.store.locate("none-000000.tar"),),
        prepared=(None,),
        options=options,
        setting=TurnSetting(batch_size=5, crop=CROP, threads=1),
        epochs=1,
    )
    with pytest.raises(PipesError, match=r"none-000000\.tar"):
        run_turn(missing)
    with pytest.raises(PipesError, match=r"did not come to 'open' within 0.001 s .*: raise --timeout-s"):
        run_turn(missing, timeout_s=0.001)
    assert not [child for child in multiprocessing.active_children() if child.name == "bench-turn"]
