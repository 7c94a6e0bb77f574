"""Write a run's files: the checkpoint, which is replaced in one move, and one line for each step."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

__all__ = ["CHECKPOINT", "STEPS", "StepLog", "load_checkpoint", "save_checkpoint"]

CHECKPOINT = "checkpoint.pt"
STEPS = "steps.jsonl"


def save_checkpoint(run: Path, state: dict[str, Any]) -> None:
    """Replace the run's checkpoint; whenever this is killed, the old one or the new one is there, and whole.

    Called by rank 0 only.
    """
    partial = run / f"{CHECKPOINT}.partial"
    with partial.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(run / CHECKPOINT)
    # The move itself is on the disk only when the directory is.
    directory = os.open(run, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def load_checkpoint(run: Path, *, resume: bool) -> dict[str, Any] | None:
    """What the run's checkpoint holds, tensors on the CPU; ``None`` where the run is a new one.

    Called by every rank before the first step, which none of them can take alone: no rank reads what another has
    already replaced.

    Raises:
        FileExistsError: If there is a checkpoint and ``resume`` was not asked for.
    """
    path = run / CHECKPOINT
    if not path.exists():
        return None
    if not resume:
        raise FileExistsError(f"'{path}' is there; pass --resume to go on from it, or another --out")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


class StepLog:
    """The run's ``steps.jsonl``: ``{"step": 0, "epoch": 0, "loss": 1.0986, "loss_hex": "0x1.193ea8p+0"}``.

    The hexadecimal loss is exact: two runs that are the same have the same lines.

    Args:
        run: The run's directory.
        step: The run's next step: lines of this one and later ones, of a run that went on past its last checkpoint
            before it was killed, are dropped.
        is_written: ``False`` on all ranks but one.
    """

    def __init__(self, run: Path, *, step: int, is_written: bool) -> None:
        self._stream = None
        if not is_written:
            return
        path, partial = run / STEPS, run / f"{STEPS}.partial"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # A kill can leave the last line half written; it is never among the first ``step``.
        partial.write_text("".join(lines[:step]))
        partial.replace(path)
        self._stream = path.open("a")

    def write(self, *, step: int, epoch: int, loss: float) -> None:
        """Add a step's line, so that it is there if the process is killed."""
        if self._stream is not None:
            line = {"step": step, "epoch": epoch, "loss": round(loss, 6), "loss_hex": loss.hex()}
            self._stream.write(json.dumps(line) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """May be called twice."""
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> "StepLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
