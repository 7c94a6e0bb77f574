"""How many bad records are allowed, and the reasons by which they are counted."""

import pytest

from prep.left_out import MaxBad, count_reasons


@pytest.mark.parametrize(
    ("text", "bad", "of", "is_allowed"),
    [("0", 1, 10, False), ("3", 3, 3, True), ("10%", 33, 330, True), ("10%", 34, 330, False), ("0.5%", 2, 399, False)],
)
def test_the_limit_is_still_allowed(text: str, bad: int, of: int, is_allowed: bool) -> None:
    assert MaxBad.parse(text).allows(bad, of=of) is is_allowed
    assert str(MaxBad.parse(text)) == text


@pytest.mark.parametrize("text", ["", "-1", "101%", "1e3", "1 %", "٣"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number such as '12'"):
        MaxBad.parse(text)


def test_one_reason_is_counted_once() -> None:
    lines = [
        "a: jpg holds a photo of 10000 x 9000 pixels, expected at most max_pixels=89478485",
        "b: jpg holds a photo of 20000 x 9000 pixels, expected at most max_pixels=89478485",
        "c: jpg holds no photo of a known format, expected JPEG (starts with 3c 68 74 6d)",
        "d: jpg holds no photo of a known format, expected JPEG (starts with 00 00 00 00)",
        "e: jpg: cannot read '/photos/e.jpg': Permission denied",
        "f: jpg holds no photo of a known format, expected JPEG",
    ]
    assert list(count_reasons(lines).items()) == [
        ("jpg holds no photo of a known format, expected JPEG", 3),
        ("jpg holds a photo of N x N pixels, expected at most max_pixels=89478485", 2),
        ("jpg: cannot read '...': Permission denied", 1),
    ]
