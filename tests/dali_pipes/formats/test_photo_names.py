"""Which component is the photo and which the mask, by names and counts."""

import pytest

from dali_pipes.errors import DataError
from dali_pipes.formats.photo_names import ComponentCounts, find_mask, find_photo, has_mask


def one(num_samples: int = 9, **counts: int) -> dict[str, ComponentCounts]:
    """A data set; ``__`` stands for a dot."""
    return {"": ComponentCounts({name.replace("__", "."): n for name, n in counts.items()}, num_samples)}


@pytest.mark.parametrize(
    ("sets", "photo", "mask"),
    [
        (one(cls=9, image__jpg=9, trimap__png=9), "image.jpg", "trimap.png"),
        (one(jpg=9, png=9, txt=9), "jpg", "png"),  # a PNG beside a photo of another format
        (one(jpg=9, mask__jpg=9), "jpg", "mask.jpg"),
        (one(jpg=5, jpeg=2, png=2, seg__png=9), "jpg;jpeg;png", "seg.png"),  # a folder of three endings, with masks
        (one(jpg=5, jpeg=4, png=9), "jpg;jpeg", "png"),
        (one(jpg=9, seg__png=4, mask__png=5), "jpg", "mask.png;seg.png"),
        (one(jpg=9, png=0), "jpg", None),  # the manifest of a part may count none
        (one(png=9, cls=9), "png", None),
        (one(mask__png=9), "mask.png", None),  # the only photo is never a mask
        (one(jpg=3, png=6), "png;jpg", None),
        ({"a": ComponentCounts({"image.jpg": 5}, 5), "b": ComponentCounts({"jpg": 7}, 7)}, "image.jpg;jpg", None),
        (
            {"a": ComponentCounts({"jpg": 5, "png": 5}, 5), "b": ComponentCounts({"jpg": 7, "seg.png": 7}, 7)},
            "jpg",
            "png;seg.png",
        ),
    ],
)
def test_photo_and_mask_are_found(sets: dict[str, ComponentCounts], photo: str, mask: str | None) -> None:
    """The only one, or alternatives of which each sample has one, the most frequent one first."""
    assert find_photo(sets) == photo
    assert has_mask(sets, photo=photo) == (mask is not None)
    if mask is None:
        with pytest.raises(DataError, match="expected a component that is a mask by its name"):
            find_mask(sets, photo=photo)
    else:
        assert find_mask(sets, photo=photo) == mask


def test_the_second_photo_is_the_mask_if_no_name_says_so() -> None:
    """The user named the photo, so the other photo is the mask. If there are several masks, none is taken."""
    sets = one(left__jpg=9, right__jpg=9)
    assert find_mask(sets, photo="left.jpg") == "right.jpg"
    assert find_photo(sets, besides="right.jpg") == "left.jpg"
    assert not has_mask(sets, photo="left.jpg")
    sets = one(jpg=9, left__seg__png=9, right__seg__png=9)
    assert find_photo(sets) == "jpg"
    with pytest.raises(DataError, match=r"one component that holds the mask, found 'left.seg.png' \(9 of 9"):
        find_mask(sets, photo="jpg")


@pytest.mark.parametrize(
    ("sets", "text"),
    [
        (
            one(left__jpg=9, right__jpg=9),
            r"^expected one component that holds the photo, found 'left.jpg' \(9 of 9 samples\), 'right.jpg' \(9 of 9 "
            r"samples\); name one of them: photo='left.jpg'$",
        ),
        (one(jpg=8, jpeg=2), r"found 'jpg' \(8 of 9 samples\), 'jpeg' \(2 of 9 samples\)"),
        (one(txt=9, cls=9), r"expected a component that is a photo by its name, found 'cls', 'txt'; name the comp"),
        (one(), "found none"),
        (one(mask__png=9, seg__png=9), "found 'mask.png', 'seg.png'"),
        (
            {"a": ComponentCounts({"jpg": 5}, 5), "b": ComponentCounts({"jpg": 7, "jpeg": 7}, 7)},
            "^data set 'b': expected one component that holds the photo",
        ),
        (
            # By "jpg;png", or by "png;jpg", one set would give its masks as photos.
            {"a": ComponentCounts({"jpg": 5, "png": 5}, 5), "b": ComponentCounts({"png": 7}, 7)},
            "data set 'a' of the mixture has its photo in 'jpg', and also the component 'png', which is the photo in "
            "another data set; name both, that of each sample first: photo='jpg;png'",
        ),
        (one(**{"b\x1b[31m__jpg": 9, "a__jpg": 9}), r"'b\\x1b\[31m.jpg'"),
    ],
)
def test_unclear_photo_is_an_error_with_the_candidates(sets: dict[str, ComponentCounts], text: str) -> None:
    """Never a guess."""
    with pytest.raises(DataError, match=text):
        find_photo(sets)
