"""Shuffle on this machine alone: for clusters without dSort, and for local directories.

The input is read front to back. The plan knows the size of every output to the byte, so each sample is written, by one
write, to its place in its output: a file on local disk (`prep.spool`). A finished output is published whole,
read back, and compared with the plan. If the disk is smaller than the output, the work is done in rounds, and each
round reads the input once.

Memory holds the contents (`prep.shuffle.contents`; with the plan about 400 bytes for each sample), and one sample and
1 MiB for each reader. It never holds a shard.

An output that exists and holds exactly the planned samples is not written again. So a run that was killed is finished
by running it again.
"""

import contextlib
import gzip
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.tar_reader import BLOCK, READ_BYTES, ArchiveReader
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from dali_pipes.store.entries import ObjectEntry
from prep.shuffle.contents import NUM_READERS, Contents, Int64s, open_shard, read_shard
from prep.spool import open_spool
from prep.tar.writer import member_header
from prep.threads import in_threads

_log = logging.getLogger(__name__)

# Share of the free space on the spool's disk that is used: other programs write there, too.
SPOOL_SHARE = 0.9
# gzip: level 6 takes four times as long as 1 on photos, and saves nothing.
GZIP_LEVEL = 1
_COPY_BYTES = 1 << 20


class PlannedShard(NamedTuple):
    """An output shard: its name, and the positions of its samples in the contents of the input."""

    name: str
    positions: Int64s

    def num_bytes(self, contents: Contents) -> int:
        """Bytes of the tar: the samples, and the two empty blocks at the end."""
        return int(contents.tar_bytes[self.positions].sum()) + 2 * BLOCK

    @property
    def is_tar(self) -> bool:
        """Whether the shard is not compressed."""
        return self.name.endswith(".tar")


def find_done(
    target: Store,
    contents: Contents,
    outputs: Sequence[PlannedShard],
    *,
    existing: Mapping[str, ObjectEntry],
    show_progress: bool = False,
) -> tuple[set[str], list[str]]:
    """Find the outputs that exist as planned, and the outputs whose names other shards have.

    Sizes are compared first, so that shards of another shuffle are not read.
    """
    there = [output for output in outputs if output.name in existing]

    def is_done(output: PlannedShard) -> bool:
        if output.is_tar and existing[output.name].size != output.num_bytes(contents):
            return False
        try:
            return _holds(target, output, contents)
        except DataError:
            return False

    done: set[str] = set()
    with bar(what="compare", total=len(there), unit="shards", shown=show_progress and bool(there)) as drawn:
        for output, is_there in zip(there, in_threads(is_done, there, NUM_READERS), strict=True):
            drawn.update(1)
            if is_there:
                done.add(output.name)
    return done, [output.name for output in there if output.name not in done]


def write_outputs(
    source: Store,
    contents: Contents,
    outputs: Sequence[PlannedShard],
    *,
    target: Store,
    prefix: str,
    spool_dir: Path | None = None,
    spool_bytes: int | None = None,
    before_writing: Callable[[], object] = lambda: None,
    show_progress: bool = False,
) -> int:
    """Write the outputs, replacing objects of the same names; read each output back and compare it.

    Args:
        source: The store of the input.
        contents: The contents of the input.
        outputs: The shards to write.
        target: The store of the output.
        prefix: Identifies the output: only one process at a time may write it.
        spool_dir: Local disk on which shards are put together. ``None``: for a directory, beside the output; for a
            bucket, the temporary directory (``TMPDIR``).
        spool_bytes: The most bytes to use there; ``None``: nine tenths of the free space.
        before_writing: Called when nothing more can be refused, before the first output is written.
        show_progress: Draw bars.

    Returns:
        The number of rounds: how often the input was read.

    Raises:
        StoreError: If the spool's disk cannot hold the largest output, or a directory's disk all of them; if another
            process writes the same outputs; or if reading or writing fails. Published outputs stay, and are complete.
        DataError: If the input changes meanwhile, or an output that is read back is not as planned.
    """
    if not outputs:
        return 0
    with open_spool(target, prefix, spool_dir) as folder:
        sizes = [output.num_bytes(contents) for output in outputs]
        _check_target(target, outputs, sizes)
        space = int(shutil.disk_usage(folder).free * SPOOL_SHARE) if spool_bytes is None else spool_bytes
        # Until it is published, a compressed output needs space beside its tar.
        space -= max((size for output, size in zip(outputs, sizes, strict=True) if not output.is_tar), default=0)
        rounds = _rounds(sizes, space=space, where=folder)
        if len(rounds) > 1:
            _log.warning(
                "'%s' has space for %d MiB of %d MiB: the input is read %d times; name a larger disk with --spool-dir",
                folder, space >> 20, sum(sizes) >> 20, len(rounds),
            )  # fmt: skip
        before_writing()
        for start, stop in rounds:
            _fill(source, contents, outputs[start:stop], folder=folder, show_progress=show_progress)
            with bar(what="publish", total=stop - start, unit="shards", shown=show_progress) as drawn:
                for number, output in enumerate(outputs[start:stop]):
                    _publish(target, output, folder / str(number))
                    if not _holds(target, output, contents):
                        raise DataError(
                            f"shard '{target.locate(output.name)}' was read back with other contents than were "
                            "written; do not use it, and check the store; the input is unchanged"
                        )
                    drawn.update(1)
    return len(rounds)


