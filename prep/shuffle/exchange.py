"""Shuffle by an exchange: each output shard is put together, from ranges of the input, by the worker that writes it.

The plan says which samples an output takes, and the contents say which bytes of which input shard each of them is. A
worker reads these ranges, several at a time, and streams the output to its store; then it reads the output back and
compares it. Nothing is kept on a disk, except compressed shards of the input, whose ranges cannot be read: they are
unpacked into a temporary folder. Outputs are independent of each other: they are tasks of `prep.workers`, and the bytes
do not depend on who does them.

# Note [memory]: a worker holds two *sections* of its output, the one that it writes and the one that it reads, and
1 MiB of the stream. Sections have at most `SECTION_BYTES`, so the size of a shard does not matter. A sample that is
larger than a section is read twice: once for its headers and digest, once to be copied in pieces.

# Note [ranges]: samples of a section that lie near each other in an input are read by one request. The gap between them
is at most as large as the next sample, so at most twice the bytes that are needed are read and held.
"""

import contextlib
import copy
import io
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, cast

import numpy as np

from dali_pipes.arrays import Int64s, UInt64s
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.tar_reader import BLOCK, ArchiveReader
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from dali_pipes.store.checksums import DEFAULT_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.http.objects import ObjectFile
from dali_pipes.store.local import LocalStore
from dali_pipes.store.patience import PatientThreads
from dali_pipes.store.shard_names import ObjectEntry
from prep.pack.target import StreamTarget, StreamTask, digest_of, is_stored, read_stored, write_file
from prep.shuffle.contents import component_state, key_digest, open_shard
from prep.shuffle.plan import PlannedShard, ShufflePlan
from prep.tar.writer import CHUNK_BYTES, Entry, Files, Part, Range, stream_tar
from prep.workers import Report, Workers

SECTION_BYTES = 16 << 20
"""The most bytes of samples that are read together; a larger sample is a section of its own."""
# A cluster redirects each request, so a range takes two round trips: at 20 ms, 32 ranges of 100 KiB at a time are
# 80 MB/s. More would wait for Python's lock.
NUM_IN_FLIGHT = 32
# Longer requests would leave the others of a section waiting for the longest.
MAX_REQUEST_BYTES = 4 << 20
# A request costs a client as much time as the transfer of some 64 KiB.
MAX_GAP_BYTES = 64 << 10
# gzip: level 6 takes four times as long as 1 on photos, and saves nothing.
_GZIP_LEVEL = 1

_CHANGED = "the shard changed since it was indexed or read; if it is indexed, index it again; then start again"
_END = bytes(2 * BLOCK)


class _Run(NamedTuple):
    """A request: bytes ``[start, stop)`` of an input, and the samples of a section that lie in it."""

    shard: int
    start: int
    stop: int
    samples: list[int]


