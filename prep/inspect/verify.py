"""Shards to what is wrong with them: every byte read, every photo decoded, all that was written about them compared.

A process for each core takes a shard, or, where there are fewer shards than cores, a part of a shard's samples, reads
it front to back and decodes as it goes. Part 0 of a shard also looks at the tar itself, names, labels and the shard's
index. What concerns the set as a whole (keys that come twice, components that most samples have, manifest and column
file) is put together here, in some 60 bytes a sample. A process holds one member and one decoded photo at a time, of at
most 4 bytes for each of ``max_pixels``.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from dali_pipes.data_set.indexing import find_columns, find_manifest, listed_sizes, read_class_table
from dali_pipes.errors import DataError, PipesError
from dali_pipes.formats.column_file import checksum
from dali_pipes.formats.names import columns_name, index_name, manifest_name
from dali_pipes.formats.photo_header import MAX_PIXELS, is_photo
from dali_pipes.formats.quarantine import QuarantineFile
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.formats.texts import Texts, pack_texts
from dali_pipes.progress import bar
from dali_pipes.store.ais import AisStore
from dali_pipes.store.base import Store
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import ShardSet
from prep.inspect.verify_shard import NOTES, SAMPLE_KINDS, Checks, Finding, ShardReport, index_problem, verify_shard
from prep.photos.decoders import Decoder, DecoderName, check_decoder, open_decoder

if TYPE_CHECKING:
    from dali_pipes.formats.manifest import Manifest
    from dali_pipes.formats.sample_columns import SampleColumns

__all__ = ["MAX_FINDINGS", "VerifyReport", "verify"]

MAX_FINDINGS = 100_000
"""Findings that a report holds; further ones are counted, and written to the quarantine."""

# Below this a process more costs more than it brings: one takes half a second to start.
_BYTES_A_WORKER = 8 << 20
_DRAW_EVERY_S = 0.2
_INDEX_ADVICE = "index the shards anew: dali-pipes prep index URL"

Int64s = npt.NDArray[np.int64]


@dataclass(kw_only=True)
class VerifyReport:
    """What `verify` found."""

    url: str
    num_shards: int
    decoder: DecoderName
    num_samples: int = 0
    num_files: int = 0
    num_decoded: int = 0
    num_bytes: int = 0
    elapsed_s: float = 0
    components: dict[str, int] = field(default_factory=dict)
    """component -> samples that have it."""
    usual: list[str] = field(default_factory=list)
    """Components that more than half of the samples have: all are expected to."""
    mask_values: dict[int, int] = field(default_factory=dict)
    """Value of a mask's pixel -> masks that have it."""
    findings: list[Finding] = field(default_factory=list)
    """In the shards' order, those of the set as a whole last; the first `MAX_FINDINGS`."""
    counts: Counter[str] = field(default_factory=Counter)
    """Kind of `prep.inspect.verify_shard.KINDS` -> how many findings, of all of them."""
    num_bad_samples: int = 0
    """Samples that can be left out, each once."""

    @property
    def num_problems(self) -> int:
        """Findings that are no notes."""
        return sum(number for kind, number in self.counts.items() if kind not in NOTES)


