"""Read the headers of a batch's photos, by their own bytes: together, one by one, or by DALI.

The shard index knows the headers already, but an index can be old, wrong or made to deceive, and components whose names
are not those of photos are not in it.

Photos in one buffer are read together: one call of numpy takes the next bytes of all JPEGs or PNGs. It goes on to the
pixels of a JPEG and to the end of a PNG, as far as a decoder's parser reads, see Note [parallel parsers]. Other photos,
and those that are not written as usual, are read by `read_whole_photo_header`, one by one; both ways always say the
same.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline

from dali_pipes.arrays import Bools, Int64s, UInt64s
from dali_pipes.formats.orientation import (
    EXIF_MARK,
    FRACTION_BYTES,
    ORIENTATION_TAG,
    TEXT_TAGS,
    UPRIGHT,
    is_surely_read,
    read_orientation,
    upright_size,
)
from dali_pipes.formats.photo_header import JPEG_FRAMES, PHOTO_FORMATS, PhotoHeader, read_whole_photo_header
from dali_pipes.formats.sure_headers import JPEG_CHANNELS, JPEG_TAIL_BYTES, PNG_KINDS, PNG_START
from dali_pipes.reader.buffers import EncodedBatch

UInt8s = npt.NDArray[np.uint8]

# A file of fewer bytes has no pixels; this many are taken without asking whether they are there.
_MIN_BYTES = 48
# Segments before the size of a JPEG or the pixels of a PNG. Most have 1 to 6; the few that have more are read alone.
_MAX_STEPS = 32
_FEW = 1 / 32
# Encoders write a PNG's pixels in chunks of 8 KiB or more.
_MIN_CHUNK = 1024
# Fewer photos are read one by one, 2 us each. That is as fast for 30; 64 together take 1 us each, 256 take 0.3.
_MIN_PHOTOS = 32
_JPEG, _PNG = (PHOTO_FORMATS.index(name) for name in ("JPEG", "PNG"))
_PNG_MAGIC = int.from_bytes(b"\x89PNG\r\n\x1a\n")
_IHDR, _IDAT, _ACTL, _IEND, _EXIF = (int.from_bytes(name) for name in (b"IHDR", b"IDAT", b"acTL", b"IEND", b"eXIf"))
# Marker and first four bytes of a JPEG's segment of EXIF data; between them stands its length.
_EXIF_MASK, _EXIF_SEGMENT = np.array([0xFFFF0000FFFFFFFF, 0xFFE1000045786966], np.uint64).view(np.int64)
_FIRST_CHUNK = int.from_bytes(PNG_START)
_ARE_CHANNELS = np.isin(np.arange(1 << 8), JPEG_CHANNELS)
_ARE_PNG_KINDS = np.isin(np.arange(1 << 16), [int.from_bytes(kind) for kind in PNG_KINDS])
_SCAN = 0xFFDA
_NONE = np.zeros(0, np.int64)
_OTHER, _FRAME, _PASSED, _APP1 = range(4)
# Entries of a directory that are looked at together; cameras write 8 to 20.
_MAX_ENTRIES = 32
_TEXT = 255
_SHORT = 3
_HEAD_BYTES = 8
_ENTRY_BYTES = 12


def _kinds_of_markers() -> UInt8s:
    """The action at two bytes of a JPEG, by their number: pass a segment with a length, stop at a frame, or ask.

    A segment that may hold EXIF data is passed, too.
    """
    kinds = np.full(1 << 16, _OTHER, np.uint8)
    kinds[0xFF02:0xFFFF] = _PASSED
    kinds[0xFFD0:0xFFDB] = _OTHER  # without a length, the end, or pixels
    kinds[[0xFF00 | marker for marker in JPEG_FRAMES]] = _FRAME
    kinds[0xFFE1] = _APP1
    return kinds


_KINDS = _kinds_of_markers()
_IS_PASSED = _KINDS == _PASSED


def _kinds_of_exif_tags() -> UInt8s:
    """The target of an entry, by its tag: nothing that matters, a text, or this number of bytes."""
    kinds = np.zeros(1 << 16, np.uint8)
    kinds[list(TEXT_TAGS)] = _TEXT
    for tag, num_bytes in FRACTION_BYTES.items():
        kinds[tag] = num_bytes
    return kinds


_EXIF_KINDS = _kinds_of_exif_tags()


class PhotoHeaders(NamedTuple):
    """Formats and sizes as `read_whole_photo_header` gives them; each [B]."""

    format: Int64s
    """Index into `PHOTO_FORMATS`."""
    height: Int64s
    """Rows as stored; 0 if the header cannot be read."""
    width: Int64s
    orientation: Int64s
    """1 to 8, as `read_orientation` gives it; 1 if it was not asked for."""
    is_plain: Bools
    """Whether DALI's decoders are sure to read the header and, if it was asked for, to see that orientation."""

    @property
    def sizes(self) -> tuple[Int64s, Int64s]:
        """Heights and widths of the upright photos; as stored if orientations were not asked for."""
        return upright_size(self.height, self.width, self.orientation)

    def header(self, row: int) -> PhotoHeader:
        """The header of one photo."""
        return PhotoHeader(PHOTO_FORMATS[self.format[row]], int(self.height[row]), int(self.width[row]))


