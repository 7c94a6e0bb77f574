"""What becomes of components that are not photos: arrays as numpy reads them, objects, errors that name the sample."""

import io
import json
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

import dali_pipes as dp
from dali_pipes.graph import parse

FLOAT32 = np.dtype(np.float32)


def parser_of(take: Callable[[dp.Components], Any]) -> parse.Parser:
    """The parser of what a graph takes."""
    samples: Any = SimpleNamespace(check_component=lambda component: None)
    example: Any = None
    components = dp.Components(source=lambda *_: object(), samples=samples, example=example, device="cpu")
    taken = take(components)
    return taken if isinstance(taken, parse.Parser) else components.inputs.parsed["parsed/0"]


NPY = parser_of(lambda components: components.npy("c"))
TEXT = parser_of(lambda components: components.text("c"))
BYTES = parser_of(lambda components: components.bytes("c"))
JSON = parser_of(lambda components: components.json("c"))
CLASSES = parser_of(lambda components: components.multi_hot("c", num_classes=5))


def npy(array: npt.NDArray[Any], version: tuple[int, int] | None = None) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version)
    return stream.getvalue()


def header(text: str, *, version: bytes = b"\x01\x00", data: bytes = b"\0" * 64) -> bytes:
    """A .npy file of this header, whatever it says."""
    length = len(text).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + length + text.encode() + data


def batch_with(there: npt.ArrayLike) -> Any:
    """A batch whose samples have each component, or lack it."""
    return SimpleNamespace(places=lambda component: SimpleNamespace(is_there=np.asarray(there, bool)))


def parse_all(
    parser: parse.Parser, files: Sequence[bytes], is_there: Sequence[bool] | None = None
) -> tuple[list[Any], parse.Problems]:
    there = np.array([True] * len(files) if is_there is None else is_there)
    encoded = {parser.component: [np.frombuffer(file, np.uint8) for file in files]}
    (values,), errors = parse.parse_batch([parser], encoded, batch=batch_with(there))
    return values, errors


def reason(parser: parse.Parser, file: bytes) -> str:
    values, errors = parse_all(parser, [file])
    assert values == [None]
    return errors[0][1].removeprefix("cannot be parsed: ")


def test_npy_headers_are_parsed_once() -> None:
    """Files of the same dtype and shape share a header; another shape has its own."""
    parse._npy_header.cache_clear()
    values = [parse.npy_array(np.frombuffer(npy(np.full(num, num, np.float32)), np.uint8)) for num in (3, 3, 5, 3)]
    assert [value.tolist() for value in values] == [[num] * num for num in (3, 3, 5, 3)]
    assert parse._npy_header.cache_info().misses == 2


@settings(max_examples=150, deadline=None)
@given(
    array=numpy_st.arrays(
        st.sampled_from([np.dtype(code) for code in ("<f4", ">f4", "<i8", ">i2", "u1", "?", "<f2", ">f8")]),
        numpy_st.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    by_columns=st.booleans(),
    version=st.sampled_from([(1, 0), (2, 0), (3, 0), None]),
    shift=st.integers(0, 7),
)
@pytest.mark.filterwarnings("ignore:Stored array in format 3.0:UserWarning")
def test_npy_is_what_numpy_loads(
    array: npt.NDArray[Any], by_columns: bool, version: tuple[int, int] | None, shift: int
) -> None:
    """Any shape, byte order, order of the axes and version, wherever in memory it lies: equal to `numpy.load`."""
    file = npy(array.copy(order="F") if by_columns else array, version)
    native = array.dtype.newbyteorder("=")
    parser = parser_of(lambda components: components.npy("a.npy", dtype=native, ndim=array.ndim))
    # A batch's files lie one after the other: data need not be aligned.
    data = np.frombuffer(b"x" * shift + file, np.uint8)[shift:]
    (values,), errors = parse.parse_batch([parser], {"a.npy": [data] * 2}, batch=batch_with(np.ones(2, bool)))
    assert not errors
    expected = np.load(io.BytesIO(file))
    for value in values:
        assert value.dtype == native
        assert np.array_equal(value, expected, equal_nan=native.kind == "f")
    stacked = parse.stack(values)
    assert isinstance(stacked, np.ndarray)
    assert stacked.shape == (2, *array.shape)


FINE = "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }"


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"\x93NUMPY\x01\x00",
        b"PK\x03\x04" + b"\0" * 60,
        header(FINE, version=b"\x04\x00"),
        header(FINE)[:40],
        header(FINE, data=b"\0" * 15),
        header(FINE.replace("(4,)", "(-4,)")),
        header(FINE.replace("(4,)", "(4611686018427387904, 4)")),
        header(FINE.replace("(4,)", "4")),
        header(FINE.replace("'<f4'", "()")),  # numpy: IndexError
        header(FINE.replace("'<f4'", "'|O'")),
        header("{'descr': '<f4'}"),
        header("__import__('os')"),
        header("(" * 300),  # numpy: an error of its tokenizer
    ],
)
def test_npy_that_numpy_refuses_is_refused(file: bytes) -> None:
    """Nothing is unpickled, and no memory is taken for data that are not there."""
    with pytest.raises(Exception):  # noqa: B017, PT011 (of whatever type)
        np.load(io.BytesIO(file), allow_pickle=False)
    assert parse_all(NPY, [header(FINE)])[1] == {}
    found = reason(NPY, file)
    assert re.match(r"expected (a \.npy file of numbers, found b|\d+ bytes of data, found \d+; it was)", found), found


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros(3, np.float64), "float64 [3]"),
        (np.zeros((3, 4), np.float32), "float32 [3, 4]"),
        (np.float32(1), "float32 []"),
        (np.zeros(3, [("x", np.float32)]), "[('x', '<f4')] [3]"),
    ],
)
def test_npy_of_another_kind_is_refused(array: npt.NDArray[Any], found: str) -> None:
    """Another dtype or number of dimensions than the graph's node has."""
    assert reason(NPY, npy(np.asarray(array))) == f"expected float32 of 1 dimensions, found {found}"


