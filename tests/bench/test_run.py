"""`bench run` on tiny data: the record's structure, the order of runs, and what it refuses."""

import contextlib
import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import bench.loaders
from bench.cli import bench as bench_command
from bench.compare import OutputError
from bench.loaders import Batch, Loader, LoaderOptions, LoaderSpec, open_loader
from bench.loaders.workers import worker_context
from bench.processes import ProcessTree
from bench.record import check_target, write_record
from bench.repeat import repeat_shards
from bench.run import run_benchmark, time_loader
from prep.errors import StoreError
from prep.index import index_shards
from prep.urls import ShardSet

from .test_processes import BURNT_S, TICKS_S, burn

FIGURES = ("samples_per_s", "mib_per_s", "cpu_ms_per_sample", "time_to_first_batch_s")


def test_run_writes_a_record_for_each_loader(shards: ShardSet, tmp_path: Path) -> None:
    """The command compares, times, prints a table and writes JSON with every promised field."""
    out = tmp_path / "run.json"
    arguments = ["run", "--shards", shards.store.url, "--loaders", "dali,webloader,webloader:turbo", "--repeats", "2"]
    arguments += ["--epochs", "3"]
    arguments += ["--batch-size", "5", "--num-threads", "2", "--crop", "64", "--device", "cpu", "--json", str(out)]
    done = CliRunner().invoke(bench_command, arguments, catch_exceptions=False)

    assert done.exit_code == 0
    table = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in table] == [
        "loader",
        table[1].split("  ")[0],
        "dali",
        "webloader (pil)",
        "webloader (turbo)",
    ]
    report = json.loads(out.read_text())
    assert set(report) == {"records", "environment"}
    assert [(row["loader"], row["decode"]) for row in report["records"]] == [
        ("dali", "dali"),
        ("webloader", "pil"),
        ("webloader", "turbo"),
    ]
    for row in report["records"]:
        assert (row["batch_size"], row["num_threads"], row["num_samples"], row["device"]) == (5, 2, 22, "cpu")
        assert row["outputs"]["num_samples"] == 22
        assert row["outputs"]["max_photo_difference"] <= 1e-6
        assert [repeat["num_epochs"] for repeat in row["repeats"]] == [3, 3]
        for figure in FIGURES:
            low, high = row["spread"][figure]
            assert 0 <= low <= row[figure] <= high
    environment = report["environment"]
    assert environment["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert environment["options"]["repeats"] == 2
    assert environment["options"]["source"] == "local files"

    shown = CliRunner().invoke(bench_command, ["table", str(out), "--markdown"], catch_exceptions=False)
    assert shown.stdout.startswith("| loader ")


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        '{"records": []}',  # nothing to be the baseline
        '{"records": [{"loader": "dali"}]}',
        '{"records": {"loader": "dali"}}',
        '{"records": ["dali"]}',
        '{"records": null}',
        "[]",
    ],
)
def test_table_of_another_file_is_refused(tmp_path: Path, text: str) -> None:
    """Issue 3: what is no record is said to be none, in one line."""
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json': expected a file that `bench run --json` wrote \("):
        CliRunner().invoke(bench_command, ["table", str(tmp_path / "run.json")], catch_exceptions=False)


def test_run_json_that_cannot_be_written_is_refused_first(
    shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 3: a directory, a directory that is not there, a read-only one: refused before anything is timed."""

    def never(*arguments: object, **keywords: object) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr("bench.run.run_benchmark", never)
    for path, message in (
        (tmp_path, "expected a file, found a directory"),
        (tmp_path / "none" / "run.json", "no such directory"),
        (Path("/proc/self/run.json"), "cannot be written"),  # read-only for root too
    ):
        arguments = ["run", "--shards", shards.store.url, "--json", str(path)]
        with pytest.raises(ValueError, match=f"--json '{path}': {message}"):
            CliRunner().invoke(bench_command, arguments, catch_exceptions=False)


def test_run_prints_the_table_even_if_the_disk_fills_up(
    shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 3: minutes of timing are on the terminal, and an earlier record is still there, whole."""
    out = tmp_path / "run.json"
    out.write_text("earlier")

    def full(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    arguments = ["run", "--shards", shards.store.url, "--loaders", "memory", "--repeats", "1"]
    arguments += ["--crop", "8", "--device", "cpu", "--json", str(out)]
    done = CliRunner().invoke(bench_command, arguments)
    assert done.stdout.splitlines()[2].startswith("memory")
    assert isinstance(done.exception, StoreError)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert out.read_text() == "earlier"


def test_record_replaces_a_links_target_and_writes_to_a_pipe(tmp_path: Path) -> None:
    """A link stays a link; /dev/null stays a device."""
    (tmp_path / "link.json").symlink_to(tmp_path / "run.json")
    for path in (tmp_path / "link.json", Path("/dev/null")):
        check_target(path)
        write_record({"records": []}, path)
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "run.json").read_text()) == {"records": []}
    assert Path("/dev/null").is_char_device()