def verify(
    shards: ShardSet,
    *,
    decoder: DecoderName = "pillow",
    masks: Sequence[str] | None = None,
    mask_values: Sequence[int] | None = None,
    max_pixels: int = MAX_PIXELS,
    workers: int | None = None,
    quarantine: Path | None = None,
    show_progress: bool = False,
) -> VerifyReport:
    """Read every shard to its end and decode every photo; nothing but ``quarantine`` is written.

    Call it from a script only below ``if __name__ == "__main__":``, processes are started anew.

    Args:
        shards: The shards; beside them manifest, shard indexes, column file and class table, as far as they are there.
        decoder: ``"pillow"`` or ``"dali"``: see `prep.photos.decoders.open_decoder`.
        masks: Components that are masks; ``None``: by their names, see `prep.inspect.verify_shard.is_mask_name`.
        mask_values: What a mask's pixels may be; ``None``: anything from 0 to 255.
        max_pixels: Photos of more pixels are bad, and are not decoded.
        workers: Processes; 1: none but this one. ``None``: one for each core, fewer for few bytes.
        quarantine: A file to which the samples that can be left out are added, for a loader's ``exclude=``.
        show_progress: Draw a bar, in bytes.

    Raises:
        DataError: If a shard is not there.
        PipesError: If the decoder is not installed, or a process died.
        StoreError: If a shard cannot be read, or the quarantine not be written.
        ValueError: If ``max_pixels`` or ``workers`` is not positive, or a mask's value not in [0, 255].
    """
    for name, number in (("max_pixels", max_pixels), ("workers", workers)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be positive, got {number}")
    if mask_values is not None and (other := [value for value in mask_values if not 0 <= value <= 255]):
        raise ValueError(f"mask_values must be in [0, 255], got {other[0]}")
    check_decoder(decoder)
    started = time.perf_counter()
    report = VerifyReport(url=shards.url, num_shards=len(shards.names), decoder=decoder)
    with contextlib.ExitStack() as resources:
        whole = _Whole(shards, report)
        if quarantine is not None:
            digest = whole.manifest.digest if whole.manifest is not None else ""
            whole.quarantine = resources.enter_context(QuarantineFile(quarantine, manifest=digest))
        checks = Checks(
            masks=None if masks is None else tuple(masks),
            mask_values=None if mask_values is None else frozenset(mask_values),
            max_pixels=max_pixels,
            classes=whole.classes,
        )
        sizes = listed_sizes(shards)
        tasks = _tasks(shards, sizes, whole, workers=workers, is_dali=decoder == "dali")
        setup = _Setup(store=_describe(shards.store), decoder=decoder, checks=checks)
        with bar(what="verify", total=sum(sizes), unit="B", shown=show_progress) as drawn:
            for part in _run(tasks, setup, drawn):
                whole.add(part)
        whole.finish()
    report.elapsed_s = time.perf_counter() - started
    return report


# What concerns the whole set


class _Whole:
    """Reports of shards, one after the other, to the report of the set."""

    def __init__(self, shards: ShardSet, report: VerifyReport) -> None:
        self._shards, self._report = shards, report
        self.quarantine: QuarantineFile | None = None
        self.manifest: Manifest | None = None
        self.rows: Int64s | None = None
        """Where each shard stands in the manifest."""
        self.classes: Mapping[int, str] = {}
        self._bad: set[tuple[int, str]] = set()
        self._columns: SampleColumns | None = None
        self._open()
        self._keys: list[Texts] = [Texts(*pack_texts([]))] * len(shards.names)
        self._digests: list[npt.NDArray[np.uint64]] = []
        self._set_numbers: dict[frozenset[str], int] = {}
        self._set_of: list[npt.NDArray[np.int32]] = []
        self._mask_values = np.zeros(256, np.int64)
        self._numbers = {name: row for row, name in enumerate(shards.names)}
        self._compared = np.ones(len(shards.names), np.bool_)

    def add(self, part: ShardReport) -> None:
        """The next part, in the shards' order."""
        report = self._report
        for finding in part.findings:
            self._find(finding)
        report.num_decoded += part.num_decoded
        self._mask_values += part.mask_values
        if part.part:
            return
        report.num_bytes += part.num_bytes
        report.num_files += part.num_files
        report.num_samples += len(part.keys)
        printable = [key.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for key in part.keys]
        self._keys[part.row] = Texts(*pack_texts(printable))
        self._digests.append(part.digests)
        numbers = [self._set_numbers.setdefault(names, len(self._set_numbers)) for names in part.component_sets]
        self._set_of.append(np.array([*numbers, 0], np.int32)[part.set_of])
        if part.is_whole:
            self._check_manifest(part)
            self._check_columns(part)

    def finish(self) -> None:
        """All parts were added."""
        self._find_missing()
        self._find_duplicates()
        values = np.flatnonzero(self._mask_values)
        self._report.mask_values = {int(value): int(self._mask_values[value]) for value in values}

    def _find(self, finding: Finding) -> None:
        report = self._report
        report.counts[finding.kind] += 1
        if len(report.findings) < MAX_FINDINGS:
            report.findings.append(finding)
        if finding.kind not in SAMPLE_KINDS:
            return
        sample = (self._numbers.get(finding.shard, -1), finding.key)
        report.num_bad_samples += sample not in self._bad
        self._bad.add(sample)
        if self.quarantine is not None:
            # A name with a tab in it is a finding of its own, and no index takes it.
            with contextlib.suppress(DataError):
                self.quarantine.add(finding.shard, finding.key, finding.component, finding.text)

    def _open(self) -> None:
        """Manifest, column file and class table, each as far as it is there and whole."""
        shards, store = self._shards, self._shards.store
        name = manifest_name(shards.prefix)
        try:
            self.manifest = find_manifest(shards)
            if self.manifest is None:
                self._find(
                    Finding("note", "", "", "", f"no manifest '{store.locate(name)}': the shards are not indexed")
                )
            else:
                self.rows = self.manifest.rows_of(shards.names, where=store.locate(name))
        except DataError as exc:
            self._find(Finding("manifest", "", "", "", str(exc)))
        if self.manifest is not None and self.rows is not None:
            try:
                columns = find_columns(shards, self.manifest)
                if columns is None:
                    where = store.locate(columns_name(shards.prefix))
                    self._find(Finding("note", "", "", "", f"no column file '{where}'"))
                else:
                    self._columns = columns.of_shards(self.manifest.samples, self.rows)
            except DataError as exc:
                self._find(Finding("columns", "", "", "", str(exc)))
        try:
            own = self.manifest.classes if self.manifest is not None else {}
            self.classes = own or read_class_table(store, shards.prefix) or {}
        except DataError as exc:
            self._find(Finding("manifest", "", "", "", str(exc)))

    def _check_manifest(self, part: ShardReport) -> None:
        if self.manifest is None or self.rows is None:
            return
        row, name = int(self.rows[part.row]), self._shards.names[part.row]
        said = (self.manifest.shard_bytes[row], self.manifest.checksums[row], self.manifest.samples[row])
        found = (part.num_bytes, part.checksum, len(part.keys))
        if tuple(map(int, said)) != found:
            text = (
                f"has {found[0]} bytes, xxhash2 {found[1]:016x}, {found[2]} samples; the manifest says {said[0]}, "
                f"{int(said[1]):016x}, {said[2]}; {_INDEX_ADVICE}"
            )
            self._find(Finding("manifest", name, "", "", text))

    def _check_columns(self, part: ShardReport) -> None:
        if self._columns is None or self.manifest is None or self.rows is None:
            return
        counts = self.manifest.samples[self.rows]
        first, num = int(counts[: part.row].sum()), int(counts[part.row])
        if num != len(part.keys):
            return  # the manifest's fault, and said
        rows = slice(first, first + num)
        problem = None
        if self._columns.keys[rows] != self._keys[part.row]:
            problem = "other keys"
        labels = self._columns.labels
        if not problem and labels is not None and (labels[rows] != part.labels).any():
            at = int(np.argmax(labels[rows] != part.labels))
            problem = f"class id {labels[rows][at]} for key '{part.keys[at]}', where the shard has {part.labels[at]}"
        for component, mask in self._columns.has.items():
            offsets = part.places.get(component)
            is_there = np.zeros(num, np.bool_) if offsets is None else offsets[0] >= 0
            if not problem and ((np.ones(num, np.bool_) if mask is None else mask[rows]) != is_there).any():
                problem = f"another set of samples with component '{component}'"
        if problem:
            text = f"the column file has {problem}; {_INDEX_ADVICE}"
            self._find(Finding("columns", self._shards.names[part.row], "", "", text))

    def _find_missing(self) -> None:
        report, sets = self._report, list(self._set_numbers)
        set_of = np.concatenate([np.zeros(0, np.int32), *self._set_of])
        counts = np.bincount(set_of, minlength=len(sets)).tolist()
        for names, number in zip(sets, counts, strict=True):
            for component in names:
                report.components[component] = report.components.get(component, 0) + number
        report.components = dict(sorted(report.components.items()))
        report.usual = [name for name, number in report.components.items() if 2 * number > report.num_samples]
        lacking: dict[int, list[str]] = {}
        replaced: Counter[tuple[str, str]] = Counter()
        for number, names in enumerate(sets):
            lacking[number] = []
            for component in (name for name in report.usual if name not in names):
                # A photo in another format is read in its place by whoever names both: "jpg;png".
                unusual = sorted(names - {*report.usual})
                if other := next((name for name in unusual if _stands_in(name, component)), None):
                    replaced[component, other] += counts[number]
                else:
                    lacking[number].append(component)
        for (component, other), number in sorted(replaced.items()):
            text = f"{number} samples have '{other}' in place of '{component}'; name both: '{component};{other}'"
            self._find(Finding("note", "", "", "", text))
        for row, numbers in enumerate(self._set_of):
            for at in np.flatnonzero(np.isin(numbers, [number for number, names in lacking.items() if names])).tolist():
                number = int(numbers[at])
                for component in lacking[number]:
                    text = f"is not there (found: {', '.join(sorted(sets[number]))})"
                    self._find(Finding("missing", self._shards.names[row], self._keys[row][at], component, text))

    def _find_duplicates(self) -> None:
        digests = np.concatenate([np.zeros(0, np.uint64), *self._digests])
        counts = np.array([len(part) for part in self._digests], np.int64)
        shard_of = np.repeat(np.arange(len(counts)), counts)
        firsts = np.cumsum(counts) - counts
        order = np.argsort(digests, kind="stable")
        is_twice = digests[order][1:] == digests[order][:-1]
        for at in np.flatnonzero(is_twice).tolist():
            earlier, later = int(order[at]), int(order[at + 1])
            shards = int(shard_of[earlier]), int(shard_of[later])
            if shards[0] == shards[1]:
                continue  # found where the shard was read
            keys = [
                self._keys[shard][row - int(firsts[shard])] for shard, row in zip(shards, (earlier, later), strict=True)
            ]
            if keys[0] == keys[1]:
                text = f"is in shard '{self._shards.names[shards[0]]}' too"
                self._find(Finding("duplicate", self._shards.names[shards[1]], keys[1], "", text))


def _stands_in(component: str, usual: str) -> bool:
    """Whether two components are the same photo in two formats, by their names.

    >>> _stands_in("image.png", "image.jpg"), _stands_in("trimap.png", "image.jpg")
    (True, False)
    """
    same = component.rpartition(".")[0] == usual.rpartition(".")[0]
    return same and is_photo(component) and is_photo(usual)


# Processes


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A shard, or a part of its samples."""

    row: int
    shard: str
    size: int
    part: int
    num_parts: int
    index: tuple[int, int] | None
    """Bytes and checksum of the shard's index, by the manifest; ``None`` without one."""


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """What all tasks have in common."""

    store: tuple[str, ...]
    decoder: DecoderName
    checks: Checks


class _Worker:
    """Does one task after the other; ``read`` is told of bytes as they are read, and may raise."""

    def __init__(self, setup: _Setup, read: Callable[[int], None]) -> None:
        self._setup, self._read = setup, read
        self._store = _store(setup.store)
        self._decoder: Decoder = open_decoder(setup.decoder)

    def verify(self, task: _Task) -> ShardReport:
        report = ShardReport(row=task.row, part=task.part)
        counted = _Counted(self._read, num_parts=task.num_parts)
        with self._store.open(task.shard) as stream:
            counted.stream = stream
            verify_shard(
                cast("BinaryIO", counted),
                report,
                shard=task.shard,
                size=task.size,
                num_parts=task.num_parts,
                decoder=self._decoder,
                checks=self._setup.checks,
            )
        if task.part == 0 and task.index is not None and report.is_whole:
            self._check_index(task, report)
        return report

    def _check_index(self, task: _Task, report: ShardReport) -> None:
        assert task.index is not None
        name = index_name(task.shard)
        problem: str | None
        if self._store.size(name) is None:
            problem = "is not there"
        else:
            data = self._store.read(name)
            if (len(data), checksum(data)) != task.index:
                problem = (
                    f"has {len(data)} bytes, xxhash2 {checksum(data):016x}; the manifest says {task.index[0]}, "
                    f"{task.index[1]:016x}"
                )
            else:
                try:
                    problem = index_problem(ShardIndex.from_bytes(data, where=name), report)
                except DataError as exc:
                    problem = str(exc)
        if problem:
            text = f"its index '{name}' {problem}; {_INDEX_ADVICE}"
            report.findings.append(Finding("index", task.shard, "", "", text))


class _Counted:
    """A stream that tells of the bytes that were read: a part's share of them, so that they add up to the shard."""

    def __init__(self, told: Callable[[int], None], *, num_parts: int) -> None:
        self.stream: BinaryIO | None = None
        self._told, self._num_parts = told, num_parts

    def read(self, size: int) -> bytes:
        assert self.stream is not None
        piece = self.stream.read(size)
        self._told(len(piece) // self._num_parts)
        return piece


class _StopError(Exception):
    """Raised in a process that is no longer wanted."""


def _tasks(
    shards: ShardSet, sizes: Sequence[int], whole: _Whole, *, workers: int | None, is_dali: bool
) -> tuple[list[_Task], int]:
    """The tasks in order, and how many processes to do them in; 0: this one."""
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), 1 + sum(sizes) // _BYTES_A_WORKER)
    num_parts = -(-workers // len(shards.names))
    tasks = []
    for row, (shard, size) in enumerate(zip(shards.names, sizes, strict=True)):
        index = None
        if whole.manifest is not None and whole.rows is not None:
            at = int(whole.rows[row])
            index = int(whole.manifest.index_bytes[at]), int(whole.manifest.index_checksums[at])
        tasks += [
            _Task(row=row, shard=shard, size=size, part=part, num_parts=num_parts, index=index)
            for part in range(num_parts)
        ]
    # DALI writes to stderr, which is this process's to draw on: always in another.
    return tasks, workers if workers > 1 or is_dali else 0


def _run(work: tuple[list[_Task], int], setup: _Setup, drawn: Any) -> Iterator[ShardReport]:
    """Each task's report, in order."""
    tasks, workers = work
    if not workers:
        worker = _Worker(setup, drawn.update)
        for task in tasks:
            yield worker.verify(task)
        return
    context = multiprocessing.get_context("spawn")  # a fork would take the store's connections along
    done, stop = context.Value("Q", 0), context.Event()
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(setup, done, stop))
    with pool:
        try:
            # A few ahead of the one that is wanted, not all: what is done waits in memory.
            ahead: deque[tuple[_Task, Future[ShardReport]]] = deque()
            left = iter(tasks)
            for _ in tasks:
                while len(ahead) < 2 * workers and (coming := next(left, None)) is not None:
                    with _without_interrupts():  # which a process is started with, and keeps
                        ahead.append((coming, pool.submit(_verify, coming)))
                task, future = ahead.popleft()
                while not wait([future], timeout=_DRAW_EVERY_S).done:
                    drawn.update(done.value - drawn.n)
                try:
                    yield future.result()
                except BrokenProcessPool as exc:
                    raise PipesError(
                        f"a process died while it verified '{task.shard}' or one of the {len(ahead)} after it: no "
                        "memory left, or a photo that its decoder does not survive; run it with --workers 1 on "
                        "these shards, or with another --decoder"
                    ) from exc
                drawn.update(done.value - drawn.n)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C waits: it is for this process to answer, not for those that it starts meanwhile.

    They keep the mask. It does not keep this one from being interrupted: a thread of some library takes the signal, and
    Python answers it in the main thread, half-way through what a new process is told. So the handlers wait, too.
    """
    came: list[int] = []
    kept = {}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # None: of a host that is no Python, whose own it is.
                if (handler := signal.getsignal(number)) is not None:
                    kept[number] = handler
                    signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for caught in came:
            signal.raise_signal(caught)


_make_worker: Callable[[], _Worker] | None = None
_worker: _Worker | None = None


def _start(setup: _Setup, done: Any, stop: Any) -> None:
    """Set this process up; it ends with the one that started it."""
    global _make_worker

    def read(num_bytes: int) -> None:
        if stop.is_set():
            raise _StopError
        with done.get_lock():
            done.value += num_bytes

    if setup.decoder == "dali":
        # The libraries below it write a line for each broken photo: what is wrong is told in their place.
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Made with the first task: what it raises then is that task's error, and not the end of this process.
    _make_worker = functools.partial(_Worker, setup, read)


def _verify(task: _Task) -> ShardReport:
    global _worker
    assert _make_worker is not None
    _worker = _worker or _make_worker()
    return _worker.verify(task)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _describe(store: Store) -> tuple[str, ...]:
    """What another process opens the same store by."""
    if isinstance(store, AisStore):
        return "bucket", store.endpoint, store.bucket, store.provider
    assert isinstance(store, LocalStore)
    return "directory", str(store.directory)


def _store(described: tuple[str, ...]) -> Store:
    kind, *rest = described
    if kind == "bucket":
        endpoint, bucket, provider = rest
        return AisStore(endpoint, bucket, provider=provider)
    return LocalStore(Path(rest[0]))
