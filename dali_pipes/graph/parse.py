"""Parse components that are not photos into numpy arrays or Python objects, one for each sample.

This runs once for each batch, in the thread that iterates. A component that cannot be parsed is a fault of its sample,
not of the batch: every sample is tried, and the problems are returned beside the values of all other samples.
"""

import functools
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.formats.names import read_json
from dali_pipes.reader.batch import Batch

# Parsed headers of .npy files that are kept: files of one data set share a few.
NUM_HEADERS = 1024
# Characters of the data that an error shows.
SHOWN_CHARACTERS = 40

Array = npt.NDArray[Any]
UInt8s = npt.NDArray[np.uint8]
Beside = Callable[[Batch], Array]
Problems = dict[int, tuple[str, str]]
"""Position in a batch -> component and reason."""

_SEPARATORS = re.compile(r"[\s,]+")
_CLASS_ID = re.compile(r"[+-]?[0-9]{1,19}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Parser:
    """A function that makes a value of one component's bytes."""

    component: str
    parse: Callable[..., Any]
    """Makes the value from a read-only uint8 array [bytes]; with ``base``, from the base's value. What ``beside`` gives
    of the sample are its further arguments."""
    empty: Callable[[], Any]
    """Makes the value of a sample that lacks the component."""
    base: "Parser | None" = None
    """A parser that runs first, once a batch for all parsers that are based on it."""
    beside: "tuple[Beside, ...]" = ()
    """Functions that compute a row for each sample of a batch: its crop, its size, its random numbers."""
    dtype: np.dtype[Any] | None = None
    """The dtype of the arrays that it makes; ``None`` if it makes other objects."""
    ndim: int = 0


def parse_batch(
    parsers: Sequence[Parser], encoded: Mapping[str, Any], *, batch: Batch
) -> tuple[list[list[Any]], Problems]:
    """Parse a batch: return for each parser one value per sample, and the samples that cannot be parsed.

    Args:
        parsers: Any number, of any components.
        encoded: Component -> a TensorListCPU, or a sequence, of uint8 [bytes].
        batch: Its samples. The bytes of a component that a sample lacks are ignored.

    Returns:
        The values, ``None`` where there is a problem; and the first problem of each sample that has one.
    """
    parsed = _ParsedBatch(encoded, batch)
    return [parsed.parsed(parser)[0] for parser in parsers], parsed.problems


class _ParsedBatch:
    # A class, because a recursive function inside another is a cycle of references: it would keep the batch's bytes
    # until the garbage collector runs.

    def __init__(self, encoded: Mapping[str, Any], batch: Batch) -> None:
        self.problems: Problems = {}
        self._encoded, self._batch = encoded, batch
        self._parsed: dict[Parser, tuple[list[Any], set[int]]] = {}

    def parsed(self, parser: Parser) -> tuple[list[Any], set[int]]:
        """Return the parser's values and the positions that failed; run it if it has not run yet."""
        if parser not in self._parsed:
            self._parsed[parser] = self._run(parser)
        return self._parsed[parser]

    def _run(self, parser: Parser) -> tuple[list[Any], set[int]]:
        sources, failed = (
            (views(self._encoded[parser.component]), set()) if parser.base is None else self.parsed(parser.base)
        )
        bad = set(failed)
        rows = [function(self._batch) for function in parser.beside]
        there = self._batch.places(parser.component).is_there.tolist()
        values: list[Any] = [None] * len(sources)
        for position, source in enumerate(zip(sources, *rows, strict=True)):
            if position in bad:
                continue
            try:
                values[position] = parser.parse(*source) if there[position] else parser.empty()
            except Exception as exc:  # noqa: BLE001 (a user's function may raise anything)
                bad.add(position)
                # Many exceptions say little without their type: KeyError: 'boxes'.
                text = str(exc) if type(exc) is ValueError else f"{type(exc).__name__}: {exc}"
                self.problems.setdefault(position, (parser.component, f"cannot be parsed: {text}"))
        return values, bad


def views(encoded: Any) -> list[UInt8s]:
    """View each sample's bytes as uint8 [bytes], read-only and not copied; a view keeps the memory of its batch.

    ``encoded`` is a TensorListCPU of uint8 [bytes], which may also be fed to a decoder, or a sequence of such arrays.
    """
    arrays = [np.asarray(encoded[number]).view() for number in range(len(encoded))]
    for array in arrays:
        array.setflags(write=False)
    return arrays


def stack(values: Sequence[Array]) -> Array | list[Array]:
    """Put the samples' arrays into the form that DALI takes: one array [B, ...] if all have one shape, else a list."""
    if len({value.shape for value in values}) == 1:
        return np.stack(values)
    return [np.require(value, requirements=["C", "A"]) for value in values]


def npy_parser(component: str, *, dtype: np.dtype[Any], ndim: int) -> Parser:
    """Parse a ``.npy`` file into an array; see `npy_array`.

    A missing component gives an array of zero length in each dimension, or a zero if ``ndim`` is 0.
    """

    def parse(data: UInt8s) -> Array:
        return _checked(npy_array(data), dtype, ndim)

    return Parser(component=component, parse=parse, empty=_zero_length(dtype, ndim), dtype=dtype, ndim=ndim)


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
        raise ValueError(f"expected a .npy file of numbers, found {_shown(header[:SHOWN_CHARACTERS])}: {text}") from exc
    return shape, is_fortran, stored


def text_parser(component: str) -> Parser:
    """Parse text in UTF-8 into a `str`; a newline at the end stays. A missing component gives ``""``."""

    def parse(data: UInt8s) -> str:
        try:
            return str(data.data, "utf-8")
        except UnicodeDecodeError as exc:
            raise ValueError(f"expected UTF-8, found {exc.reason} at byte {exc.start} of {len(data)}") from exc

    return Parser(component=component, parse=parse, empty=str)


def bytes_parser(component: str) -> Parser:
    """Copy the bytes. A missing component gives ``b""``."""
    return Parser(component=component, parse=bytes, empty=bytes)


def json_parser(component: str) -> Parser:
    """Parse a JSON document in UTF-8 into its object. A missing component gives ``None``."""
    return Parser(component=component, parse=lambda data: _json(bytes(data)), empty=lambda: None)


def array_parser(
    component: str,
    function: Callable[..., Any],
    *,
    dtype: np.dtype[Any],
    ndim: int,
    base: Parser | None = None,
    beside: Sequence[Beside] = (),
    empty: Callable[[], Any] | None = None,
) -> Parser:
    """Make an array with the user's ``function`` of a sample's bytes, or of the value that ``base`` made of them.

    A number or list of numbers becomes an array if ``dtype`` holds them exactly, except for the precision of floats; an
    array must already be of ``dtype``. The function is not called for a missing component, for which ``empty`` makes
    the array: by default one of zero length in each dimension, or a zero if ``ndim`` is 0.
    """

    def parse(*source: Any) -> Array:
        value = function(*source)
        return _checked(value if isinstance(value, np.ndarray) else _converted(value, dtype), dtype, ndim)

    empty = empty or _zero_length(dtype, ndim)
    return Parser(
        component=component, parse=parse, empty=empty, base=base, beside=tuple(beside), dtype=dtype, ndim=ndim
    )


def multi_hot_parser(component: str, *, num_classes: int, dtype: np.dtype[Any]) -> Parser:
    """Parse class ids, in a JSON list or separated by white space or commas: ``dtype`` [num_classes], 1 at each id.

    All other elements are 0. A component without ids, or a missing one, gives zeros.
    """

    def parse(data: UInt8s) -> Array:
        ids = _class_ids(bytes(data))
        if wrong := [number for number in ids if not 0 <= number < num_classes]:
            raise ValueError(f"expected class ids in [0, {num_classes}), found {wrong[0]}")
        row: Array = np.zeros(num_classes, dtype)
        row[ids] = 1
        return row

    return Parser(component=component, parse=parse, empty=lambda: np.zeros(num_classes, dtype), dtype=dtype, ndim=1)


def _json(data: bytes) -> Any:
    try:
        return read_json(data)
    except ValueError as exc:  # not JSON, or not UTF-8
        raise ValueError(f"expected JSON, found {_shown(data)}: {exc}") from exc


def _class_ids(data: bytes) -> list[int]:
    expected = "expected class ids, a JSON list or separated by white space or commas"
    text = data.decode(errors="replace").strip()
    if text.startswith("["):
        ids: list[Any] = _json(data)
        # bool is a subclass of int, but [true, false] is not a list of ids.
        if wrong := [number for number in ids if type(number) is not int]:
            raise ValueError(f"{expected}, found {_shown(json.dumps(wrong[0]))}")
        return ids
    words = _SEPARATORS.split(text.strip(",")) if text else []
    if not_numbers := [word for word in words if not _CLASS_ID.fullmatch(word)]:
        raise ValueError(f"{expected}, found {_shown(not_numbers[0])}")
    return [int(word) for word in words]


def _converted(value: Any, dtype: np.dtype[Any]) -> Array:
    found = np.asarray(value)
    with np.errstate(invalid="ignore", over="ignore"):
        array = found.astype(dtype) if found.dtype.kind in "biuf" else None
        if array is None or (dtype.kind != "f" and not np.array_equal(array, found)):
            raise ValueError(f"expected {dtype}, found {_shown(value)}")
    return array


def _checked(array: Array, dtype: np.dtype[Any], ndim: int) -> Array:
    if array.dtype != dtype or array.ndim != ndim:
        raise ValueError(f"expected {dtype} of {ndim} dimensions, found {array.dtype} {list(array.shape)}")
    return array


def _zero_length(dtype: np.dtype[Any], ndim: int) -> Callable[[], Array]:
    return lambda: np.zeros((0,) * ndim, dtype)


def _shown(found: object) -> str:
    text = repr(found)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