def test_run_interleaves_repeats_one_loader_at_a_time(
    shards: ShardSet, options: LoaderOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is A B A B after a comparison of each, and none is open while another is."""
    events: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def spied(name: str, shards: ShardSet, *, options: LoaderOptions) -> Iterator[Loader]:
        events.append(("open", name))
        with open_loader("webloader", shards, options=options) as loader:
            yield loader
        events.append(("close", name))

    monkeypatch.setattr("bench.run.open_loader", spied)
    specs = [LoaderSpec(name="webloader"), LoaderSpec(name="webloader-tutorial")]
    run_benchmark(shards, specs, options=options, repeats=2)
    expected = [(what, name) for _ in range(3) for name in (specs[0].name, specs[1].name) for what in ("open", "close")]
    assert events == expected


def test_run_wrong_loader_is_found_before_anything_is_timed(
    shards: ShardSet, options: LoaderOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader with one wrong label stops the run; no clock was started."""

    class _Wrong:
        num_workers, decode, device = 0, "pil", "cpu"

        def __init__(self, loader: Loader) -> None:
            self._loader = loader

        def epoch(self) -> Iterator[Batch]:
            for batch in self._loader.epoch():
                if "animals/pet_007" in batch["key"]:
                    batch["label"][batch["key"].index("animals/pet_007")] = 99
                yield batch

    @contextlib.contextmanager
    def wrong(name: str, shards: ShardSet, *, options: LoaderOptions) -> Iterator[Loader]:
        with open_loader(name, shards, options=options) as loader:
            yield _Wrong(loader)

    def never(*arguments: object, **keywords: object) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr("bench.run.open_loader", wrong)
    monkeypatch.setattr("bench.run.time_loader", never)
    with pytest.raises(OutputError, match=r"loader 'webloader', key 'animals/pet_007': label differs: .* found 99"):
        run_benchmark(shards, [LoaderSpec(name="webloader")], options=options)


def test_time_loader_counts_workers_that_live_for_one_epoch(
    shards: ShardSet, options: LoaderOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader whose workers start and end within the epoch pays for them."""

    class _Burning:
        num_workers, decode, device = 1, "pil", "cpu"

        def epoch(self) -> Iterator[Batch]:
            context = worker_context()
            done, done_end = context.Pipe(duplex=False)
            stay_end, stay = context.Pipe(duplex=False)
            process = context.Process(target=burn, args=(done_end, stay_end))
            process.start()
            done.recv()
            stay.send(None)
            process.join()
            image, mask = torch.zeros(1, 3, 8, 8), torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
            yield {"image": image, "trimap": mask, "label": torch.zeros(1, dtype=torch.int64), "key": ["a"]}

    @contextlib.contextmanager
    def burning(name: str, shards: ShardSet, *, options: LoaderOptions) -> Iterator[Loader]:
        yield _Burning()

    monkeypatch.setattr("bench.run.open_loader", burning)
    timed = time_loader("webloader", shards, options=options, tree=ProcessTree())
    assert timed.epoch_cpu_s >= BURNT_S - TICKS_S
    assert timed.first_epoch_cpu_s >= BURNT_S - TICKS_S
    assert (timed.num_samples, timed.num_batches) == (1, 1)


@pytest.mark.parametrize(
    ("specs", "repeats", "message"),
    [
        ([], 1, "loaders must name at least one loader"),
        (["webloader", "webloader"], 1, "loaders must not repeat, got webloader, webloader"),
        (["webloader"], 0, "repeats must be at least 1, got 0"),
    ],
)
def test_run_bad_arguments_are_refused(
    shards: ShardSet, options: LoaderOptions, specs: list[str], repeats: int, message: str
) -> None:
    """Arguments are checked before any work."""
    with pytest.raises(ValueError, match=message):
        run_benchmark(shards, [LoaderSpec.parse(text) for text in specs], options=options, repeats=repeats)


@pytest.mark.parametrize("num_samples", [50, 7])
def test_repeat_shards_gives_unique_keys_and_the_same_bytes(shards: ShardSet, tmp_path: Path, num_samples: int) -> None:
    """50 samples of 22: two whole rounds and six more, in as many shards; 7 of 22: a part of the first round."""
    repeated = repeat_shards(shards, num_samples=num_samples, directory=tmp_path)
    assert len(repeated.names) == len(shards.names)
    manifest = index_shards(repeated)
    assert manifest.num_samples == num_samples
    options = LoaderOptions(batch_size=8, num_threads=1, crop=8, device="cpu")
    with open_loader("webloader", repeated, options=options) as loader:
        labels = {
            key: label
            for batch in loader.epoch()
            for key, label in zip(batch["key"], batch["label"].tolist(), strict=True)
        }
    assert len(labels) == num_samples
    assert all(label == int(key[-3:]) % 5 + 1 for key, label in labels.items())
    assert {key.partition("/")[0] for key in labels} == {f"r{number}" for number in range(-(-num_samples // 22))}


def test_registry_modules_are_imported_late() -> None:
    """The registry names modules; opening one is what imports it."""
    assert all(module.startswith("bench.loaders.") for module in bench.loaders.LOADERS.values())
    with pytest.raises(ValueError, match=r"loader must be one of .*, got 'nothing'"):
        open_loader("nothing", None, options=LoaderOptions())  # type: ignore[arg-type]
