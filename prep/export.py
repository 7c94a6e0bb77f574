"""Shards to TFRecord files: a ``tf.train.Example`` a sample, and the index of each file that DALI's reader wants.

What a record is made of is in the shard indexes, its bytes alone are in the shards: sizes of all files are known, and
every sample has been looked at, before anything is written. Each file is then one stream, made by a process of its own,
that appears whole or not at all. The same shards give the same files, byte for byte, so an export that was interrupted
is finished by running it again.

# Note [memory]: 8 bytes a sample; in a process 1 MiB, one record, and of its file's samples keys and places. A record
is held whole, for its checksum stands behind its data and its length before them.

Nothing of TensorFlow is needed; `prep.tfrecords` reads what is written here.
"""

import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prep.checksums import DEFAULT_CHECKSUM_TYPE
from prep.errors import DataError, StoreError, shown
from prep.index import find_manifest, listed_sizes
from prep.info import IndexedSet
from prep.manifest import LABEL_COMPONENT, ShardIndex, manifest_name
from prep.photos import PHOTO_FORMATS
from prep.progress import bar
from prep.shard_tasks import StreamTarget, digest_of, is_same, write_streamed
from prep.store import AisStore, LocalStore, ObjectEntry, Store
from prep.tar_stream import CHUNK_BYTES
from prep.tfrecords import MAX_RECORD_BYTES, masked_crc32c
from prep.transfer import BucketAccess, RemoteFile
from prep.urls import ShardSet, check_object_name
from prep.verify_shard import is_mask_name
from prep.workers import Report, Workers, default_jobs

__all__ = ["PHOTO_FEATURES", "ExportReport", "export_tfrecords", "record_index"]

ENCODED, FORMAT, HEIGHT, WIDTH = "image/encoded", "image/format", "image/height", "image/width"
LABEL, TEXT, KEY = "image/class/label", "image/class/text", "image/filename"
PHOTO_FEATURES = (ENCODED, FORMAT, HEIGHT, WIDTH, LABEL, TEXT, KEY)
"""What a record has beside the components that go under names of their own."""

# Kinds of a Feature's list, the field that holds it: bytes and integers.
_BYTES, _INTEGERS = 1, 3

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
# Length, its checksum, and that of the data.
FRAME_BYTES = _LENGTH.size + 2 * _CRC.size
# Below this, starting processes takes longer than writing: half a second and more, in which one writes as much.
MIN_SHARED_BYTES = 256 << 20
# Files are numbered by six digits.
MAX_FILES = 1_000_000

Int64s = npt.NDArray[np.int64]


class _Place(NamedTuple):
    """Where a value lies in its shard."""

    offset: int
    size: int


class _Feature(NamedTuple):
    name: str
    kind: int
    value: bytes | _Place
    """As it stands in the list: bytes, or a varint."""


class _Shard(NamedTuple):
    """A shard as a worker reads it, and those of its samples that go into one file."""

    file: Path | RemoteFile
    records: Sequence[Sequence[_Feature]]


class _Task(NamedTuple):
    """A file to be, for a worker."""

    name: str
    num_bytes: int
    shards: Sequence[_Shard]
    target: StreamTarget | None
    """Where to write it."""
    stored: "tuple[str, str] | Path | RemoteFile | None"
    """What to compare it with: type and checksum, or the file itself."""


@dataclass(frozen=True, kw_only=True)
class _File:
    """A file to be: the samples ``[start, stop)``, counted over all shards."""

    name: str
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What goes into a record."""

    photos: Sequence[str]
    """The photo is the first of these that a sample has."""
    features: Mapping[str, str] | None
    """Feature -> component; ``None``: each of the other components under its own name."""
    classes: Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export did."""

    url: str
    """``ais://pets-tf/samples-``: what all the names start with."""
    files: tuple[str, ...]
    """The TFRecord files, in order; the index of ``x.tfrecord`` is ``x.idx``."""
    num_written: int
    """Those that were not there already, byte for byte."""
    num_samples: int
    num_bytes: int
    """Of all the files, their indexes not counted."""
    index_bytes: int
    features: tuple[str, ...]
    """The names that features have, in at least one record, sorted."""
    elapsed_s: float


