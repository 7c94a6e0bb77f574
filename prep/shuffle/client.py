"""Shards to shards in another order, by this machine alone: for clusters without dSort, and for local directories.

The input is read front to back and each sample is put, by one write, where the plan says that it stands in its output:
into files on local disk, for the plan knows the size of every output to the byte. A finished output is published whole,
read back, and compared with the plan. If the disk holds less than the output, this is done in rounds, the input read
once in each.

Memory holds the contents (`prep.shuffle.contents`; with what the plan takes some 400 bytes a sample) and, for each reader, one
sample and 1 MiB: never a shard.

What is there already is not written again: an output that holds, sample by sample, what the plan says stays. So a run
that was killed is finished by running it again.
"""

import contextlib
import errno
import fcntl
import gzip
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.tar_reader import ArchiveReader
from dali_pipes.progress import bar
from dali_pipes.store.base import ObjectEntry, Store
from dali_pipes.store.local import LocalStore
from prep.shuffle.contents import BLOCK, NUM_READERS, Contents, open_shard, read_samples, read_shard

__all__ = ["Output", "find_done", "write_outputs"]

_log = logging.getLogger(__name__)

# Of the free room of the spool's disk: others write there, too.
SPOOL_SHARE = 0.9
# gzip: level 6 takes four times as long as 1 on photos, and saves nothing.
GZIP_LEVEL = 1
_COPY_BYTES = 1 << 20

Int64s = npt.NDArray[np.int64]


class Output(NamedTuple):
    """A shard to be written: its name, and the positions of its samples in the contents of the input."""

    name: str
    positions: Int64s

    def num_bytes(self, contents: Contents) -> int:
        """Of the tar: its samples, and the two empty blocks at its end."""
        return int(contents.tar_bytes[self.positions].sum()) + 2 * BLOCK


def find_done(
    target: Store,
    contents: Contents,
    outputs: Sequence[Output],
    *,
    existing: Mapping[str, ObjectEntry],
    show_progress: bool = False,
) -> tuple[set[str], list[str]]:
    """The outputs that are there as planned, and those under whose names something else is.

    Sizes are compared first, so that a shard of another shuffle is not read.
    """
    there = [output for output in outputs if output.name in existing]

    def is_done(output: Output) -> bool:
        if _is_tar(output) and existing[output.name].size != output.num_bytes(contents):
            return False
        try:
            return _holds(target, output, contents)
        except DataError:
            return False

    with (
        bar(what="compare", total=len(there), unit="shards", shown=show_progress and bool(there)) as drawn,
        ThreadPoolExecutor(NUM_READERS) as readers,
    ):
        done: set[str] = set()
        for output, found in zip(there, readers.map(is_done, there), strict=True):
            drawn.update(1)
            if found:
                done.add(output.name)
    return done, [output.name for output in there if output.name not in done]


def write_outputs(
    source: Store,
    contents: Contents,
    outputs: Sequence[Output],
    *,
    target: Store,
    prefix: str,
    spool_dir: Path | None = None,
    spool_bytes: int | None = None,
    show_progress: bool = False,
) -> int:
    """Write the outputs, replacing what is under their names; each is read back and compared.

    Args:
        source: Where the input is.
        contents: Of the input.
        outputs: What to write.
        target: Where to.
        prefix: What the output is called as a whole, written or not: of two that write it at a time one is refused.
        spool_dir: Local disk for shards that are being put together; ``None``: beside the output in a directory, the
            temporary directory (``TMPDIR``) for a bucket.
        spool_bytes: At most so much of it; ``None``: nine tenths of what is free.
        show_progress: Draw bars.

    Returns:
        How often the input was read: the rounds.

    Raises:
        StoreError: If a disk does not hold the largest output, or a directory's disk all of them, another process
            writes the same ones, or reading or writing fails. Outputs that were published by then stay, whole.
        DataError: If the input changes meanwhile, or an output that was read back is not as planned.
    """
    if not outputs:
        return 0
    with _spool(target, prefix, spool_dir) as folder, _writing(folder):
        sizes = [output.num_bytes(contents) for output in outputs]
        _check_target(target, outputs, sizes)
        room = int(shutil.disk_usage(folder).free * SPOOL_SHARE) if spool_bytes is None else spool_bytes
        # A compressed output stands beside its tar until it is published.
        room -= max((n for output, n in zip(outputs, sizes, strict=True) if not _is_tar(output)), default=0)
        rounds = _rounds(sizes, room=room, where=folder)
        if len(rounds) > 1:
            _log.warning(
                "'%s' has room for %d MiB of %d MiB: the input is read %d times; name a larger disk with --spool-dir",
                folder, room >> 20, sum(sizes) >> 20, len(rounds),
            )  # fmt: skip
        for start, stop in rounds:
            _fill(source, contents, outputs[start:stop], folder=folder, show_progress=show_progress)
            with bar(what="publish", total=stop - start, unit="shards", shown=show_progress) as drawn:
                for number, output in enumerate(outputs[start:stop]):
                    _publish(target, output, folder / str(number))
                    if not _holds(target, output, contents):
                        raise DataError(
                            f"shard '{target.locate(output.name)}': what was written is not what is read back; "
                            "do not use it, and look at the store; the input is as it was"
                        )
                    drawn.update(1)
    return len(rounds)


