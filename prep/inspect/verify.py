"""Verify shards: read every byte, decode every photo, and compare all files that describe the shards.

A worker process takes a shard, or a part of a shard's samples if there are fewer shards than cores. It reads the shard
front to back, and decodes each photo when it comes to it (`prep.inspect.verify_shard`). Part 0 of a shard also checks
the tar itself, names, labels and the shard's index. This process checks the set as a whole (`prep.inspect.verify_set`).
A worker holds one member and one decoded photo at a time, of at most 4 bytes for each of ``max_pixels``.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import Manifest, checksum
from dali_pipes.formats.names import index_name
from dali_pipes.formats.photo_header import MAX_PIXELS
from dali_pipes.formats.photo_rules import PhotoRules
from dali_pipes.formats.quarantine import Quarantine
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.findings import ShardFinding
from prep.inspect.verify_set import INDEX_ADVICE, READ_ADVICE, SetChecker, VerifyReport
from prep.inspect.verify_shard import Checks, ShardReport, index_problem, verify_shard
from prep.photos.decoders import DecoderName, choose_decoder, open_decoder
from prep.workers import Report, WorkersKind, open_workers

# A task is sent to a worker process, and a class table may be long.
_NO_SUMS: Mapping[str, Any] = {"components": {}, "classes": {}, "photos": {}, "labels": {}}
# Bytes for each worker: for fewer bytes, the start of a worker takes longer than its work.
_BYTES_A_WORKER = 8 << 20
_ADVICE = (
    "either memory ran out or a decoder crashed on a photo; run it with --workers 1 on this shard, or with another "
    "--decoder"
)


def verify(
    shards: ShardSet,
    *,
    missing: Sequence[str] = (),
    beyond: Sequence[str] = (),
    decoder: DecoderName | None = None,
    masks: Sequence[str] | None = None,
    mask_values: Sequence[int] | None = None,
    max_pixels: int = MAX_PIXELS,
    workers: int | None = None,
    on: WorkersKind = "processes",
    quarantine: Path | None = None,
    show_progress: bool = False,
) -> VerifyReport:
    """Read every shard to its end and decode every photo; only ``quarantine`` is written.

    Args:
        shards: The shards. Their manifest, shard indexes, column file and class table are checked, too, if they exist.
        missing: URLs or paths of further shards of the set, which the store lacks; each is a finding.
        beyond: URLs or paths of shards beside the set that no manifest lists; each is a finding.
        decoder: ``"dali"`` or ``"pillow"``, see `prep.photos.decoders.open_decoder`; ``None``: DALI's, if installed.
        masks: Components that are masks; ``None``: see `dali_pipes.formats.photo_names.photo_roles`.
        mask_values: The values that a mask's pixels may have; ``None``: anything from 0 to 255.
        max_pixels: Photos with more pixels are bad, and are not decoded.
        workers: The number of processes; 1: only this one. ``None``: one for each core, fewer if there are few bytes;
            on Ray, the cluster's CPUs.
        on: Who works: see `prep.workers.open_workers`.
        quarantine: A file to which bad samples that can be left out are added, for a loader's ``Select(exclude=...)``.
        show_progress: Draw a bar, in bytes.

    Raises:
        PipesError: If the decoder is not installed, or a worker process died.
        StoreError: If a shard is missing or cannot be read, or the quarantine cannot be written.
        ValueError: If ``max_pixels`` or ``workers`` is not positive, or a mask's value not in [0, 255].
    """
    for name, number in (("max_pixels", max_pixels), ("workers", workers)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be positive, got {number}")
    if mask_values is not None and (other := [value for value in mask_values if not 0 <= value <= 255]):
        raise ValueError(f"mask_values must be in [0, 255], got {other[0]}")
    decoder = choose_decoder(decoder)
    started = time.perf_counter()
    report = VerifyReport(url=shards.url, num_shards=len(shards.names), decoder=decoder)
    with contextlib.ExitStack() as resources:
        checker = SetChecker(shards, report, masks=masks)
        checker.compare(missing=missing, beyond=beyond)
        if quarantine is not None:
            checker.quarantine = resources.enter_context(Quarantine(quarantine, manifest=checker.digest, made_now=True))
        checks = Checks(
            masks=None if checker.masks is None else tuple(checker.masks),
            mask_values=None if mask_values is None else frozenset(mask_values),
            photos=PhotoRules(max_pixels=max_pixels),
            classes=checker.classes,
        )
        sizes = [entry.size for entry in shards.entries()]
        if workers is None and on == "processes":
            workers = min(len(os.sched_getaffinity(0)), 1 + sum(sizes) // _BYTES_A_WORKER)
        is_dali = decoder == "dali"
        pool = resources.enter_context(
            open_workers(on, workers, setup=_silence if is_dali else None, isolated=is_dali, advice=_ADVICE)
        )
        pool.check_reach(directory for directory in [shards.store.directory] if directory is not None)
        tasks = _tasks(shards, sizes, checker, num_parts=-(-pool.jobs // len(shards.names)))
        check = partial(_verify, shards.store, decoder, checks)
        drawn = resources.enter_context(bar(what="verify", total=sum(sizes), unit="B", shown=show_progress))
        # Only a few tasks run ahead of the report that is added next, because reports wait in memory.
        for part in pool.map(
            check, tasks, on_progress=drawn.update, name=lambda task: f"shard '{task.shard}'", max_ahead=2 * pool.jobs
        ):
            checker.add(part)
        checker.finish()
    report.elapsed_s = time.perf_counter() - started
    return report


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A shard, or a part of its samples."""

    row: int
    shard: str
    size: int
    part: int
    num_parts: int
    listed: Manifest | None
    """The manifest's row of the shard, without class table and sums; ``None``: there is no manifest."""