def read_photo_headers(photos: Sequence[Any], *, orient: bool = False) -> PhotoHeaders:
    """Read the headers and ends of a batch's photos.

    Args:
        photos: A sequence of B buffers of uint8, empty where there is no photo. An `EncodedBatch` is read
            together.
        orient: Also read the orientations.
    """
    format, height, width = np.zeros((3, len(photos)), np.int64)
    is_read, is_sure = np.zeros((2, len(photos)), np.bool_)
    found = PhotoHeaders(format, height, width, np.full(len(photos), UPRIGHT), np.ones(len(photos), np.bool_))
    if len(photos) >= _MIN_PHOTOS and isinstance(photos, EncodedBatch):
        _read_together(photos, found, is_read, is_sure, orient=orient)
    for row in np.flatnonzero(~(is_read & is_sure)).tolist():
        data = photo_bytes(photos, row)
        if is_read[row]:
            name = PHOTO_FORMATS[format[row]]
        else:
            name, height[row], width[row] = read_whole_photo_header(data)
            format[row] = PHOTO_FORMATS.index(name)
        if orient:
            found.orientation[row], found.is_plain[row] = read_orientation(data, name)
        elif not is_surely_read(data, name):
            found.is_plain[row] = False
    return found


def photo_bytes(photos: Sequence[Any], row: int) -> memoryview:
    """The bytes of one photo, not copied."""
    return memoryview(np.asarray(photos[row]))  # type: ignore[arg-type]  # mypy does not know numpy's buffers


def _read_together(photos: EncodedBatch, found: PhotoHeaders, is_read: Bools, is_sure: Bools, *, orient: bool) -> None:
    """Fill the rows of ``found`` whose photos are written as usual, and set them in ``is_read``.

    ``is_sure`` is set for photos whose headers DALI surely reads.
    """
    buffer, starts, sizes = photos.buffer, photos.starts, photos.sizes
    long = np.flatnonzero(sizes >= _MIN_BYTES)
    if not len(long):
        return
    # Eight bytes from every byte on, as one number.
    words: UInt64s = np.ndarray(len(buffer) - 7, ">u8", buffer, strides=(1,))
    stops = starts[long] + sizes[long]
    first, last = words[starts[long]], words[stops - 8]
    for is_one, read, code, ends in (
        (first >> 40 == 0xFFD8FF, _read_jpegs, _JPEG, last & 0xFFFF == 0xFFD9),
        (first == _PNG_MAGIC, _read_pngs, _PNG, last >> 32 == _IEND),
    ):
        some = np.flatnonzero(is_one & ends)
        if len(some):
            rows = long[some]
            together = read(words, starts[rows], stops[some], orient=orient)
            found.format[rows], found.height[rows], found.width[rows] = code, together.height, together.width
            is_read[rows], is_sure[rows] = together.height > 0, together.is_sure
            if len(together.with_exif):
                turned = rows[together.with_exif]
                found.orientation[turned] = _plain_orientations(buffer, together.starts, together.stops)
                is_read[turned] &= found.orientation[turned] > 0


