"""Records to WebDataset shards in a bucket or a directory, original bytes kept.

Everything that can be known before a byte is written is known then: which records are bad, how many shards there will
be and how large, and what is in their place already. One shard at a time is on the local disk. The same records give
the same shards, byte for byte, so a pack that was interrupted is finished by running it again.
"""

import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import xxhash

from prep.errors import DataError, StoreError, shown
from prep.manifest import classes_name, columns_name, index_name, manifest_name
from prep.progress import bar
from prep.record_check import check_records, components_with_label, open_source
from prep.records import Record, Source
from prep.shard_plan import ShardPlan, plan_shards
from prep.store import AisStore, LocalStore, ObjectEntry, Store
from prep.urls import check_object_name, is_remote, open_store

__all__ = ["DEFAULT_PREFIX", "OnBad", "PackReport", "open_target", "pack"]

OnBad = Literal["fail", "skip", "keep"]
DEFAULT_PREFIX = "samples-"

# AIStore and WebDataset recommend shards of some 100 MB to 1 GB; the count is a second limit, for small samples.
DEFAULT_MAX_COUNT = 10_000
DEFAULT_MAX_BYTES = 256 << 20

COPY_BYTES = 1 << 20


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
    noted: tuple[str, ...]
    """Photos in another format than their name says, which DALI decodes all the same: packed, likewise."""
    elapsed_s: float
    dry_run: bool


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
        on_bad: What to do about a photo in no format that DALI decodes (one in another format than its extension
            says is packed, and noted), an empty file, or a mask that is no 8-bit grey PNG. ``"fail"``: raise, before
            anything is written; ``"skip"``: leave the record out; ``"keep"``: pack it as it is.
        overwrite: Replace shards of other content under these names, and delete those beyond the last one.
        dry_run: Check and plan only.
        show_progress: Draw bars.

    Raises:
        DataError: If records are bad and ``on_bad`` is ``"fail"``, none is left, a key cannot be a member's name, two
            are equal, or a file's or class's name is not UTF-8.
        StoreError: If there are other shards under the prefix and ``overwrite`` is false, or writing fails. Shards that
            were complete by then stay, none is half there; running again finishes the pack.
    """
    started = time.perf_counter()
    _check_arguments(prefix=prefix, max_count=max_count, max_bytes=max_bytes, on_bad=on_bad)
    if isinstance(store, AisStore):
        check_object_name(prefix, url=store.locate(prefix))
    bad, noted, sizes = check_records(source, show_progress=show_progress)
    if bad and on_bad == "fail":
        raise DataError(
            f"{len(bad)} of {len(source.records)} records of {source.name} are bad: "
            f"{shown(list(bad.values()), are_names=False)}; "
            "leave them out with --on-bad skip, or pack them as they are with --on-bad keep"
        )
    wanted = [number for number in range(len(source.records)) if on_bad == "keep" or number not in bad]
    if not wanted:
        raise DataError(
            f"{source.name}: no record is left to pack; {shown([*bad.values(), *source.skipped], are_names=False)}"
        )
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
        noted=tuple(noted[number] for number in wanted if number in noted),
        elapsed_s=time.perf_counter() - started,
        dry_run=dry_run,
    )


def open_target(url: str | Path, *, endpoint: str | None) -> tuple[Store, str]:
    """The store and the prefix that a pack's URL names.

    ``ais://BUCKET[/PREFIX]`` or ``DIRECTORY[/PREFIX]``. A last part that ends in ``-`` or ``_`` is what the shards'
    names start with; any other is a folder, and `DEFAULT_PREFIX` follows.

    Raises:
        ValueError: If the URL names shards and not a prefix, a bucket's or object's name is none, or there is no
            ``endpoint`` for a bucket.
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
            f"'{store.locate(prefix)}' holds shards of another pack: {shown(stale + others)}; "
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
        self._forget(manifest_name(self.prefix), columns_name(self.prefix), index_name(name))
        self.store.upload(name, path)
        self.num_written += 1

    def finish(self, stale: Sequence[str], classes: Mapping[int, str]) -> None:
        """Delete the shards beyond the last one; write the class table, unless the store has it."""
        for name in stale:
            self._forget(manifest_name(self.prefix), columns_name(self.prefix), index_name(name))
            self.store.delete(name)
        table = json.dumps({str(label): classes[label] for label in sorted(classes)}, indent=0, ensure_ascii=False)
        name, data = classes_name(self.prefix), table.encode()
        if name not in self.existing or self.store.read(name) != data:
            self._forget(manifest_name(self.prefix), columns_name(self.prefix))
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
    for component, content in components_with_label(record).items():
        if isinstance(content, bytes):
            sample[component] = content
        else:
            with open_source(content) as stream:
                sample[component] = stream.read()
    return sample


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
