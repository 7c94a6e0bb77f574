"""Verify shards: read every byte, decode every photo, and compare all files that describe the shards.

A worker process takes a shard at a time, reads it front to back, and decodes each photo when it comes to it
(`prep.inspect.verify_shard`); it holds one member and one decoded photo. This process compares the shards with the
manifest, the column file and each other, which takes about 100 bytes of memory for each sample.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from dali_pipes.arrays import Bools, UInt64s
from dali_pipes.data_set.indexing import find_columns, find_manifest, read_class_table
from dali_pipes.errors import DataError, shown
from dali_pipes.formats.manifest import Manifest, checksum
from dali_pipes.formats.names import columns_name, index_name, manifest_name
from dali_pipes.formats.photo_header import MAX_PIXELS, PhotoRules
from dali_pipes.formats.photo_names import ComponentCounts
from dali_pipes.formats.quarantine import Quarantine
from dali_pipes.formats.sample_columns import SampleColumns
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.formats.texts import Texts, join_texts, pack_texts
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from dali_pipes.store.shard_names import ObjectEntry
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.findings import SAMPLE_KINDS, ShardFinding, missing_components, usual_components
from prep.inspect.verify_shard import Checks, ShardReport, verify_shard
from prep.left_out import as_reason
from prep.photos.decoders import DecoderName, choose_decoder, open_decoder
from prep.workers import Report, WorkersKind, open_workers

MAX_FINDINGS = 100_000
"""The largest number of findings that a report holds. Further findings are counted and written to the quarantine."""
_INDEX_ADVICE = "index the shards anew: dali-pipes prep index URL"
_READ_ADVICE = f"{_INDEX_ADVICE} --anew"  # without --anew, an index that is not what its shard holds may be taken over
# Bytes for each worker: for fewer bytes, the start of a worker takes longer than its work.
_BYTES_A_WORKER = 8 << 20
_DEAD_ADVICE = (
    "either memory ran out or a decoder crashed on a photo; run it with --workers 1 on this shard, or with another "
    "--decoder"
)


@dataclass(kw_only=True)
class VerifyReport:
    """The result of `verify`."""

    url: str
    num_shards: int
    decoder: DecoderName
    num_samples: int = 0
    num_decoded: int = 0
    num_bytes: int = 0
    elapsed_s: float = 0
    components: dict[str, int] = field(default_factory=dict)
    """component -> number of samples that have it."""
    mask_values: dict[int, int] = field(default_factory=dict)
    """Value of a mask's pixels -> the number of masks that have it."""
    findings: list[ShardFinding] = field(default_factory=list)
    """The first `MAX_FINDINGS`, in the shards' order; findings of the set as a whole come last."""
    counts: Counter[str] = field(default_factory=Counter)
    """Kind of finding (a key of `prep.inspect.findings.KINDS`) -> the number of all such findings."""
    reasons: dict[str, Counter[str]] = field(default_factory=dict)
    """Kind of finding of a sample -> what is wrong, without what belongs to one sample alone -> the number of such
    findings."""
    num_bad_samples: int = 0
    """Bad samples that can be left out, each counted once."""

    @property
    def num_problems(self) -> int:
        """The number of findings that are not notes."""
        return sum(number for kind, number in self.counts.items() if kind != "note")

    @property
    def num_set_problems(self) -> int:
        """The number of findings that leaving out samples does not mend."""
        return self.num_problems - sum(self.counts[kind] for kind in SAMPLE_KINDS)


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
        decoder: See `prep.photos.decoders.open_decoder`; ``None``: DALI's, if it is installed.
        masks: The components that hold masks. With ``None``, `dali_pipes.formats.photo_names.photo_roles` finds them.
        mask_values: The values that a mask's pixels may have. ``None`` allows 0 to 255.
        max_pixels: Photos with more pixels are bad, and are not decoded.
        workers: The number of processes; with 1, this process does the work. ``None`` stands for one process a core,
            fewer if there are few bytes or shards; on Ray, for the cluster's CPUs.
        on: Who works: see `prep.workers.open_workers`.
        quarantine: A file to which bad samples that can be left out are added, for a loader's ``Select(exclude=...)``.
        show_progress: Draw a bar, in bytes.

    Raises:
        PipesError: If the decoder is not installed, or a worker process died.
        StoreError: If a shard is missing or cannot be read, or the quarantine cannot be written.
    """
    decoder = choose_decoder(decoder)
    started = time.perf_counter()
    report = VerifyReport(url=shards.url, num_shards=len(shards.names), decoder=decoder)
    with contextlib.ExitStack() as resources:
        checker = _SetChecker(shards, report)
        checker.find_differing_shards(missing, beyond)
        if quarantine is not None:
            made = Quarantine(quarantine, manifest=checker.digest, made_now=True)
            checker.quarantine = resources.enter_context(made)
        checks = Checks(
            counts=checker.counts,
            masks=None if masks is None else tuple(masks),
            mask_values=None if mask_values is None else frozenset(mask_values),
            photos=PhotoRules(max_pixels=max_pixels),
            classes=checker.classes,
        )
        entries = shards.entries()
        total = sum(entry.size for entry in entries)
        if workers is None and on == "processes":
            workers = min(len(os.sched_getaffinity(0)), 1 + total // _BYTES_A_WORKER, len(entries))
        is_dali = decoder == "dali"
        setup = _silence if is_dali else None
        with (
            open_workers(on, workers, setup=setup, isolated=is_dali, advice=_DEAD_ADVICE) as pool,
            bar(what="verify", total=total, unit="B", shown=show_progress) as drawn,
        ):
            pool.check_reach(directory for directory in [shards.store.directory] if directory is not None)
            parts = pool.map(
                partial(_verify, shards.store, decoder, checks),
                ((entry, checker.listed_index(row)) for row, entry in enumerate(entries)),
                on_progress=drawn.update,
                name=lambda task: f"shard '{task[0].name}'",
                max_ahead=2 * pool.jobs,  # reports wait in memory
            )
            for row, part in enumerate(parts):
                checker.add(row, part)
        checker.compare_shards(checks)
    report.elapsed_s = time.perf_counter() - started
    return report


# In a worker


Task = tuple[ObjectEntry, tuple[int, int] | None]
"""A shard, and bytes and checksum of its index by the manifest; ``None`` without a manifest."""


def _silence() -> None:
    """Write nothing to stderr: DALI's libraries write a line for each broken photo, which is a finding here."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


