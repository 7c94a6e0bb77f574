"""Records to WebDataset shards in a bucket or a directory, original bytes kept.

Everything that can be known before a byte is written is known then: which records are bad, how many shards there will
be and how large, and what is in their place already. One shard at a time is on the local disk. The same records give
the same shards, byte for byte, so a pack that was interrupted is finished by running it again.
"""

import contextlib
import json
import os
import re
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, get_args

import xxhash

from prep.errors import DataError, StoreError
from prep.index import LABEL_COMPONENT
from prep.keys import split_key
from prep.manifest import classes_name, index_name, manifest_name
from prep.photos import is_photo, read_photo_header
from prep.progress import bar
from prep.records import Record, Source
from prep.store import AisStore, LocalStore, ObjectEntry, Store
from prep.urls import is_remote, open_store

__all__ = ["DEFAULT_PREFIX", "OnBad", "PackReport", "ShardPlan", "open_target", "pack", "plan_shards", "tar_bytes"]

OnBad = Literal["fail", "skip", "keep"]
DEFAULT_PREFIX = "samples-"

# AIStore and WebDataset recommend shards of some 100 MB to 1 GB; the count is a second limit, for small samples.
DEFAULT_MAX_COUNT = 10_000
DEFAULT_MAX_BYTES = 256 << 20

BLOCK = 512
# A tar ends with two empty blocks and is filled up to a multiple of this.
RECORD = 20 * BLOCK
MAX_SHARDS = 10**6

# Enough of a file to tell its format, and a PNG's colour type.
HEAD_BYTES = 64
COPY_BYTES = 1 << 20
_SHOWN = 3

_FORMATS = {
    "jpg": "JPEG",
    "jpeg": "JPEG",
    "jpe": "JPEG",
    "png": "PNG",
    "webp": "WEBP",
    "tif": "TIFF",
    "tiff": "TIFF",
    "bmp": "BMP",
    "ppm": "PPM",
    "pgm": "PPM",
    "pbm": "PPM",
    "pnm": "PPM",
    "jp2": "JPEG2000",
    "j2k": "JPEG2000",
}
"""Extension -> the format that its bytes must have. A GIF is not among them: DALI cannot decode one."""


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """What a pack did, or with ``dry_run`` would do."""

    url: str
    """``ais://pets/samples-``: what all the names start with."""
    shards: tuple[str, ...]
    """All shards of the set, in order."""
    num_written: int
    """Those that were not there already, byte for byte."""
    num_samples: int
    num_bytes: int
    """Of all the shards."""
    skipped: tuple[str, ...]
    """What was left out, one line each: key and reason."""
    kept: tuple[str, ...]
    """Bad records that were packed all the same, likewise."""
    elapsed_s: float
    dry_run: bool


class ShardPlan(NamedTuple):
    """Which records ``[start, stop)`` one shard holds, and the size that gives it."""

    start: int
    stop: int
    num_bytes: int


