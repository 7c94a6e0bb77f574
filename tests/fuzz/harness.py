"""Run a target's worker, and report crashes, hangs and broken promises with their inputs."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

MAX_FINDINGS = 5


@dataclass
class Outcome:
    """What a target did with its inputs."""

    counts: Counter[str] = field(default_factory=Counter)
    """The numbers of inputs ``taken`` and ``refused`` with an error of ours, and the ``seconds`` of checking."""
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.counts['taken']} taken, {self.counts['refused']} refused, {len(self.findings)} findings"


def fuzz(
    name: str,
    *,
    seed: int,
    keep: Path,
    seconds: float | None = None,
    report: Callable[[Outcome], object] = lambda outcome: None,
) -> Outcome:
    """Fuzz one target with its ``num_daily`` inputs, or for ``seconds``; the start of a worker does not count.

    A worker that crashes is replaced by another with the next seed. ``keep`` gets inputs of findings, and the files
    that were made of them; ``report`` is told the outcome so far from time to time, and at a worker's end.
    """
    outcome = Outcome()
    while len(outcome.findings) < MAX_FINDINGS:
        remaining = None if seconds is None else seconds - outcome.counts["seconds"]
        if remaining is not None and remaining <= 0:
            break
        with tempfile.TemporaryDirectory(prefix="dali-pipes-fuzz-") as folder:
            found = _run_worker(name, seed, Path(folder), remaining, outcome, report)
            if found:
                path = keep / f"{name}-{len(outcome.findings)}.bin"
                keep.mkdir(parents=True, exist_ok=True)
                current = Path(folder) / "input"  # not there if the worker could not start
                path.write_bytes(current.read_bytes() if current.exists() else b"")
                if (files := Path(folder) / "files").exists():
                    shutil.copytree(files, path.with_suffix(".files"), dirs_exist_ok=True)
                outcome.findings.append(f"{found}; repeat it: python -m tests.fuzz {name} --input {path}")
        if seconds is None:
            break
        seed += 1_000_000
    return outcome


def _run_worker(
    name: str, seed: int, folder: Path, seconds: float | None, outcome: Outcome, report: Callable[[Outcome], object]
) -> str:
    """Run one worker until it ends, add its counts, and return its finding, or an empty text."""
    before = outcome.counts.copy()
    command = [sys.executable, "-m", "tests.fuzz.worker", name, str(seed), str(folder), str(seconds or "")]
    log = folder / "log"
    with log.open("wb") as stderr, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith(b"{"):  # libraries print other lines
                outcome.counts = before + Counter(json.loads(line))
                report(outcome)
    if not worker.returncode:
        return ""
    if (folder / "finding").exists():
        return (folder / "finding").read_text()
    said = log.read_bytes()[-1500:].decode(errors="replace")
    if "Timeout (" in said:  # `tests.fuzz.watch` ended it
        return f"hangs: {said[said.index('Timeout (') :]}"
    why = signal.Signals(-worker.returncode).name if worker.returncode < 0 else f"exit code {worker.returncode}"
    return f"ends with {why}: {said[-600:]}"