_decoder = cache(open_decoder)


def _verify(store: Store, decoder: DecoderName, checks: Checks, task: Task, report: Report) -> ShardReport:
    shard, listed_index = task
    with store.open(shard.name) as stream:
        found = verify_shard(stream, shard=shard.name, size=shard.size, decoder=_decoder(decoder), checks=checks)
    can_be_indexed = found.is_whole and all(one.kind == "note" or one.kind in SAMPLE_KINDS for one in found.findings)
    if listed_index is not None and can_be_indexed:
        name = index_name(shard.name)
        data = store.find(name)
        problem = ""
        if data is None:
            problem = f"does not exist; {_INDEX_ADVICE}"
        elif (len(data), checksum(data)) != listed_index:
            problem = f"is not the one that the manifest lists; {_INDEX_ADVICE}"
        elif data != found.index.to_bytes():
            problem = f"says something else than the shard holds{_changed(found.index, data)}; {_READ_ADVICE}"
        if problem:
            found.findings.append(ShardFinding("index", f"its index '{name}' {problem}", shard.name))
    report(shard.size)
    return found


def _changed(index: ShardIndex, stored: bytes) -> str:
    """Name the components whose bytes are others than those of the index in the store."""
    columns = ((index.offsets[name], index.sizes[name], index.checksums[name]) for name in index.offsets)
    sums = {(int(at), int(size)): int(known) for three in columns for at, size, known in zip(*three, strict=True)}
    with contextlib.suppress(DataError):  # an index of another version
        changed = [*ShardIndex.from_bytes(stored, where="").changed(lambda start, size: sums.get((start, size)))]
        return f": other bytes in {shown(changed, are_names=False)}" if changed else ""
    return ""