def pack(
    source: Source,
    *,
    store: Store,
    prefix: str = DEFAULT_PREFIX,
    max_count: int = DEFAULT_MAX_COUNT,
    max_bytes: int = DEFAULT_MAX_BYTES,
    on_bad: OnBad = "fail",
    overwrite: bool = False,
    dry_run: bool = False,
    show_progress: bool = False,
) -> PackReport:
    """Write ``PREFIX000000.tar``, ``PREFIX000001.tar``, ... and, last, the class table ``PREFIXclasses.json``.

    Args:
        source: The records, packed in their order, and their class table.
        store: Where to; a bucket that is not there is made.
        prefix: What the names start with.
        max_count: Samples a shard at most.
        max_bytes: Bytes a shard at most; a sample that is larger gets a shard of its own.
        on_bad: What to do about a photo whose bytes are not what its extension says, an empty file, or a mask that is
            no 8-bit grey PNG. ``"fail"``: raise, before anything is written; ``"skip"``: leave the record out;
            ``"keep"``: pack it as it is.
        overwrite: Replace shards of other content under these names, and delete those beyond the last one.
        dry_run: Check and plan only.
        show_progress: Draw bars.

    Raises:
        DataError: If records are bad and ``on_bad`` is ``"fail"``, none is left, a key cannot be a member's name, or
            two are equal.
        StoreError: If there are other shards under the prefix and ``overwrite`` is false, or writing fails. Shards that
            were complete by then stay, none is half there; running again finishes the pack.
    """
    started = time.perf_counter()
    _check_arguments(prefix=prefix, max_count=max_count, max_bytes=max_bytes, on_bad=on_bad)
    bad, sizes = _check_records(source, show_progress=show_progress)
    if bad and on_bad == "fail":
        raise DataError(
            f"{len(bad)} of {len(source.records)} records of {source.name} are bad: {_shown(list(bad.values()))}; "
            "leave them out with --on-bad skip, or pack them as they are with --on-bad keep"
        )
    wanted = [number for number in range(len(source.records)) if on_bad == "keep" or number not in bad]
    if not wanted:
        raise DataError(f"{source.name}: no record is left to pack; {_shown([*bad.values(), *source.skipped])}")
    plan = plan_shards([sizes[number] for number in wanted], max_count=max_count, max_bytes=max_bytes)
    names = tuple(f"{prefix}{number:06d}.tar" for number in range(len(plan)))

    existing = _listing(store, prefix)
    stale = _check_existing(store, prefix, existing, dict(zip(names, plan, strict=True)), overwrite=overwrite)
    num_written = 0
    if not dry_run:
        if isinstance(store, AisStore) and not store.exists():
            store.create()
        records = [source.records[number] for number in wanted]
        target = _Target(store=store, prefix=prefix, existing=existing, overwrite=overwrite)
        _write_shards(records, plan, names, target=target, show_progress=show_progress)
        target.finish(stale, source.classes)
        num_written = target.num_written
    return PackReport(
        url=store.locate(prefix),
        shards=names,
        num_written=num_written,
        num_samples=len(wanted),
        num_bytes=sum(shard.num_bytes for shard in plan),
        skipped=(*source.skipped, *(bad.values() if on_bad == "skip" else ())),
        kept=tuple(bad.values()) if on_bad == "keep" else (),
        elapsed_s=time.perf_counter() - started,
        dry_run=dry_run,
    )


def open_target(url: str | Path, *, endpoint: str | None) -> tuple[Store, str]:
    """The store and the prefix that a pack's URL names.

    ``ais://BUCKET[/PREFIX]`` or ``DIRECTORY[/PREFIX]``. A last part that ends in ``-`` or ``_`` is what the shards'
    names start with; any other is a folder, and `DEFAULT_PREFIX` follows.

    Raises:
        ValueError: If the URL names shards and not a prefix, or there is no ``endpoint`` for a bucket.
    """
    text = str(url)
    if "{" in text or text.endswith(".tar"):
        raise ValueError(f"'{text}' names shards; expected what their names start with, such as ais://pets/samples-")
    if is_remote(text):
        store, prefix = open_store(text, endpoint=endpoint)
        if prefix and not prefix.endswith(("-", "_", "/")):
            prefix += "/"
        return store, prefix if prefix.endswith(("-", "_")) else f"{prefix}{DEFAULT_PREFIX}"
    if text.endswith(("-", "_")) and not Path(text).is_dir():
        return open_store(text, endpoint=endpoint)
    if "://" in text:
        open_store(text, endpoint=endpoint)  # raises, and names the schemes
    return LocalStore(Path(text)), DEFAULT_PREFIX


def plan_shards(sizes: Sequence[int], *, max_count: int, max_bytes: int) -> list[ShardPlan]:
    """Cut records into shards, in order, each as full as both limits allow.

    Args:
        sizes: Bytes that each record takes in a tar; see `tar_bytes`.
        max_count: Records a shard at most.
        max_bytes: Bytes of the finished tar at most; one record alone may be more.

    >>> plan_shards([2048, 2048, 2048], max_count=2, max_bytes=1 << 20)
    [ShardPlan(start=0, stop=2, num_bytes=10240), ShardPlan(start=2, stop=3, num_bytes=10240)]
    """
    shards: list[ShardPlan] = []
    start, filled = 0, 0
    for number, size in enumerate(sizes):
        if number > start and (number - start >= max_count or _finished_bytes(filled + size) > max_bytes):
            shards.append(ShardPlan(start, number, _finished_bytes(filled)))
            start, filled = number, 0
        filled += size
    if sizes:
        shards.append(ShardPlan(start, len(sizes), _finished_bytes(filled)))
    if len(shards) > MAX_SHARDS:
        raise ValueError(f"{len(shards)} shards, names count to {MAX_SHARDS}; use larger --max-bytes and --max-count")
    return shards


