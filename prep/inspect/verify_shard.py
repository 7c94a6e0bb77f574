"""One shard's bytes to what is wrong with it and its samples: what a process of `prep.inspect.verify` does."""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from dali_pipes.data_set.indexing import check_member_name, parse_label
from dali_pipes.errors import DataError
from dali_pipes.formats.keys import split_key
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.formats.tar_reader import ArchiveReader, Header, Member
from prep.photos.decoders import Decoder, Undecodable, decode

__all__ = [
    "KINDS",
    "NOTES",
    "SAMPLE_KINDS",
    "Checks",
    "Finding",
    "ShardReport",
    "index_problem",
    "is_mask_name",
    "verify_shard",
]

Int64s = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]

KINDS: Mapping[str, str] = {
    # What is wrong with a shard: no loader can read it as it is.
    "archive": "shards that are no whole tar",
    "split": "samples whose members do not stand together",
    "twice": "components that a sample has twice",
    "name": "members whose names cannot be keys",
    "link": "components that are links",
    # What is wrong with a sample: it can be left out.
    "duplicate": "keys that come more than once",
    "missing": "components that samples lack",
    "photo": "photos that cannot be decoded",
    "mask": "masks that are no 8-bit gray PNG",
    "mask size": "masks of another size than their photo",
    "mask values": "masks with other values",
    "label": "labels that are none",
    # What is wrong with what was written about the shards.
    "manifest": "shards that are not as the manifest says",
    "index": "shard indexes that do not fit",
    "columns": "a column file that does not fit",
    # Notes: nothing that a loader of ours minds.
    "note": "notes",
}
"""Kind of finding -> what is counted under it, for people."""
SAMPLE_KINDS = frozenset({"duplicate", "missing", "photo", "mask", "mask size", "mask values", "label"})
"""What a sample can be left out for; all else is mended by packing or indexing anew."""

NOTES = frozenset({"note"})
"""What is told and is no problem."""

_MASK_WORDS = frozenset({"mask", "masks", "seg", "segmentation", "trimap", "label", "labels", "annotation"})
_BLOCK_BYTES = 512
_PIXELS_AT_A_TIME = 1 << 20
# Examples that a note names.
_SHOWN = 3
# Kinds of headers: links, and what stands before a member's own.
_LINKS, _EXTENDED = frozenset(b"12"), frozenset(b"xXgLK")
# Control characters, and bytes that are no UTF-8.
_ODD = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class Finding(NamedTuple):
    """One thing that is wrong, or a note."""

    kind: str
    """Of `KINDS`."""
    shard: str
    key: str
    """Empty where it is the shard that is at fault."""
    component: str
    text: str
    """Goes on after shard, key and component."""

    def __str__(self) -> str:
        parts = (("shard", self.shard), ("key", self.key), ("component", self.component))
        named = ", ".join(f"{what} '{name}'" for what, name in parts if name)
        # Names in a tar may hold anything, also what a terminal obeys.
        return _ODD.sub(lambda match: f"\\x{ord(match[0]) & 0xFF:02x}", f"{named}: {self.text}" if named else self.text)


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What is held against each sample."""

    masks: tuple[str, ...] | None = None
    """Components that are masks; ``None``: those that `is_mask_name` takes for such."""
    mask_values: frozenset[int] | None = None
    """What a mask's pixels may be; ``None``: anything."""
    max_pixels: int
    classes: Mapping[int, str] = field(default_factory=dict)
    """The class table; empty: any integer will do."""


@dataclass(kw_only=True)
class ShardReport:
    """What was found in one shard, or in a part of its samples; a row of an array is a sample of the whole shard."""

    row: int
    part: int
    findings: list[Finding] = field(default_factory=list)
    num_bytes: int = 0
    checksum: int = 0
    num_files: int = 0
    num_decoded: int = 0
    """Photos and masks of this part's samples."""
    mask_values: Int64s = field(default_factory=lambda: np.zeros(256, np.int64))
    """int64 [256]: masks of this part that have each value."""
    # Of part 0 alone.
    is_whole: bool = False
    """Whether it was read to its end."""
    keys: list[str] = field(default_factory=list)
    digests: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    """XXH64 of each key."""
    component_sets: list[frozenset[str]] = field(default_factory=list)
    set_of: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 [N]: which of ``component_sets`` each sample has."""
    places: dict[str, tuple[Int64s, Int64s]] = field(default_factory=dict)
    """Component -> offsets and sizes, int64 [N] each; -1 and 0 where a sample lacks it."""
    labels: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [N]: class ids; 0 of samples that have none, or one that is no integer."""


