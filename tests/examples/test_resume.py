"""Trainings that are killed and resumed, against ones that were not."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from run_files import CHECKPOINT, STEPS, load_checkpoint, save_checkpoint

from bench.loaders.workers import worker_context
from tests.docs.pages import RUN_FILE
from tests.examples.conftest import EXAMPLES, NUM_SAMPLES
from tests.examples.ranks import train_rank
from tests.lazy import Lazy
from tests.programs import free_port

torch = Lazy("torch")

GLOBAL_BATCH_SIZE = 4
NUM_STEPS = NUM_SAMPLES // GLOBAL_BATCH_SIZE  # of an epoch: 13
EPOCHS = 4
CHECKPOINT_EVERY = 5  # no multiple of it is an epoch's last step


def arguments_of(shards: Path, run: Path, *options: str, num_processes: int) -> list[str]:
    """A tiny training."""
    size = GLOBAL_BATCH_SIZE // num_processes
    numbers = f"--epochs {EPOCHS} --batch-size {size} --crop 64 --checkpoint-every {CHECKPOINT_EVERY} --seed 3"
    return ["--shards", str(shards), "--out", str(run), "--device", "cpu", *numbers.split(), *options]


def wait_for_step(run: Path, step: int, *, is_running: Callable[[], bool]) -> None:
    """Return as soon as the run's log has this step."""
    while not (run / STEPS).exists() or (run / STEPS).read_bytes().count(b"\n") <= step:
        output = run.parent / f"{run.name}.txt"
        assert is_running(), output.read_text() if output.exists() else ""
        time.sleep(0.002)


def whole_lines(run: Path) -> list[dict[str, Any]]:
    """The steps that were logged; a kill may have cut the last line."""
    return [json.loads(line) for line in (run / STEPS).read_text().splitlines(keepends=True) if line.endswith("\n")]


def assert_same_end(run: Path, expected: Path) -> None:
    """Every step's loss and all of the last state, bit for bit."""
    assert whole_lines(run) == whole_lines(expected)
    last = [flat(torch.load(each / CHECKPOINT, weights_only=True)) for each in (expected, run)]
    assert last[0].keys() == last[1].keys()
    for path, value in last[0].items():
        assert torch.equal(value, last[1][path]) if isinstance(value, torch.Tensor) else value == last[1][path], path


def flat(state: Any, where: str = "") -> dict[str, Any]:
    """The leaves of a checkpoint by their path."""
    if isinstance(state, dict | list | tuple):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return {path: leaf for name, each in pairs for path, leaf in flat(each, f"{where}/{name}").items()}
    return {where: state}


@pytest.mark.usefixtures("torch_settings")
def test_training_killed_and_resumed_has_the_losses_of_the_unbroken_run(photo_shards: Path, tmp_path: Path) -> None:
    """SIGKILL in mid-epoch, past a checkpoint; then every step's loss and all of the last state, bit for bit."""
    program = importlib.import_module("classification")  # random windows, flips, dropout
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    assert program.main(arguments_of(photo_shards, unbroken, num_processes=1)) == 0
    expected = whole_lines(unbroken)
    assert [(line["step"], line["epoch"]) for line in expected] == [
        (step, step // NUM_STEPS) for step in range(EPOCHS * NUM_STEPS)
    ]
    assert len({line["loss_hex"] for line in expected}) > len(expected) // 2  # it trains: losses are not one number

    arguments = arguments_of(photo_shards, broken, num_processes=1)
    environment = os.environ | {"PYTHONPATH": f"{EXAMPLES}:{EXAMPLES.parent}"}
    with (tmp_path / "broken.txt").open("wb") as output:
        command = [sys.executable, "-c", RUN_FILE, str(EXAMPLES / "classification.py"), *arguments]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    wait_for_step(broken, NUM_STEPS + 4, is_running=lambda: process.poll() is None)
    process.kill()
    process.wait()
    before = whole_lines(broken)
    saved = torch.load(broken / CHECKPOINT, weights_only=True)
    assert saved["step"] % NUM_STEPS
    assert saved["loader"]["delivered"] == saved["step"] % NUM_STEPS * GLOBAL_BATCH_SIZE
    assert 0 < saved["step"] <= len(before) < EPOCHS * NUM_STEPS

    assert program.main([*arguments, "--resume"]) == 0
    assert before == expected[: len(before)]
    assert_same_end(broken, unbroken)


def test_one_rank_that_is_told_to_stop_stops_all_at_one_step(photo_shards: Path, tmp_path: Path) -> None:
    """Two ranks, the signal to the one that writes nothing: both end with its code, and lose no step."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"

    with ProcessPoolExecutor(2, mp_context=worker_context()) as pool:

        def start(run: Path) -> list[Future[int]]:
            arguments = arguments_of(photo_shards, run, "--shrink", "2", "--resume", num_processes=2)
            port = free_port()
            return [pool.submit(train_rank, "segmentation", arguments, run, rank, 2, port) for rank in range(2)]

        assert [rank.result() for rank in start(unbroken)] == [0, 0]
        ranks = start(broken)
        wait_for_step(broken, 5, is_running=lambda: not any(rank.done() for rank in ranks))
        os.kill(int((broken / "1.pid").read_text()), signal.SIGTERM)
        assert [rank.result() for rank in ranks] == [128 + signal.SIGTERM] * 2
        stopped = len(whole_lines(broken))
        assert 6 <= stopped < EPOCHS * NUM_STEPS
        assert torch.load(broken / CHECKPOINT, weights_only=True)["step"] == stopped
        assert [rank.result() for rank in start(broken)] == [0, 0]
    assert_same_end(broken, unbroken)


def test_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    """Whatever ends the writing in the middle, the last whole checkpoint is the one that is read."""
    save_checkpoint(tmp_path, {"step": 5, "weights": torch.arange(3)})
    with pytest.raises(Exception, match=r"pickle|local object"):
        save_checkpoint(tmp_path, {"step": 10, "weights": lambda: None})
    found = load_checkpoint(tmp_path, resume=True)
    assert found is not None
    assert found["step"] == 5
