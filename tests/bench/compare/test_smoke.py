"""`bench smoke` passes what is right and fails what is wrong; CI runs it over every loader that is installed."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bench.compare.check_loaders
from bench.compare.smoke import MODES, format_trials, named_loaders, run_smoke
from bench.loaders.protocol import BenchBatch, BenchLoader
from bench.loaders.registry import LOADERS
from bench.loaders.selection import LoaderSpec, open_loader


@pytest.mark.slow
def test_smoke_of_every_loader() -> None:
    """All that are installed, in all modes, in a process of its own, as DALI's S3 client wants it: none fails."""
    done = subprocess.run(
        [sys.executable, "-m", "dali_pipes", "bench", "smoke"], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_smoke_of_ours_in_every_mode(tmp_path: Path) -> None:
    """Files and bucket, warm and cold, one process and two."""
    trials = list(run_smoke(tmp_path, loaders=[LoaderSpec(name="dali")]))
    assert [(trial.mode, trial.outcome, trial.reason) for trial in trials] == [
        (mode, "ok", "22 samples, all parts") for mode in MODES
    ]
    assert format_trials(trials).endswith("3 ok")


def test_smoke_fails_a_loader_whose_output_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One label of one sample; the reason names loader and key, and the next loader is tried."""

    @contextlib.contextmanager
    def wrong(name: str, shards: Any, **keywords: Any) -> Iterator[BenchLoader]:
        with open_loader(name, shards, **keywords) as loader:
            epoch = loader.epoch

            def changed() -> Iterator[BenchBatch]:
                for batch in epoch():
                    batch["label"][-1] += 1
                    yield batch

            loader.epoch = changed  # type: ignore[method-assign]
            yield loader

    monkeypatch.setattr(bench.compare.check_loaders, "open_loader", wrong)
    trials = list(run_smoke(tmp_path, loaders=[LoaderSpec(name="memory")]))
    assert [trial.outcome for trial in trials] == ["failed"] * 3
    assert "loader 'memory', key 'pets/" in trials[0].reason
    assert "label differs" in trials[0].reason


def test_smoke_skips_what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extra that brings it; a skipped loader is no failure."""
    monkeypatch.setattr(
        "bench.compare.smoke.available_loaders", lambda: {"webloader": "loader 'webloader' needs the package 'x'"}
    )
    trials = list(run_smoke(tmp_path, loaders=[LoaderSpec(name="webloader")]))
    assert {(trial.outcome, trial.reason) for trial in trials} == {
        ("skipped", "loader 'webloader' needs the package 'x'")
    }


def test_smoke_takes_groups_as_run_does() -> None:
    """Each loader once, what is not installed too; a name is still refused if it is none."""
    peers = [str(spec) for spec in named_loaders(["peers", "dali", "webloader"])]
    assert peers == [*(name for name in LOADERS if name not in ("dali", "memory", "synthetic")), "dali"]
    assert [str(spec) for spec in named_loaders(["webloader:turbo", "all"])][:2] == ["webloader:turbo", "dali"]
    with pytest.raises(ValueError, match=r"loader must be one of dali, .*, got 'peer'"):
        named_loaders(["peer"])