def tar_bytes(name: str, size: int) -> int:
    """Bytes that a member takes in a tar: header blocks, more for a long or non-ASCII name, and data blocks.

    >>> tar_bytes("a.jpg", 1)
    1024
    """
    member = tarfile.TarInfo(name)
    member.size = size
    return len(member.tobuf()) + -(-size // BLOCK) * BLOCK


def _finished_bytes(filled: int) -> int:
    return -(-(filled + 2 * BLOCK) // RECORD) * RECORD


def _check_arguments(*, prefix: str, max_count: int, max_bytes: int, on_bad: str) -> None:
    if not prefix or prefix.endswith("/") or prefix[-1].isdigit():
        raise ValueError(
            f"prefix must end in a name's start that is no digit, such as 'train/samples-', got '{prefix}'"
        )
    if max_count < 1:
        raise ValueError(f"max_count must be positive, got {max_count}")
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be positive, got {max_bytes}")
    if on_bad not in get_args(OnBad):
        raise ValueError(f"on_bad must be one of {', '.join(get_args(OnBad))}, got '{on_bad}'")


# Before anything is written


def _check_records(source: Source, *, show_progress: bool) -> tuple[dict[int, str], list[int]]:
    """The bad records, number -> key and reason, and the bytes that each record takes in a tar."""
    bad: dict[int, str] = {}
    sizes: list[int] = []
    numbers: dict[str, int] = {}
    with bar(what="check", total=len(source.records), unit="records", shown=show_progress) as drawn:
        for number, record in enumerate(source.records):
            earlier = numbers.setdefault(record.key, number)
            if earlier != number:
                raise DataError(f"{source.name}: key '{record.key}' is there twice, records {earlier} and {number}")
            reasons: list[str] = []
            size = 0
            for component, content in _with_label(record).items():
                name = f"{record.key}.{component}"
                if split_key(name) != (record.key, component):
                    raise DataError(
                        f"{source.name}: '{name}' would not be read back as key '{record.key}', component "
                        f"'{component}': WebDataset cuts the key at the first dot, and it must not be empty"
                    )
                head, num_bytes = _head(content)
                size += tar_bytes(name, num_bytes)
                reason = _reason(component, head, num_bytes, is_mask=component in source.masks)
                if reason:
                    reasons.append(reason)
            sizes.append(size)
            if reasons:
                bad[number] = f"{record.key}: {'; '.join(reasons)}"
            drawn.update(1)
    return bad, sizes


def _reason(component: str, head: bytes, num_bytes: int, *, is_mask: bool) -> str | None:
    """Why a component is bad, ``None`` where it is not."""
    if not num_bytes:
        return f"{component} is empty"
    if not is_photo(component):
        return None
    expected = "PNG" if is_mask else _FORMATS.get(component.rpartition(".")[2])
    found = read_photo_header(head).format
    if found == "GIF":
        return f"{component} is a GIF, which DALI cannot decode"
    if found == "unknown":
        return f"{component} is no photo of a known format (starts with {head[:4].hex(' ')})"
    if found != expected:
        return f"{component} is a {found}"
    # IHDR: bit depth, colour type.
    if is_mask and tuple(head[24:26]) != (8, 0):
        return (
            f"{component} is no 8-bit grey PNG (bit depth {head[24]}, colour type {head[25]}), class ids would be lost"
        )
    return None


def _head(content: bytes | Path) -> tuple[bytes, int]:
    if isinstance(content, bytes):
        return content[:HEAD_BYTES], len(content)
    with _reading(content) as stream:
        return stream.read(HEAD_BYTES), os.fstat(stream.fileno()).st_size


def _listing(store: Store, prefix: str) -> dict[str, ObjectEntry]:
    if isinstance(store, AisStore) and not store.exists():
        return {}
    return {entry.name: entry for entry in store.list(prefix)}


def _check_existing(
    store: Store,
    prefix: str,
    existing: Mapping[str, ObjectEntry],
    planned: Mapping[str, ShardPlan],
    *,
    overwrite: bool,
) -> list[str]:
    """The shards beyond the last one, to be deleted at the end.

    Raises:
        StoreError: If there are such, or shards of another size in the place of ours, without ``overwrite``.
    """
    stale = [
        name for name in existing if re.fullmatch(rf"{re.escape(prefix)}[0-9]+\.tar", name) and name not in planned
    ]
    others = [name for name, shard in planned.items() if name in existing and existing[name].size != shard.num_bytes]
    if (stale or others) and not overwrite:
        raise StoreError(
            f"'{store.locate(prefix)}' holds shards of another pack: {_shown(stale + others)}; "
            "--overwrite replaces them, or pack under another prefix"
        )
    return stale


# Writing


@dataclass(kw_only=True)
class _Target:
    """The store while it is written to."""

    store: Store
    prefix: str
    existing: Mapping[str, ObjectEntry]
    overwrite: bool
    num_written: int = 0

    def publish(self, name: str, path: Path) -> None:
        """Upload a finished shard, unless the store has these very bytes."""
        entry = self.existing.get(name)
        if entry is not None and entry.size == path.stat().st_size:
            with path.open("rb") as stream:
                checksum = _checksum(stream)
            if checksum == self._stored_checksum(entry):
                return
            if not self.overwrite:
                raise StoreError(
                    f"'{self.store.locate(name)}' is there with other content; "
                    "--overwrite replaces it, or pack under another prefix"
                )
        self._forget(manifest_name(self.prefix), index_name(name))
        self.store.upload(name, path)
        self.num_written += 1

    def finish(self, stale: Sequence[str], classes: Mapping[int, str]) -> None:
        """Delete the shards beyond the last one; write the class table, unless the store has it."""
        for name in stale:
            self._forget(manifest_name(self.prefix), index_name(name))
            self.store.delete(name)
        table = json.dumps({str(label): classes[label] for label in sorted(classes)}, indent=0, ensure_ascii=False)
        name, data = classes_name(self.prefix), table.encode()
        if name not in self.existing or self.store.read(name) != data:
            self._forget(manifest_name(self.prefix))
            self.store.write(name, data)

    def _forget(self, *names: str) -> None:
        """Delete what describes other shards than the store will hold."""
        for name in names:
            if name in self.existing:
                self.store.delete(name)

    def _stored_checksum(self, entry: ObjectEntry) -> int:
        # 16 hexadecimal digits: xxhash2. A bucket may be set to another checksum, or to none.
        if entry.checksum and re.fullmatch(r"[0-9a-f]{16}", entry.checksum):
            return int(entry.checksum, 16)
        with self.store.open(entry.name) as stream:
            return _checksum(stream)


def _write_shards(
    records: Sequence[Record],
    plan: Sequence[ShardPlan],
    names: Sequence[str],
    *,
    target: _Target,
    show_progress: bool,
) -> None:
    from webdataset import ShardWriter

    def publish(written: str) -> None:
        path = Path(written)
        number = int(path.stem)
        if path.stat().st_size != plan[number].num_bytes:
            raise DataError(
                f"shard '{names[number]}' came out at {path.stat().st_size} bytes, {plan[number].num_bytes} were "
                "planned: source files changed while they were packed; run it again"
            )
        target.publish(names[number], path)
        path.unlink()

    # Whatever happens, the folder goes with all that is in it.
    with (
        _writing(),
        tempfile.TemporaryDirectory(prefix="dali-pipes-pack-") as folder,
        bar(what="pack", total=len(records), unit="samples", shown=show_progress) as drawn,
    ):
        # The plan says where a shard ends. Fixed times, owner and mode: the same records give the same bytes.
        writer = ShardWriter(
            f"{folder.replace('%', '%%')}/%06d.tar",
            maxcount=sys.maxsize,
            maxsize=float("inf"),
            post=publish,
            verbose=0,
            encoder=False,
            mtime=0,
            user="",
            group="",
            mode=0o644,
        )
        try:
            for number, shard in enumerate(plan):
                if number:
                    writer.next_stream()
                for record in records[shard.start : shard.stop]:
                    writer.write(_read_sample(record))
                    drawn.update(1)
            writer.close()
        except BaseException:
            # Closing it publishes the shard, which is not complete.
            writer.post = None
            with contextlib.suppress(OSError):
                writer.finish()
            raise


def _read_sample(record: Record) -> dict[str, str | bytes]:
    sample: dict[str, str | bytes] = {"__key__": record.key}
    for component, content in _with_label(record).items():
        if isinstance(content, bytes):
            sample[component] = content
        else:
            with _reading(content) as stream:
                sample[component] = stream.read()
    return sample


def _with_label(record: Record) -> dict[str, bytes | Path]:
    return {**record.components, LABEL_COMPONENT: str(record.label).encode()}


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as stream:
            yield stream
    except OSError as exc:
        raise StoreError(f"cannot read '{path}': {exc.strerror or exc}") from exc


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        # A write that fails names no file.
        where = exc.filename or tempfile.tempdir or "the temporary directory"
        raise StoreError(
            f"cannot write '{where}': {exc.strerror or exc}; shards are put together there one at a time: "
            "set TMPDIR to a directory with more room, or take a smaller --max-bytes"
        ) from exc


def _checksum(stream: BinaryIO) -> int:
    state = xxhash.xxh64()
    while block := stream.read(COPY_BYTES):
        state.update(block)
    return int(state.intdigest())


def _shown(lines: Iterable[str]) -> str:
    lines = list(lines)
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more
