"""The order of the samples by keys, names and contents, and the cuts into shards: the same for ever."""

import pytest

from dali_pipes.errors import DataError
from prep.shuffle.order import Algorithm, arrange, cut, parse_content, shuffled
from tests.programs import start_python


def test_shuffled_is_the_same_everywhere_and_for_ever() -> None:
    """The order must be the same on every machine and Python version: another order would be another data set."""
    expected = [6, 3, 7, 2, 1, 4, 0, 5]
    assert shuffled([f"{index:02}" for index in range(8)], seed=0) == expected
    program = "from prep.shuffle.order import shuffled; print(shuffled([f'{i:02}' for i in range(8)], seed=0))"
    with start_python(program, PYTHONHASHSEED="5") as other:
        assert other.communicate()[0].strip() == str(expected)


@pytest.mark.parametrize(
    ("sizes", "target", "expected"),
    [
        ([], 10, []),  # nothing gives no shard
        ([1], 10, [1]),
        ([5, 5, 5], 10, [2, 1]),  # the item that reaches the target still belongs to the shard
        ([20, 1, 20], 10, [1, 2]),  # one too large is a shard of its own
        ([0, 0, 0], 10, [3]),
        ([10, 10], 10, [1, 1]),  # no empty shard at the end
    ],
)
def test_cut(sizes: list[int], target: int, expected: list[int]) -> None:
    """A shard ends with the item that brings it to the target."""
    assert cut(sizes, target=target) == expected


NAMES_IN = ["b/2.jpg", "a/10.jpg", "a/1.jpg", "a/1-x.jpg", "\u00e4.jpg", "Z.jpg"]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (Algorithm(kind="none"), [0, 1, 2, 3, 4, 5]),
        # Bytes are compared, and the whole name: '-' before '.', upper case first, what is not ASCII last.
        (Algorithm(kind="alphanumeric"), [5, 3, 2, 1, 0, 4]),
        (Algorithm(kind="alphanumeric", decreasing=True), [4, 0, 1, 2, 3, 5]),
    ],
)
def test_arrange_by_name(algorithm: Algorithm, expected: list[int]) -> None:
    assert arrange(NAMES_IN, algorithm=algorithm) == expected


@pytest.mark.parametrize(
    ("key_type", "decreasing", "expected"),
    [
        ("int", False, [3, 1, 4, 0, 2]),  # -1 2 2 10 30: ties as they stood
        ("int", True, [2, 0, 1, 4, 3]),  # also when the order is turned
        ("float", False, [3, 1, 4, 0, 2]),
        ("string", False, [3, 0, 1, 4, 2]),  # b"-1" b"10" b"2" b"2" b"30"
    ],
)
def test_arrange_by_content(key_type: str, decreasing: bool, expected: list[int]) -> None:
    algorithm = Algorithm(kind="content", component=".cls", key_type=key_type, decreasing=decreasing)
    contents = [parse_content(data, algorithm=algorithm, where="") for data in (b"10", b"2", b"30", b"-1", b"2")]
    assert arrange([""] * 5, algorithm=algorithm, contents=contents) == expected


def test_parse_content_allows_white_space_around_numbers_and_says_where_there_is_none() -> None:
    as_int, as_float = (Algorithm(kind="content", component="c", key_type=key_type) for key_type in ("int", "float"))
    assert parse_content(b" 7\n", algorithm=as_int, where="") == 7
    assert parse_content(b" 1e3\n", algorithm=as_float, where="") == 1000
    # Python converts no text of 5000 digits to an int.
    for data, algorithm in (
        (b"7.0", as_int),
        (b"", as_int),
        (b"9" * 5000, as_int),
        (b"x", as_float),
        (b"nan", as_float),
    ):
        with pytest.raises(
            DataError, match=f"^here: component 'c' holds '.*', expected {algorithm.key_type} to sort by"
        ):
            parse_content(data, algorithm=algorithm, where="here")
