"""Trainings that are killed and resumed, against ones that were not."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_files import CHECKPOINT, STEPS, StepLog, load_checkpoint, save_checkpoint

from bench.loaders.workers import worker_context
from tests.docs.pages import RUN_FILE
from tests.examples.conftest import EXAMPLES, NUM_SAMPLES
from tests.examples.ranks import first_is_as_later, train_rank
from tests.lazy import Lazy

torch = Lazy("torch")

GLOBAL_BATCH_SIZE = 4
NUM_STEPS = NUM_SAMPLES // GLOBAL_BATCH_SIZE  # of an epoch: 13
EPOCHS = 4
CHECKPOINT_EVERY = 5  # no multiple of it is an epoch's last step


def arguments_of(shards: Path, run: Path, *options: str, num_processes: int) -> list[str]:
    """A tiny training."""
    arguments = {
        "--shards": shards,
        "--out": run,
        "--epochs": EPOCHS,
        "--batch-size": GLOBAL_BATCH_SIZE // num_processes,
        "--crop": 64,
        "--checkpoint-every": CHECKPOINT_EVERY,
        "--device": "cpu",
        "--seed": 3,
    }
    return [*(str(each) for pair in arguments.items() for each in pair), *options]


def launch(program: str, shards: Path, run: Path, *options: str, num_processes: int) -> subprocess.Popen[bytes]:
    """Start a training as a user does; its output goes to a file beside the run's directory."""
    launcher, environment = ["-c", RUN_FILE], os.environ | {"PYTHONPATH": f"{EXAMPLES}:{EXAMPLES.parent}"}
    if num_processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
        environment |= {"OMP_NUM_THREADS": "1"}
    arguments = arguments_of(shards, run, *options, num_processes=num_processes)
    command = [sys.executable, *launcher, str(EXAMPLES / program), *arguments]
    with (run.parent / f"{run.name}.txt").open("ab") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def train(program: str, shards: Path, run: Path, *options: str, num_processes: int) -> None:
    """A training to its end."""
    process = launch(program, shards, run, *options, num_processes=num_processes)
    assert process.wait() == 0, (run.parent / f"{run.name}.txt").read_text()


def wait_for_step(run: Path, step: int, *, is_running: Callable[[], bool]) -> None:
    """Return as soon as the run's log has this step."""
    while not (run / STEPS).exists() or (run / STEPS).read_bytes().count(b"\n") <= step:
        output = run.parent / f"{run.name}.txt"
        assert is_running(), output.read_text() if output.exists() else ""
        time.sleep(0.002)


def kill_at_step(process: subprocess.Popen[bytes], run: Path, step: int) -> None:
    """SIGKILL for the launcher and all its processes as soon as the run's log has this step."""
    wait_for_step(run, step, is_running=lambda: process.poll() is None)
    launcher = psutil.Process(process.pid)
    everybody = [launcher, *launcher.children(recursive=True)]
    for each in everybody:
        each.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(everybody, timeout=120)


