"""Check one shard, or a part of its samples: read the whole tar, decode photos, compare masks, labels and names."""

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from dali_pipes.arrays import Int64s
from dali_pipes.data_set.indexing import MAX_LABEL_BYTES, check_member_name, parse_label
from dali_pipes.errors import DataError, printable
from dali_pipes.formats.names import LABEL_COMPONENT, split_key
from dali_pipes.formats.orientation import UPRIGHT, read_orientation
from dali_pipes.formats.photo_header import PHOTO_FORMATS, PhotoHeader, is_photo, read_whole_photo_header
from dali_pipes.formats.photo_names import is_mask_name
from dali_pipes.formats.photo_rules import PhotoRules
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.formats.tar_reader import BLOCK, LINKS, REGULAR, ArchiveReader, Header, Member
from prep.inspect.findings import ShardFinding, note, without_shard
from prep.photos.decoders import Decoder, Undecodable, check_size, count_values, decode
from prep.photos.masks import PhotoSize, mask_size_problem

# The number of values or names that a finding or note names.
_SHOWN = 3
_PNG = b"\x89PNG\r\n\x1a\n"
_COLOURS = {0: "gray", 2: "RGB", 3: "palette", 4: "gray and alpha", 6: "RGBA"}


@dataclass(frozen=True, kw_only=True)
class Checks:
    """The expectations with which each sample is compared."""

    masks: tuple[str, ...] | None = None
    """Components that are masks; ``None``: the set's components are unknown, each sample is judged by itself."""
    mask_values: frozenset[int] | None = None
    """The values that a mask's pixels may have; ``None``: any."""
    photos: PhotoRules
    classes: Mapping[int, str] = field(default_factory=dict)
    """The class table; empty: any integer is a label."""

    def is_mask(self, component: str, photos: Set[str]) -> bool:
        return component in self.masks if self.masks is not None else is_mask_name(component, photos)


