"""Check one shard: read its whole tar, decode its photos, and compare masks, labels, names and the shard index."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.data_set.indexing import MAX_LABEL_BYTES, IndexRow, check_member_name, index_of_rows, parse_label
from dali_pipes.errors import DataError, printable
from dali_pipes.formats.names import LABEL_COMPONENT, split_key
from dali_pipes.formats.photo_header import PhotoRules, is_photo
from dali_pipes.formats.photo_names import ComponentCounts, PhotoRoles, photo_roles
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.formats.tar_reader import LINKS, ArchiveReader, Member
from prep.inspect.findings import ShardFinding, unknown_labels, wrong_mask_sizes
from prep.photos.decoders import Decoder, Output, Undecodable, check_size, count_values, decode

_NUM_NAMED = 3
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, kw_only=True)
class Checks:
    """The expectations with which each sample is compared."""

    counts: ComponentCounts | None = None
    """The components of the data set; ``None``: unknown, each shard is judged by its own."""
    masks: tuple[str, ...] | None = None
    """The components that hold masks. With ``None``, `photo_roles` finds them."""
    mask_values: frozenset[int] | None = None
    """The values that a mask's pixels may have. ``None`` allows all."""
    photos: PhotoRules
    classes: Mapping[int, str] = field(default_factory=dict)
    """The class table; empty: any integer is a label."""

    def roles(self, counts: ComponentCounts) -> PhotoRoles:
        """The photos and masks; ``counts`` are those of the samples at hand, for a data set that is not indexed."""
        roles = photo_roles(self.counts or counts, besides=self.masks or ())
        return roles if self.masks is None else PhotoRoles(roles.photos, self.masks)


@dataclass(kw_only=True)
class ShardReport:
    """The result for one shard."""

    index: ShardIndex
    is_whole: bool
    findings: list[ShardFinding]
    num_decoded: int
    """Photos and masks."""
    mask_values: Int64s
    """int64 [256]: the number of masks that have each value."""


def verify_shard(stream: BinaryIO, *, shard: str, size: int, decoder: Decoder, checks: Checks) -> ShardReport:
    """Read a tar of ``size`` bytes to its end, and decode its photos."""
    archive = _NotingReader(stream, shard=shard, size=size)
    samples = _Samples(shard, decoder, checks)
    is_whole = True
    try:
        for member in archive:
            samples.add(member)
    except DataError as exc:
        is_whole = False
        samples.find("archive", str(exc))
    index = index_of_rows(samples.rows, shard=shard, archive=archive)
    counts = {name: int((offsets >= 0).sum()) for name, offsets in index.offsets.items()}
    roles = checks.roles(ComponentCounts(counts, index.num_samples))
    mask_values = samples.check_masks(roles.masks)
    findings = samples.findings
    bad_keys = {finding.key for finding in findings}
    by_index = itertools.chain(wrong_mask_sizes(index, roles), unknown_labels(index, checks.classes))
    findings += [finding for finding in by_index if finding.key not in bad_keys]
    findings += archive.findings
    if archive.num_outside:
        names = ", ".join(f"'{name}'" for name in archive.outside)
        more = ", ..." if archive.num_outside > len(archive.outside) else ""
        samples.find("note", f"{archive.num_outside} files belong to no sample: {names}{more}")
    if is_whole and not index.num_samples:
        samples.find("note", "holds no sample")
    return ShardReport(
        index=index,
        is_whole=is_whole,
        findings=findings,
        num_decoded=samples.num_decoded,
        mask_values=mask_values,
    )