def whole_lines(run: Path) -> list[dict[str, Any]]:
    """The steps that were logged; a kill may have cut the last line."""
    return [json.loads(line) for line in (run / STEPS).read_text().splitlines(keepends=True) if line.endswith("\n")]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


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
@pytest.mark.parametrize(
    ("program", "options", "num_processes"),
    [
        # By day, two ranks are stopped and resumed below, by a signal.
        pytest.param("segmentation.py", ["--shrink", "2"], 2, marks=pytest.mark.nightly),
        ("classification.py", ["--task", "breed"], 1),  # random windows, flips, dropout
    ],
)
def test_training_killed_and_resumed_has_the_losses_of_the_unbroken_run(
    photo_shards: Path, tmp_path: Path, program: str, options: list[str], num_processes: int
) -> None:
    """SIGKILL in mid-epoch, past a checkpoint; then every step's loss and all of the last state, bit for bit."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    if num_processes == 1:  # as good in this process, and it has torch and DALI loaded
        arguments = arguments_of(photo_shards, unbroken, *options, num_processes=1)
        assert importlib.import_module(program.removesuffix(".py")).main(arguments) == 0
    else:
        train(program, photo_shards, unbroken, *options, num_processes=num_processes)
    expected = whole_lines(unbroken)
    assert [(line["step"], line["epoch"]) for line in expected] == [
        (step, step // NUM_STEPS) for step in range(EPOCHS * NUM_STEPS)
    ]
    assert len({line["loss_hex"] for line in expected}) > len(expected) // 2  # it trains: losses are not one number

    process = launch(program, photo_shards, broken, *options, num_processes=num_processes)
    kill_at_step(process, broken, NUM_STEPS + 4)
    before = whole_lines(broken)
    saved = torch.load(broken / CHECKPOINT, weights_only=True)
    assert 0 < saved["step"] < EPOCHS * NUM_STEPS
    assert saved["step"] % NUM_STEPS
    assert saved["loader"]["delivered"] == saved["step"] % NUM_STEPS * GLOBAL_BATCH_SIZE
    assert saved["step"] <= len(before) < EPOCHS * NUM_STEPS

    train(program, photo_shards, broken, *options, "--resume", num_processes=num_processes)
    assert before == expected[: len(before)]
    assert_same_end(broken, unbroken)


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_training_told_to_stop_keeps_its_last_step_and_goes_on(
    photo_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """The checkpoint is of the step that the log ends with, between two that are due; the exit code is the signal's.
    An epoch that was over is validated after the resume, once.
    """
    program = importlib.import_module("classification")
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    options = ["--val-shards", str(photo_shards / "s-000005.tar"), "--checkpoint-every", "1000"]
    assert program.main(arguments_of(photo_shards, unbroken, *options, num_processes=1)) == 0
    validated = capsys.readouterr().out
    assert validated.count("photos right") == EPOCHS
    for last in (0, NUM_STEPS + 4, 2 * NUM_STEPS - 1):
        handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
        with pytest.MonkeyPatch.context() as patch:
            write = StepLog.write

            def told(self: StepLog, *, last: int = last, write: Any = write, **line: Any) -> None:
                if line["step"] == last:
                    os.kill(os.getpid(), number)
                write(self, **line)

            patch.setattr(StepLog, "write", told)
            arguments = arguments_of(photo_shards, broken, *options, "--resume", num_processes=1)
            assert program.main(arguments) == 128 + number
        assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == handlers
        assert len(whole_lines(broken)) == last + 1
        assert torch.load(broken / CHECKPOINT, weights_only=True)["step"] == last + 1
    assert program.main(arguments_of(photo_shards, broken, *options, "--resume", num_processes=1)) == 0
    assert_same_end(broken, unbroken)
    assert capsys.readouterr().out == validated


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


def test_gradients_of_the_first_step_are_added_up_as_in_any_other() -> None:
    """Four ranks, whose sums depend on their order: a resumed run's first step has the bits of the unbroken run's."""
    port = free_port()
    with ProcessPoolExecutor(4, mp_context=worker_context()) as pool:
        assert list(pool.map(first_is_as_later, range(4), [4] * 4, [port] * 4)) == [True] * 4


def test_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    """Whatever ends the writing in the middle, the last whole checkpoint is the one that is read."""
    save_checkpoint(tmp_path, {"step": 5, "weights": torch.arange(3)})
    with pytest.raises(Exception, match=r"pickle|local object"):
        save_checkpoint(tmp_path, {"step": 10, "weights": lambda: None})
    found = load_checkpoint(tmp_path, resume=True)
    assert found is not None
    assert found["step"] == 5
    save_checkpoint(tmp_path, {"step": 10})
    assert load_checkpoint(tmp_path, resume=True) == {"step": 10}


def test_step_log_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    """Steps that are taken again have one line each; a line cut by a kill goes, too; the loss is exact."""
    with StepLog(tmp_path, step=0, is_written=True) as log:
        for step in range(4):
            log.write(step=step, epoch=0, loss=step / 3)
    with (tmp_path / STEPS).open("a") as stream:
        stream.write('{"step": 4, "ep')
    with StepLog(tmp_path, step=2, is_written=True) as log, StepLog(tmp_path, step=2, is_written=False) as other:
        log.write(step=2, epoch=1, loss=0.1)
        other.write(step=2, epoch=1, loss=0.2)
    lines = [json.loads(line) for line in (tmp_path / STEPS).read_text().splitlines()]
    assert [(line["step"], float.fromhex(line["loss_hex"])) for line in lines] == [(0, 0.0), (1, 1 / 3), (2, 0.1)]