@dataclass(kw_only=True)
class ShardReport:
    """The result for one shard, or for a part of its samples. A row of an array is a sample of the whole shard."""

    row: int
    part: int
    findings: list[ShardFinding] = field(default_factory=list)
    num_bytes: int = 0
    checksum: int = 0
    num_files: int = 0
    num_decoded: int = 0
    """Photos and masks of this part's samples."""
    mask_values: Int64s = field(default_factory=lambda: np.zeros(256, np.int64))
    """int64 [256]: the number of this part's masks that have each value."""
    headers: list[tuple[int, str, PhotoHeader, int]] = field(default_factory=list)
    """Row, component, header and orientation, as a code of the shard index, of each photo of this part's samples."""
    is_whole: bool = False
    """Whether the shard was read to its end."""
    # Only part 0 fills the following fields.
    keys: list[str] = field(default_factory=list)
    digests: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    """XXH64 of each key."""
    component_sets: list[frozenset[str]] = field(default_factory=list)
    set_of: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 [N]: the row of each sample's components in ``component_sets``."""
    places: dict[str, tuple[Int64s, Int64s]] = field(default_factory=dict)
    """Component -> offsets and sizes, int64 [N] each; -1 and 0 where a sample lacks it."""
    labels: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [N]: class ids; 0 for samples without a label, or with a label that is not an integer."""


def verify_shard(
    stream: BinaryIO,
    report: ShardReport,
    *,
    shard: str,
    size: int | None,
    num_parts: int,
    decoder: Decoder,
    checks: Checks,
) -> None:
    """Read a tar to its end into ``report``; decode every ``num_parts``-th sample, beginning with the part's number.

    Args:
        stream: The tar's bytes.
        report: A new report. The report of part 0 gets all findings that do not need decoding.
        shard: The shard's name.
        size: The shard's bytes, if they are known.
        num_parts: The number of parts among which the samples are divided.
        decoder: Decodes the photos.
        checks: The expectations.
    """
    archive = NotingReader(stream, shard=shard, size=size)
    rows = _Rows(report, shard=shard, num_parts=num_parts, decoder=decoder, checks=checks)
    try:
        for member in archive:
            rows.add(member)
        report.is_whole = True
    except DataError as exc:
        if report.part == 0:
            report.findings.append(ShardFinding("archive", shard, "", "", without_shard(str(exc), shard)))
    rows.finish()
    report.num_bytes, report.checksum = archive.num_bytes, archive.checksum
    if report.part == 0:
        report.findings += [*archive.links, *archive.notes()]


def index_problem(index: ShardIndex, report: ShardReport) -> str | None:
    """Describe how a shard's index differs from the shard; ``None`` if it does not differ.

    A report of another part than 0 has only photos to compare.
    """
    problem = _rows_problem(index, report) if report.part == 0 else None
    return problem or _photos_problem(index, report)


def _photos_problem(index: ShardIndex, report: ShardReport) -> str | None:
    for row, component, header, orientation in report.headers:
        photo = index.photos.get(component)
        if photo is None or row >= index.num_samples:
            continue  # told by part 0
        height, width, format = int(photo.height[row]), int(photo.width[row]), PHOTO_FORMATS[photo.format[row]]
        if (format, height, width) != header:
            return (
                f"has a {format} of {height} x {width} pixels as component '{component}' of key '{index.keys[row]}'; "
                f"in the shard it is a {header.format} of {header.height} x {header.width}"
            )
        indexed = UPRIGHT if photo.orientation is None else int(photo.orientation[row])
        if indexed != orientation:
            return (
                f"has EXIF orientation {indexed} for component '{component}' of key '{index.keys[row]}'; "
                f"in the shard it is {orientation}"
            )
    return None


def _rows_problem(index: ShardIndex, report: ShardReport) -> str | None:
    keys, places, labels = report.keys, report.places, report.labels
    if index.num_samples != len(keys):
        return f"lists {index.num_samples} samples, the shard holds {len(keys)}"
    if index.keys != keys:
        row = next(row for row, key in enumerate(keys) if index.keys[row] != key)
        return f"has key '{index.keys[row]}' where the shard has '{keys[row]}'"
    if sorted(index.offsets) != sorted(places):
        return f"knows components {', '.join(sorted(index.offsets))}, the shard has {', '.join(sorted(places))}"
    for component, (offsets, sizes) in places.items():
        differs = (index.offsets[component] != offsets) | (index.sizes[component] != sizes)
        if differs.any():
            row = int(np.argmax(differs))
            return (
                f"has component '{component}' of key '{keys[row]}' at byte {index.offsets[component][row]}, "
                f"{index.sizes[component][row]} bytes; in the shard it is at {offsets[row]}, {sizes[row]} bytes"
            )
    if index.labels is not None and (index.labels != labels).any():
        row = int(np.argmax(index.labels != labels))
        return f"has class id {index.labels[row]} for key '{keys[row]}', the shard has {labels[row]}"
    return None


class _Decoded(NamedTuple):
    """The size of a decoded photo, and the values of a mask."""

    size: PhotoSize
    kind: str
    """Describes a photo that is not an 8-bit gray PNG."""
    values: Int64s | None
    """The values of the pixels, each once, if the photo is an 8-bit gray PNG."""


@dataclass(kw_only=True)
class _Sample:
    key: str
    is_mine: bool
    components: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Component -> offset and size."""
    decoded: dict[str, _Decoded] = field(default_factory=dict)