def is_mask_name(component: str, photos: Set[str]) -> bool:
    """Whether a photo component is a mask, by its name and those of the sample's other photos.

    One that is called so (``seg.png``, ``trimap.png``, ``left-mask.png``), or a PNG beside photos that are none.

    >>> is_mask_name("trimap.png", {"image.jpg", "trimap.png"}), is_mask_name("png", {"png"})
    (True, False)
    >>> is_mask_name("mask.jpg", {"jpg", "mask.jpg"}), is_mask_name("masked.jpg", {"jpg", "masked.jpg"})
    (True, False)
    """
    if len(photos) < 2:
        return False
    stem, _, extension = component.rpartition(".")
    if not _MASK_WORDS.isdisjoint(re.split(r"[._-]", stem)):
        return True
    return extension == "png" and any(not photo.endswith("png") for photo in photos)


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
    """Read a tar to its end into ``report``; every ``num_parts``-th sample from its part on is decoded.

    Args:
        stream: The tar's bytes.
        report: Empty but for shard and part. Part 0 has all that is not about decoding.
        shard: The shard's name.
        size: Its bytes, where they are known.
        num_parts: How many share its samples.
        decoder: What decodes them.
        checks: What is held against each sample.
    """
    archive = _Inspected(stream, shard=shard, size=size)
    rows = _Rows(report, shard=shard, num_parts=num_parts, decoder=decoder, checks=checks)
    try:
        for member in archive:
            rows.add(member)
        report.is_whole = True
    except DataError as exc:
        if report.part == 0:
            report.findings.append(Finding("archive", shard, "", "", _without_prefix(str(exc), shard)))
    rows.finish()
    report.num_bytes, report.checksum = archive.num_bytes, archive.checksum
    if report.part == 0:
        report.findings += [*archive.links, *archive.notes()]


def index_problem(index: ShardIndex, report: ShardReport) -> str | None:
    """How a shard's index differs from what was found in the shard; ``None`` where it does not."""
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


class _Inspected(ArchiveReader):
    """An archive whose peculiarities are noted: what other readers of tars get wrong, or what holds no sample."""

    def __init__(self, stream: BinaryIO, *, shard: str, size: int | None) -> None:
        super().__init__(stream, shard=shard, size=size)
        self._name = shard
        self._stop = -1
        """Where the first end-of-archive block begins; -1 before it was met."""
        self._num_zeros = 0
        """Bytes of nothing but zeros from there on."""
        self._trailing = False
        self._long: dict[str, int] = {}
        self._path = b""
        """The name that an extended header has for the next member."""
        self.links: list[Finding] = []
        """Members of samples that are links: no reader of shards follows one."""
        self._outside: list[str] = []
        self._num_members = self._num_outside = self._num_spaces = 0

    def notes(self) -> list[Finding]:
        """What was noted."""
        texts = [
            f"{number} member{'' if number == 1 else 's'} with {kind}" for kind, number in sorted(self._long.items())
        ]
        if self._stop >= 0 and not self._num_members:
            texts.append("holds no sample; DALI without an index takes it for one of empty components")
        if self._num_outside:
            shown = ", ".join(f"'{name}'" for name in self._outside)
            more = f" and {self._num_outside - len(self._outside)} more" if self._num_outside > _SHOWN else ""
            texts.append(f"{self._num_outside} files belong to no sample: {shown}{more}")
        if self._num_spaces:
            texts.append(f"{self._num_spaces} names with white space, which DALI's own index format cannot hold")
        if self._trailing:
            texts.append(f"bytes after the end of the archive, at byte {self._stop}: readers of tars pass them over")
        elif self._stop >= 0 and self._num_zeros < 2 * _BLOCK_BYTES:
            texts.append("one end-of-archive block, where there ought to be two")
        return [Finding("note", self._name, "", "", text) for text in texts]

    def _next_header(self) -> Header | None:
        start = self._position
        header = super()._next_header()
        if header is None:
            self._stop = start
            self._look_behind(bytes(_BLOCK_BYTES) + self._piece[self._piece_start :])
        elif header.kind == ord("L"):
            kind = "GNU's long name, at which wds2idx points to wrong bytes"
            self._long[kind] = self._long.get(kind, 0) + 1
        elif header.kind not in _EXTENDED:
            if header.kind in _LINKS:
                self._add_link((self._path or header.name).decode("utf-8", "surrogateescape"))
            self._path = b""
        return header

    def _add_link(self, name: str) -> None:
        if (names := split_key(name)) is not None:
            text = "is a link, which no reader of shards follows; pack it anew (tar: --hard-dereference or -h)"
            self.links.append(Finding("link", self._name, names[0], names[1].lower(), text))

    def _extended(self, header: Header) -> bytes:
        content = super()._extended(header)
        if header.kind == ord("L"):
            self._path = content.partition(b"\0")[0]
        return content

    def _pax_records(self, header: Header) -> dict[bytes, bytes]:
        records = super()._pax_records(header)
        if records.get(b"path"):
            self._path = records[b"path"]
            kind = "a PAX long name, which DALI without an index takes for another sample"
            self._long[kind] = self._long.get(kind, 0) + 1
        return records

    def _member(self, name: str, size: int, kind: int, said: Mapping[bytes, bytes]) -> Iterator[Member]:
        belongs = False
        for member in super()._member(name, size, kind, said):
            belongs = True
            self._num_members += 1
            self._num_spaces += any(character.isspace() for character in name)
            yield member
        if not belongs and kind in b"0\x007":
            self._num_outside += 1
            if len(self._outside) < _SHOWN:
                self._outside.append(name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))

    def _read_piece(self) -> bool:
        is_more = super()._read_piece()
        if self._stop >= 0:
            self._look_behind(self._piece)
        return is_more

    def _look_behind(self, piece: bytes) -> None:
        self._trailing = self._trailing or any(piece)
        self._num_zeros += len(piece)


