import pytest

from dali_pipes.formats.names import split_key


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jpg", ("a", "jpg")),
        ("a/001.seg.png", ("a/001", "seg.png")),  # the first dot, not the last
        ("v1.0/001.jpg", ("v1.0/001", "jpg")),  # dots of folders do not count
        ("./a.jpg", ("./a", "jpg")),
        ("/a.jpg", ("/a", "jpg")),
        ("a.JPG", ("a", "JPG")),  # case kept
        ("a b.jpg", ("a b", "jpg")),
        ("ä.jpg", ("ä", "jpg")),
        ("a..jpg", ("a", ".jpg")),
        ("README", None),
        (".hidden", None),
        ("dir/._photo.jpg", None),  # what macOS puts into archives
        ("dir/photo.", None),
        ("dir/", None),
        ("", None),
    ],
)
def test_split_key_cuts_at_first_dot_after_last_slash(name: str, expected: tuple[str, str] | None) -> None:
    assert split_key(name) == expected