def _check_target(target: Store, outputs: Sequence[PlannedShard], sizes: Sequence[int]) -> None:
    """Refuse an output that a directory's disk cannot hold: rounds save space only in the spool."""
    if target.directory is None:
        return
    # Compressed outputs are not counted: their size is not known.
    needed = sum(
        size - (target.size(output.name) or 0) for output, size in zip(outputs, sizes, strict=True) if output.is_tar
    )
    # The directory may not exist until the first shard is written.
    folder = next(path for path in (target.directory, *target.directory.parents) if path.exists())
    if needed > (free := shutil.disk_usage(folder).free):
        raise StoreError(
            f"'{target.directory}' has {free} bytes free, the output shards take {needed} more; free some space, or "
            "name a place on another disk"
        )


def _rounds(sizes: Sequence[int], *, space: int, where: Path) -> list[tuple[int, int]]:
    """Ranges ``[start, stop)`` of outputs that fit on the disk together."""
    if max(sizes) > space:
        raise StoreError(
            f"'{where}' has space for {max(space, 0)} bytes, the largest output shard takes {max(sizes)}; "
            "name another disk with --spool-dir, or take smaller shards"
        )
    rounds: list[tuple[int, int]] = []
    start = filled = 0
    for number, size in enumerate(sizes):
        if filled + size > space:
            rounds.append((start, number))
            start, filled = number, 0
        filled += size
    return [*rounds, (start, len(sizes))]


def _fill(
    source: Store, contents: Contents, outputs: Sequence[PlannedShard], *, folder: Path, show_progress: bool
) -> None:
    """Write the samples of these outputs to their places, in files that are named by the outputs' numbers."""
    output_of = np.full(contents.num_samples, -1, np.int64)
    places = np.zeros(contents.num_samples, np.int64)
    for number, output in enumerate(outputs):
        sizes = contents.tar_bytes[output.positions]
        output_of[output.positions] = number
        places[output.positions] = np.cumsum(sizes) - sizes
        with (folder / str(number)).open("wb") as file:
            file.truncate(output.num_bytes(contents))
    starts = contents.starts
    wanted = [row for row in range(len(contents.shards)) if (output_of[starts[row] : starts[row + 1]] >= 0).any()]

    def copy(row: int) -> None:
        name, position, stop = contents.shards[row], int(starts[row]) - 1, int(starts[row + 1])
        changed = DataError(f"shard '{source.locate(name)}': changed while it was being read; start again")
        key: str | None = None
        left = 0  # bytes of the sample's place that are not filled yet
        with open_shard(source, name) as stream, contextlib.ExitStack() as writing:
            archive = ArchiveReader(stream, shard=source.locate(name))
            for member in archive:
                if member.key != key:
                    position += 1
                    if left or position >= stop:
                        raise changed
                    key, left = member.key, int(contents.tar_bytes[position])
                    writing.close()
                    path = folder / str(output_of[position])
                    out = writing.enter_context(_SampleWriter(path, int(places[position])))
                header = member_header(member.name, member.size)
                left -= len(header) + member.size + -member.size % BLOCK
                if left < 0:  # checked before it is written: another sample's place begins there
                    raise changed
                if output_of[position] >= 0:
                    for piece in itertools.chain([header], member.pieces(), [bytes(-member.size % BLOCK)]):
                        out.add(piece)
            if left or position != stop - 1 or archive.checksum != contents.checksums[row]:
                raise changed

    with bar(what="shuffle", total=len(wanted), unit="shards", shown=show_progress) as drawn:
        for _ in in_threads(copy, wanted, NUM_READERS):
            drawn.update(1)


class _SampleWriter:
    """Writes the pieces of a sample to its place in a file; it holds at most 2 MiB. A context manager."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path, self._offset = path, offset
        self._pieces: list[bytes] = []
        self._held = 0

    def __enter__(self) -> "_SampleWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._flush()

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._held += len(piece)
        if self._held >= READ_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        rest = memoryview(b"".join(self._pieces))
        self._pieces, self._held = [], 0
        # Opened for each sample, in 10 us: there may be more outputs than a process may have open.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            while rest:
                written = os.pwrite(descriptor, rest, self._offset)
                self._offset, rest = self._offset + written, rest[written:]
        finally:
            os.close(descriptor)


def _publish(target: Store, output: PlannedShard, path: Path) -> None:
    if not output.is_tar:
        plain_path, path = path, path.with_name(f"{path.name}.gz")
        # The file holds neither name nor time, so the same samples give the same bytes.
        with (
            plain_path.open("rb") as plain,
            path.open("wb") as file,
            gzip.GzipFile(filename="", mode="wb", compresslevel=GZIP_LEVEL, fileobj=file, mtime=0) as stream,
        ):
            shutil.copyfileobj(plain, stream, _COPY_BYTES)
        plain_path.unlink()
    target.move_in(output.name, path)


def _holds(target: Store, output: PlannedShard, contents: Contents) -> bool:
    """Whether a shard holds exactly the planned samples, in order."""
    return np.array_equal(read_shard(target, output.name).rows, contents.rows[output.positions])
