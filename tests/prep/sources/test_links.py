"""Links, pipes and devices in a folder of photos: nothing is packed twice, and nothing waits for ever."""

import itertools
import os
import socket
from pathlib import Path

import pytest

from dali_pipes.errors import DataError, StoreError
from prep.sources.imagefolder import imagefolder
from tests.prep.commands.calls import run_prep
from tests.sources import encode_photo


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, name in enumerate(("a/1.jpg", "a/deep/2.jpg", "b/3.jpg")):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_photo(seed=number))
    return tmp_path / "root"


@pytest.mark.parametrize(
    ("links", "text"),
    [
        ({"a/up": ".."}, r"root/a/up' and '.*root' are the same folder"),
        ({"a/here": "."}, r"root/a/here' and '.*root/a' are the same folder"),
        ({"a/deep/up": ".."}, r"root/a/deep/up' and '.*root/a' are the same folder"),
        ({"all": "."}, r"root/all' and '.*root' are the same folder"),
        ({"a/x": "../b", "b/x": "../a"}, r"are the same folder"),  # without an end
        ({"c": "a"}, r"root/c' and '.*root/a' are the same folder"),
        ({"a/again": "deep"}, r"root/a/(again|deep)' and '.*root/a/(again|deep)' are the same folder"),
    ],
)
@pytest.mark.timeout(30)
def test_folder_under_two_paths_is_refused(root: Path, links: dict[str, str], text: str) -> None:
    """Its photos would be packed twice, up to the forty links that Linux follows, or for ever."""
    for name, target in links.items():
        (root / name).symlink_to(target)
    with pytest.raises(DataError, match=text):
        imagefolder(root)


def test_folders_that_double_at_each_level_are_refused(root: Path) -> None:
    """Thirty levels of two links each are a thousand million paths, without any loop."""
    levels = [root / "a" / "levels", *(root.parent / f"level{number}" for number in range(30))]
    for level in levels:
        level.mkdir()
    for here, below in itertools.pairwise(levels):
        (here / "x").symlink_to(below)
        (here / "y").symlink_to(below)
    with pytest.raises(DataError, match="are the same folder"):
        imagefolder(root)


def test_links_elsewhere_are_followed(root: Path, tmp_path: Path) -> None:
    """A class may be a link to a folder, and a photo a link to a file, on any disk."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "4.jpg").write_bytes(encode_photo(seed=4))
    (root / "c").symlink_to(tmp_path / "other")
    (root / "b" / "5.jpg").symlink_to(tmp_path / "other" / "4.jpg")
    keys = [record.key for record in imagefolder(root).records]
    assert keys == ["a/1", "a/deep/2", "b/3", "b/5", "c/4"]


@pytest.mark.timeout(60)
def test_what_is_no_file_is_named_and_does_not_wait(root: Path, tmp_path: Path) -> None:
    """A pipe without a writer, a socket, a device, a folder, a link that leads nowhere or to itself."""
    os.mkfifo(root / "a" / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(root / "a")  # a socket's path is short
        try:
            listening.bind("socket.jpg")
        finally:
            os.chdir(here)
    (root / "a" / "zero.jpg").symlink_to("/dev/zero")
    (root / "a" / "nowhere.jpg").symlink_to("missing")
    (root / "a" / "self.jpg").symlink_to("self.jpg")
    options = ("--max-bytes", "1MiB", "--jobs", "1")
    run_prep(
        "pack", "imagefolder", root, tmp_path / "out", *options, expect=DataError, match="5 of 8 records of .* are bad"
    )
    result = run_prep("pack", "imagefolder", root, tmp_path / "out", *options, "--on-bad", "skip", "--max-bad", "100%")
    for name in ("pipe", "zero"):
        assert f"{name}.jpg': expected a file, found a pipe or a device" in result.stderr
    assert "3 samples" in result.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everywhere")
def test_folder_that_cannot_be_read_is_named(root: Path) -> None:
    """Its photos would be missing without a word."""
    (root / "a" / "deep").chmod(0)
    with pytest.raises(StoreError, match=r"cannot read the folder '.*root/a/deep': Permission denied"):
        imagefolder(root)