def export_tfrecords(
    shards: ShardSet,
    *,
    store: Store,
    prefix: str,
    photo: str | None = None,
    features: Mapping[str, str] | None = None,
    max_bytes: int | None = None,
    overwrite: bool = False,
    jobs: int | None = None,
    show_progress: bool = False,
) -> ExportReport:
    """Write ``PREFIX000000.tfrecord`` and, after it, ``PREFIX000000.idx``, ...; samples keep order and bytes.

    A record has ``image/encoded``, the photo; ``image/format`` (``JPEG``), ``image/height`` and ``image/width`` as its
    header has them; ``image/class/label``, where the sample has ``cls``, and ``image/class/text``, where the class has
    a name; ``image/filename``, the key; and the other components, as bytes.

    Args:
        shards: Indexed, in a bucket or a directory.
        store: Where to; a bucket that is not there is made.
        prefix: What the names start with.
        photo: The component that is the photo; ``"jpg;png"`` takes the first that a sample has. By default the first
            that is no mask, by the names of the photos in the data set.
        features: Feature -> component whose bytes it is, of a sample that has it. By default each component but the
            photo and ``cls`` under its own name, ``trimap.png``.
        max_bytes: Bytes a file at most; a record that is larger gets a file of its own. By default there is a file for
            each shard.
        overwrite: Replace other files under these names, and delete those beyond the last one.
        jobs: Files in flight, each written by a process; by default the cores, at most 16.
        show_progress: Draw a bar.

    Raises:
        DataError: If the shards are not indexed or have changed since, a sample has no photo, a component is not known,
            or a record would be larger than a protocol buffer can be. Nothing has been written then.
        StoreError: If there are other files under the prefix and ``overwrite`` is false, or reading or writing fails.
            Files that were complete by then stay, none is half there; running again finishes the export.
        ValueError: If an argument cannot be.
    """
    started = time.perf_counter()
    jobs = default_jobs() if jobs is None else jobs
    _check_arguments(prefix=prefix, features=features, max_bytes=max_bytes, jobs=jobs)
    if isinstance(store, AisStore):
        check_object_name(prefix, url=store.locate(prefix))
    source = _Source(shards, photo=photo, features=features)
    sizes, names = source.look()
    # One past the last sample of each shard.
    ends = np.cumsum(source.indexed.manifest.samples)
    planned = _plan(sizes, ends, prefix=prefix, max_bytes=max_bytes)
    target = _Target(store, prefix, overwrite=overwrite)
    with Workers(jobs) as workers:
        tasks = _Tasks(source, target, workers, ends, show_progress=show_progress)
        stale = target.check(planned)
        missing = tasks.missing(planned)
        if isinstance(store, AisStore) and not store.exists():
            store.create()
        tasks.write(missing)
    index_bytes = target.finish(planned, sizes, stale)
    return ExportReport(
        url=store.locate(prefix),
        files=tuple(file.name for file in planned),
        num_written=len(missing),
        num_samples=len(sizes),
        num_bytes=int(sizes.sum()),
        index_bytes=index_bytes,
        features=tuple(sorted(names)),
        elapsed_s=time.perf_counter() - started,
    )


def record_index(sizes: Sequence[int]) -> bytes:
    """The index of a TFRecord file, as DALI's ``tfrecord2idx`` makes it: a line a record, its first byte and its bytes.

    >>> record_index([100, 50])
    b'0 100\\n100 50\\n'
    """
    lines, offset = [], 0
    for size in sizes:
        lines.append(b"%d %d\n" % (offset, size))
        offset += size
    return b"".join(lines)


def _check_arguments(*, prefix: str, features: Mapping[str, str] | None, max_bytes: int | None, jobs: int) -> None:
    if not prefix or prefix.endswith("/") or prefix[-1].isdigit():
        raise ValueError(
            f"prefix must end in a name's start that is no digit, such as 'train/samples-', got '{prefix}'"
        )
    if taken := next((name for name in features or {} if name in PHOTO_FEATURES), None):
        raise ValueError(f"feature '{taken}' is written of each sample as it is; give component another name")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes must be positive, got {max_bytes}")
    if jobs < 1:
        raise ValueError(f"jobs must be positive, got {jobs}")


# What is read