# The set as a whole


class _Kept(NamedTuple):
    """The samples of a shard that were not removed, for the comparison with other shards."""

    keys: Texts
    digests: UInt64s
    """XXH64 of each key."""
    has: Mapping[str, Bools]
    """Component -> which samples have it."""


class _SetChecker:
    """Adds the reports of shards to the report of the set, and compares the shards with each other."""

    def __init__(self, shards: ShardSet, report: VerifyReport) -> None:
        """Read manifest, column file and class table, if they exist and are not damaged."""
        self._shards, self._report = shards, report
        self.counts: ComponentCounts | None = None
        """Counts of components in the whole data set, by its manifest."""
        self.quarantine: Quarantine | None = None
        self.digest = ""
        """The manifest's digest; empty: there is no manifest."""
        self.classes: Mapping[int, str] = {}
        self._listed: Manifest | None = None
        """The manifest of these shards alone, in their order."""
        self._columns: SampleColumns | None = None
        self._bad: set[tuple[str, str]] = set()
        """Shard and key of bad samples."""
        self._kept: list[_Kept] = []
        self._mask_values = np.zeros(256, np.int64)
        store, prefix = shards.store, shards.prefix
        where = store.locate(manifest_name(prefix))
        manifest = None
        with self._finding("manifest"):
            manifest = find_manifest(shards)
            if manifest is None:
                self._find(ShardFinding("note", f"no manifest '{where}': the shards are not indexed"))
            else:
                self.digest, self.classes = manifest.digest, manifest.classes
                self.counts = ComponentCounts(manifest.components, manifest.num_samples)
                self._listed = manifest.select(shards.names, where=where)
        if manifest is not None and self._listed is not None:
            with self._finding("columns"):
                if (columns := find_columns(shards, manifest)) is None:
                    self._find(ShardFinding("note", f"no column file '{store.locate(columns_name(prefix))}'"))
                else:
                    self._columns = columns.of_shards(manifest.samples, manifest.rows_of(shards.names, where=where))
        with self._finding("manifest"):
            self.classes = self.classes or read_class_table(store, prefix) or {}

    @contextlib.contextmanager
    def _finding(self, kind: str) -> Iterator[None]:
        try:
            yield
        except DataError as exc:
            self._find(ShardFinding(kind, str(exc)))

    def _find(self, finding: ShardFinding) -> None:
        report = self._report
        report.counts[finding.kind] += 1
        if len(report.findings) < MAX_FINDINGS:
            report.findings.append(finding)
        if finding.kind not in SAMPLE_KINDS:
            return
        report.reasons.setdefault(finding.kind, Counter())[as_reason(finding.text)] += 1
        self._bad.add((finding.shard, finding.key))
        report.num_bad_samples = len(self._bad)
        if self.quarantine is not None:
            # A quarantine file cannot hold a name with a tab. The report has a separate finding for such a name.
            with contextlib.suppress(DataError):
                self.quarantine.add(finding.shard, finding.key, finding.component, finding.text)

    def find_differing_shards(self, missing: Sequence[str], beyond: Sequence[str]) -> None:
        """Report the shards (URLs or paths) that the store lacks, and those that no manifest lists."""
        has_versions = self._listed is not None and self._listed.version > 1
        adding = f"dali-pipes prep add TAR '{self._shards.url}'" if has_versions else self._shards.index_command
        gone = f"is not there: put it back, or leave it out: {self._shards.drop_command}"
        more = f"is there, and no loader reads it; to add it to the data set: {adding}"
        for kind, locations, text in (("gone", missing, gone), ("beyond", beyond, more)):
            for location in locations:
                self._find(ShardFinding(kind, text, location))

    def listed_index(self, row: int) -> tuple[int, int] | None:
        listed = self._listed
        return None if listed is None else (int(listed.index_bytes[row]), int(listed.index_checksums[row]))

    def add(self, row: int, part: ShardReport) -> None:
        report, index, listed = self._report, part.index, self._listed
        # (names that are not UTF-8 are findings)
        names = [key.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for key in index.keys]
        keys, has = Texts(*pack_texts(names)), {name: offsets >= 0 for name, offsets in index.offsets.items()}
        removed = np.empty(0, np.int64)
        if listed is not None and index.num_samples == listed.samples[row]:
            removed = listed.removed_in(row)
        kept = np.setdiff1d(np.arange(index.num_samples), removed)
        removed_keys = {index.keys[at] for at in removed.tolist()}
        for finding in part.findings:
            if finding.kind not in SAMPLE_KINDS or finding.key not in removed_keys:
                self._find(finding)
        report.num_bytes += index.shard_bytes
        report.num_samples += len(kept)
        report.num_decoded += part.num_decoded
        self._mask_values += part.mask_values
        digests = np.fromiter((xxhash.xxh64_intdigest(name.encode()) for name in names), np.uint64, len(names))
        self._kept.append(_Kept(keys.take(kept), digests[kept], {name: rows[kept] for name, rows in has.items()}))
        if not part.is_whole or listed is None:
            return
        expected = tuple(int(column[row]) for column in (listed.shard_bytes, listed.checksums, listed.samples))
        found = (index.shard_bytes, index.shard_checksum, index.num_samples)
        if expected != found:
            described = "{} bytes, xxhash2 {:016x}, {} samples"
            text = f"has {described.format(*found)}; the manifest says {described.format(*expected)}; {_READ_ADVICE}"
            self._find(ShardFinding("manifest", text, index.shard))
        if self._columns is not None and index.num_samples == listed.samples[row]:
            columns = self._columns.of_shards(listed.samples, np.array([row]))
            if problem := _columns_problem(columns, index, keys, has):
                text = f"the column file has other {problem} than the shard; {_INDEX_ADVICE}"
                self._find(ShardFinding("columns", text, index.shard))

    def compare_shards(self, checks: Checks) -> None:
        """Compare the shards with each other, after all were added."""
        report, names = self._report, self._shards.names
        components = Counter[str]()
        for kept in self._kept:
            components.update({name: int(rows.sum()) for name, rows in kept.has.items()})
        report.components = dict(sorted(components.items()))
        report.mask_values = {int(value): int(self._mask_values[value]) for value in np.flatnonzero(self._mask_values)}
        usual = usual_components(report.components, report.num_samples)
        roles = checks.roles(ComponentCounts(report.components, report.num_samples))
        for shard, kept in zip(names, self._kept, strict=True):
            for finding in missing_components(shard, kept.keys, kept.has, usual=usual, roles=roles):
                self._find(finding)
        shard_of = np.repeat(np.arange(len(self._kept)), [len(kept.keys) for kept in self._kept])
        keys = join_texts([kept.keys for kept in self._kept])
        digests = np.concatenate([np.zeros(0, np.uint64), *(kept.digests for kept in self._kept)])
        order = np.argsort(digests, kind="stable")
        for at in np.flatnonzero(digests[order][1:] == digests[order][:-1]).tolist():
            earlier, later = order[at], order[at + 1]
            # Within a shard it is a finding of the shard already.
            if shard_of[earlier] != shard_of[later] and keys[earlier] == keys[later]:
                text = f"is in shard '{names[shard_of[earlier]]}' too"
                self._find(ShardFinding("duplicate", text, names[shard_of[later]], keys[later]))


def _columns_problem(columns: SampleColumns, index: ShardIndex, keys: Texts, has: Mapping[str, Bools]) -> str:
    """In what the columns of a shard's samples differ from the shard; empty: in nothing."""
    if columns.keys != keys:
        return "keys"
    labels = np.zeros(len(keys), np.int64) if index.labels is None else index.labels
    if columns.labels is not None and (columns.labels != labels).any():
        return "labels"
    nowhere, everywhere = np.zeros(len(keys), np.bool_), np.ones(len(keys), np.bool_)
    for name, rows in columns.has.items():
        if (has.get(name, nowhere) != (everywhere if rows is None else rows)).any():
            return "components"
    return ""