def _tasks(shards: ShardSet, sizes: Sequence[int], checker: SetChecker, *, num_parts: int) -> Iterator[_Task]:
    listed = checker.listed
    for row, (shard, size) in enumerate(zip(shards.names, sizes, strict=True)):
        one = None if listed is None else replace(listed.take(np.array([row])), **_NO_SUMS)
        for part in range(num_parts):
            yield _Task(row=row, shard=shard, size=size, part=part, num_parts=num_parts, listed=one)


# In a worker


def _silence() -> None:
    """Write nothing to stderr: DALI's libraries write a line for each broken photo, which is a finding here."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


_decoder = cache(open_decoder)


def _verify(store: Store, decoder: DecoderName, checks: Checks, task: _Task, report: Report) -> ShardReport:
    found = ShardReport(row=task.row, part=task.part)
    with store.open(task.shard) as stream:
        verify_shard(
            cast("BinaryIO", _Counted(stream, report, num_parts=task.num_parts)),
            found,
            shard=task.shard,
            size=task.size,
            num_parts=task.num_parts,
            decoder=_decoder(decoder),
            checks=checks,
        )
    listed = task.listed if found.is_whole else None
    if listed is not None and (problem := _index_problem(store, listed, found)):
        found.findings.append(ShardFinding("index", task.shard, "", "", problem))
    found.headers.clear()
    return found


def _index_problem(store: Store, listed: Manifest, report: ShardReport) -> str | None:
    name = index_name(listed.names[0])
    data = store.find(name)
    if data is None:
        return f"its index '{name}' does not exist; {INDEX_ADVICE}"
    expected = (int(listed.index_bytes[0]), int(listed.index_checksums[0]))
    if (len(data), checksum(data)) != expected:
        return (
            f"its index '{name}' has {len(data)} bytes, xxhash2 {checksum(data):016x}; the manifest says "
            f"{expected[0]}, {expected[1]:016x}; {INDEX_ADVICE}"
        )
    try:
        index = listed.shard_index(0, data, where=name)
        problem = index_problem(index, report)
    except DataError as exc:
        return str(exc)
    return problem and f"its index '{name}' {problem}; {READ_ADVICE}"


class _Counted:
    """Reports the bytes that are read from a stream, divided by the number of parts, so that their sum is the size."""

    def __init__(self, stream: BinaryIO, report: Report, *, num_parts: int) -> None:
        self._stream, self._report, self._num_parts = stream, report, num_parts

    def read(self, size: int) -> bytes:
        piece = self._stream.read(size)
        self._report(len(piece) // self._num_parts)
        return piece