class _Read(NamedTuple):
    """The headers of N photos of one format, read together."""

    height: Int64s
    """0 where a photo must be read alone."""
    width: Int64s
    is_sure: Bools
    """Whether a decoder's parser surely reads what follows these, too."""
    with_exif: Int64s = _NONE
    """Photos, by their numbers, that have one EXIF block each; those with several are read alone."""
    starts: Int64s = _NONE
    """The places of these blocks in the buffer."""
    stops: Int64s = _NONE

    @classmethod
    def of(
        cls,
        height: Int64s,
        width: Int64s,
        is_read: Bools,
        is_sure: Bools,
        exif: Sequence[tuple[Int64s, Int64s, Int64s]],
    ) -> "_Read":
        """Make it from sizes, of which some are not valid, and the EXIF blocks that were found, by step."""
        if not exif:
            return cls(height * is_read, width * is_read, is_sure)
        rows, starts, stops = (np.concatenate(column) for column in zip(*exif, strict=True))
        is_read &= np.bincount(rows, minlength=len(is_read)) <= 1
        kept = is_read[rows]
        return cls(height * is_read, width * is_read, is_sure, rows[kept], starts[kept], stops[kept])


def _read_jpegs(words: UInt64s, starts: Int64s, stops: Int64s, *, orient: bool) -> _Read:
    at, last = starts + 2, stops - JPEG_TAIL_BYTES - 4
    few = len(starts) * _FEW
    exif: list[tuple[Int64s, Int64s, Int64s]] = []
    for _ in range(_MAX_STEPS):
        # No frame begins at the start: a JPEG whose segments lead too far is read alone.
        np.copyto(at, starts, where=at > last)
        segment = words[at].astype(np.int64)
        kind = _KINDS[segment >> 48 & 0xFFFF]
        passes = kind >= _PASSED
        if np.count_nonzero(passes) <= few:
            break
        if orient and kind.max() == _APP1 and len(rows := np.flatnonzero(segment & _EXIF_MASK == _EXIF_SEGMENT)):
            exif.append(_exif_blocks(words, at, segment, rows))
        elif kind.max() == _APP1 and not orient:  # a block without room for its mark is refused; else it is read below
            passes &= (kind != _APP1) | (segment >> 32 & 0xFFFF >= 2 + len(EXIF_MARK))
        at += ((segment >> 32 & 0xFFFF) + 2) * passes
    has_frame = kind == _FRAME
    np.copyto(at, starts, where=~has_frame)
    frame = words[at + 2].astype(np.int64)  # length, bits, height, width, channels
    height, width = frame >> 24 & 0xFFFF, frame >> 8 & 0xFFFF
    is_read = has_frame & (frame >> 40 & 0xFF == 8) & (height > 0) & (width > 0)
    is_sure = _ARE_CHANNELS[frame & 0xFF] & _reach_scan(words, at + 2 + (frame >> 48 & 0xFFFF), last, few)
    return _Read.of(height, width, is_read, is_sure, exif)


def _reach_scan(words: UInt64s, at: Int64s, last: Int64s, few: float) -> Bools:
    """Tell which JPEGs have nothing but usual segments from these places on, behind their frames, to their scans."""
    segments = words[:, None].view(">u4")[:, 0]
    for _ in range(_MAX_STEPS):
        # The bytes behind a JPEG's end are in the same buffer, and no scan counts there.
        np.minimum(at, len(segments) - 1, out=at)
        segment = segments[at].astype(np.int64)  # marker, length
        passes = _IS_PASSED[marker := segment >> 16]
        if np.count_nonzero(passes) <= few:
            break
        at += ((segment & 0xFFFF) + 2) * passes
    reach: Bools = (marker == _SCAN) & (at <= last)
    return reach


