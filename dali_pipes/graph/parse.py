"""Parse what is no photo: encoded bytes in, a numpy array or a Python object a sample out. Part of the seam.

It runs once a batch in the thread that iterates. What cannot be parsed belongs to its sample and not to the batch:
every sample is tried, and what is wrong with which is given back beside the values of all others.
"""

import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError

__all__ = [
    "Parser",
    "SampleError",
    "array_parser",
    "bytes_parser",
    "json_parser",
    "multi_hot_parser",
    "npy_parser",
    "parse_batch",
    "stack",
    "text_parser",
    "views",
]

# Headers of .npy files kept by one parser: as many different shapes are read without parsing theirs anew.
NUM_HEADERS = 1024
# Characters of what was found that an error repeats.
SHOWN_CHARACTERS = 40

Array = npt.NDArray[Any]
UInt8s = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

_SEPARATORS = re.compile(r"[\s,]+")
_CLASS_ID = re.compile(r"[+-]?[0-9]{1,19}")


class SampleError(DataError):
    """One sample's component could not be parsed."""

    def __init__(self, position: int, component: str, cause: Exception) -> None:
        # What a user's function raises says little without its type: KeyError: 'boxes'.
        text = str(cause) if type(cause) is ValueError else f"{type(cause).__name__}: {cause}"
        self.reason = f"cannot be parsed: {text}"
        super().__init__(f"component '{component}' {self.reason}")
        self.position = position
        """Of the sample in its batch."""
        self.component = component
        self.cause = cause
        self.__cause__ = cause


@dataclass(frozen=True, kw_only=True, eq=False)
class Parser:
    """How one component's bytes become a value."""

    component: str
    parse: Callable[[Any], Any]
    """uint8 [bytes], read-only, to the value; with ``base``, the base's value to the value."""
    empty: Callable[[], Any]
    """The value of a sample that lacks the component."""
    base: "Parser | None" = None
    """What is parsed first, once a batch for all parsers that are based on it."""


def parse_batch(
    parsers: Sequence[Parser], encoded: Mapping[str, Any], *, is_there: Callable[[str], Bools]
) -> tuple[list[list[Any]], dict[int, SampleError]]:
    """A batch's values: for each parser one a sample; and what could not be parsed.

    Args:
        parsers: Any number, of any components.
        encoded: component -> a TensorListCPU, or a list, of uint8 [bytes].
        is_there: Which samples have a component: bool [B]. Bytes of those that lack it are not looked at.

    Returns:
        The values, ``None`` where there is an error; and for each position of the batch at which any parser failed, the
        first error.
    """
    errors: dict[int, SampleError] = {}
    inputs: dict[str, Sequence[UInt8s]] = {}
    parsed: dict[Parser, tuple[list[Any], set[int]]] = {}

    def run(parser: Parser) -> tuple[list[Any], set[int]]:
        if parser in parsed:
            return parsed[parser]
        if parser.base is not None:
            sources, failed = run(parser.base)
            bad = set(failed)
        else:
            if parser.component not in inputs:
                inputs[parser.component] = views(encoded[parser.component])
            sources, bad = list(inputs[parser.component]), set()
        there = is_there(parser.component).tolist()
        values: list[Any] = [None] * len(sources)
        for position, source in enumerate(sources):
            if position in bad:
                continue
            try:
                values[position] = parser.parse(source) if there[position] else parser.empty()
            except Exception as exc:  # noqa: BLE001 (kept with its sample, whatever a user's function raises)
                bad.add(position)
                errors.setdefault(position, SampleError(position, parser.component, exc))
        parsed[parser] = values, bad
        return parsed[parser]

    return [run(parser)[0] for parser in parsers], errors


def views(encoded: Any) -> Sequence[UInt8s]:
    """Each sample's bytes as uint8 [bytes], read-only and not copied; a view keeps the memory of its batch.

    Args:
        encoded: A TensorListCPU of uint8 [bytes], which DALI may hand to a decoder, too; or a list of such arrays.
    """
    if isinstance(encoded, list | tuple):
        return [_read_only(np.asarray(data).view()) for data in encoded]  # a view: the array is the caller's own
    if encoded.is_dense_tensor():  # one view of all: 0.1 us a sample instead of 1.2
        return list(_read_only(np.asarray(encoded.as_tensor())))
    return [_read_only(np.asarray(encoded[i])) for i in range(len(encoded))]