class _Decoded(NamedTuple):
    """What is kept of a photo that was decoded."""

    height: int
    width: int
    kind: str
    """What it is instead, where it is no 8-bit gray PNG."""
    values: Int64s | None
    """Those of its pixels, each once, where it is one."""


@dataclass(kw_only=True)
class _Sample:
    key: str
    is_mine: bool
    components: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Component -> offset and size."""
    decoded: dict[str, _Decoded] = field(default_factory=dict)


class _Rows:
    """The samples of one shard, each held against the checks as it passes by."""

    def __init__(self, report: ShardReport, *, shard: str, num_parts: int, decoder: Decoder, checks: Checks) -> None:
        self._report, self._shard, self._num_parts = report, shard, num_parts
        self._decoder, self._checks = decoder, checks
        self._is_first = report.part == 0
        self._sample: _Sample | None = None
        self._num_samples = 0
        self._seen: dict[str, set[str]] = {}
        self._places: dict[str, tuple[list[int], list[int], list[int]]] = {}
        self._set_numbers: dict[frozenset[str], int] = {}
        self._set_of: list[int] = []
        self._labels: dict[int, int] = {}

    def add(self, member: Member) -> None:
        """The next member."""
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
                self._find("twice", sample.key, component, f"is there twice (member '{member.name}')")
            return
        sample.components[component] = (member.offset, member.size)
        if component == LABEL_COMPONENT and self._is_first:
            self._check_label(sample.key, member.read())
        elif sample.is_mine and is_photo(component):
            self._decode(sample, component, member.read)

    def finish(self) -> None:
        """No more members come: the report's columns are filled."""
        self._finish_sample()
        report, num = self._report, self._num_samples
        if not self._is_first:
            return
        encoded = (key.encode("utf-8", "surrogateescape") for key in report.keys)
        report.digests = np.fromiter((xxhash.xxh64_intdigest(key) for key in encoded), np.uint64, num)
        report.component_sets, report.set_of = list(self._set_numbers), np.array(self._set_of, np.int32)
        report.labels = np.zeros(num, np.int64)
        report.labels[list(self._labels)] = list(self._labels.values())
        for component, (rows, offsets, sizes) in self._places.items():
            columns = np.full(num, -1, np.int64), np.zeros(num, np.int64)
            columns[0][rows], columns[1][rows] = offsets, sizes
            report.places[component] = columns

    def _finish_sample(self) -> None:
        sample, self._sample = self._sample, None
        if sample is None:
            return
        self._check_masks(sample)
        if self._is_first:
            for component, (offset, size) in sample.components.items():
                for column, value in zip(
                    self._places.setdefault(component, ([], [], [])), (self._num_samples, offset, size), strict=True
                ):
                    column.append(value)
            names = frozenset(sample.components)
            self._set_of.append(self._set_numbers.setdefault(names, len(self._set_numbers)))
            self._report.keys.append(sample.key)
        self._num_samples += 1

    # Checks

    def _find(self, kind: str, key: str, component: str, text: str) -> None:
        self._report.findings.append(Finding(kind, self._shard, key, component, text))

    def _check_new(self, member: Member) -> None:
        before = self._seen.setdefault(member.key, set())
        if member.component in before:
            self._find("split", member.key, "", f"is there twice, again from member '{member.name}' on")
        elif before:
            text = f"member '{member.name}' comes after other samples; those of one sample must stand together"
            self._find("split", member.key, "", text)

    def _check_name(self, name: str) -> None:
        try:
            check_member_name(name, shard=self._shard)
        except DataError as exc:
            self._find("name", "", "", _without_prefix(str(exc), self._shard))

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

    def _decode(self, sample: _Sample, component: str, read: Callable[[], bytes]) -> None:
        data = read()
        # Which photos are masks is known when all names of the sample are: the values of whatever may be one are taken.
        is_gray = _is_gray_png(data)
        try:
            header, pixels = decode(
                self._decoder, data, max_pixels=self._checks.max_pixels, output="gray" if is_gray else "nothing"
            )
        except Undecodable as exc:
            self._find("photo", sample.key, component, str(exc))
            return
        self._report.num_decoded += 1
        values = _values(pixels) if is_gray else None
        kind = "" if is_gray else _kind(data, header.format)
        sample.decoded[component] = _Decoded(header.height, header.width, kind, values)

    def _check_masks(self, sample: _Sample) -> None:
        photos = {name for name in sample.components if is_photo(name)}
        masks = [name for name in sample.decoded if self._is_mask(name, photos)]
        photo = next((name for name in sample.decoded if name not in masks), None)
        for mask in masks:
            found = sample.decoded[mask]
            if found.values is None:
                text = f"is {found.kind}, expected an 8-bit gray PNG: its class ids would be lost"
                self._find("mask", sample.key, mask, text)
            else:
                self._check_values(sample.key, mask, found.values)
            expected = sample.decoded[photo] if photo is not None else found
            if (found.height, found.width) != (expected.height, expected.width):
                text = f"has {found.height} x {found.width} pixels, '{photo}' {expected.height} x {expected.width}"
                self._find("mask size", sample.key, mask, text)

    def _check_values(self, key: str, mask: str, values: Int64s) -> None:
        self._report.mask_values[values] += 1
        allowed = self._checks.mask_values
        if allowed is not None and (other := sorted(set(values.tolist()) - allowed)):
            shown = ", ".join(map(str, other[:_SHOWN])) + (", ..." if len(other) > _SHOWN else "")
            self._find("mask values", key, mask, f"holds {shown}, expected {', '.join(map(str, sorted(allowed)))}")

    def _is_mask(self, component: str, photos: set[str]) -> bool:
        masks = self._checks.masks
        return component in masks if masks is not None else is_mask_name(component, photos)


def _values(pixels: Pixels) -> Int64s:
    """The values that come, each once."""
    counts = np.zeros(256, np.int64)
    flat = pixels.ravel()
    # Piece by piece: numpy counts in 8 bytes a pixel.
    for start in range(0, len(flat), _PIXELS_AT_A_TIME):
        counts += np.bincount(flat[start : start + _PIXELS_AT_A_TIME], minlength=256)
    return np.flatnonzero(counts)


def _is_gray_png(data: bytes) -> bool:
    # IHDR: bit depth, colour type.
    return data[:8] == b"\x89PNG\r\n\x1a\n" and tuple(data[24:26]) == (8, 0)


def _kind(data: bytes, format: str) -> str:
    colours = {0: "gray", 2: "RGB", 3: "palette", 4: "gray and alpha", 6: "RGBA"}
    if format != "PNG":
        return f"a {format}"
    return f"a {data[24]}-bit {colours.get(data[25], 'unknown')} PNG"


def _without_prefix(text: str, shard: str) -> str:
    """An error's text without the shard, which a finding names by itself."""
    for prefix in (f"shard '{shard}': ", f"shard '{shard}', ", f"shard '{shard}' "):
        if text.startswith(prefix):
            return text.removeprefix(prefix)
    return text
