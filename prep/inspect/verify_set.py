"""Check a set of shards as a whole: its manifest and column file, duplicate keys, and missing components.

The check takes about 60 bytes of memory for each sample.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import Int64s
from dali_pipes.data_set.indexing import find_columns, find_manifest, read_class_table
from dali_pipes.errors import DataError
from dali_pipes.formats.names import columns_name, manifest_name
from dali_pipes.formats.photo_names import ComponentCounts, photo_roles
from dali_pipes.formats.texts import Texts, pack_texts
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.findings import SAMPLE_KINDS, ShardFinding, note
from prep.inspect.verify_shard import ShardReport
from prep.left_out import as_reason
from prep.photos.decoders import DecoderName

if TYPE_CHECKING:
    from dali_pipes.formats.manifest import Manifest
    from dali_pipes.formats.quarantine import Quarantine
    from dali_pipes.formats.sample_columns import SampleColumns


MAX_FINDINGS = 100_000
"""The largest number of findings that a report holds. Further findings are counted and written to the quarantine."""

INDEX_ADVICE = "index the shards anew: dali-pipes prep index URL"
READ_ADVICE = f"{INDEX_ADVICE} --anew"
"""For an index that is not what its shard holds: without ``--anew``, it might be taken over."""


@dataclass(kw_only=True)
class VerifyReport:
    """The result of `verify`."""

    url: str
    num_shards: int
    decoder: DecoderName
    num_samples: int = 0
    num_files: int = 0
    num_decoded: int = 0
    num_bytes: int = 0
    elapsed_s: float = 0
    components: dict[str, int] = field(default_factory=dict)
    """component -> number of samples that have it."""
    usual: list[str] = field(default_factory=list)
    """Components that more than half of the samples have; every sample is expected to have them."""
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


class SetChecker:
    """Adds the reports of shards to the report of the set, and compares the shards with each other."""

    def __init__(self, shards: ShardSet, report: VerifyReport, *, masks: Sequence[str] | None) -> None:
        self._shards, self._report = shards, report
        self.masks = masks
        """Components that are masks; ``None``: unknown until all samples were read."""
        self._counts: ComponentCounts | None = None
        """Of the whole data set, by its manifest."""
        self.quarantine: Quarantine | None = None
        self.digest = ""
        """The manifest's digest; empty: there is no manifest."""
        self.listed: Manifest | None = None
        """The manifest of these shards alone, in their order."""
        self.classes: Mapping[int, str] = {}
        self._columns: SampleColumns | None = None
        self._bad: set[tuple[int, str]] = set()
        self._removed: set[tuple[int, str]] = set()
        """Row and key of samples that were removed from the data set: nothing is said of them."""
        self._keys: list[Texts] = [Texts(*pack_texts([]))] * len(shards.names)
        self._digests: list[npt.NDArray[np.uint64]] = []
        self._set_numbers: dict[frozenset[str], int] = {}
        self._set_of: list[npt.NDArray[np.int32]] = []
        self._mask_values = np.zeros(256, np.int64)
        self._numbers = {name: row for row, name in enumerate(shards.names)}
        self._open()

    def compare(self, *, missing: Sequence[str], beyond: Sequence[str]) -> None:
        """Report the shards (URLs or paths) that the store lacks, and those that no manifest lists."""
        has_versions = self.listed is not None and self.listed.version > 1
        adding = f"dali-pipes prep add TAR '{self._shards.url}'" if has_versions else self._shards.index_command
        for kind, locations, text in (
            ("gone", missing, f"is not there: put it back, or leave it out: {self._shards.drop_command}"),
            ("beyond", beyond, f"is there, and no loader reads it; to add it to the data set: {adding}"),
        ):
            for location in locations:
                self._find(ShardFinding(kind, location, "", "", text))

    def add(self, part: ShardReport) -> None:
        """Add the next part, in the shards' order."""
        report = self._report
        removed = self._removed_in(part)
        removed_keys = {part.keys[row] for row in removed.tolist()}
        self._removed |= {(part.row, key) for key in removed_keys}
        for finding in part.findings:
            self._find(finding)
        report.num_decoded += part.num_decoded
        self._mask_values += part.mask_values
        if part.part:
            return
        report.num_bytes += part.num_bytes
        report.num_files += part.num_files
        report.num_samples += len(part.keys) - len(removed)
        printable = [key.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for key in part.keys]
        keys, kept = Texts(*pack_texts(printable)), np.delete(np.arange(len(part.keys)), removed)
        self._keys[part.row] = keys if not len(removed) else keys.take(kept)
        self._digests.append(part.digests[kept])
        numbers = [self._set_numbers.setdefault(names, len(self._set_numbers)) for names in part.component_sets]
        self._set_of.append(np.array([*numbers, 0], np.int32)[part.set_of][kept])
        if part.is_whole and self.listed is not None:
            self._check_manifest(part, self.listed)
            self._check_columns(part, keys, self.listed)

    def finish(self) -> None:
        """Check the set, after all parts were added."""
        self._find_missing()
        self._find_duplicates()
        values = np.flatnonzero(self._mask_values)
        self._report.mask_values = {int(value): int(self._mask_values[value]) for value in values}

    def _find(self, finding: ShardFinding) -> None:
        report = self._report
        if finding.kind in SAMPLE_KINDS and (self._numbers.get(finding.shard, -1), finding.key) in self._removed:
            return
        report.counts[finding.kind] += 1
        if len(report.findings) < MAX_FINDINGS:
            report.findings.append(finding)
        if finding.kind not in SAMPLE_KINDS:
            return
        report.reasons.setdefault(finding.kind, Counter())[as_reason(finding.text)] += 1
        sample = (self._numbers.get(finding.shard, -1), finding.key)
        report.num_bad_samples += sample not in self._bad
        self._bad.add(sample)
        if self.quarantine is not None:
            # The file refuses a tab in a name. Such a name is a finding itself, and no index accepts it.
            with contextlib.suppress(DataError):
                self.quarantine.add(finding.shard, finding.key, finding.component, finding.text)

    def _open(self) -> None:
        """Read manifest, column file and class table, if they exist and are not damaged."""
        shards, store = self._shards, self._shards.store
        where = store.locate(manifest_name(shards.prefix))
        manifest = None
        with self._finding("manifest"):
            manifest = find_manifest(shards)
            if manifest is None:
                self._find(note(f"no manifest '{where}': the shards are not indexed"))
            else:
                self.digest = manifest.digest
                self._counts = ComponentCounts(manifest.components, manifest.num_samples)
                if self.masks is None:
                    self.masks = photo_roles(self._counts).masks
                self.listed = manifest.select(shards.names, where=where)
        if manifest is not None and self.listed is not None:
            with self._finding("columns"):
                if (columns := find_columns(shards, manifest)) is None:
                    self._find(note(f"no column file '{store.locate(columns_name(shards.prefix))}'"))
                else:
                    rows = manifest.rows_of(shards.names, where=where)
                    self._columns = columns.of_shards(manifest.samples, rows)
        with self._finding("manifest"):
            own = manifest.classes if manifest is not None else {}
            self.classes = own or read_class_table(store, shards.prefix) or {}

    @contextlib.contextmanager
    def _finding(self, kind: str) -> Iterator[None]:
        """Turn a `DataError` into a finding."""
        try:
            yield
        except DataError as exc:
            self._find(ShardFinding(kind, "", "", "", str(exc)))

    def _check_manifest(self, part: ShardReport, listed: "Manifest") -> None:
        row = part.row
        said = tuple(int(column[row]) for column in (listed.shard_bytes, listed.checksums, listed.samples))
        found = (part.num_bytes, part.checksum, len(part.keys))
        if said != found:
            text = (
                f"has {found[0]} bytes, xxhash2 {found[1]:016x}, {found[2]} samples; the manifest says {said[0]}, "
                f"{said[1]:016x}, {said[2]}; {READ_ADVICE}"
            )
            self._find(ShardFinding("manifest", self._shards.names[row], "", "", text))

    def _check_columns(self, part: ShardReport, keys: Texts, listed: "Manifest") -> None:
        num = int(listed.samples[part.row])
        if self._columns is None or num != len(part.keys):
            return  # another number of samples is a finding of kind "manifest"
        first = int(listed.samples[: part.row].sum())
        if problem := _columns_problem(self._columns, slice(first, first + num), part, keys):
            text = f"the column file has {problem}; {INDEX_ADVICE}"
            self._find(ShardFinding("columns", self._shards.names[part.row], "", "", text))

    def _removed_in(self, part: ShardReport) -> Int64s:
        """The samples of a whole shard that were removed, as numbers within it; of another part of it: none."""
        if part.part or self.listed is None or len(part.keys) != self.listed.samples[part.row]:
            return np.empty(0, np.int64)
        return self.listed.removed_in(part.row)

    def _find_missing(self) -> None:
        report, sets = self._report, list(self._set_numbers)
        counts = np.bincount(np.concatenate([np.zeros(0, np.int32), *self._set_of]), minlength=len(sets)).tolist()
        components: Counter[str] = Counter()
        for names, number in zip(sets, counts, strict=True):
            components.update(dict.fromkeys(names, number))
        report.components = dict(sorted(components.items()))
        report.usual = [name for name, number in report.components.items() if 2 * number > report.num_samples]
        whole = self._counts or ComponentCounts(report.components, report.num_samples)
        alternatives = photo_roles(whole, besides=self.masks or ()).photos
        lacking: dict[int, list[str]] = {}
        replaced: Counter[tuple[str, str]] = Counter()
        for number, names in enumerate(sets):
            for component in (name for name in report.usual if name not in names):
                other = next((name for name in alternatives if name in names and component in alternatives), None)
                if other is None:
                    lacking.setdefault(number, []).append(component)
                else:
                    replaced[component, other] += counts[number]
        for (component, other), number in sorted(replaced.items()):
            self._find(
                note(
                    f"{number} samples have '{other}' in place of '{component}'; the built-in graphs read both; in a "
                    f"graph of your own, name both: '{component};{other}'"
                )
            )
        for row, numbers in enumerate(self._set_of):
            for at in np.flatnonzero(np.isin(numbers, [*lacking])).tolist():
                text = f"is missing (found: {', '.join(sorted(sets[int(numbers[at])]))})"
                for component in lacking[int(numbers[at])]:
                    self._find(ShardFinding("missing", self._shards.names[row], self._keys[row][at], component, text))

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
                continue  # already a finding of the shard
            keys = [
                self._keys[shard][row - int(firsts[shard])] for shard, row in zip(shards, (earlier, later), strict=True)
            ]
            if keys[0] == keys[1]:
                text = f"is in shard '{self._shards.names[shards[0]]}' too"
                self._find(ShardFinding("duplicate", self._shards.names[shards[1]], keys[1], "", text))


def _columns_problem(columns: "SampleColumns", rows: slice, part: ShardReport, keys: Texts) -> str | None:
    """Describe how the rows of a shard in the column file differ from the shard."""
    if columns.keys[rows] != keys:
        return "other keys"
    labels = columns.labels
    if labels is not None and (labels[rows] != part.labels).any():
        at = int(np.argmax(labels[rows] != part.labels))
        return f"class id {labels[rows][at]} for key '{part.keys[at]}', where the shard has {part.labels[at]}"
    num = len(part.keys)
    for component, mask in columns.has.items():
        offsets = part.places.get(component)
        is_there = np.zeros(num, np.bool_) if offsets is None else offsets[0] >= 0
        if ((np.ones(num, np.bool_) if mask is None else mask[rows]) != is_there).any():
            return f"another set of samples with component '{component}'"
    return None