def stack(values: Sequence[Array]) -> Array | list[Array]:
    """Samples' arrays as DALI takes them: [B, ...] where all have one shape, else a list.

    Of equal shapes the list would do, too, but costs DALI twice the time: 3 to 5 us a sample instead of 1.5 to 2.
    """
    if len({value.shape for value in values}) == 1:
        return np.stack(values)
    return [np.require(value, requirements=["C", "A"]) for value in values]


def npy_parser(component: str, *, dtype: np.dtype[Any], ndim: int) -> Parser:
    """A ``.npy`` file, as `numpy.save` writes it: the array, in this machine's byte order.

    A header is parsed once for all files that have it. Nothing is ever unpickled. Where the component is missing: an
    array of zero length in each dimension; of ``ndim=0``, a zero.
    """

    @lru_cache(NUM_HEADERS)
    def layout(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Any, int]:
        return _npy_layout(header, dtype=dtype, ndim=ndim)

    def parse(data: UInt8s) -> Array:
        content = data.data
        if len(content) < 12:
            raise ValueError(f"expected a .npy file, found {len(content)} bytes")
        # Version 1 has a header's length of two bytes, the later ones of four.
        if content[6] == 1:
            start = 10 + int.from_bytes(content[8:10], "little")
        else:
            start = 12 + int.from_bytes(content[8:12], "little")
        stored, shape, order, num_bytes = layout(bytes(content[:start]))
        if len(content) < start + num_bytes:
            raise ValueError(
                f"expected {num_bytes} bytes of data ({_kind(dtype, shape)}), found {len(content) - start}; it was cut "
                "off"
            )
        array: Array = np.ndarray(shape, stored, data, start, order=order)
        return array if stored == dtype else array.astype(dtype)

    return Parser(component=component, parse=parse, empty=_zero_length(dtype, ndim))


def text_parser(component: str) -> Parser:
    """UTF-8 as a str, all of it: a newline at the end stays. ``""`` where it is missing."""

    def parse(data: UInt8s) -> str:
        try:
            return str(data.data, "utf-8")
        except UnicodeDecodeError as exc:
            found = f"{exc.reason}, 0x{exc.object[exc.start]:02x}"
            raise ValueError(f"expected UTF-8, found {found} at byte {exc.start} of {len(data)}") from exc

    return Parser(component=component, parse=parse, empty=str)


def bytes_parser(component: str) -> Parser:
    """The bytes as they are, copied: ``b""`` where it is missing."""
    return Parser(component=component, parse=bytes, empty=bytes)


def json_parser(component: str) -> Parser:
    """The object that a JSON document in UTF-8 holds; ``None`` where it is missing."""
    return Parser(component=component, parse=lambda data: _json(bytes(data)), empty=lambda: None)


def array_parser(
    component: str,
    function: Callable[[Any], Any],
    *,
    dtype: np.dtype[Any],
    ndim: int,
    base: Parser | None = None,
) -> Parser:
    """What ``function`` makes of a sample's bytes, or of the value that ``base`` made of them.

    Numbers and lists of numbers become an array if none of them is changed by it, but for the precision of floats; an
    array must be of ``dtype`` already. Where the component is missing the function is not called: an array of zero
    length in each dimension; of ``ndim=0``, a zero.
    """

    def parse(source: Any) -> Array:
        value = function(source)
        array = value if isinstance(value, np.ndarray) else _converted(value, dtype)
        if array.dtype != dtype or array.ndim != ndim:
            raise ValueError(f"expected {_kind(dtype, ndim)} of the function, found {_kind(array.dtype, array.shape)}")
        return array

    return Parser(component=component, parse=parse, empty=_zero_length(dtype, ndim), base=base)