@dataclass(frozen=True, kw_only=True)
class ExchangeTask(StreamTask):
    """An output shard, and where its samples are; pickles, for a worker."""

    tar_bytes: int
    """Bytes of the tar. It is ``num_bytes`` too, unless the output is compressed: that length is not known before."""
    source: Store
    output: Store
    """The store of the output: an object there is compared with the task, or written by it."""
    url: str
    """The URL of the input's store, for errors."""
    shards: tuple[str, ...]
    """The input shards that the output takes samples of."""
    rows: Int64s
    """int64 [sample], the input shard of each sample, as a row of ``shards``."""
    starts: Int64s
    """int64 [sample], the first byte of each sample in its input shard; files that belong to no sample may be there."""
    stops: Int64s
    """int64 [sample], the byte after its last one."""
    digests: UInt64s
    """uint64 [sample, (key, content)], as `Contents.digests` has them."""
    has_digests: bool
    """Whether the digests of contents are known."""

    @property
    def is_tar(self) -> bool:
        """Whether the output is not compressed."""
        return self.name.endswith(".tar")

    def stream(self, on_sample: Callable[[], None]) -> Iterator[memoryview]:
        tar = stream_tar(self._entries(), shard=self.name, num_bytes=self.tar_bytes, on_sample=on_sample)
        return tar if self.is_tar else _compressed(tar)

    def _entries(self) -> Iterator[Entry]:
        """The samples as they are written; the requests for the next section are sent before this one is written."""
        own = threading.local()  # each thread has connections of its own
        with PatientThreads(NUM_IN_FLIGHT) as threads:
            ahead: tuple[range, list[tuple[_Run, Future[memoryview]]]] | None = None
            for samples in [*sections(self.starts, self.stops), None]:
                coming = None
                if samples is not None:
                    is_large = self.stops[samples[0]] - self.starts[samples[0]] > SECTION_BYTES
                    needed = [] if is_large else runs(samples, self.rows, self.starts, self.stops)
                    coming = samples, [(run, threads.submit(self._read, run, own)) for run in needed]
                if ahead is not None:
                    found: dict[int, memoryview] = {}
                    for run, future in ahead[1]:
                        view = future.result()
                        for sample in run.samples:
                            found[sample] = view[self.starts[sample] - run.start : self.stops[sample] - run.start]
                    for sample in ahead[0]:
                        data = found.pop(sample, None)
                        yield (
                            self._large(sample)
                            if data is None
                            else self._entry(sample, io.BytesIO(b"".join((data, _END))))
                        )
                ahead = coming

    def _read(self, run: _Run, own: threading.local) -> memoryview:
        """The bytes of a run, in a thread."""
        if not hasattr(own, "access"):
            own.access = copy.copy(self.source)
        files = Files()
        try:
            # As a file that ends with the range, it is asked for these bytes alone.
            file = own.access.file(self.shards[run.shard], size=run.stop)
            return memoryview(files.read(files.open(Range(file, run.start, run.stop - run.start))))
        finally:
            files.close()

    def _large(self, sample: int) -> Entry:
        """Return a sample that is larger than a section. Its components are copied when they are written."""
        start, stop = int(self.starts[sample]), int(self.stops[sample])
        file = self.source.file(self.shards[self.rows[sample]], size=stop)
        with contextlib.closing(_RangeStream(Range(file, start, stop - start))) as stream:
            return self._entry(sample, cast("BinaryIO", stream), file)

    def _entry(self, sample: int, stream: BinaryIO, file: Path | ObjectFile | None = None) -> Entry:
        """Return a sample as it is written: with the bytes of its components, or with their ranges in ``file``.

        Raises:
            DataError: If it is not the planned sample.
        """
        where = f"shard '{self.url}/{self.shards[self.rows[sample]]}', bytes {self.starts[sample]} to "
        where += f"{self.stops[sample]}"
        key, content = "", 0
        parts: list[tuple[str, Part]] = []
        try:
            for member in ArchiveReader(stream, shard=where):
                if parts and member.key != key:
                    raise DataError(f"{where}: holds samples '{key}' and '{member.key}'")
                key = member.key
                state = component_state(member.component)
                part: Part
                if file is None:
                    state.update(part := member.read())
                else:
                    part = Range(file, int(self.starts[sample]) + member.offset, member.size)
                    for piece in member.pieces():
                        state.update(piece)
                parts.append((member.name.removeprefix(f"{key}."), part))
                content = (content + state.intdigest()) % 2**64
        except DataError as exc:
            raise DataError(f"{exc}; {_CHANGED}") from exc
        expected = self.digests[sample]
        if key_digest(key) != expected[0] or (self.has_digests and content != expected[1]):
            raise DataError(f"{where}: expected another sample than '{key}', which is there; {_CHANGED}")
        return key, parts


class _RangeStream:
    """A stream of the bytes of a range, followed by the end of a tar archive."""

    def __init__(self, of: Range) -> None:
        self._files, self._rest = Files(), _END
        self._num_bytes = self._files.open(of)

    def close(self) -> None:
        self._files.close()

    def read(self, size: int) -> bytes:
        if not self._num_bytes:
            rest, self._rest = self._rest, b""
            return rest
        view = memoryview(bytearray(min(size, self._num_bytes, CHUNK_BYTES)))
        num = self._files.read_into(view)
        self._num_bytes -= num
        return bytes(view[:num])


def sections(starts: Int64s, stops: Int64s) -> Iterator[range]:
    """Cut the samples of an output into sections of at most `SECTION_BYTES`; a larger sample has one of its own.

    >>> [list(samples) for samples in sections(np.array([0, 0, 0]), np.array([9 << 20, 9 << 20, 20 << 20]))]
    [[0], [1], [2]]
    """
    first = filled = 0
    for sample, size in enumerate((stops - starts).tolist()):
        if sample > first and filled + size > SECTION_BYTES:
            yield range(first, sample)
            first, filled = sample, 0
        filled += size
    if first < len(starts):
        yield range(first, len(starts))


def runs(samples: Sequence[int], rows: Int64s, starts: Int64s, stops: Int64s) -> list[_Run]:
    """The requests that read these samples: see Note [ranges].

    >>> at = np.array([0, 512, 8192]), np.array([512, 2048, 9216])
    >>> [(run.start, run.stop, run.samples) for run in runs([0, 1, 2], np.zeros(3, np.int64), *at)]
    [(0, 2048, [0, 1]), (8192, 9216, [2])]
    """
    found: list[_Run] = []
    for sample in sorted(samples, key=lambda at: (rows[at], starts[at])):
        row, start, stop = int(rows[sample]), int(starts[sample]), int(stops[sample])
        if found and found[-1].shard == row:
            last = found[-1]
            is_near = start - last.stop <= min(MAX_GAP_BYTES, stop - start)
            if is_near and stop - last.start <= MAX_REQUEST_BYTES:
                found[-1] = last._replace(stop=max(last.stop, stop), samples=[*last.samples, sample])
                continue
        found.append(_Run(row, start, stop, [sample]))
    return found


def _compressed(tar: Iterable[memoryview]) -> Iterator[memoryview]:
    """The tar in gzip's format, without a name and a time: the same samples give the same bytes."""
    packer = zlib.compressobj(_GZIP_LEVEL, wbits=16 + zlib.MAX_WBITS)
    for chunk in tar:
        yield memoryview(packer.compress(chunk))
    yield memoryview(packer.flush())