class _Samples:
    """Checks the samples of one shard, member by member, and collects the rows of its index."""

    def __init__(self, shard: str, decoder: Decoder, checks: Checks) -> None:
        self._shard, self._decoder, self._checks = shard, decoder, checks
        self._keys: set[str] = set()
        self._decoded: list[tuple[str, str, Int64s | None, str]] = []
        """Key, component, values of its pixels (``None`` if it is not an 8-bit gray PNG), and what it is."""
        self.rows: list[IndexRow] = []
        self.findings: list[ShardFinding] = []
        self.num_decoded = 0

    def find(self, kind: str, text: str, key: str = "", component: str = "") -> None:
        text = re.sub(rf"^shard '{re.escape(self._shard)}'(: |, | )", "", text)  # a finding names the shard itself
        self.findings.append(ShardFinding(kind, text, self._shard, key, component))

    def add(self, member: Member) -> None:
        key, component = member.key, member.component
        if not self.rows or self.rows[-1].key != key:
            if key in self._keys:
                text = f"member '{member.name}' comes after other samples; members of one sample must stand together"
                self.find("split", text, key)
            self._keys.add(key)
            self.rows.append(IndexRow(key=key))
        row = self.rows[-1]
        try:
            check_member_name(member.name, shard=self._shard)
        except DataError as exc:
            self.find("name", str(exc))
        if component in row.places:
            self.find("twice", f"occurs twice (member '{member.name}')", key, component)
            return
        if component == LABEL_COMPONENT:
            try:
                row.label = parse_label(member.take(MAX_LABEL_BYTES + 1), shard=self._shard, key=key)
            except DataError as exc:
                self.find("label", str(exc).rpartition(f"component '{component}' ")[2], key, component)
        elif is_photo(component):
            self._decode(row, component, member)
        row.places[component] = (member.offset, member.size, member.checksum())

    def _decode(self, row: IndexRow, component: str, member: Member) -> None:
        # Masks are known only when all components are known; so the values of each gray PNG are kept.
        data = row.add_photo(component, member)
        is_gray = data[:8] == _PNG and tuple(data[24:26]) == (8, 0)  # IHDR: bit depth, colour type
        try:
            check_size(member.size)
            output: Output = "gray" if is_gray else "nothing"
            header, pixels = decode(self._decoder, data, rules=self._checks.photos, output=output)
        except Undecodable as exc:
            self.find("photo", str(exc), row.key, component)
            return
        self.num_decoded += 1
        is_png = header.format == "PNG"
        what = f"a PNG of {data[24]} bits and colour type {data[25]}" if is_png else f"a {header.format}"
        values = np.flatnonzero(count_values(pixels)) if is_gray else None
        self._decoded.append((row.key, component, values, what))

    def check_masks(self, masks: Sequence[str]) -> Int64s:
        """Check depth and values of the decoded masks; returns how many masks have each value, int64 [256]."""
        allowed, counts = self._checks.mask_values, np.zeros(256, np.int64)
        for key, component, values, what in self._decoded:
            if component not in masks:
                continue
            if values is None:
                self.find("mask", f"is {what}, expected an 8-bit gray PNG: its class ids would be lost", key, component)
                continue
            counts[values] += 1
            if allowed is not None and (others := sorted({*values.tolist()} - allowed)):
                named = ", ".join(map(str, others[:_NUM_NAMED])) + (", ..." if len(others) > _NUM_NAMED else "")
                text = f"holds {named}, expected {', '.join(map(str, sorted(allowed)))}"
                self.find("mask values", text, key, component)
        return counts


class _NotingReader(ArchiveReader):
    """Reads an archive, and notes the members that no reader of shards gives to anybody."""

    def __init__(self, stream: BinaryIO, *, shard: str, size: int) -> None:
        super().__init__(stream, shard=shard, size=size)
        self.findings: list[ShardFinding] = []
        self.num_outside = 0
        self.outside: list[str] = []
        """The first files that belong to no sample."""

    def _skip_special(self, name: str, kind: int) -> None:
        if kind in LINKS and (names := split_key(name)) is not None:
            text = "is a link, which no reader of shards follows; pack it anew (tar: --hard-dereference or -h)"
            self.findings.append(ShardFinding("link", text, self._shard, names[0], names[1].lower()))

    def _names(self, name: str) -> tuple[str, str] | None:
        names = super()._names(name)
        if names is None:
            self.num_outside += 1
            self.outside += [printable(name)] if self.num_outside <= _NUM_NAMED else []
        return names
