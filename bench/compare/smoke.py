"""Try every installed loader in every mode on tiny data, and find those that fail or whose output is wrong.

Times do not matter here. Each loader's outputs are compared with Pillow's and torchvision's, from files and from a
bucket. It takes a warm turn in one process, from files, and a cold turn in two processes, each with a part of the
shards, from a bucket that is a millisecond away, with an emulated step; then a warm turn of the classification recipe
from the bucket. A loader with two decoders uses the first with files and the last with the bucket.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bench.compare.check_loaders import compare_outputs
from bench.compare.data import DataSets
from bench.compare.records import figures_of
from bench.compare.run import check_counts
from bench.compare.settings import TurnSetting
from bench.compare.turn import run_turn
from bench.engine.turn_process import fork_server
from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import GROUPS, LOADERS
from bench.loaders.selection import LoaderSpec, available_loaders
from bench.reports.tables import format_rows
from bench.tools.drawn_shards import draw_shards
from bench.tools.folders import RunFolder
from dali_pipes.errors import PipesError

NUM_SAMPLES, NUM_SHARDS = 22, 4
CROP = 48
# Below, at and above the crop, odd and even, so that padding, cutting and rounding all happen.
SIZES = ((33, 48), (47, 47), (48, 33), (49, 71), (64, 64), (71, 49))
BATCH_SIZE = 5
TURN_S = 60.0

MODES = {
    "files": TurnSetting(batch_size=BATCH_SIZE, crop=CROP, threads=2),
    "bucket": TurnSetting(
        batch_size=BATCH_SIZE, crop=CROP, threads=1, ranks=2, cache="cold", latency_ms=1.0, compute_ms=1.0
    ),
    "classification": TurnSetting(batch_size=BATCH_SIZE, crop=CROP, threads=2, latency_ms=1.0),
}
"""Mode -> the setting of its turn. The last one's recipe is classification, that of the others segmentation."""


class Trial(NamedTuple):
    """The outcome of one loader in one mode."""

    loader: str
    mode: str
    outcome: str
    """``ok``, ``skipped`` or ``failed``."""
    reason: str
    """One line: why it was skipped or failed, or what was compared."""
    elapsed_s: float


def named_loaders(texts: Sequence[str]) -> list[LoaderSpec]:
    """Return the loaders of names, ``NAME:DECODE`` and groups, each once.

    A loader of a group has no decoder yet: `run_smoke` chooses one for each mode. The group includes loaders that are
    not installed: their trials say that they were skipped.

    Raises:
        ValueError: If there is no such loader, group or decoder.

    >>> [str(spec) for spec in named_loaders(["dali-decode", "dali", "spdl:turbo"])]
    ['dali', 'memory', 'dali-s3', 'dali-external', 'spdl:turbo']
    """
    found: list[LoaderSpec] = []
    for text in texts:
        if text in GROUPS:
            found += [LoaderSpec(name=name) for name in filter(GROUPS[text], LOADERS)]
        else:
            found.append(LoaderSpec.parse(text))
    return list(dict.fromkeys(found))


def run_smoke(directory: Path, *, loaders: Sequence[LoaderSpec] | None = None) -> Iterator[Trial]:
    """Try loaders one after the other, and yield each trial when it is over.

    Args:
        directory: Empty; shards are made there.
        loaders: ``None``: all of the registry. A loader that is named with a decoder uses it in all modes.
    """
    missing = available_loaders()
    shards = draw_shards(directory, num=NUM_SAMPLES, num_shards=NUM_SHARDS, sizes=SIZES, mask_cell=1, folder="pets/")
    options = LoaderOptions(device="cpu")
    classification = replace(options, recipe="classification", mask=None)
    fork_server()
    with RunFolder() as folder, contextlib.ExitStack() as stack:
        data = DataSets(shards, options=options, folder=folder, stack=stack)
        for named in loaders or named_loaders(["all"]):
            for (mode, setting), which in zip(MODES.items(), (0, -1, -1), strict=True):
                decodes = LOADERS[named.name].decodes
                spec = LoaderSpec(name=named.name, decode=decodes[which]) if decodes and not named.decode else named
                started = time.perf_counter()
                if (reason := missing[spec.name]) is not None:
                    outcome = "skipped"
                else:
                    own = classification if mode == "classification" else options
                    outcome, reason = _try(data, spec, setting, options=own)
                yield Trial(str(spec), mode, outcome, reason, time.perf_counter() - started)


def format_trials(trials: Sequence[Trial]) -> str:
    """One row for each trial, and below the table the number of each outcome."""
    rows = [["loader", "mode", "", "s", "why"]]
    rows += [[one.loader, one.mode, one.outcome, f"{one.elapsed_s:.1f}", one.reason] for one in trials]
    counts = {outcome: sum(one.outcome == outcome for one in trials) for outcome in ("ok", "skipped", "failed")}
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    return "\n".join([format_rows(rows, left=5), "", told])


def _try(data: DataSets, spec: LoaderSpec, setting: TurnSetting, *, options: LoaderOptions) -> tuple[str, str]:
    """Compare the outputs and take a turn; return outcome and reason."""
    if not {"local" if setting.latency_ms is None else "ais", "converted"} & set(LOADERS[spec.name].source):
        return "skipped", "it does not read these"
    try:
        comparison = compare_outputs(data, [spec], [setting], options=options, timeout_s=TURN_S)[spec, setting]
        job = data.turn_job(spec, setting, options=options, epochs=1)
        turn = run_turn(job, bystanders=data.bystanders, timeout_s=TURN_S)
        _, facts = data.open(setting)
        check_counts(spec, turn, facts)
        assert figures_of(turn, setting=setting, facts=facts)["samples_per_s"], "a turn takes time"
    except Exception as exc:  # noqa: BLE001 (a loader's library may raise anything; the next is tried)
        line = (str(exc).splitlines() or [""])[0]
        return "failed", line if isinstance(exc, PipesError) else f"{type(exc).__name__}: {line}"
    parts = f"without {', '.join(comparison.not_compared)}" if comparison.not_compared else "all parts"
    return "ok", f"{comparison.num_samples} samples, {parts}"
