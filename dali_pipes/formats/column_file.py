"""Read and write the files that describe a data set: safetensors files of typed columns with a JSON header.

Any language reads them without parsing. Texts (shard names, keys) are one run of UTF-8 bytes and the column of their
end offsets. `dali_pipes.formats.manifest`, `dali_pipes.formats.shard_index` and `dali_pipes.formats.sample_columns` say
what the columns of each kind hold. A reader may rely on that: a file is checked before anything is made of it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from dali_pipes.errors import DataError
from dali_pipes.formats.photo_header import PHOTO_FORMATS
from dali_pipes.formats.texts import Texts

UNSIZED = "unsized"
"""Beside the formats in `Manifest.photos`: photos whose header gives no height and width."""


def save_columns(columns: Mapping[str, npt.NDArray[Any]], header: Mapping[str, Any]) -> bytes:
    """The bytes of a file; the same columns and header always give the same bytes."""
    # One entry only: safetensors writes several in the order of a hash map, which differs between processes.
    metadata = {"header": json.dumps(header)}
    contiguous = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    return cast("bytes", save_tensors(contiguous, metadata=metadata))


@dataclass(frozen=True, kw_only=True)
class ColumnFile:
    """Columns and header of one file; each is checked when it is taken."""

    where: str
    kind: str
    columns: dict[str, npt.NDArray[Any]]
    """The columns that were not taken yet."""
    header: dict[str, Any]

    @classmethod
    def open(cls, data: bytes, *, where: str, kind: str, version: int) -> "ColumnFile":
        """Read a file; ``where`` names it.

        Raises:
            DataError: If it is not of this kind and version.
        """
        expected = f"expected a {kind}, version {version}"
        try:
            columns = load_tensors(data)
            header_stop = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(json.loads(data[8:header_stop])["__metadata__"]["header"])
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as exc:
            found = f"{len(data)} bytes of something else ({exc})"
            raise DataError(f"'{where}': {expected}, found {found}; rebuild it: dali-pipes prep index URL") from exc
        if not isinstance(header, dict):
            header = {}
        if header.get("kind") != kind or header.get("version") != version:
            found = f"a {header.get('kind')}, version {header.get('version')}"
            raise DataError(f"'{where}': {expected}, found {found}; rebuild it: dali-pipes prep index URL")
        return cls(where=where, kind=kind, columns=columns, header=header)

    def refused(self, expected: str, found: str) -> DataError:
        """The error for a file with invalid values."""
        return DataError(
            f"'{self.where}' is a broken {self.kind}: expected {expected}, found {found}; "
            "rebuild it: dali-pipes prep index URL"
        )

    def column(self, name: str, dtype: type[np.generic], length: int | None = None) -> npt.NDArray[Any]:
        """Take a column of this dtype and length; it must be there."""
        column = self.columns.pop(name, None)
        expected = f"column '{name}' of {'' if length is None else f'{length} '}{np.dtype(dtype)}"
        if column is None:
            raise self.refused(expected, "none")
        if column.dtype != dtype or column.ndim != 1 or (length is not None and len(column) != length):
            raise self.refused(expected, f"{column.dtype} of shape {list(column.shape)}")
        return column

    def texts(self, name: str) -> Texts:
        """Take the two columns of texts."""
        texts = Texts(self.column(f"{name}/bytes", np.uint8), self.column(f"{name}/ends", np.int64))
        try:
            texts.check()
        except ValueError as exc:
            raise self.refused(f"columns '{name}/bytes' and '{name}/ends' that hold texts", str(exc)) from exc
        return texts

    def expect_no_more(self) -> None:
        """Refuse a file with columns that were not taken."""
        if self.columns:
            raise self.refused("no other columns", ", ".join(f"'{name}'" for name in sorted(self.columns)[:3]))

    def whole_number(self, name: str) -> int:
        """A count in the header."""
        value = self.header.get(name)
        if not _is_count(value):
            raise self.refused(f"'{name}' to be a whole number", f"{value!r:.40}")
        return cast("int", value)

    def text(self, name: str) -> str:
        """A text in the header."""
        value = self.header.get(name)
        if not isinstance(value, str):
            raise self.refused(f"'{name}' to be a text", f"{value!r:.40}")
        return value

    def hexadecimal(self, name: str) -> int:
        """A number of 16 hexadecimal digits in the header."""
        value = self.header.get(name)
        try:
            number = int(value, 16) if isinstance(value, str) and len(value) == 16 else -1
        except ValueError:
            number = -1
        if number < 0:
            raise self.refused(f"'{name}' to be 16 hexadecimal digits", f"{value!r:.40}")
        return number

    def counts(self, value: object, name: str) -> dict[str, int]:
        """Counts by name, called ``name`` in the header."""
        if not isinstance(value, dict) or not all(map(_is_count, value.values())):
            raise self.refused(f"'{name}' to be whole numbers by name", f"{value!r:.40}")
        return value

    def classes(self) -> dict[int, str]:
        """The class table in the header."""
        value = self.header.get("classes")
        try:
            if not isinstance(value, dict) or not all(isinstance(name, str) for name in value.values()):
                raise TypeError("not a table")
            return {int(label): name for label, name in value.items()}
        except (TypeError, ValueError) as exc:
            raise self.refused("'classes' to be names by class id", f"{value!r:.40}") from exc

    def photos(self) -> dict[str, dict[str, int]]:
        """Counts of formats by component, in the header."""
        value = self.header.get("photos")
        if not isinstance(value, dict):
            raise self.refused("'photos' to be counts by component", f"{value!r:.40}")
        photos = {component: self.counts(counts, f"photos of {component}") for component, counts in value.items()}
        for counts in photos.values():
            if unknown := counts.keys() - {*PHOTO_FORMATS, UNSIZED}:
                raise self.refused(f"photos to be in one of {', '.join(PHOTO_FORMATS)}", f"'{min(unknown)}'")
        return photos

    def labels(self) -> dict[str, int]:
        """The range of class ids in the header."""
        value = self.header.get("labels")
        if value == {}:
            return {}
        if not isinstance(value, dict) or value.keys() != {"min", "max"} or not all(map(_is_int64, value.values())):
            raise self.refused("'labels' to be min and max", f"{value!r:.40}")
        return value


def _is_int64(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_count(value: object) -> bool:
    return _is_int64(value) and cast("int", value) >= 0