def _is_tar(output: Output) -> bool:
    return output.name.endswith(".tar")


def _check_target(target: Store, outputs: Sequence[Output], sizes: Sequence[int]) -> None:
    """Refuse what a directory's disk does not hold: rounds spare the spool, not the place that all ends up in."""
    if not isinstance(target, LocalStore):
        return
    # How well photos are compressed nobody knows.
    there = [(n, target.size(output.name) or 0) for output, n in zip(outputs, sizes, strict=True) if _is_tar(output)]
    # It may be made only when the first is written.
    folder = next(path for path in (target.directory, *target.directory.parents) if path.exists())
    needed, free = sum(n - replaced for n, replaced in there), shutil.disk_usage(folder).free
    if needed > free:
        raise StoreError(
            f"'{target.directory}' has {free} bytes free, the output shards take {needed} more; make room, or name a "
            "place on another disk"
        )


def _rounds(sizes: Sequence[int], *, room: int, where: Path) -> list[tuple[int, int]]:
    """Runs ``[start, stop)`` of outputs that have room together."""
    if max(sizes) > room:
        raise StoreError(
            f"'{where}' has room for {max(room, 0)} bytes, the largest output shard takes {max(sizes)}; "
            "name another disk with --spool-dir, or take smaller shards"
        )
    rounds: list[tuple[int, int]] = []
    start = filled = 0
    for number, size in enumerate(sizes):
        if filled + size > room:
            rounds.append((start, number))
            start, filled = number, 0
        filled += size
    return [*rounds, (start, len(sizes))]


def _fill(source: Store, contents: Contents, outputs: Sequence[Output], *, folder: Path, show_progress: bool) -> None:
    """Put the samples of these outputs where they belong, in files called by the outputs' numbers."""
    output_of = np.full(contents.num_samples, -1, np.int64)
    places = np.zeros(contents.num_samples, np.int64)
    for number, output in enumerate(outputs):
        sizes = contents.tar_bytes[output.positions]
        output_of[output.positions] = number
        places[output.positions] = np.cumsum(sizes) - sizes
        with (folder / str(number)).open("wb") as file:
            file.truncate(output.num_bytes(contents))
    wanted = [
        row
        for row in range(len(contents.shards))
        if (output_of[contents.starts[row] : contents.starts[row + 1]] >= 0).any()
    ]

    def copy(row: int) -> None:
        name, start, stop = contents.shards[row], int(contents.starts[row]), int(contents.starts[row + 1])
        position = start
        with open_shard(source, name) as stream:
            archive = ArchiveReader(stream, shard=source.locate(name))
            for sample in read_samples(archive, with_pieces=True):
                # Before it is written: another sample may be of another size.
                if position >= stop or sample.tar_bytes != contents.tar_bytes[position]:
                    break
                if output_of[position] >= 0:
                    _write_at(folder / str(output_of[position]), sample.pieces or [], int(places[position]))
                position += 1
            else:
                if position == stop and archive.checksum == contents.checksums[row]:
                    return
        raise DataError(f"shard '{source.locate(name)}': changed while it was being read; start again")

    with (
        bar(what="shuffle", total=len(wanted), unit="shards", shown=show_progress) as drawn,
        ThreadPoolExecutor(NUM_READERS) as readers,
    ):
        try:
            for _ in readers.map(copy, wanted):
                drawn.update(1)
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise


