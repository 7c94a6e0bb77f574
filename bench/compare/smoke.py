"""Try every installed loader in every mode on tiny data, and find those that fail or whose output is wrong.

Times do not matter here. Each loader's outputs are compared with Pillow's and torchvision's, from files and from a
bucket. It takes a warm turn in one process, from files, and a cold one in two processes, each with a part of the
shards, from a bucket that is a millisecond away, with an emulated step. A loader with two decoders uses the first with
files and the last with the bucket.
"""

import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from bench.compare.check_loaders import compare_outputs
from bench.compare.data import DataSets
from bench.compare.ranks import run_turn
from bench.compare.records import figures_of
from bench.compare.run import Contender, check_counts, turn_jobs
from bench.compare.settings import TurnSetting
from bench.engine.turn_process import fork_server
from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import GROUPS, LOADERS
from bench.loaders.selection import LoaderSpec, available_loaders
from bench.reports.tables import format_rows
from bench.tools.folders import RunFolder
from bench.tools.repeat import write_shard
from dali_pipes.errors import PipesError
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from prep.index import index_shards

NUM_SAMPLES, NUM_SHARDS = 22, 4
CROP = 48
# Below, at and above the crop, odd and even, so that padding, cutting and rounding all happen.
SIDES = (33, 47, 48, 49, 64, 71)
BATCH_SIZE = 5
TURN_S = 60.0

MODES = {
    "files": TurnSetting(batch_size=BATCH_SIZE, crop=CROP, threads=2),
    "bucket": TurnSetting(
        batch_size=BATCH_SIZE, crop=CROP, threads=1, ranks=2, cache="cold", latency_ms=1.0, compute_ms=1.0
    ),
}
"""Name to the setting of the turn that is made."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The outcome of one loader in one mode."""

    loader: str
    mode: str
    outcome: str
    """``ok``, ``skipped`` or ``failed``."""
    reason: str
    """Why, in one line; if it is ok, what was seen."""
    elapsed_s: float


def named_loaders(texts: Sequence[str]) -> list[LoaderSpec]:
    """The loaders of names, ``NAME:DECODE`` and groups, none twice.

    A loader of a group has no decoder yet: it takes one with files and another with the bucket. It is there even if it
    is not installed: a trial says that it is skipped.

    Raises:
        ValueError: If there is no such loader, group or decoder.

    >>> [str(spec) for spec in named_loaders(["dali-decode", "dali", "spdl:turbo"])]
    ['dali', 'memory', 'dali-s3', 'dali-external', 'spdl:turbo']
    """
    found: list[LoaderSpec] = []
    for text in texts:
        named = [LoaderSpec(name=name) for name in filter(GROUPS[text], LOADERS)] if text in GROUPS else []
        found += named or [LoaderSpec.parse(text)]
    return list(dict.fromkeys(found))


def run_smoke(directory: Path, *, loaders: Sequence[LoaderSpec] | None = None) -> Iterator[Trial]:
    """Try loaders one after the other, and yield each trial when it is over.

    Args:
        directory: Empty; shards are made there.
        loaders: ``None``: all of the registry. A loader that is named with a decoder uses it in all modes.
    """
    missing = available_loaders()
    named = loaders or [LoaderSpec(name=name) for name in LOADERS]
    shards = make_shards(directory)
    options = LoaderOptions(device="cpu")
    fork_server()
    with RunFolder() as folder, DataSets(shards, photo=options.photo, mask=options.mask, folder=folder) as data:
        for name in named:
            for row, (mode, setting) in enumerate(MODES.items()):
                spec = _with_decoder(name, row)
                kind = "local" if setting.latency_ms is None else "ais"
                started = time.perf_counter()
                outcome, reason = "ok", ""
                if missing[spec.name] is not None:
                    outcome, reason = "skipped", str(missing[spec.name])
                elif not {kind, "converted"} & set(LOADERS[spec.name].source):
                    outcome, reason = "skipped", "it does not read these"
                else:
                    try:
                        reason = _try(data, spec, setting, options=options)
                    except Exception as exc:  # noqa: BLE001 (a loader's library may raise anything; the next is tried)
                        said = str(exc).splitlines() or [""]
                        kept = said[0] if isinstance(exc, PipesError) else f"{type(exc).__name__}: {said[0]}"
                        outcome, reason = "failed", kept
                yield Trial(
                    loader=str(spec),
                    mode=mode,
                    outcome=outcome,
                    reason=reason,
                    elapsed_s=time.perf_counter() - started,
                )


def make_shards(directory: Path) -> ShardSet:
    """22 photos with masks and labels in four indexed shards, the same each time."""
    draw = np.random.default_rng(0)
    names = tuple(f"smoke-{shard:06d}.tar" for shard in range(NUM_SHARDS))
    for shard, name in enumerate(names):
        members: list[tuple[str, bytes]] = []
        for row in range(shard, NUM_SAMPLES, NUM_SHARDS):
            width, height = SIDES[row % len(SIDES)], SIDES[(row * 5 + 2) % len(SIDES)]
            coarse = draw.integers(0, 256, (6, 6, 3), np.uint8)
            photo = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
            mask = Image.fromarray(draw.integers(1, 4, (height, width), np.uint8))
            key = f"pets/{row:03d}"
            members.append((f"{key}.cls", str(row % 5 + 1).encode()))
            members.append((f"{key}.image.jpg", _encoded(photo, "JPEG")))
            members.append((f"{key}.trimap.png", _encoded(mask, "PNG")))
        write_shard(directory / name, members)
    shards = ShardSet(store=LocalStore(directory), names=names)
    index_shards(shards)
    return shards


def format_trials(trials: Sequence[Trial]) -> str:
    """A row a trial, and how many failed."""
    rows = [["loader", "mode", "", "s", "why"]]
    rows += [[one.loader, one.mode, one.outcome, f"{one.elapsed_s:.1f}", one.reason] for one in trials]
    counts = {outcome: sum(one.outcome == outcome for one in trials) for outcome in ("ok", "skipped", "failed")}
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    return "\n".join([format_rows(rows, left=5), "", told])


def _with_decoder(spec: LoaderSpec, mode: int) -> LoaderSpec:
    decodes = LOADERS[spec.name].decodes
    if spec.decode is not None or not decodes:
        return spec
    return LoaderSpec(name=spec.name, decode=decodes[-1 if mode else 0])


def _try(data: DataSets, spec: LoaderSpec, setting: TurnSetting, *, options: LoaderOptions) -> str:
    """Compare and make a turn; what was seen, in words."""
    comparison = compare_outputs(data, [spec], [setting], options=options, timeout_s=TURN_S)[Contender(spec, setting)]
    jobs = turn_jobs(data, spec, setting, options=options, epochs=1)
    turn = run_turn(jobs, bystanders=data.bystanders, timeout_s=TURN_S)
    facts = data.open(setting).facts
    check_counts(spec, turn, facts)
    figures = figures_of(turn, setting=setting, facts=facts)
    assert figures["samples_per_s"], "a turn takes time"
    parts = f"without {', '.join(comparison.not_compared)}" if comparison.not_compared else "all parts"
    return f"{comparison.num_samples} samples, {parts}"


def _encoded(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()
