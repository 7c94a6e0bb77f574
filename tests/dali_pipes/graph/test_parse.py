"""What becomes of components that are not photos: arrays as numpy reads them, objects, errors that name the sample."""

from __future__ import annotations

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
from tests.shards import npy_bytes

Take = Callable[[Any], Any]
"""A graph's function that takes an input from its components."""


def parser_of(take: Take) -> parse.Parser:
    samples: Any = SimpleNamespace(check_component=lambda component: None)
    example: Any = None
    components = dp.Components(source=lambda *_: object(), samples=samples, example=example, device="cpu")
    taken = take(components)
    return taken if isinstance(taken, parse.Parser) else components.inputs.parsed["parsed/0"]


def npy(components: Any) -> Any:
    return components.npy("c")


def text(components: Any) -> Any:
    return components.text("c")


def json_(components: Any) -> Any:
    return components.json("c")


def classes(components: Any) -> Any:
    return components.multi_hot("c", num_classes=5)


def returning(value: object, dtype: Any = np.float32, ndim: int = 1) -> Take:
    """A graph's input from a user's function that returns this value."""
    return lambda components: components.parsed("c", lambda data: value, dtype=dtype, ndim=ndim)


def batch_with(there: npt.ArrayLike) -> Any:
    """A batch whose samples have each component, or lack it."""
    return SimpleNamespace(places=lambda component: SimpleNamespace(is_there=np.asarray(there, bool)))


def parse_all(
    take: Take, files: Sequence[bytes], is_there: Sequence[bool] | None = None
) -> tuple[list[Any], parse.Problems]:
    there = [True] * len(files) if is_there is None else is_there
    encoded = {"c": [np.frombuffer(file, np.uint8) for file in files]}
    (values,), errors = parse.parse_batch([parser_of(take)], encoded, batch=batch_with(there))
    return values, errors