def _write_at(path: Path, pieces: Sequence[bytes], offset: int) -> None:
    # Opened for each sample, in 10 us: there may be more outputs than a process may have open.
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        whole = sum(map(len, pieces))
        written = os.pwritev(descriptor, pieces, offset) if len(pieces) <= 1000 else 0
        if written < whole:
            rest = memoryview(b"".join(pieces))
            while written < whole:
                written += os.pwrite(descriptor, rest[written:], offset + written)
    finally:
        os.close(descriptor)


def _publish(target: Store, output: Output, path: Path) -> None:
    if not _is_tar(output):
        path = _compressed(path)
    if isinstance(target, LocalStore):
        # On its own disk: a rename, where an upload would copy.
        try:
            place = target.directory / output.name
            path.chmod(0o644)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.rename(place)
            return
        except OSError as exc:
            if exc.errno != errno.EXDEV:
                raise StoreError(f"cannot write '{target.locate(output.name)}': {exc.strerror or exc}") from exc
    target.upload(output.name, path)
    path.unlink()


def _compressed(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    # No name and no time inside: the same samples give the same bytes.
    with (
        path.open("rb") as plain,
        packed.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", compresslevel=GZIP_LEVEL, fileobj=file, mtime=0) as stream,
    ):
        shutil.copyfileobj(plain, stream, _COPY_BYTES)
    path.unlink()
    return packed


def _holds(target: Store, output: Output, contents: Contents) -> bool:
    """Whether a shard has exactly the planned samples, in order."""
    found = read_shard(target, output.name)
    return np.array_equal(found.rows, contents.rows[output.positions])


@contextlib.contextmanager
def _spool(target: Store, prefix: str, spool_dir: Path | None) -> Iterator[Path]:
    """A folder of this output alone, emptied of what a run that was killed left in it, and gone afterwards."""
    if spool_dir is None and isinstance(target, LocalStore):
        place = target.directory / prefix
        base, mark = place.parent, f".partial-{hashlib.blake2b(place.name.encode(), digest_size=6).hexdigest()}"
    else:
        digest = hashlib.blake2b(target.locate(prefix).encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
        base, mark = spool_dir or Path(tempfile.gettempdir()), f"dali-pipes-shuffle-{os.getuid()}-{digest}"
    folder = base / mark
    lock = None
    while lock is None:
        try:
            lock = _locked(folder)
        except BlockingIOError as exc:
            raise StoreError(
                f"another process is writing '{target.locate(prefix)}' from '{folder}'; wait for it"
            ) from exc
        except OSError as exc:
            raise StoreError(f"cannot write '{folder}': {exc.strerror or exc}; name another with --spool-dir") from exc
    try:
        _empty(folder)
        try:
            yield folder
        finally:
            _empty(folder)
            with contextlib.suppress(OSError):
                folder.rmdir()
    finally:
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """The descriptor of a folder that is made, and locked; ``None`` where whom it belonged to removed it meanwhile.

    A lock on what was removed would keep nobody out of the folder that the next process makes in its place.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise StoreError(f"'{folder}' is not a folder of this user; remove it, or name another with --spool-dir")
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), folder.lstat()):
                return lock
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StoreError(
            f"cannot write '{exc.filename or folder}': {exc.strerror or exc}; shards are put together there: "
            "name a disk with more room with --spool-dir"
        ) from exc


def describe(outputs: Sequence[Output], contents: Contents) -> list[dict[str, Any]]:
    """The plan, for people and machines: name, samples and bytes of each output."""
    return [
        {"name": output.name, "num_samples": len(output.positions), "num_bytes": output.num_bytes(contents)}
        for output in outputs
    ]
