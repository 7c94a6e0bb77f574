"""The image: extents, checked bytes, room; and that DALI reads it without its having a name."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.errors import CacheError, DataError
from dali_pipes.image import EXTENT_ALIGNMENT, Image, choose_cache_dir, extent_starts
from prep.manifest import checksum

SHARDS = [bytes([i + 1]) * size for i, size in enumerate((10_240, 512, 4096, 3_000_000))]
SIZES = np.array([len(shard) for shard in SHARDS])


def never() -> bool:
    return False


@given(st.lists(st.integers(0, 2**40), max_size=20))
def test_extents_are_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    """Each shard fits into its extent, which starts on a page; nothing else is in it."""
    starts = extent_starts(np.array(sizes, np.int64))
    assert len(starts) == len(sizes) + 1
    assert all(start % EXTENT_ALIGNMENT == 0 for start in starts.tolist())
    assert all(sizes[i] <= starts[i + 1] - starts[i] < sizes[i] + EXTENT_ALIGNMENT for i in range(len(sizes)))


@pytest.mark.parametrize("source", ["file", "stream"])
def test_fill_puts_each_shard_at_its_address(tmp_path: Path, source: str) -> None:
    """Filled in any order, from a local file or a stream of a store: the bytes stand at the extent's start."""
    image = Image(SIZES, cache_dir=tmp_path)
    for number in (2, 0, 3, 1):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(SHARDS[number])
        with path.open("rb") if source == "file" else io.BytesIO(SHARDS[number]) as stream:
            assert image.fill(number, stream, checksum=checksum(SHARDS[number]), name="n", stopped=never)
    data = Path(image.path).read_bytes()
    for number, shard in enumerate(SHARDS):
        start = int(image.starts[number])
        assert data[start : start + len(shard)] == shard
    image.close()
    image.close()


def test_image_takes_the_blocks_of_filled_extents_only(tmp_path: Path) -> None:
    """A sparse file: a terabyte of shards costs what was staged of them."""
    image = Image(np.array([2**40, 4096, 2**40]), cache_dir=tmp_path)
    image.fill(1, io.BytesIO(b"x" * 4096), checksum=checksum(b"x" * 4096), name="n", stopped=never)
    assert Path(image.path).stat().st_blocks * 512 < 1 << 20
    image.close()


def test_image_leaves_no_name(tmp_path: Path) -> None:
    """Nothing to clean up after a kill: the file never had a name."""
    image = Image(SIZES, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    image.close()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (SHARDS[0][:-1], "shard 'n' has 10239 bytes, the manifest says 10240; it was cut off or replaced"),
        (SHARDS[0] + b"x", "shard 'n' has more than 10240 bytes, the manifest says 10240"),
        (b"\0" * 10_240, "shard 'n' has the xxhash2 .{16}, the manifest says .{16}; .* prep index"),
    ],
    ids=["shorter", "longer", "other"],
)
@pytest.mark.parametrize("source", ["file", "stream"])
def test_fill_refuses_what_is_not_the_manifests(tmp_path: Path, source: str, data: bytes, text: str) -> None:
    """Size and checksum are checked, from a file and from a stream."""
    image = Image(SIZES, cache_dir=tmp_path)
    (tmp_path / "n").write_bytes(data)
    with (
        (tmp_path / "n").open("rb") if source == "file" else io.BytesIO(data) as stream,
        pytest.raises(DataError, match=text),
    ):
        image.fill(0, stream, checksum=checksum(SHARDS[0]), name="n", stopped=never)
    image.close()


def test_fill_stopped_gives_up(tmp_path: Path) -> None:
    """A loader that is closed does not wait for a large shard."""
    image = Image(SIZES, cache_dir=tmp_path)
    assert not image.fill(3, io.BytesIO(SHARDS[3]), checksum=0, name="n", stopped=lambda: True)
    image.close()


def test_choose_cache_dir_says_what_is_needed() -> None:
    """More bytes than any disk: what is needed, what is free where, what to pass."""
    with pytest.raises(CacheError, match=r"the shards take 1152921504606846976 bytes; free are \d+ in .*cache_dir="):
        choose_cache_dir(2**60)
    assert choose_cache_dir(1) == Path("/dev/shm")