@pytest.mark.parametrize(
    ("parser", "file", "expected"),
    [
        (TEXT, b"", ""),
        (TEXT, "Größe 🐈\r\nb\0\n".encode(), "Größe 🐈\r\nb\0\n"),
        (BYTES, b"abc", b"abc"),
        (JSON, b'{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        (JSON, '"ü"'.encode(), "ü"),
        (JSON, b"null", None),
    ],
)
def test_text_bytes_and_json_are_as_they_are(parser: parse.Parser, file: bytes, expected: object) -> None:
    values, errors = parse_all(parser, [file, b""], [True, False])
    assert (values[0], errors) == (expected, {})


@pytest.mark.parametrize(
    ("parser", "file", "text"),
    [
        (TEXT, "né".encode("latin-1"), "expected UTF-8, found unexpected end of data at byte 1 of 2"),
        (JSON, b"", "expected JSON, found b'': Expecting value: line 1 column 1"),
        (JSON, b'{"a": 1', "expected JSON, found b'{\"a\": 1': Expecting ',' delimiter"),
        (JSON, b'"\xff"', "expected JSON, found b'\"\\xff\"'"),
    ],
)
def test_what_is_no_text_or_json_is_refused(parser: parse.Parser, file: bytes, text: str) -> None:
    assert reason(parser, file).startswith(text)


@pytest.mark.parametrize(
    ("file", "ids"),
    [
        (b"[0, 3]", [0, 3]),
        (b" [3,3,1]\n", [1, 3]),  # twice is once
        (b"[]", []),
        (b"", []),  # a photo of nothing that has a class
        (b" \n", []),
        (b"0 3\n", [0, 3]),
        (b"0,3", [0, 3]),
        (b"0, 3,\n4,", [0, 3, 4]),
        (b"004", [4]),
    ],
)
def test_multi_hot_has_ones_at_the_ids(file: bytes, ids: list[int]) -> None:
    """JSON lists and plain ones; no ids give zeros."""
    (value,), errors = parse_all(CLASSES, [file])
    assert not errors
    assert (value.dtype, value.shape) == (np.float32, (5,))
    assert np.flatnonzero(value == 1).tolist() == ids
    assert value.sum() == len(ids)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (b"[0, 5]", "in [0, 5), found 5"),
        (b"2 -1", "in [0, 5), found -1"),
        (b"[true]", "found 'true'"),
        (b"[1.0]", "found '1.0'"),
        (b"[null]", "found 'null'"),
        (b"[1", "expected JSON, found b'[1'"),
        (b'{"a": 1}', "found '{\"a\":'"),
        (b"1 cat", "found 'cat'"),
        (b"1_0", "found '1_0'"),
        ("٣".encode(), "found '٣'"),  # int() would take it
        (b"\xff\xfe", "found '"),
    ],
)
def test_multi_hot_refuses_what_are_no_ids_of_these_classes(file: bytes, text: str) -> None:
    assert text in reason(CLASSES, file)