class _Rows:
    """Checks the samples of one shard, member by member."""

    def __init__(self, report: ShardReport, *, shard: str, num_parts: int, decoder: Decoder, checks: Checks) -> None:
        self._report, self._shard, self._num_parts = report, shard, num_parts
        self._decoder, self._checks = decoder, checks
        self._is_first = report.part == 0
        self._sample: _Sample | None = None
        self._num_samples = 0
        self._seen: dict[str, set[str]] = {}
        self._places: dict[str, list[tuple[int, int, int]]] = {}
        """Component -> row of the sample, offset and size."""
        self._set_numbers: dict[frozenset[str], int] = {}
        self._set_of: list[int] = []
        self._labels: dict[int, int] = {}

    def add(self, member: Member) -> None:
        """Check the next member."""
        sample, component = self._sample, member.component
        if sample is None or sample.key != member.key:
            self._finish_sample()
            is_mine = self._num_samples % self._num_parts == self._report.part
            sample = self._sample = _Sample(key=member.key, is_mine=is_mine)
            if self._is_first:
                self._check_new(member)
        if self._is_first:
            self._report.num_files += 1
            self._seen[member.key].add(component)
            self._check_name(member.name)
        if component in sample.components:
            if self._is_first:
                self._find("twice", sample.key, component, f"occurs twice (member '{member.name}')")
            return
        sample.components[component] = (member.offset, member.size)
        if component == LABEL_COMPONENT and self._is_first:
            self._check_label(sample.key, member.take(MAX_LABEL_BYTES + 1))
        elif sample.is_mine and is_photo(component):
            self._decode(sample, component, member)

    def finish(self) -> None:
        """Fill the report's columns, after the last member."""
        self._finish_sample()
        report, num = self._report, self._num_samples
        if not self._is_first:
            return
        encoded = (key.encode("utf-8", "surrogateescape") for key in report.keys)
        report.digests = np.fromiter((xxhash.xxh64_intdigest(key) for key in encoded), np.uint64, num)
        report.component_sets, report.set_of = list(self._set_numbers), np.array(self._set_of, np.int32)
        report.labels = np.zeros(num, np.int64)
        report.labels[list(self._labels)] = list(self._labels.values())
        for component, places in self._places.items():
            columns = np.full(num, -1, np.int64), np.zeros(num, np.int64)
            rows, offsets, sizes = np.array(places, np.int64).T
            columns[0][rows], columns[1][rows] = offsets, sizes
            report.places[component] = columns

    def _finish_sample(self) -> None:
        sample, self._sample = self._sample, None
        if sample is None:
            return
        self._check_masks(sample)
        if self._is_first:
            for component, (offset, size) in sample.components.items():
                self._places.setdefault(component, []).append((self._num_samples, offset, size))
            names = frozenset(sample.components)
            self._set_of.append(self._set_numbers.setdefault(names, len(self._set_numbers)))
            self._report.keys.append(sample.key)
        self._num_samples += 1

    def _find(self, kind: str, key: str, component: str, text: str) -> None:
        self._report.findings.append(ShardFinding(kind, self._shard, key, component, text))

    def _check_new(self, member: Member) -> None:
        before = self._seen.setdefault(member.key, set())
        if member.component in before:
            self._find("split", member.key, "", f"occurs twice, again from member '{member.name}' on")
        elif before:
            text = f"member '{member.name}' comes after other samples; members of one sample must stand together"
            self._find("split", member.key, "", text)

    def _check_name(self, name: str) -> None:
        try:
            check_member_name(name, shard=self._shard)
        except DataError as exc:
            self._find("name", "", "", without_shard(str(exc), self._shard))

    def _check_label(self, key: str, data: bytes) -> None:
        try:
            label = parse_label(data, shard=self._shard, key=key)
        except DataError as exc:
            self._find("label", key, LABEL_COMPONENT, str(exc).rpartition(f"component '{LABEL_COMPONENT}' ")[2])
            return
        self._labels[self._num_samples] = label
        classes = self._checks.classes
        if classes and label not in classes:
            table = f"{len(classes)} classes, {min(classes)} to {max(classes)}"
            self._find("label", key, LABEL_COMPONENT, f"class id {label} is not in the class table ({table})")

    def _decode(self, sample: _Sample, component: str, member: Member) -> None:
        # Masks are known only when all components of the sample are known; so the values of each gray PNG are kept.
        try:
            check_size(member.size)
            data = member.read()
            header = read_whole_photo_header(data)
            orientation = read_orientation(data, header.format)
            self._report.headers.append((self._num_samples, component, header, orientation.value))
            is_gray = _is_gray_png(data)
            header, pixels = decode(
                self._decoder, data, rules=self._checks.photos, output="gray" if is_gray else "nothing"
            )
        except Undecodable as exc:
            self._find("photo", sample.key, component, str(exc))
            return
        self._report.num_decoded += 1
        values = np.flatnonzero(count_values(pixels)) if is_gray else None
        kind = "" if is_gray else _kind(data, header.format)
        size = PhotoSize.of(header.height, header.width, orientation.value)
        sample.decoded[component] = _Decoded(size, kind, values)

    def _check_masks(self, sample: _Sample) -> None:
        photos = {name for name in sample.components if is_photo(name)}
        masks = [name for name in sample.decoded if self._checks.is_mask(name, photos)]
        photo = next((name for name in sample.decoded if name not in masks), None)
        for mask in masks:
            found = sample.decoded[mask]
            if found.values is None:
                text = f"is {found.kind}, expected an 8-bit gray PNG: its class ids would be lost"
                self._find("mask", sample.key, mask, text)
            else:
                self._check_values(sample.key, mask, found.values)
            if photo is not None and (problem := mask_size_problem(photo, sample.decoded[photo].size, found.size)):
                self._find("mask size", sample.key, mask, problem)

    def _check_values(self, key: str, mask: str, values: Int64s) -> None:
        self._report.mask_values[values] += 1
        allowed = self._checks.mask_values
        if allowed is not None and (other := sorted(set(values.tolist()) - allowed)):
            shown = ", ".join(map(str, other[:_SHOWN])) + (", ..." if len(other) > _SHOWN else "")
            self._find("mask values", key, mask, f"holds {shown}, expected {', '.join(map(str, sorted(allowed)))}")


