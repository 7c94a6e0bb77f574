"""Which sizes photos get."""

import pytest

from prep.recode.photos import Recoding


@pytest.mark.parametrize(
    ("settings", "size", "expected"),
    [
        ({"short_side": 256}, (375, 500), (256, 341)),
        ({"short_side": 256}, (500, 375), (341, 256)),
        ({"short_side": 256}, (256, 300), None),  # already so small
        ({"short_side": 256}, (100, 9000), None),  # the shorter side counts
        ({"max_side": 256}, (375, 500), (192, 256)),
        ({"max_side": 256}, (256, 256), None),
        ({"short_side": 256, "max_side": 1000}, (300, 9000), (33, 1000)),  # both hold: the smaller ratio
        ({"short_side": 256, "max_side": 1000}, (1000, 1000), (256, 256)),
        ({"short_side": 256, "max_side": 1000}, (257, 258), (256, 257)),
        ({"max_side": 10}, (1, 5000), (1, 10)),  # no side becomes 0
        ({"optimize": True}, (4000, 3000), None),
    ],
)
def test_new_size(settings: dict[str, int], size: tuple[int, int], expected: tuple[int, int] | None) -> None:
    assert Recoding(**settings).new_size(*size) == expected  # type: ignore[arg-type]


def test_no_photo_is_enlarged_and_limits_hold_for_all_sizes() -> None:
    recoding = Recoding(short_side=64, max_side=100)
    for height in range(1, 200, 3):
        for width in range(1, 200, 3):
            rows, columns = recoding.new_size(height, width) or (height, width)
            assert 1 <= rows <= height
            assert 1 <= columns <= width
            assert min(rows, columns) <= 64
            assert max(rows, columns) <= 100


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"short_side": 0}, "short_side must be 1 to 65500 pixels .*, got 0"),
        ({"max_side": True}, "max_side must be 1 to 65500 pixels .*, got True"),
        ({"quality": 101, "short_side": 9}, "quality must be 1 to 100, got 101"),
        ({"masks": "nearest"}, "masks='nearest' .* needs short_side or max_side"),
        ({"masks": "linear", "short_side": 9}, "masks must be 'nearest' or None, got 'linear'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Recoding(**settings)  # type: ignore[arg-type]
