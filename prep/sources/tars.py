"""Tars to records: where their members lie, for shards of another size; order, names and bytes stay.

Each tar is read once to find its members, and once more when they are packed; of one in a bucket, the members of a new
shard are one range or two, read front to back. A compressed one is unpacked on the way, from its start for each shard
that takes from it: for shards of its own size two or three times in all, for ten times smaller ones six or seven.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.formats.tar_reader import ArchiveReader
from dali_pipes.progress import bar
from dali_pipes.store.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import extension_of
from dali_pipes.store.transfer import RemoteFile
from dali_pipes.store.urls import ShardSet
from prep.sources.record import Record, Source
from prep.tar.gzipped import ReadStream, UnpackedFile
from prep.tar.writer import Range
from prep.workers import Report, Workers, default_jobs

__all__ = ["tars"]

HEAD_BYTES = 64
# Below so many tars, starting processes may take longer than reading; from here on it hardly matters.
MIN_SHARED_TARS = 3


File = Path | RemoteFile | UnpackedFile


class _Member(NamedTuple):
    key: str
    component: str
    offset: int
    size: int
    head: bytes
    """Of a photo; nobody looks at another's."""


def tars(shards: ShardSet, *, jobs: int | None = None, show_progress: bool = False) -> Source:
    """The samples of tars, in their order; a sample is the members that stand together and share a key.

    Members keep bytes and order, components are lower-cased as WebDataset does. What belongs to no sample, a
    directory, a link or a name without a dot, is left out. The class table beside the tars goes along.

    Args:
        shards: In a bucket or a directory; ``.tar``, ``.tgz`` or ``.tar.gz``.
        jobs: Tars read at a time, each by a process; by default the cores, at most 16.
        show_progress: Draw a bar.

    Raises:
        DataError: If one is no tar, or no gzip file, or was cut off, holds no sample, or a sample has two members of
            one component.
        StoreError: If one cannot be read.
    """
    store = shards.store
    stored: Sequence[Path | RemoteFile]
    if isinstance(store, AisStore):
        access = store.access()
        sizes = {entry.name: entry.size for entry in store.list(shards.prefix)}
        if missing := next((name for name in shards.names if name not in sizes), None):
            raise StoreError(f"no object '{store.locate(missing)}' at {store.endpoint}")
        stored = [RemoteFile(access, name, sizes[name]) for name in shards.names]
    else:
        stored = [Path(store.locate(name)) for name in shards.names]
    files: list[File] = [
        UnpackedFile(file) if extension_of(name) in (".tgz", ".tar.gz") else file
        for file, name in zip(stored, shards.names, strict=True)
    ]
    jobs = default_jobs() if jobs is None else jobs
    with (
        Workers(min(jobs, len(files))) as workers,
        bar(what="read", total=len(files), unit="tars", shown=show_progress) as drawn,
    ):
        found = workers.map(
            _scan,
            zip(files, shards.names, strict=True),
            inline=lambda _: len(files) < MIN_SHARED_TARS,
            on_progress=drawn.update,
        )
    records = list(chain.from_iterable(_records(*row) for row in zip(files, shards.names, found, strict=True)))
    if not records:
        raise DataError(f"'{shards.url}' holds no sample; expected members such as 'a.jpg', 'a.cls'")
    from dali_pipes.data_set.indexing import read_class_table

    return Source(
        name=f"tars '{shards.url}'",
        records=records,
        classes=read_class_table(store, shards.prefix) or {},
        keeps_order=True,
        reads=frozenset(_place(store, name) for name in shards.names),
    )


def _place(store: object, name: str) -> str:
    assert isinstance(store, AisStore | LocalStore), "there are no other stores"
    return store.locate(name) if isinstance(store, AisStore) else str(Path(store.locate(name)).resolve())


def _scan(task: "tuple[File, str]", report: Report) -> list[_Member]:
    file, name = task
    members: list[_Member] = []
    try:
        stream = file.open("rb", buffering=0) if isinstance(file, Path) else cast("BinaryIO", ReadStream(file))
        with stream:
            for member in ArchiveReader(stream, shard=name):
                head = member.read()[:HEAD_BYTES] if is_photo(member.component) else b""
                members.append(_Member(member.key, member.component, member.offset, member.size, head))
    except OSError as exc:
        raise StoreError(f"cannot read '{file}': {exc.strerror or exc}") from exc
    report(1)
    return members


def _records(file: File, name: str, members: Sequence[_Member]) -> list[Record]:
    records: list[Record] = []
    components: dict[str, object] = {}
    key: str | None = None
    for member in members:
        if member.key != key:
            key, components = member.key, {}
            records.append(Record(key=key, components=components, label=None))
        if member.component in components:
            raise DataError(
                f"shard '{name}', key '{member.key}': two members are component '{member.component}'; expected one"
            )
        components[member.component] = Range(file, member.offset, member.size, member.head)
    return records
