"""Write a run's files: the checkpoint, which is replaced in one move, and one line for each step."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

CHECKPOINT = "checkpoint.pt"
STEPS = "steps.jsonl"


def save_checkpoint(run: Path, state: dict[str, Any]) -> None:
    """Replace the run's checkpoint. If this is killed, the old or the new checkpoint is there, and complete.

    Only rank 0 calls this.
    """
    partial = run / f"{CHECKPOINT}.partial"
    with partial.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(run / CHECKPOINT)
    # The move itself is on the disk only after the directory was written, too.
    directory = os.open(run, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def load_checkpoint(run: Path, *, resume: bool) -> dict[str, Any] | None:
    """Return the run's checkpoint, with tensors on the CPU; ``None`` for a new run.

    Every rank calls this before the first step. No rank can take that step alone, so no rank reads a checkpoint that
    another one has already replaced.

    Raises:
        FileExistsError: If there is a checkpoint and ``resume`` was not asked for.
    """
    path = run / CHECKPOINT
    if not path.exists():
        return None
    if not resume:
        raise FileExistsError(f"'{path}' exists; pass --resume to continue from it, or another --out")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


class StepLog:
    """The run's ``steps.jsonl``: ``{"step": 0, "epoch": 0, "loss": 1.0986, "loss_hex": "0x1.193ea8p+0"}``.

    The hexadecimal loss is exact: two runs that are the same have the same lines.

    Args:
        run: The run's directory.
        step: The run's next step. Lines of this step and of later ones are dropped: a run that was killed may have
            continued after its last checkpoint.
        is_written: ``False`` on all ranks except one.
    """

    def __init__(self, run: Path, *, step: int, is_written: bool) -> None:
        self._stream = None
        if not is_written:
            return
        path, partial = run / STEPS, run / f"{STEPS}.partial"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # A kill can leave the last line incomplete; that line is never among the first ``step`` lines.
        partial.write_text("".join(lines[:step]))
        partial.replace(path)
        self._stream = path.open("a")

    def write(self, *, step: int, epoch: int, loss: float) -> None:
        """Write a step's line at once, so that it survives if the process is killed."""
        if self._stream is not None:
            line = {"step": step, "epoch": epoch, "loss": round(loss, 6), "loss_hex": loss.hex()}
            self._stream.write(json.dumps(line) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Close the file. Can be called twice."""
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> "StepLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
