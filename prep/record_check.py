"""Records to those that are bad, and the bytes that each takes: looked at before anything is written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from prep.errors import DataError, StoreError
from prep.index import LABEL_COMPONENT
from prep.keys import split_key
from prep.photos import is_photo, read_photo_header
from prep.progress import bar
from prep.records import Record, Source
from prep.shard_plan import tar_bytes

__all__ = ["check_records", "components_with_label", "open_source"]

# Enough of a file to tell its format, and a PNG's colour type.
HEAD_BYTES = 64

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
"""Extension -> the format that it announces. All of them DALI decodes, under any name; a GIF it does not."""


def check_records(source: Source, *, show_progress: bool) -> tuple[dict[int, str], dict[int, str], list[int]]:
    """The bad records and those to be noted, number -> key and reason, and the bytes that each record takes in a tar.

    Raises:
        DataError: If a key cannot be a member's name, two are equal, or a file's or class's name is not UTF-8.
        StoreError: If a file cannot be read.
    """
    bad: dict[int, str] = {}
    noted: dict[int, str] = {}
    sizes: list[int] = []
    numbers: dict[str, int] = {}
    for label, text in source.classes.items():
        _check_utf8(text, what=f"{source.name}: the name of class {label}")
    with bar(what="check", total=len(source.records), unit="records", shown=show_progress) as drawn:
        for number, record in enumerate(source.records):
            earlier = numbers.setdefault(record.key, number)
            if earlier != number:
                raise DataError(f"{source.name}: key '{record.key}' is there twice, records {earlier} and {number}")
            reasons: list[str] = []
            notes: list[str] = []
            size = 0
            for component, content in components_with_label(record).items():
                name = f"{record.key}.{component}"
                if split_key(name) != (record.key, component):
                    raise DataError(
                        f"{source.name}: '{name}' would not be read back as key '{record.key}', component "
                        f"'{component}': WebDataset cuts the key at the first dot, and it must not be empty"
                    )
                path = str(content) if isinstance(content, Path) else name
                _check_utf8(name, what=f"{source.name}: the name of file '{_printable(path)}'")
                head, num_bytes = _head(content)
                size += tar_bytes(name, num_bytes)
                reason = _reason(component, head, num_bytes, is_mask=component in source.masks)
                if reason:
                    reasons.append(reason)
                elif note := _note(component, head):
                    notes.append(note)
            sizes.append(size)
            if reasons:
                bad[number] = f"{record.key}: {'; '.join(reasons)}"
            if notes:
                noted[number] = f"{record.key}: {'; '.join(notes)}"
            drawn.update(1)
    return bad, noted, sizes


def _reason(component: str, head: bytes, num_bytes: int, *, is_mask: bool) -> str | None:
    """Why a component is bad, ``None`` where it is not."""
    if not num_bytes:
        return f"{component} is empty"
    if not is_photo(component):
        return None
    found = read_photo_header(head).format
    if found == "GIF":
        return f"{component} is a GIF, which DALI cannot decode"
    if found == "unknown":
        return f"{component} is no photo of a known format (starts with {head[:4].hex(' ')})"
    if is_mask and found != "PNG":
        return f"{component} is a {found}, a mask must be an 8-bit grey PNG"
    # IHDR: bit depth, colour type.
    if is_mask and tuple(head[24:26]) != (8, 0):
        return (
            f"{component} is no 8-bit grey PNG (bit depth {head[24]}, colour type {head[25]}), class ids would be lost"
        )
    return None


def _note(component: str, head: bytes) -> str | None:
    """That a photo is in another format than its name says, ``None`` where it is not."""
    if not is_photo(component):
        return None
    found = read_photo_header(head).format
    return f"{component} is a {found}" if found != _FORMATS.get(component.rpartition(".")[2].lower()) else None


def _check_utf8(text: str, *, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise DataError(f"{what} is not UTF-8: '{_printable(text)}'; rename it") from exc


def _printable(text: str) -> str:
    r"""A name from the file system, its bytes that are not UTF-8 as ``\xff``."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _head(content: bytes | Path) -> tuple[bytes, int]:
    if isinstance(content, bytes):
        return content[:HEAD_BYTES], len(content)
    with open_source(content) as stream:
        return stream.read(HEAD_BYTES), os.fstat(stream.fileno()).st_size


def components_with_label(record: Record) -> dict[str, bytes | Path]:
    """The files of a sample as they are packed: its components, and its class id as ``cls``."""
    return {**record.components, LABEL_COMPONENT: str(record.label).encode()}


@contextlib.contextmanager
def open_source(path: Path) -> Iterator[BinaryIO]:
    """A source file's bytes.

    Raises:
        StoreError: If it cannot be read; names it.
    """
    try:
        with path.open("rb") as stream:
            yield stream
    except OSError as exc:
        raise StoreError(f"cannot read '{path}': {exc.strerror or exc}") from exc