def _exif_blocks(words: UInt64s, at: Int64s, segment: Int64s, rows: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """The JPEGs among ``rows`` that have an EXIF block in their segments at these places, its starts and its stops."""
    rows = rows[words[at[rows] + 8] >> 48 == 0]  # the mark of a block is Exif and two zeros
    begin = at[rows]
    return rows, begin + 10, begin + 2 + (segment[rows] >> 32 & 0xFFFF)


def _read_pngs(words: UInt64s, starts: Int64s, stops: Int64s, *, orient: bool) -> _Read:
    size = words[starts + 16].astype(np.int64)
    width, height = size >> 32, size & 0xFFFFFFFF
    at, last = starts + 8, stops - 8
    few = len(starts) * _FEW
    exif: list[tuple[Int64s, Int64s, Int64s]] = []
    for _ in range(_MAX_STEPS):
        chunk = words[at].astype(np.int64)  # length, type
        kind = chunk & 0xFFFFFFFF
        after = at + 12 + (chunk >> 32 & 0xFFFFFFFF)
        passes = (kind != _IDAT) & (kind != _ACTL) & (after <= last)
        if np.count_nonzero(passes) <= few:
            break
        if orient and len(rows := np.flatnonzero(passes & (kind == _EXIF))):
            exif.append((rows, at[rows] + 8, after[rows] - 4))
        at = np.where(passes, after, at)
    is_read = (kind == _IDAT) & (words[starts + 8] & 0xFFFFFFFF == _IHDR)
    is_read &= (height > 0) & (height < 2**31) & (width > 0) & (width < 2**31)
    is_sure = (words[starts + 8] == _FIRST_CHUNK) & _ARE_PNG_KINDS[words[starts + 24] >> 48]
    is_sure &= _reach_end(words, at * is_read + starts * ~is_read, last, few)
    return _Read.of(height, width, is_read, is_sure, exif)


def _reach_end(words: UInt64s, at: Int64s, last: Int64s, few: float) -> Bools:
    """Tell which PNGs have whole chunks from these places on, where pixels begin, to their ends, and no EXIF data.

    Most encoders write pixels in chunks of one length: these are passed together.
    """
    chunk = words[at].astype(np.int64)
    step = 12 + (chunk >> 32)
    num = np.where(step >= _MIN_CHUNK, np.maximum(last - at, 0) // step, 0)
    if num.max() > 1:
        rows = np.repeat(np.arange(len(at)), num)  # [chunk of a photo, photo after photo]
        places = at[rows] + step[rows] * (np.arange(len(rows)) - np.repeat(np.cumsum(num) - num, num))
        others = np.flatnonzero(words[places].astype(np.int64) != chunk[rows])
        photos, first = np.unique(rows[others], return_index=True)
        num[photos] = (places[others[first]] - at[photos]) // step[photos]
        at = at + step * num
    for _ in range(_MAX_STEPS):
        chunk = words[at].astype(np.int64)
        kind = chunk & 0xFFFFFFFF
        after = at + 12 + (chunk >> 32 & 0xFFFFFFFF)
        passes = (kind != _IEND) & (kind != _EXIF) & (after <= last)
        if np.count_nonzero(passes) <= few:
            break
        at = np.where(passes, after, at)
    reach: Bools = kind == _IEND
    return reach


def _plain_orientations(buffer: UInt8s, starts: Int64s, stops: Int64s) -> Int64s:
    """The orientation in each of N blocks, 1 to 8; 0 where a block is not plain, or must be read alone: int64 [N].

    ``starts`` and ``stops`` are the blocks' places in ``buffer``, which goes on for eight bytes behind each stop.
    """
    found = np.zeros(len(starts), np.int64)
    is_long = stops - starts >= _HEAD_BYTES + 2
    words = _numbers(buffer, ">u4")
    marks = words[np.where(is_long, starts, 0)]
    for order, mark in (("<", 0x49492A00), (">", 0x4D4D002A)):
        rows = np.flatnonzero(is_long & (marks == mark))
        if len(rows):
            found[rows] = _orientations_of(buffer, starts[rows], stops[rows], order)
    return found


def _orientations_of(buffer: UInt8s, starts: Int64s, stops: Int64s, order: str) -> Int64s:
    """Read blocks of one byte order, as `_plain_orientations` does."""
    shorts, longs = _numbers(buffer, f"{order}u2"), _numbers(buffer, f"{order}u4")
    sizes = stops - starts
    first = longs[starts + 4].astype(np.int64)
    is_read = first + 2 <= sizes
    first = np.where(is_read, first, 0)
    num = shorts[starts + first].astype(np.int64)
    is_read &= (num <= _MAX_ENTRIES) & (first + 2 + _ENTRY_BYTES * num <= sizes)
    num = np.where(is_read, num, 0)
    entry = np.arange(num.max())
    is_there = entry < num[:, None]  # [row, entry]
    at = np.where(is_there, (starts + first)[:, None] + 2 + _ENTRY_BYTES * entry, starts[:, None])
    tags = shorts[at]
    kinds = _EXIF_KINDS[tags] * is_there
    counts, places = longs[at + 4].astype(np.int64), longs[at + 8].astype(np.int64)
    reach = np.where(kinds == _TEXT, np.where(counts > 4, places + counts, 0), (places + kinds) * (kinds > 0))
    is_read &= (reach <= sizes[:, None]).all(axis=1)
    is_orientation = (tags == ORIENTATION_TAG) & is_there
    num_orientations = np.count_nonzero(is_orientation, axis=1)
    is_read &= num_orientations <= 1
    value = np.full(len(starts), UPRIGHT, np.int64)
    if (rows := np.flatnonzero(is_read & (num_orientations == 1))).size:
        place = at[rows, np.argmax(is_orientation[rows], axis=1)]
        is_read[rows] &= (shorts[place + 2] == _SHORT) & (longs[place + 4] == 1)
        given = shorts[place + 8].astype(np.int64)
        value[rows] = np.where((given >= 1) & (given <= 8), given, UPRIGHT)
    return value * is_read


def _numbers(buffer: UInt8s, dtype: str) -> npt.NDArray[Any]:
    """The numbers of this kind that begin at each byte of a buffer."""
    kind = np.dtype(dtype)
    return np.ndarray(len(buffer) - kind.itemsize + 1, kind, buffer, strides=(1,))


def header_problems(photos: Sequence[tuple[UInt8s, PhotoHeader]]) -> list[str | None]:
    """Say of each photo why DALI's decoders cannot read its header as the given one; ``None``: they can.

    The pixels are not judged. It takes 3 ms, and 0.1 ms more for each photo.
    """
    waiting: list[UInt8s] = []
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1, exec_dynamic=True)
    with pipeline:
        encoded = fn.external_source(source=lambda: [waiting.pop()], batch=True, dtype=types.UINT8, ndim=1)
        corner = fn.decoders.image_slice(encoded, (0, 0), (1, 1), axes=(0, 1), adjust_orientation=False)
        pipeline.set_outputs(fn.peek_image_shape(encoded, adjust_orientation=False), corner)
    problems: list[str | None] = []
    for data, header in photos:
        waiting.append(data)
        try:
            height, width, *_ = np.asarray(pipeline.run()[0].at(0)).tolist()
            is_same = (height, width) == (header.height, header.width)
            problems.append(None if is_same else f"has a header that DALI reads as {height} x {width} pixels")
        except RuntimeError as exc:
            is_read = "Failed to decode sample" in str(exc)
            problems.append(None if is_read else f"cannot be decoded: {reason_of(exc)}")
    return problems


def reason_of(exc: RuntimeError) -> str:
    """Put DALI's reason for a failure into one line."""
    reason = str(exc).partition("encountered:")[2].strip() or str(exc)
    # Without the number in the batch and the place in the cache file, which mean nothing to the user.
    reason = re.split(r"C\+\+ context|Current pipeline object is no longer valid", reason)[0]
    reason = re.sub(r" sample #\d+ :.*", " ", reason)
    return " ".join(reason.split())
