"""Parse components that are not photos into numpy arrays or Python objects, one for each sample.

This runs once for each batch, in the thread that iterates. A component that cannot be parsed is a fault of its sample,
not of the batch: every sample is tried, and the problems are returned.
"""

import functools
import io
import json
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import UInt8s
from dali_pipes.formats.names import read_json
from dali_pipes.reader.batch import Batch

# Parsed headers of .npy files that are kept: files of one data set share a few.
NUM_HEADERS = 1024
# Characters of the data that an error shows.
SHOWN_CHARACTERS = 80

Array = npt.NDArray[Any]
Problems = dict[int, tuple[str, str]]
"""Position in a batch -> component and reason."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Parser:
    """A function that makes a value of one component's bytes; as an output of a graph, a list of one for each sample.

    With ``dtype`` the values are arrays, and inputs of the decode pipeline: a number or list of numbers becomes an
    array if ``dtype`` holds it exactly, except for the precision of floats; an array must already be of ``dtype``.
    """

    component: str
    parse: Callable[..., Any]
    """Makes the value from a read-only uint8 array [bytes]; with ``base``, from the base's value. The values that
    ``beside`` gives for the sample are its further arguments."""
    empty: Callable[[], Any]
    """Makes the value of a sample that lacks the component."""
    base: "Parser | None" = None
    """A parser that runs first, once a batch for all parsers that are based on it; it has no base itself."""
    beside: Sequence[Callable[[Batch], Array]] = ()
    """Functions that compute a row for each sample of a batch: its crop, its size, its random numbers."""
    dtype: np.dtype[Any] | None = None
    ndim: int = 0


def _text_of(exc: Exception, function: Callable[..., Any]) -> str:
    """What was wrong. A `ValueError` is about the data; others, as ``KeyError: 'boxes'``, may be the function's."""
    if type(exc) is ValueError:
        return str(exc)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(exc.__traceback__) if frame.filename == file]
    place = f" at {Path(str(file)).name}, line {lines[-1]}" if lines else ""
    return f"function '{name}' ended{place}: {type(exc).__name__}: {exc}"


def parse_batch(
    parsers: Sequence[Parser], encoded: Mapping[str, Any], *, batch: Batch
) -> tuple[list[list[Any]], Problems]:
    """Parse a batch: return for each parser one value per sample, and the samples that cannot be parsed.

    ``encoded`` has, for each component, a TensorListCPU or a sequence of uint8 [bytes]; the bytes of a component that a
    sample lacks are ignored. The values of a sample with a problem may be ``None``.
    """
    problems: Problems = {}
    values: dict[Parser, list[Any]] = {}
    bases = [parser.base for parser in parsers if parser.base is not None]
    for parser in dict.fromkeys([*bases, *parsers]):
        sources = views(encoded[parser.component]) if parser.base is None else values[parser.base]
        rows = [function(batch) for function in parser.beside]
        there = batch.places(parser.component).is_there.tolist()
        found = values[parser] = [None] * len(sources)
        for position, source in enumerate(zip(sources, *rows, strict=True)):
            if position in problems:
                continue
            try:
                value = parser.parse(*source) if there[position] else parser.empty()
                found[position] = value if parser.dtype is None else _as_array(value, parser.dtype, parser.ndim)
            except Exception as exc:  # noqa: BLE001 (a user's function may raise anything)
                problems[position] = (parser.component, f"cannot be parsed: {_text_of(exc, parser.parse)}")
    return [values[parser] for parser in parsers], problems


def views(encoded: Any) -> list[UInt8s]:
    """View each sample's bytes as uint8 [bytes], read-only and not copied; a view keeps the memory of its batch."""
    arrays = [np.asarray(encoded[number]).view() for number in range(len(encoded))]
    for array in arrays:
        array.setflags(write=False)
    return arrays


def stack(values: Sequence[Array]) -> Array | list[Array]:
    """Put the samples' arrays into the form that DALI takes: one array [B, ...] if all have one shape, else a list."""
    if len({value.shape for value in values}) == 1:
        return np.stack(values)
    return [np.require(value, requirements=["C", "A"]) for value in values]