def multi_hot_parser(component: str, *, num_classes: int, dtype: np.dtype[Any]) -> Parser:
    """Class ids, a JSON list or separated by white space or commas: ``dtype`` [num_classes], 1 at each id, else 0.

    No ids, or no component: zeros.
    """

    def parse(data: UInt8s) -> Array:
        ids = _class_ids(bytes(data))
        # Found at once and without a loop; a negative one would count from the end.
        if ids and not 0 <= min(ids) <= max(ids) < num_classes:
            wrong = next(number for number in ids if not 0 <= number < num_classes)
            raise ValueError(f"expected class ids in [0, {num_classes}), found {wrong}")
        row: Array = np.zeros(num_classes, dtype)
        row[ids] = 1
        return row

    return Parser(component=component, parse=parse, empty=lambda: np.zeros(num_classes, dtype))


def _npy_layout(header: bytes, *, dtype: np.dtype[Any], ndim: int) -> tuple[np.dtype[Any], tuple[int, ...], Any, int]:
    """What follows a header: dtype as stored, shape, order, bytes.

    Raises:
        ValueError: If it is no header that `numpy.load` would take, or not of ``dtype`` and ``ndim``.
    """
    stream = io.BytesIO(header)
    read = np.lib.format
    try:
        version = read.read_magic(stream)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"its version is {version[0]}.{version[1]}")
        # Version 3 is version 2 in UTF-8, for the names of fields: no array with fields is taken here.
        shape, is_fortran, stored = (
            read.read_array_header_1_0(stream) if version == (1, 0) else read.read_array_header_2_0(stream)
        )
    except Exception as exc:  # what numpy raises of a broken header is of many types
        raise ValueError(f"expected a .npy file, found {_shown(header)}: {' '.join(str(exc).split())}") from exc
    if stored.hasobject:
        raise ValueError(f"expected {_kind(dtype, ndim)}, found pickled Python objects, which are never loaded")
    if stored.newbyteorder("=") != dtype or len(shape) != ndim:
        raise ValueError(f"expected {_kind(dtype, ndim)}, found {_kind(stored, shape)}")
    if any(length < 0 for length in shape):
        raise ValueError(f"expected {_kind(dtype, ndim)}, found the shape {list(shape)}")
    return stored, shape, "F" if is_fortran else "C", math.prod(shape) * stored.itemsize


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as exc:  # what is no JSON, or no UTF-8
        raise ValueError(f"expected JSON, found {_shown(data)}: {exc}") from exc


def _class_ids(data: bytes) -> list[int]:
    try:
        text = data.decode().strip()
    except UnicodeDecodeError as exc:
        raise ValueError(f"expected class ids, found {_shown(data)}") from exc
    if not text.startswith("["):
        words = _SEPARATORS.split(text.strip(",")) if text else []
        if (wrong := next((word for word in words if not _CLASS_ID.fullmatch(word)), None)) is not None:
            raise ValueError(f"expected class ids separated by white space or commas, found {_shown(wrong)}")
        return [int(word) for word in words]
    ids: list[Any] = _json(data)
    # bool is a kind of int: [true, false] is no list of ids.
    if (wrong := next((number for number in ids if type(number) is not int), ids)) is not ids:
        raise ValueError(f"expected a JSON list of class ids, found {_shown(json.dumps(wrong))} in it")
    return ids


def _converted(value: Any, dtype: np.dtype[Any]) -> Array:
    found = np.asarray(value)
    with np.errstate(invalid="ignore", over="ignore"):
        array = found.astype(dtype) if found.dtype.kind in "biuf" else None
        if array is None or (dtype.kind != "f" and not np.array_equal(array, found)):
            raise ValueError(f"expected {dtype} of the function, found {_shown(value)}")
    return array


def _zero_length(dtype: np.dtype[Any], ndim: int) -> Callable[[], Array]:
    return lambda: np.zeros((0,) * ndim, dtype)


def _read_only(array: UInt8s) -> UInt8s:
    array.setflags(write=False)
    return array


def _kind(dtype: np.dtype[Any], shape: Sequence[int] | int) -> str:
    """``float32 [*, *]`` or ``float32 [3, 4]``, as errors name an array's kind."""
    lengths = ["*"] * shape if isinstance(shape, int) else [str(length) for length in shape]
    return f"{dtype} [{', '.join(lengths)}]"


def _shown(found: object) -> str:
    text = repr(found)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
