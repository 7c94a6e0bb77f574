"""Tasks that workers run. Worker processes import this module, so it imports little."""

import os
import signal
import time
from pathlib import Path

from dali_pipes.errors import DataError
from prep.workers import Report


def double(number: int, report: Report) -> int:
    """Twice a number."""
    if number < 0:
        raise ValueError(f"expected a number of 0 or more, got {number}")
    report(1)
    return 2 * number


def square(task: int, report: Report) -> tuple[int, int]:
    report(task)
    return task * task, os.getpid()


def fail_at_three(task: int, report: Report) -> int:
    if task == 3:
        raise DataError("task 3 is bad")
    return task


def kill_itself(task: int, report: Report) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def count_setup(directory: Path) -> None:
    with (directory / str(os.getpid())).open("a") as stream:
        stream.write("x")


def touch_and_wait(task: str, report: Report) -> None:
    """Write a file, wait, and delete the file when the task ends."""
    path = Path(task)
    try:  # who sees the file may stop the task
        path.write_text(str(os.getpid()))
        time.sleep(600)
    finally:
        path.unlink()


class FreedSlowly:
    """A task whose worker is busy freeing it: it writes a file and waits."""

    def __init__(self, path: Path) -> None:
        self.path, self.owner = path, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            self.path.touch()
            time.sleep(600)


def ignore(task: object, report: Report) -> None:
    pass


def unchanged(sample: dict[str, bytes]) -> dict[str, bytes]:
    """A transform that changes nothing."""
    return sample
