"""Tuning files: what they hold, for whom they hold, and how they are found."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes.cli import main
from dali_pipes.commands import tune
from dali_pipes.commands.tune import HW_DECODER_LOADS, search
from dali_pipes.errors import DataError
from dali_pipes.options import Decode
from dali_pipes.tuning import TUNING_VARIABLE, Machine, Settings, Tuning, choose_settings

HERE = Machine.here(None)
TUNED = Tuning(machine=HERE, settings=Settings(num_threads=3, prefetch_queue_depth=4), measured={"samples": 7})


@pytest.fixture(autouse=True)
def _no_file_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TUNING_VARIABLE, raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A tuning file of this machine."""
    TUNED.write(tmp_path / "tuning.json")
    return tmp_path / "tuning.json"


def test_another_machine_s_file_is_told_once_and_not_used(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What differs is in the text; a job's every loader must not repeat it."""
    other = dataclasses.replace(TUNED, machine=dataclasses.replace(HERE, cores=HERE.cores + 126))
    other.write(path)
    with caplog.at_level(logging.INFO, logger="dali_pipes.tuning"):
        found = [choose_settings(Decode(tuning=path), device_id=None) for _ in range(3)]
    assert found == [Settings(num_threads=HERE.cores, prefetch_queue_depth=2)] * 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"'cores': {HERE.cores + 126}" in record.message
    # No warning if settings tuned for a GPU are used on the CPU: a training may validate there.
    caplog.clear()
    dataclasses.replace(TUNED, machine=dataclasses.replace(HERE, gpu="NVIDIA H100")).write(path)
    assert choose_settings(Decode(tuning=path), device_id=None).num_threads == HERE.cores
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory: .*; make it: dali-pipes tune"),
        ("[]", "cannot be used"),
        ('{"format": "dali-pipes tuning 2"}', "found 'dali-pipes tuning 2'"),
        (
            '{"format": "dali-pipes tuning 1", "machine": {"cpu": "x", "cores": 2, "gpu": null},'
            ' "settings": {"num_threads": 0, "prefetch_queue_depth": 2}}',
            "cannot be used: threads must be positive, got 0",
        ),
    ],
)
def test_a_file_that_is_none_is_an_error(text: str | None, message: str, tmp_path: Path) -> None:
    """Whoever names a file wants its settings: none is silently passed over."""
    path = tmp_path / "tuning.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        choose_settings(Decode(tuning=path), device_id=None)


def test_search_finds_the_best_of_each_in_turn() -> None:
    """Threads first, at the default share; what costs more must be worth it; of the shares the fastest."""

    def rate(settings: Settings, seconds: float) -> float:
        threads = {1: 100, 2: 190, 4: 300, 8: 304, 12: 305, 16: 306}[settings.num_threads]
        share = 0.65 if settings.hw_decoder_load is None else settings.hw_decoder_load
        return threads * (1 - abs(share - 0.4)) * {2: 1.0, 3: 1.01, 4: 1.02}[settings.prefetch_queue_depth]

    found, timed = search(rate, cores=16, on_gpu=True, budget_s=60, show=False)
    assert found == Settings(num_threads=4, prefetch_queue_depth=2, hw_decoder_load=0.4)
    assert list(timed) == ["num_threads", "hw_decoder_load", "prefetch_queue_depth"]
    assert list(timed["hw_decoder_load"]) == list(HW_DECODER_LOADS)


def test_search_ends_with_its_time_and_keeps_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run takes nine times as long as it should: two rounds of the first setting fit into the time."""
    now_s = 0.0
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: now_s))

    def rate(settings: Settings, seconds: float) -> float:
        nonlocal now_s
        now_s += 9 * seconds
        return 100.0

    found, timed = search(rate, cores=16, on_gpu=True, budget_s=90, show=False)
    assert found == Settings(num_threads=1, prefetch_queue_depth=2)
    assert list(timed) == ["num_threads"]
    assert now_s == pytest.approx(90)


def test_tune_command_writes_what_loaders_take(
    small_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of this machine, and of the cores that each of its ranks has; settings are among those that were tried."""
    path = tmp_path / "tuning.json"
    arguments = ["tune", str(small_shards), "--crop", "24", "--batch-size", "6", "--device", "cpu", "--seconds", "0.5"]
    assert main([*arguments, "--ranks", "1000", "-o", str(path)]) == 0
    assert f"wrote '{path}': num_threads " in capsys.readouterr().out
    tuning = Tuning.read(path)
    assert tuning.machine == dataclasses.replace(HERE, cores=1)
    assert tuning.settings.hw_decoder_load is None
    assert str(tuning.settings.num_threads) in tuning.measured["samples_per_s"]["num_threads"]
    dataclasses.replace(tuning, machine=HERE).write(path)
    assert choose_settings(Decode(tuning=path), device_id=None) == tuning.settings


def test_loader_decodes_as_the_file_says(path: Path, small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By argument or environment; what is asked for comes first. The batches are the same."""

    def settings_of(**decode: Any) -> tuple[int, int, list[str]]:
        shared: dict[str, Any] = {
            "batch_size": 6,
            "device": "cpu",
            "outputs": dp.Outputs(keys=True),
            "cache": dp.Cache(show_progress=False),
            "decode": dp.Decode(**decode),
        }
        with dp.loader(small_shards, dp.segmentation(crop=24), **shared) as loader:
            keys = [key for (batch,) in loader for key in batch["key"]]
            return loader.parts.decode.num_threads, loader.parts.decode.prefetch_queue_depth, keys

    keys = settings_of()[2]
    assert settings_of(tuning=str(path), threads=1) == (1, 4, keys)
    monkeypatch.setenv(TUNING_VARIABLE, str(path))
    assert settings_of(queue_depth=1) == (3, 1, keys)
    with pytest.raises(DataError, match=r"tuning file 'none\.json' cannot be used"):
        settings_of(tuning="none.json")


@pytest.mark.gpu
def test_tune_on_a_gpu_finds_a_share_of_the_engines(gpu: None, small_shards: Path, tmp_path: Path) -> None:
    """The file is the GPU's, and only loaders on it use it."""
    path = tmp_path / "tuning.json"
    arguments = ["tune", str(small_shards), "--crop", "24", "--batch-size", "6", "--device", "gpu"]
    assert main([*arguments, "--seconds", "60", "-o", str(path)]) == 0
    tuning = Tuning.read(path)
    assert tuning.machine == Machine.here(0)
    assert tuning.settings.hw_decoder_load in HW_DECODER_LOADS
    assert choose_settings(Decode(tuning=path), device_id=None).hw_decoder_load is None