@pytest.mark.parametrize(
    ("value", "dtype", "ndim", "expected"),
    [
        ([[0.1, 0.2]], np.float32, 2, [[np.float32(0.1), np.float32(0.2)]]),
        (3.0, np.int32, 0, 3),
        ([1, 0], np.bool_, 1, [True, False]),
        ([], np.int32, 1, []),
        (np.float32(2), np.float32, 0, 2.0),
        (np.arange(3, dtype=np.uint8), np.uint8, 1, [0, 1, 2]),
    ],
)
def test_function_gives_an_array_or_what_fits_one(value: object, dtype: type, ndim: int, expected: object) -> None:
    """Numbers and lists of them become the array that was asked for, unchanged."""
    parser = parser_of(lambda components: components.parsed("b", lambda data: value, dtype=dtype, ndim=ndim))
    (found,), errors = parse_all(parser, [b"x"])
    assert not errors
    assert (found.dtype, found.ndim, found.tolist()) == (dtype, ndim, expected)


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        ([1.5], np.int64, "expected int64, found [1.5]"),
        ([300], np.uint8, "expected uint8, found [300]"),
        ([2], np.bool_, "expected bool, found [2]"),
        ([float("nan")], np.int32, "expected int32, found [nan]"),
        (["1"], np.float32, "expected float32, found ['1']"),
        ([[1], [2, 3]], np.float32, "setting an array element with a sequence"),
        (1.0, np.float32, "expected float32 of 1 dimensions, found float32 []"),
        (np.zeros(2), np.float32, "expected float32 of 1 dimensions, found float64 [2]"),
        (np.zeros(2, ">f4"), np.float32, "expected float32 of 1 dimensions, found >f4 [2]"),
    ],
)
def test_function_that_gives_something_else_is_refused(value: object, dtype: type, text: str) -> None:
    """Nothing is rounded, wrapped or read out of a str behind the user's back."""
    parser = parser_of(lambda components: components.parsed("b", lambda data: value, dtype=dtype))
    assert reason(parser, b"x").startswith(text)


def test_function_cannot_write_into_the_bytes() -> None:
    """The decoder is handed the same memory."""

    def scribble(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        data[0] = 0
        return data

    parser = parser_of(lambda components: components.parsed("b", scribble, dtype=np.uint8))
    assert reason(parser, b"x") == "assignment destination is read-only"
    mine = np.array([1], np.uint8)
    parse.views([mine])
    mine[0] = 2  # the caller's own array stays as it was


def test_all_bad_samples_of_a_batch_are_given_back_with_their_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every parser; a sample that two of them refuse is there once. A document is parsed once for all that is made
    of it.
    """
    calls = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda data: calls.append(data) or loads(data))
    text = parser_of(lambda components: components.text("txt"))
    boxes = parser_of(lambda components: components.json("json", to=lambda found: found["boxes"]))
    documents = (b'{"boxes": [1]}', b"{}", b"{", b'{"boxes": []}', b'{"boxes": 2}')
    encoded = {
        "txt": [np.frombuffer(data, np.uint8) for data in (b"a", b"\xff", b"c", b"\xff", b"e")],
        "json": [np.frombuffer(data, np.uint8) for data in documents],
    }
    values, errors = parse.parse_batch([text, boxes], encoded, batch=batch_with(np.ones(5, bool)))
    assert [values[0][0], values[1][0].tolist()] == ["a", [1.0]]
    assert {position: component for position, (component, _) in errors.items()} == {
        1: "txt", 2: "json", 3: "txt", 4: "json",
    }  # fmt: skip
    assert errors[2][1].startswith("cannot be parsed: expected JSON, found b'{': ")
    assert errors[4][1] == "cannot be parsed: expected float32 of 1 dimensions, found float32 []"
    assert len(calls) == len(documents)
    assert reason(boxes, b"{}") == "KeyError: 'boxes'"


@pytest.mark.parametrize(
    ("parser", "empty"),
    [
        (TEXT, ""),
        (BYTES, b""),
        (JSON, None),
        (parser_of(lambda components: components.npy("c", ndim=2)), np.zeros((0, 0), np.float32)),
        (parser_of(lambda components: components.npy("c", ndim=0)), np.float32(0)),
        (parser_of(lambda components: components.parsed("c", lambda data: [1])), np.zeros(0, np.float32)),
        (CLASSES, np.zeros(5, np.float32)),
    ],
)
def test_missing_component_is_empty_and_no_error(parser: parse.Parser, empty: object) -> None:
    """No bytes, and nobody calls a function with them; an empty file that is there is parsed like any other."""
    values, errors = parse_all(parser, [b"", b""], is_there=[False, False])
    assert not errors
    for value in values:
        assert type(value) is type(empty) or isinstance(empty, np.generic)
        assert np.array_equal(value, empty)
        if isinstance(empty, np.ndarray):
            assert (value.dtype, value.shape) == (empty.dtype, empty.shape)
    if empty is None or parser.ndim == 2:
        assert list(parse_all(parser, [b"", b""], [False, True])[1]) == [1]