def _is_gray_png(data: bytes) -> bool:
    # IHDR: bit depth, colour type.
    return data[:8] == _PNG and tuple(data[24:26]) == (8, 0)


def _kind(data: bytes, format: str) -> str:
    if format != "PNG":
        return f"a {format}"
    return f"a {data[24]}-bit {_COLOURS.get(data[25], 'unknown')} PNG"


class NotingReader(ArchiveReader):
    """Reads an archive. Afterwards `links` and `notes` list its oddities."""

    def __init__(self, stream: BinaryIO, *, shard: str, size: int | None) -> None:
        super().__init__(stream, shard=shard, size=size)
        self._name = shard
        self._stop = -1
        """Byte at which the first end-of-archive block begins; -1 until it was read."""
        self._num_zeros = 0
        """Bytes from there on; used only if all of them are zero."""
        self._trailing = False
        self._long: Counter[str] = Counter()
        self.links: list[ShardFinding] = []
        """Findings for members of samples that are links, which no reader of shards follows."""
        self._outside: list[str] = []
        self._num_members = self._num_outside = self._num_spaces = 0

    def notes(self) -> list[ShardFinding]:
        """The notes; call it when the whole archive was read."""
        texts = [
            f"{number} member{'' if number == 1 else 's'} with {kind}" for kind, number in sorted(self._long.items())
        ]
        if self._stop >= 0 and not self._num_members:
            texts.append("holds no sample; DALI without an index reads it as one sample with empty components")
        if self._num_outside:
            shown = ", ".join(f"'{name}'" for name in self._outside)
            more = f" and {self._num_outside - len(self._outside)} more" if self._num_outside > _SHOWN else ""
            texts.append(f"{self._num_outside} files belong to no sample: {shown}{more}")
        if self._num_spaces:
            texts.append(f"{self._num_spaces} names with white space, which DALI's own index format cannot hold")
        if self._trailing:
            texts.append(f"bytes after the end of the archive, at byte {self._stop}: readers of tars ignore them")
        elif self._stop >= 0 and self._num_zeros < 2 * BLOCK:
            texts.append("one end-of-archive block, expected two")
        return [note(text, shard=self._name) for text in texts]

    def _next_header(self) -> Header | None:
        start = self._position
        header = super()._next_header()
        if header is None:
            self._stop = start
            self._look_behind(bytes(BLOCK) + self._piece[self._piece_start :])
        elif header.kind == ord("L"):
            self._long["GNU's long name, for which wds2idx writes a wrong position"] += 1
        return header

    def _skip_special(self, name: str, kind: int) -> None:
        if kind in LINKS and (names := split_key(name)) is not None:
            text = "is a link, which no reader of shards follows; pack it anew (tar: --hard-dereference or -h)"
            self.links.append(ShardFinding("link", self._name, names[0], names[1].lower(), text))

    def _pax_records(self, header: Header) -> dict[bytes, bytes]:
        records = super()._pax_records(header)
        if records.get(b"path"):
            self._long["a PAX long name, which DALI without an index reads as another sample"] += 1
        return records

    def _member(self, name: str, size: int, kind: int, said: Mapping[bytes, bytes]) -> Iterator[Member]:
        belongs = False
        for member in super()._member(name, size, kind, said):
            belongs = True
            self._num_members += 1
            self._num_spaces += any(character.isspace() for character in name)
            yield member
        if not belongs and kind in REGULAR:
            self._num_outside += 1
            if len(self._outside) < _SHOWN:
                self._outside.append(printable(name))

    def _read_piece(self) -> bool:
        is_more = super()._read_piece()
        if self._stop >= 0:
            self._look_behind(self._piece)
        return is_more

    def _look_behind(self, piece: bytes) -> None:
        """Examine bytes after the end of the archive."""
        self._trailing = self._trailing or any(piece)
        self._num_zeros += len(piece)
