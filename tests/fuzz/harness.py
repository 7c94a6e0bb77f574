"""Run a target's worker for a while, and report crashes, hangs and broken promises with their inputs."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

# Far above what a slow machine needs for one input, or to start a worker.
HANG_S = 60.0
_POLL_S = 0.2


@dataclass
class Outcome:
    """What a target did with its inputs."""

    counts: Counter[str] = field(default_factory=Counter)
    """Inputs that were taken, and that were refused with an error of ours."""
    findings: list[str] = field(default_factory=list)
    """What went wrong, and the file that holds the input."""

    def __str__(self) -> str:
        return f"{self.counts['taken']} taken, {self.counts['refused']} refused, {len(self.findings)} findings"


def fuzz(name: str, *, seconds: float, seed: int, keep: Path, max_findings: int = 5, hang_s: float = HANG_S) -> Outcome:
    """Fuzz one target.

    Args:
        name: A key of `tests.fuzz.targets.all.TARGETS`.
        seconds: For so long, without the time that workers take to start; one that crashes is replaced.
        seed: Of the first round.
        keep: The inputs of findings are written here.
        max_findings: Stop after so many.
        hang_s: A worker that checks no input for so long hangs.
    """
    outcome = Outcome()
    left_s = seconds
    while left_s > 0 and len(outcome.findings) < max_findings:
        with tempfile.TemporaryDirectory(prefix="dali-pipes-fuzz-") as folder:
            found, taken_s = _run_worker(
                name, seed=seed, seconds=left_s, folder=Path(folder), counts=outcome.counts, hang_s=hang_s
            )
            left_s -= taken_s
            if found:
                path = keep / f"{name}-{len(outcome.findings)}.bin"
                keep.mkdir(parents=True, exist_ok=True)
                current = Path(folder) / "input"  # not there if the worker could not start
                path.write_bytes(current.read_bytes() if current.exists() else b"")
                outcome.findings.append(f"{found}; the input is '{path}'")
        seed += 1_000_000
    return outcome


def _run_worker(
    name: str, *, seed: int, seconds: float, folder: Path, counts: Counter[str], hang_s: float
) -> tuple[str, float]:
    """Run one worker until the time is over or it ends; returns what it found, if anything, and the time it took."""
    log = folder / "log"
    with log.open("wb") as stderr:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", name, str(seed), str(folder)], stdout=stderr, stderr=stderr
        )
    seen, seen_at, begun_at, found = "", time.monotonic(), 0.0, ""
    while worker.poll() is None:
        time.sleep(_POLL_S)
        counted = (folder / "counts").read_text() if (folder / "counts").exists() else ""
        if counted != seen:
            seen, seen_at = counted, time.monotonic()
            begun_at = begun_at or seen_at
        if begun_at and time.monotonic() - begun_at > seconds:
            (folder / "stop").touch()
        if time.monotonic() - seen_at > hang_s:
            found = f"hangs for {hang_s:.0f} s"
            worker.send_signal(signal.SIGKILL)
            worker.wait()
            break
    taken_s = time.monotonic() - begun_at if begun_at else 0.0
    if (folder / "counts").exists():
        counts.update(json.loads((folder / "counts").read_text()))
    if not found and worker.returncode:
        found = _why_it_ended(worker.returncode, folder, log)
    return found, taken_s


def _why_it_ended(code: int, folder: Path, log: Path) -> str:
    if (folder / "finding").exists():
        return (folder / "finding").read_text()
    why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"ends with {why}: {log.read_bytes()[-600:].decode(errors='replace')}"
