"""Find the members of tars, to pack them into shards of another size; order, names and bytes stay.

Each tar is read once to find its members, and again when they are packed. A compressed tar is unpacked from its start
for each shard that takes members of it.
"""

from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

from dali_pipes.data_set.indexing import read_class_table, read_recoded
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.photo_header import MAX_PHOTO_BYTES, is_photo, read_whole_photo_header
from dali_pipes.formats.tar_reader import ArchiveReader
from dali_pipes.progress import bar
from dali_pipes.store.http.objects import ObjectFile
from dali_pipes.store.shard_names import extension_of
from dali_pipes.store.shard_set import ShardSet
from prep.sources.record import HEAD_BYTES, Record, Source
from prep.tar.inside import ReadStream, UnpackedFile
from prep.tar.writer import Range
from prep.workers import Report, Workers

# With fewer tars, starting processes may take longer than reading.
MIN_SHARED_TARS = 3
# Memory for the list of one compressed tar's members: a small one can unpack to any number of them.
MAX_LIST_BYTES = 2 << 30
# Memory for a member, without its name: measured with 200,000.
_MEMBER_BYTES = 1200

File = Path | ObjectFile | UnpackedFile


def tars(shards: ShardSet, *, jobs: int | None = None, show_progress: bool = False) -> Source:
    """The samples of tars, in their order; a sample is the members that stand together and share a key.

    Members keep their bytes and order; components become lower case, as in WebDataset. Members that belong to no sample
    (directories, links, names without a dot) are left out. The class table beside the tars is used.

    Args:
        shards: In a bucket or a directory; ``.tar``, ``.tgz`` or ``.tar.gz``.
        jobs: The number of processes, each of which reads a tar; by default the cores, at most 16.
        show_progress: Draw a bar.

    Raises:
        DataError: If a file is not a tar or not a gzip file, was cut off, or has too many members to list, if there is
            no sample, or a sample has two members of one component.
        StoreError: If a file cannot be read.
    """
    store, access = shards.store, shards.store.access()
    files: list[File] = []
    for entry in shards.entries():
        file = access.file(entry.name, size=entry.size)
        files.append(UnpackedFile(file) if extension_of(entry.name) in (".tgz", ".tar.gz") else file)
    with (
        Workers(jobs, at_most=len(files)) as workers,
        bar(what="read", total=len(files), unit="tars", shown=show_progress) as drawn,
    ):
        found = workers.map(
            _find_records,
            zip(files, shards.names, strict=True),
            inline=lambda _: len(files) < MIN_SHARED_TARS,
            on_progress=drawn.update,
        )
        records = list(chain.from_iterable(found))
    if not records:
        raise DataError(f"'{shards.url}' holds no sample; expected members such as 'a.jpg', 'a.cls'")
    return Source(
        name=f"tars '{shards.url}'",
        records=records,
        classes=read_class_table(store, shards.prefix) or {},
        keeps_order=True,
        steps=read_recoded(store, shards.prefix),
        reads=frozenset(store.identity(name) for name in shards.names),
    )


def _find_records(task: "tuple[File, str]", report: Report) -> list[Record]:
    file, shard = task
    records: list[Record] = []
    components: dict[str, bytes | Path | Range] = {}
    held = 0
    try:
        stream = file.open("rb", buffering=0) if isinstance(file, Path) else cast("BinaryIO", ReadStream(file))
        with stream:
            for member in ArchiveReader(stream, shard=shard):
                held += _MEMBER_BYTES + len(member.name)
                if held > MAX_LIST_BYTES and isinstance(file, UnpackedFile):
                    raise DataError(
                        f"shard '{shard}': the list of its members takes more than {MAX_LIST_BYTES >> 20} MiB of "
                        "memory; if that is not a mistake, gunzip it first"
                    )
                if not records or member.key != records[-1].key:
                    components = {}
                    records.append(Record(key=member.key, components=components, label=None))
                if member.component in components:
                    raise DataError(
                        f"shard '{shard}', key '{member.key}': two members are component '{member.component}'; "
                        "expected one"
                    )
                head, photo = b"", None
                if is_photo(member.component) and member.size <= MAX_PHOTO_BYTES:
                    data = member.read()
                    head, photo = data[:HEAD_BYTES], read_whole_photo_header(data)
                components[member.component] = Range(file, member.offset, member.size, head, photo)
    except OSError as exc:
        raise StoreError(f"cannot read '{file}': {exc.strerror or exc}") from exc
    report(1)
    return records