@settings(max_examples=100, deadline=None)
@given(
    array=numpy_st.arrays(
        st.sampled_from([np.dtype(code) for code in ("<f4", ">f4", "<i8", ">i2", "u1", "?", "<f2", ">f8")]),
        numpy_st.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    by_columns=st.booleans(),
    version=st.sampled_from([(1, 0), (2, 0), (3, 0)]),
    shift=st.integers(0, 7),
)
@pytest.mark.filterwarnings("ignore:Stored array in format 3.0:UserWarning")
def test_npy_is_what_numpy_loads(
    array: npt.NDArray[Any], by_columns: bool, version: tuple[int, int], shift: int
) -> None:
    """Any shape, byte order, order of the axes and version, wherever in memory it lies: equal to `numpy.load`."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array.copy(order="F") if by_columns else array, version=version)
    file = stream.getvalue()
    native = array.dtype.newbyteorder("=")
    parser = parser_of(lambda components: components.npy("c", dtype=native, ndim=array.ndim))
    # A batch's files lie one after the other: data need not be aligned.
    data = np.frombuffer(b"x" * shift + file, np.uint8)[shift:]
    (values,), errors = parse.parse_batch([parser], {"c": [data] * 2}, batch=batch_with(np.ones(2, bool)))
    assert not errors
    expected = np.load(io.BytesIO(file))
    for value in values:
        assert value.dtype == native
        assert np.array_equal(value, expected, equal_nan=native.kind == "f")
    stacked = parse.stack(values)
    assert isinstance(stacked, np.ndarray)
    assert stacked.shape == (2, *array.shape)


FINE = "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }"


def header(text: str, *, version: bytes = b"\x01\x00", data: bytes = b"\0" * 64) -> bytes:
    """A .npy file with this header, valid or not."""
    length = len(text).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + length + text.encode() + data


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"PK\x03\x04" + b"\0" * 60,
        header(FINE, version=b"\x04\x00"),
        header(FINE, data=b"\0" * 15),
        header(FINE.replace("(4,)", "(4611686018427387904, 4)")),
        header(FINE.replace("'<f4'", "()")),  # numpy: IndexError
        header(FINE.replace("'<f4'", "'|O'")),
        header("__import__('os')"),
        header("(" * 300),  # numpy: an error of its tokenizer
    ],
)
def test_npy_that_numpy_refuses_is_refused(file: bytes) -> None:
    """Nothing is unpickled, and no memory is taken for data that are not there."""
    with pytest.raises(Exception):  # noqa: B017, PT011 (of whatever type)
        np.load(io.BytesIO(file), allow_pickle=False)
    assert parse_all(npy, [header(FINE)])[1] == {}
    (found,) = parse_all(npy, [file])[1].values()
    assert re.search(r"expected (a \.npy file of numbers, found b|\d+ bytes of data, found \d+; it was)", found[1])


@pytest.mark.parametrize(
    ("take", "file", "expected"),
    [
        (text, b"", ""),
        (text, "Größe 🐈\r\nb\0\n".encode(), "Größe 🐈\r\nb\0\n"),
        (lambda components: components.bytes("c"), b"abc", b"abc"),
        (json_, b'{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        (json_, '"ü"'.encode(), "ü"),
        (classes, b"[0, 3]", np.array([1, 0, 0, 1, 0], np.float32)),
        (classes, b" [3,3,1]\n", np.array([0, 1, 0, 1, 0], np.float32)),  # a repeated class counts once
        (classes, b"", np.zeros(5, np.float32)),  # a photo without any class
        (classes, b"0, 3,\n04,", np.array([1, 0, 0, 1, 1], np.float32)),
        # Numbers and lists of numbers become the requested array.
        (returning([[0.1, 0.2]], np.float32, 2), b"x", np.array([[0.1, 0.2]], np.float32)),
        (returning(3.0, np.int32, 0), b"x", np.int32(3)),
        (returning([1, 0], np.bool_), b"x", np.array([True, False])),
        (returning([], np.int32), b"x", np.zeros(0, np.int32)),
    ],
)
def test_values_are_what_the_bytes_say(take: Take, file: bytes, expected: Any) -> None:
    (value,), errors = parse_all(take, [file])
    assert not errors
    assert np.array_equal(value, expected)
    assert np.asarray(value).dtype == np.asarray(expected).dtype


@pytest.mark.parametrize(
    ("take", "file", "found"),
    [
        (npy, npy_bytes(np.zeros(3)), "expected float32 of 1 dimensions, found float64 [3]"),
        (npy, npy_bytes(np.zeros(3, [("x", np.float32)])), "1 dimensions, found [('x', '<f4')] [3]"),
        (text, "né".encode("latin-1"), "expected UTF-8, found unexpected end of data at byte 1 of 2"),
        (json_, b"", "expected JSON, found b'': Expecting value: line 1 column 1"),
        (classes, b"[0, 5]", "in [0, 5), found 5"),
        (classes, b"[true]", "found 'true'"),
        (classes, b"[1", "expected JSON, found b'[1'"),
        (classes, b"1 cat", "found 'cat'"),
        (classes, b"1_0", "found '1_0'"),
        (classes, "٣".encode(), "found '٣'"),  # int() would accept it
        # The parser does not round or wrap numbers, and reads no numbers from strings.
        (returning([1.5], np.int64), b"x", "expected int64, found [1.5]"),
        (returning([300], np.uint8), b"x", "expected uint8, found [300]"),
        (returning([2], np.bool_), b"x", "expected bool, found [2]"),
        (returning(["1"]), b"x", "expected float32, found ['1']"),
        (returning([[1], [2, 3]]), b"x", "setting an array element with a sequence"),
        (returning(1.0), b"x", "expected float32 of 1 dimensions, found float32 []"),
        (returning(np.zeros(2)), b"x", "expected float32 of 1 dimensions, found float64 [2]"),
        (returning(np.zeros(2, ">f4")), b"x", "expected float32 of 1 dimensions, found >f4 [2]"),
    ],
)
def test_what_cannot_be_parsed_is_refused(take: Take, file: bytes, found: str) -> None:
    """The error says what was expected and what was found."""
    values, errors = parse_all(take, [file])
    assert values == [None]
    component, cause = errors[0]
    assert component == "c"
    assert cause.startswith("cannot be parsed: ")
    assert found in cause


def test_all_bad_samples_of_a_batch_are_given_back_with_their_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every parser; a sample that two of them refuse is there once. A document is parsed once for all that is made
    of it.
    """
    calls = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda data: calls.append(data) or loads(data))
    caption = parser_of(lambda components: components.text("txt"))
    boxes = parser_of(lambda components: components.json("json", to=lambda found: found["boxes"]))
    files = {
        "txt": (b"a", b"\xff", b"c", b"\xff", b"e", b"f"),
        "json": (b'{"boxes": [1]}', b"{}", b"{", b'{"boxes": []}', b'{"boxes": 2}', b"{}"),
    }
    encoded = {name: [np.frombuffer(data, np.uint8) for data in column] for name, column in files.items()}
    values, errors = parse.parse_batch([caption, boxes], encoded, batch=batch_with(np.ones(6, bool)))
    assert [values[0][0], values[1][0].tolist()] == ["a", [1.0]]
    assert [(at, errors[at][0]) for at in sorted(errors)] == [
        *((1, "txt"), (2, "json"), (3, "txt"), (4, "json"), (5, "json"))
    ]
    assert errors[2][1].startswith("cannot be parsed: expected JSON, found b'{': ")
    assert errors[4][1] == "cannot be parsed: expected float32 of 1 dimensions, found float32 []"
    assert re.fullmatch(
        r"cannot be parsed: function '.*' ended at test_parse.py, line \d+: KeyError: 'boxes'", errors[5][1]
    )
    assert len(calls) == len(files["json"])


@pytest.mark.parametrize(
    ("take", "empty"),
    [
        (text, ""),
        (lambda components: components.bytes("c"), b""),
        (json_, None),
        (lambda components: components.npy("c", ndim=2), np.zeros((0, 0), np.float32)),
        (lambda components: components.npy("c", ndim=0), np.float32(0)),
        (returning([1]), np.zeros(0, np.float32)),
        (classes, np.zeros(5, np.float32)),
    ],
)
def test_missing_component_is_empty_and_no_error(take: Take, empty: object) -> None:
    """No bytes, and nobody calls a function with them; an empty file that is there is parsed like any other."""
    (value,), errors = parse_all(take, [b""], is_there=[False])
    assert not errors
    assert type(value) is type(empty) or isinstance(empty, np.generic)
    assert np.array_equal(value, empty)
    if isinstance(empty, np.ndarray):
        assert (value.dtype, value.shape) == (empty.dtype, empty.shape)
    if take is json_:
        assert list(parse_all(take, [b"", b""], [False, True])[1]) == [1]