class _Source:
    """Indexed shards, and what of their samples goes into records."""

    def __init__(self, shards: ShardSet, *, photo: str | None, features: Mapping[str, str] | None) -> None:
        if find_manifest(shards) is None:
            where = shards.store.locate(manifest_name(shards.prefix))
            raise DataError(f"no manifest '{where}': the shards are not indexed; dali-pipes prep index {shards.url}")
        self.shards = shards
        self.indexed = IndexedSet(shards)
        if not self.indexed.manifest.num_samples:
            raise DataError(f"'{shards.url}' holds no sample to export")
        self._check_sizes()
        manifest = self.indexed.manifest
        self._check_known((features or {}).items())
        if photo is None:
            known = {*manifest.photos}
            photos = [name for name in sorted(known) if not is_mask_name(name, known)]
            if not photos:
                raise DataError(
                    f"'{shards.url}': no component is a photo by its name (found: {_list(manifest.components)}); "
                    "name it: --photo COMPONENT"
                )
        else:
            photos = photo.split(";")
            self._check_known((ENCODED, name) for name in photos)
        self._wanted = _Wanted(photos=photos, features=features, classes=manifest.classes)

    def _check_sizes(self) -> None:
        manifest = self.indexed.manifest
        for name, size, expected in zip(
            manifest.names, listed_sizes(self.shards), manifest.shard_bytes.tolist(), strict=True
        ):
            if size != expected:
                raise DataError(
                    f"shard '{self.shards.store.locate(name)}' has {size} bytes, its manifest says {expected}: it was "
                    f"written anew; dali-pipes prep index {self.shards.url}"
                )

    def _check_known(self, features: Iterable[tuple[str, str]]) -> None:
        known = self.indexed.manifest.components
        for feature, component in features:
            if component not in known:
                raise DataError(
                    f"feature '{feature}': no component '{component}' in '{self.shards.url}' (found: {_list(known)})"
                )

    def look(self) -> tuple[Int64s, set[str]]:
        """Bytes of each sample's framed record, int64 [N], and the names of all features; every sample is looked at."""
        sizes = np.zeros(self.indexed.manifest.num_samples, np.int64)
        names: set[str] = set()
        number = 0
        for _, index in self.indexed.each():
            for row in range(index.num_samples):
                features = self.features(index, row)
                num_bytes = example_bytes(features)
                if num_bytes >= MAX_RECORD_BYTES:
                    raise DataError(
                        f"shard '{index.shard}', key '{index.keys[row]}': a record of {num_bytes} bytes, a protocol "
                        f"buffer has less than {MAX_RECORD_BYTES}; leave components out with --feature"
                    )
                sizes[number] = FRAME_BYTES + num_bytes
                names.update(feature.name for feature in features)
                number += 1
        return sizes, names

    def features(self, index: ShardIndex, row: int) -> list[_Feature]:
        """Those of one sample, by name in order.

        Raises:
            DataError: If it has no photo.
        """
        wanted = self._wanted
        there = {c: _Place(int(index.offsets[c][row]), int(index.sizes[c][row])) for c in index.offsets}
        there = {component: place for component, place in there.items() if place.offset >= 0}
        key = index.keys[row]
        photo = next((name for name in wanted.photos if name in there), None)
        if photo is None:
            raise DataError(
                f"shard '{index.shard}', key '{key}': no photo '{';'.join(wanted.photos)}' (found: {_list(there)}); "
                "pack it anew without the sample, or name the photo: --photo COMPONENT"
            )
        features = [
            _Feature(ENCODED, _BYTES, there[photo]),
            _Feature(KEY, _BYTES, key.encode()),
            *self._header_features(index, row, photo),
        ]
        if index.labels is not None and LABEL_COMPONENT in there:
            label = int(index.labels[row])
            features.append(_Feature(LABEL, _INTEGERS, _varint(label)))
            if label in wanted.classes:
                features.append(_Feature(TEXT, _BYTES, wanted.classes[label].encode()))
        if wanted.features is None:
            others = {name: name for name in there if name not in (photo, LABEL_COMPONENT)}
        else:
            others = {feature: name for feature, name in wanted.features.items() if name in there}
        features += [_Feature(feature, _BYTES, there[component]) for feature, component in others.items()]
        return sorted(features, key=lambda feature: feature.name)

    def _header_features(self, index: ShardIndex, row: int, photo: str) -> list[_Feature]:
        columns = index.photos.get(photo)
        code = 0 if columns is None else int(columns.format[row])
        name = PHOTO_FORMATS[code] if code else photo.rpartition(".")[2].upper()
        features = [_Feature(FORMAT, _BYTES, name.encode())]
        # 0: the header says nothing, and a record says nothing of it.
        if columns is not None and columns.height[row]:
            features.append(_Feature(HEIGHT, _INTEGERS, _varint(int(columns.height[row]))))
            features.append(_Feature(WIDTH, _INTEGERS, _varint(int(columns.width[row]))))
        return features

    def file(self, row: int) -> Path | RemoteFile:
        """A shard, as a worker reads it."""
        store, manifest = self.shards.store, self.indexed.manifest
        if isinstance(store, AisStore):
            return RemoteFile(self._access, manifest.names[row], int(manifest.shard_bytes[row]))
        return Path(store.locate(manifest.names[row]))

    @cached_property
    def _access(self) -> BucketAccess:
        assert isinstance(self.shards.store, AisStore), "asked for where shards are in a bucket"
        return self.shards.store.access()


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _plan(sizes: Int64s, ends: Int64s, *, prefix: str, max_bytes: int | None) -> list[_File]:
    """Which samples go into which file."""
    if max_bytes is None:
        # A shard without samples gives no file.
        starts = sorted({0, *ends[ends < len(sizes)].tolist()})
    else:
        starts, filled = [0], 0
        for number, size in enumerate(sizes.tolist()):
            if filled and filled + size > max_bytes:
                starts.append(number)
                filled = 0
            filled += size
    if len(starts) > MAX_FILES:
        raise ValueError(f"{len(starts)} files, names count to {MAX_FILES}; use a larger --max-bytes")
    stops = [*starts[1:], len(sizes)]
    return [
        _File(name=f"{prefix}{number:06d}.tfrecord", start=start, stop=stop, num_bytes=int(sizes[start:stop].sum()))
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


# Where it goes


class _Target:
    """The store, while it is written to."""

    def __init__(self, store: Store, prefix: str, *, overwrite: bool) -> None:
        self._store, self._prefix, self._overwrite = store, prefix, overwrite
        is_there = not isinstance(store, AisStore) or store.exists()
        self._existing: dict[str, ObjectEntry] = {e.name: e for e in store.list(prefix)} if is_there else {}

    def check(self, planned: Sequence[_File]) -> list[str]:
        """The files beyond the last one, to be deleted at the end.

        Raises:
            StoreError: If there are such, or files of another size in the place of ours, without ``overwrite``.
        """
        expected = {file.name: file.num_bytes for file in planned}
        known = {*expected, *map(_index_of, expected)}
        ours = re.compile(rf"{re.escape(self._prefix)}[0-9]+\.(tfrecord|idx)")
        stale = [name for name in self._existing if ours.fullmatch(name) and name not in known]
        others = [name for name, size in expected.items() if self.size(name) not in (None, size)]
        if (stale or others) and not self._overwrite:
            raise StoreError(
                f"'{self._store.locate(self._prefix)}' holds files of another export: {shown(others + stale)}; "
                "--overwrite replaces them, or export under another prefix"
            )
        return stale

    def refuse(self, names: Sequence[str]) -> None:
        """Files that have our sizes and are other ones."""
        if names and not self._overwrite:
            more = f", and {len(names) - 1} more are" if len(names) > 1 else ""
            raise StoreError(
                f"'{self._store.locate(names[0])}' is there with other content{more}; "
                "--overwrite replaces it, or export under another prefix"
            )

    def forget_index(self, name: str) -> None:
        """Delete the index of a file that is about to be replaced: it must not stand beside another."""
        if _index_of(name) in self._existing:
            self._store.delete(_index_of(name))
            del self._existing[_index_of(name)]

    def finish(self, planned: Sequence[_File], sizes: Int64s, stale: Sequence[str]) -> int:
        """Write the indexes that are not there; their bytes."""
        total = 0
        for file in planned:
            name, data = _index_of(file.name), record_index(sizes[file.start : file.stop].tolist())
            total += len(data)
            if self.size(name) != len(data) or self._store.read(name) != data:
                self._store.write(name, data)
        for name in stale:
            self._store.delete(name)
        return total

    def size(self, name: str) -> int | None:
        entry = self._existing.get(name)
        return None if entry is None else entry.size

    def access(self) -> "BucketAccess | LocalStore":
        """The store, as a worker has it."""
        assert isinstance(self._store, AisStore | LocalStore), "there are no other stores"
        return self._store.access() if isinstance(self._store, AisStore) else self._store

    def stored(self, name: str) -> "tuple[str, str] | Path | RemoteFile":
        """What is there, to compare with."""
        entry = self._existing[name]
        if isinstance(access := self.access(), BucketAccess):
            # Of a cloud's object the cluster may know what is no checksum of its bytes.
            kind = access.checksum_type if access.provider == "ais" else DEFAULT_CHECKSUM_TYPE
            if entry.checksum and len(entry.checksum) == len(digest_of((), kind)):
                return kind, entry.checksum
            return RemoteFile(access, entry.name, entry.size)
        return Path(self._store.locate(name))


class _Tasks:
    """Files to be, handed to workers."""

    def __init__(
        self, source: _Source, target: _Target, workers: Workers, ends: Int64s, *, show_progress: bool
    ) -> None:
        self._source, self._target, self._workers = source, target, workers
        self._ends, self._show_progress = ends, show_progress
        self._read: tuple[int, ShardIndex] | None = None

    def missing(self, files: Sequence[_File]) -> list[_File]:
        """Those that the store does not have, byte for byte."""
        suspects = [file for file in files if self._target.size(file.name) == file.num_bytes]
        made = (self._task(file, stored=self._target.stored(file.name)) for file in suspects)
        same = self._map(_is_stored, made, suspects, what="compare") if suspects else []
        there = {file.name for file, is_same in zip(suspects, same, strict=True) if is_same}
        self._target.refuse([file.name for file in suspects if file.name not in there])
        return [file for file in files if file.name not in there]

    def write(self, files: Sequence[_File]) -> None:
        if not files:
            return
        access = self._target.access()
        for file in files:
            self._target.forget_index(file.name)
        self._map(_write, (self._task(file, target=access) for file in files), files, what="export")

    def _map(
        self, function: Callable[[_Task, Report], bool], tasks: Iterable[_Task], files: Sequence[_File], *, what: str
    ) -> list[bool]:
        num_samples = sum(file.stop - file.start for file in files)
        is_small = len(files) == 1 or sum(file.num_bytes for file in files) < MIN_SHARED_BYTES
        with bar(what=what, total=num_samples, unit="samples", shown=self._show_progress) as drawn:
            return self._workers.map(function, tasks, inline=lambda _: is_small, on_progress=drawn.update)

    def _task(
        self,
        file: _File,
        *,
        target: StreamTarget | None = None,
        stored: "tuple[str, str] | Path | RemoteFile | None" = None,
    ) -> _Task:
        shards: list[_Shard] = []
        number = file.start
        while number < file.stop:
            row = int(np.searchsorted(self._ends, number, side="right"))
            index = self._index(row)
            first = int(self._ends[row]) - index.num_samples
            stop = min(file.stop, int(self._ends[row]))
            records = [self._source.features(index, sample - first) for sample in range(number, stop)]
            shards.append(_Shard(self._source.file(row), records))
            number = stop
        return _Task(file.name, file.num_bytes, shards, target, stored)

    def _index(self, row: int) -> ShardIndex:
        # Files follow each other through the shards, so the next one mostly begins in the shard of the last.
        if self._read is None or self._read[0] != row:
            self._read = row, self._source.indexed.read(row)
        return self._read[1]


def _index_of(name: str) -> str:
    return f"{name.removesuffix('.tfrecord')}.idx"


# In a worker


def _write(task: _Task, report: Report) -> bool:
    assert task.target is not None, "a task to write says where"
    return write_streamed(
        task.target, task.name, lambda on_sample: _stream(task, on_sample), num_bytes=task.num_bytes, report=report
    )


def _is_stored(task: _Task, report: Report) -> bool:
    """Whether what is stored has the file's bytes; they are made for that, and dropped."""
    assert task.stored is not None, "a task to compare says with what"
    return is_same(task.stored, _stream(task, lambda: report(1)))


def _stream(task: _Task, on_sample: Callable[[], None]) -> Iterator[memoryview]:
    """The file's bytes, in pieces of some 1 MiB, or of a record that is larger."""
    pieces: list[bytes] = []
    held = 0
    for shard in task.shards:
        with _Values(shard.file) as values:
            for features in shard.records:
                data = encode_example(features, values)
                length = _LENGTH.pack(len(data))
                pieces += (length, _CRC.pack(masked_crc32c(length)), data, _CRC.pack(masked_crc32c(data)))
                held += FRAME_BYTES + len(data)
                on_sample()
                if held >= CHUNK_BYTES:
                    yield memoryview(b"".join(pieces))
                    pieces, held = [], 0
    if held:
        yield memoryview(b"".join(pieces))


class _Values:
    """The bytes of a shard's components; a context manager."""

    def __init__(self, file: Path | RemoteFile) -> None:
        self._remote = file if isinstance(file, RemoteFile) else None
        self._where = file.url if isinstance(file, RemoteFile) else str(file)
        self._descriptor = -1
        if not isinstance(file, RemoteFile):
            try:
                self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as exc:
                raise StoreError(f"cannot read '{file}': {exc.strerror or exc}") from exc

    def __enter__(self) -> "_Values":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Can be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._remote is not None:
            self._remote.close()

    def read(self, place: _Place) -> bytes:
        buffer = bytearray(place.size)
        view, filled = memoryview(buffer), 0
        while filled < place.size:
            num = self._read_into(view[filled:], place.offset + filled)
            if not num:
                raise DataError(
                    f"'{self._where}' ends at byte {place.offset + filled}: it was cut while it was exported; index it "
                    "anew: dali-pipes prep index URL"
                )
            filled += num
        return bytes(buffer)

    def _read_into(self, view: memoryview, offset: int) -> int:
        if self._remote is not None:
            return self._remote.read_into(view, offset=offset)
        try:
            return os.preadv(self._descriptor, [view], offset)
        except OSError as exc:
            raise StoreError(f"cannot read '{self._where}': {exc.strerror or exc}") from exc


# Example {1: Features {1, a map: {1: name, 2: Feature {kind: list {1: value}}}}}, as in `prep.tf_example`.


def example_bytes(features: Sequence[_Feature]) -> int:
    """Bytes of `encode_example`, without reading any."""
    return _field_bytes(sum(_field_bytes(_entry_bytes(feature)) for feature in features))


def encode_example(features: Sequence[_Feature], values: _Values) -> bytes:
    """A ``tf.train.Example``; what lies in the shard is read in the order in which it lies there."""
    places = sorted({feature.value for feature in features if isinstance(feature.value, _Place)})
    read = {place: values.read(place) for place in places}
    pieces = [b""]
    num_bytes = 0
    for feature in features:
        value = read[feature.value] if isinstance(feature.value, _Place) else feature.value
        name = feature.name.encode()
        listed = _field_bytes(len(value))
        held = _field_bytes(listed)
        entry = _entry_bytes(feature)
        pieces += (
            _tag(1, entry), _tag(1, len(name)), name, _tag(2, held), _tag(feature.kind, listed),
            _tag(1, len(value)), value,
        )  # fmt: skip
        num_bytes += _field_bytes(entry)
    pieces[0] = _tag(1, num_bytes)
    return b"".join(pieces)


def _entry_bytes(feature: _Feature) -> int:
    """Of a feature's entry in the map, without its own tag and length."""
    size = feature.value.size if isinstance(feature.value, _Place) else len(feature.value)
    return _field_bytes(len(feature.name.encode())) + _field_bytes(_field_bytes(_field_bytes(size)))


def _field_bytes(size: int) -> int:
    """A field of so many bytes: its tag, of one byte for numbers below 16, its length, and they."""
    return 1 + max(1, -(-size.bit_length() // 7)) + size


def _tag(number: int, size: int) -> bytes:
    """What stands before a field of bytes."""
    return bytes((number << 3 | 2,)) + _varint(size)


def _varint(value: int) -> bytes:
    """A number, seven bits a byte, the lowest first; negative ones as the 64 bits that they are.

    >>> _varint(300)
    b'\\xac\\x02'
    """
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