class Exchange:
    """Makes the tasks of a plan, and runs them by workers. A context manager."""

    def __init__(self, plan: ShufflePlan, workers: Workers) -> None:
        self.plan, self._workers = plan, workers
        self._folder = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.close()

    def find_done(self, existing: Mapping[str, ObjectEntry]) -> set[str]:
        """The names of the outputs that exist byte for byte as planned."""
        tasks = []
        for output in self.plan.own_outputs:
            if output.name not in existing:
                continue
            task, entry = self._task(output), existing[output.name]
            if not task.is_tar or entry.size == task.num_bytes:
                stored = task.output.known_checksum(entry) or task.output.file(entry.name, size=entry.size)
                tasks.append(replace(task, stored=stored))
        same = self._run(is_stored, tasks, total=sum(len(task.rows) for task in tasks), what="compare")
        return {task.name for task, is_same in zip(tasks, same, strict=True) if is_same}

    def write(self, outputs: Sequence[PlannedShard]) -> None:
        """Write these outputs of the plan, replacing objects of the same names; each is read back and compared.

        Raises:
            StoreError: If a store fails. Outputs that are written stay, and are complete.
            DataError: If the input changed, or an output that is read back is not as it was written.
            PipesError: If a worker process died.
        """
        # Tasks are made one by one, when a worker is free: all of them together would need about 50 bytes a sample.
        total = sum(len(output.positions) for output in outputs)
        self._run(write_and_compare, map(self._task, outputs), total=total, what="shuffle")

    def _run(
        self, function: Callable[[ExchangeTask, Report], bool], tasks: Iterable[ExchangeTask], *, total: int, what: str
    ) -> list[bool]:
        request = self.plan.request
        with bar(what=what, total=total, unit="samples", shown=request.show_progress) as drawn:
            return list(
                self._workers.map(
                    function,
                    tasks,
                    on_progress=drawn.update,
                    name=lambda task: f"shard '{request.output_store.locate(task.name)}'",
                )
            )

    @cached_property
    def _accesses(self) -> tuple[Store, Store]:
        """Of input and output, which exist by the first task."""
        request = self.plan.request
        source = request.shards.store if request.input_extension == ".tar" else self._unpack()
        return source.access(), request.output_store.access()

    def _unpack(self) -> LocalStore:
        """Unpack the input into a temporary folder, under the same names."""
        shards = self.plan.request.shards
        store = LocalStore(Path(self._folder.enter_context(tempfile.TemporaryDirectory(prefix="dali-pipes-shuffle-"))))
        for name in shards.names:
            path = store.directory / name
            with open_shard(shards.store, name) as stream:
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as file:
                        shutil.copyfileobj(stream, file, CHUNK_BYTES)
                except OSError as exc:
                    raise StoreError(
                        f"cannot unpack '{shards.store.locate(name)}' into '{store.directory}': {exc.strerror or exc}; "
                        "set TMPDIR to a disk with more free space"
                    ) from exc
        return store

    def _task(self, output: PlannedShard) -> ExchangeTask:
        contents, positions = self.plan.contents, output.positions
        source, target = self._accesses
        of_input, ends = contents.shards_of(positions), contents.samples["end"]
        used, rows = np.unique(of_input, return_inverse=True)
        num_bytes = output.num_bytes(contents)
        return ExchangeTask(
            name=output.name,
            num_bytes=num_bytes,
            tar_bytes=num_bytes,
            source=source,
            output=target,
            url=self.plan.request.shards.store.url,
            shards=tuple(contents.shards[row] for row in used.tolist()),
            rows=rows.ravel(),
            # A sample begins where the one before it ends, or at its shard's first byte.
            starts=np.where(contents.starts[of_input] == positions, 0, ends[positions - 1]),
            stops=ends[positions],
            digests=contents.digests[positions],
            has_digests=contents.has_digests,
        )


def write_and_compare(task: ExchangeTask, report: Report) -> bool:
    """Write an output, read it back and compare it; returns ``True``."""
    if not task.is_tar:
        # A store is told the length first, so a compressed output is made twice.
        task = replace(task, num_bytes=sum(len(chunk) for chunk in task.stream(lambda: None)))
    target = _Digesting(task.output)
    write_file(replace(task, target=target), report)
    if digest_of(read_stored(task.output.file(task.name, size=task.num_bytes))) != target.digest:
        raise DataError(
            f"shard '{task.name}' was read back with other bytes than were written; do not use it, and check the "
            "store; the input is unchanged"
        )
    return True


class _Digesting:
    """A target that computes the digest of what is written to it."""

    def __init__(self, target: StreamTarget) -> None:
        self._target = target
        self.digest = ""

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        def digested() -> Iterator[memoryview]:
            state = new_checksum(DEFAULT_CHECKSUM_TYPE)
            for chunk in chunks():
                state.update(chunk)
                yield chunk
            self.digest = state.hexdigest()

        self._target.write_stream(name, digested, num_bytes=num_bytes)