def npy_array(data: UInt8s) -> Array:
    """Read the array of a ``.npy`` file, of any dtype and shape, in this machine's byte order.

    Raises:
        ValueError: If it is no such file, is cut off, or holds Python objects, which are never unpickled.
    """
    first = 10 if data[6:7].tobytes() == b"\1" else 12  # the header's length has two bytes in version 1, then four
    start = first + int.from_bytes(data[8:first].tobytes(), "little")
    shape, is_fortran, stored = _npy_header(data[:start].tobytes())
    num_bytes = math.prod(shape) * stored.itemsize
    if len(data) < start + num_bytes:
        raise ValueError(f"expected {num_bytes} bytes of data, found {len(data) - start}; it was cut off")
    array: Array = np.ndarray(shape, stored, data, start, order="F" if is_fortran else "C")
    return array.astype(stored.newbyteorder("="), copy=False)


@functools.lru_cache(NUM_HEADERS)
def _npy_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    stream, read = io.BytesIO(header), np.lib.format
    try:
        version = read.read_magic(stream)
        # Version 3 differs from 2 in the names of fields only.
        read_header = {(1, 0): read.read_array_header_1_0}.get(version, read.read_array_header_2_0)
        shape, is_fortran, stored = read_header(stream)
        if version > (3, 0) or stored.hasobject or any(length < 0 for length in shape):
            raise ValueError(f"version {version}, {stored} {list(shape)}")
    except Exception as exc:  # numpy raises many types for a broken header
        text = " ".join(str(exc).split())
        raise ValueError(f"expected a .npy file of numbers, found {shown(header[:SHOWN_CHARACTERS])}: {text}") from exc
    return shape, is_fortran, stored


def text_of(data: UInt8s) -> str:
    """Read text in UTF-8; a newline at the end stays."""
    try:
        return str(data.data, "utf-8")
    except UnicodeDecodeError as exc:
        raise ValueError(f"expected UTF-8, found {exc.reason} at byte {exc.start} of {len(data)}") from exc


def json_value(data: UInt8s) -> Any:
    """Read a JSON document in UTF-8."""
    text = bytes(data)
    try:
        return read_json(text)
    except ValueError as exc:  # not JSON, or not UTF-8
        raise ValueError(f"expected JSON, found {shown(text)}: {exc}") from exc


def class_ids(data: UInt8s) -> list[int]:
    """Read class ids, in a JSON list or separated by white space or commas; there may be none."""
    expected = "expected class ids, a JSON list or separated by white space or commas"
    text = bytes(data).decode(errors="replace").strip()
    if text.startswith("["):
        ids: list[Any] = json_value(data)
        # bool is a subclass of int, but [true, false] is not a list of ids.
        if wrong := [number for number in ids if type(number) is not int]:
            raise ValueError(f"{expected}, found {shown(json.dumps(wrong[0]))}")
        return ids
    words = re.split(r"[\s,]+", text.strip(",")) if text else []
    if not_numbers := [word for word in words if not re.fullmatch(r"[+-]?[0-9]{1,19}", word)]:
        raise ValueError(f"{expected}, found {shown(not_numbers[0])}")
    return [int(word) for word in words]


def _as_array(value: Any, dtype: np.dtype[Any], ndim: int) -> Array:
    array = np.asarray(value)
    if not isinstance(value, np.ndarray):
        if array.dtype.kind not in "biuf":
            raise ValueError(f"expected {dtype}, found {shown(value)}")
        with np.errstate(invalid="ignore", over="ignore"):
            array, found = array.astype(dtype), array
        if dtype.kind != "f" and not np.array_equal(array, found):
            raise ValueError(f"expected {dtype}, found {shown(value)}")
    if array.dtype != dtype or array.ndim != ndim:
        raise ValueError(f"expected {dtype} of {ndim} dimensions, found {array.dtype} {list(array.shape)}")
    return array


def shown(found: object) -> str:
    """Show a value of the data in an error."""
    text = repr(found.tolist() if isinstance(found, np.ndarray) else found)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
