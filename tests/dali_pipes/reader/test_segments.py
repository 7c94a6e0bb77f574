"""The index as a program: lines in any order, repeated, from anywhere in the file; DALI reads exactly those."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_pipes.reader.segments import Segment, index_text

BLOCKS = 64


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "image"
    path.write_bytes(os.urandom(512 * BLOCKS))
    return path


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_segment_reads_exactly_its_lines(image: Path, data: st.DataObject) -> None:
    """Whatever the lines, in whatever order, however often: the batches are those bytes, in that order."""
    batch_size, num_batches, num_components = (data.draw(st.integers(1, limit)) for limit in (5, 4, 3))
    num = batch_size * num_batches
    places = st.lists(st.integers(0, BLOCKS - 2), min_size=num, max_size=num)
    offsets = [np.array(data.draw(places)) * 512 for _ in range(num_components)]
    sizes = [np.array(data.draw(st.lists(st.integers(1, 1000), min_size=num, max_size=num))) for _ in offsets]
    content = image.read_bytes()
    text = index_text(np.arange(num), offsets, sizes)
    with contextlib.closing(Segment(str(image), text, num_components=num_components, batch_size=batch_size)) as segment:
        for first in range(0, num, batch_size):
            outputs = segment.read()
            assert len(outputs) == num_components
            for output, offset, size in zip(outputs, offsets, sizes, strict=True):
                found = [np.asarray(output.at(i)).tobytes() for i in range(batch_size)]
                rows = range(first, first + batch_size)
                assert found == [content[offset[row] : offset[row] + size[row]] for row in rows]


def test_outputs_stay_while_later_batches_are_read(image: Path) -> None:
    """TensorLists are held at the seam while the reader goes on."""
    offsets, sizes = [np.arange(40) * 512], [np.full(40, 300)]
    content = image.read_bytes()
    with contextlib.closing(
        Segment(str(image), index_text(np.arange(40), offsets, sizes), num_components=1, batch_size=2)
    ) as segment:
        held = [segment.read()[0] for _ in range(20)]
        for batch, output in enumerate(held):
            assert np.asarray(output.at(1)).tobytes() == content[(2 * batch + 1) * 512 :][:300]


def test_source_info_ends_in_the_ordinal(image: Path) -> None:
    """What DALI's own errors repeat: image, offset, ordinal."""
    text = index_text(np.array([2**40]), [np.array([512])], [np.array([5])])
    with contextlib.closing(Segment(str(image), text, num_components=1, batch_size=1)) as segment:
        assert segment.read()[0][0].source_info().endswith(f":512:{2**40}")


def test_close_closes_the_image(image: Path) -> None:
    """A shard may be evicted after its last reader: the reader's descriptor is gone, not just unused."""

    def holders() -> int:
        links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return links.count(str(image))

    before = holders()
    segment = Segment(
        str(image), index_text(np.array([0]), [np.array([0])], [np.array([5])]), num_components=1, batch_size=1
    )
    segment.read()
    assert holders() == before + 1
    segment.close()
    segment.close()
    assert holders() == before
