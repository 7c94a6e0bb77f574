"""What the data or a server says is shown as one harmless line of bounded length."""

import pickle

import pytest

from dali_pipes.errors import DataError, printable
from dali_pipes.store.http.answers import MissingObjectError

HOSTILE = [
    ("\x1b[2J", r"\x1b[2J"),  # clears a terminal
    ("\x1b]0;title\x07", r"\x1b]0;title\x07"),  # sets a terminal's title
    ("\x9b31m", r"\x9b31m"),  # the one-character form of ESC [
    ("a\r\nerror: b", r"a\r\nerror: b"),  # a line that looks like ours
    ("a\u2028b\x85c\x0bd", r"a\u2028b\x85c\x0bd"),  # other line breaks
    ("\t\0\x7f", r"\t\x00\x7f"),
    ("\u202egnp.exe", r"\u202egnp.exe"),  # turns the direction of writing
    ("\u2066x\u2069\u200f", r"\u2066x\u2069\u200f"),
    ("\ud800", r"\ud800"),  # half of a surrogate pair: cannot be printed as UTF-8
    ("\udcff", r"\xff"),  # a byte of a name that is not UTF-8
    ("\U000e0001", r"\U000e0001"),  # an invisible tag
    (r"Käse/写真 C:\new it's", r"Käse/写真 C:\new it's"),  # ordinary file names are not changed
]


@pytest.mark.parametrize(("text", "expected"), HOSTILE)
def test_printable_escapes_hostile_characters(text: str, expected: str) -> None:
    """No control character, line break, direction mark or surrogate reaches a terminal."""
    assert printable(text) == expected
    assert printable(printable(text)) == expected
    assert expected.isprintable()


def test_printable_cuts_long_texts() -> None:
    """A text of exactly the limit is whole; one more character, or an escape that goes past it, is cut with a mark."""
    assert printable("x" * 30, max_chars=30) == "x" * 30
    assert printable("x" * 31, max_chars=30) == "x" * 11 + "... (31 characters)"
    assert printable("\x1b" * 10, max_chars=30) == r"\x1b\x1b\x1" + "... (10 characters)"
    assert len(printable("\U000e0001" * 10**7)) < 400


def test_every_error_of_ours_is_one_printable_line() -> None:
    """An error whose text repeats hostile data is printable, also after it came from another process."""
    error = DataError("key 'a\x1b[2J\nb'" + "x" * 10**6)
    assert str(error).startswith(r"key 'a\x1b[2J\nb'x")
    assert str(error).isprintable()
    assert len(str(error)) < 10_000
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_errors_that_know_more_than_their_text_can_be_pickled() -> None:
    """Frameworks send errors between processes."""
    missing = pickle.loads(pickle.dumps(MissingObjectError("no 'x'", said="404")))
    assert (str(missing), missing.said) == ("no 'x'", "404")
