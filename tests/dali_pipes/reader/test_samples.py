"""Ordinals to rows: columns equal a loop over the shard indexes; what is missing or disagrees is named."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import Manifest, checksum
from dali_pipes.formats.photo_header import PHOTO_FORMATS
from dali_pipes.formats.shard_index import PhotoColumns, ShardIndex
from dali_pipes.reader.batch import NO_PHOTO, SampleRules
from dali_pipes.reader.samples import Samples, StoredSamples

JPEG = PHOTO_FORMATS.index("JPEG")
CLASSES = {10: "a", 20: "b", 40: "c"}


def make_index(shard: int, num_samples: int) -> ShardIndex:
    """Samples with `jpg` or `jpeg`, in turns, some with `txt`; every number tells its shard and row."""
    rows = np.arange(num_samples, dtype=np.int64)
    base = 512 * (1000 * shard + 10 * rows)
    offsets = {
        "cls": base + 1 * 512,
        "jpg": np.where(rows % 2 == 0, base + 2 * 512, -1),
        "jpeg": np.where(rows % 2 == 1, base + 3 * 512, -1),
        "txt": np.where(rows % 3 == 0, base + 4 * 512, -1),
    }
    photo = PhotoColumns(
        height=(100 * shard + 10 + rows).astype(np.int32),
        width=(200 * shard + 10 + rows).astype(np.int32),
        format=np.full(num_samples, JPEG, np.uint8),
    )
    return ShardIndex(
        shard=f"s-{shard}.tar",
        shard_bytes=10_000_000,
        shard_checksum=shard,
        keys=[f"{shard}/k{row}" for row in rows],
        offsets=offsets,
        sizes={name: np.where(found >= 0, 5 + rows, 0) for name, found in offsets.items()},
        checksums={name: np.zeros(num_samples, np.uint64) for name in offsets},
        labels=np.array([10, 20, 40], np.int64)[rows % 3],
        photos={"jpg": photo, "jpeg": photo},
    )


class DataSet:
    """Shard indexes, the manifest of them, and which were read."""

    def __init__(self, indexes: Sequence[ShardIndex], *, classes: dict[int, str] | None = None) -> None:
        self.indexes = indexes
        self.read: list[int] = []
        counts = {name: sum(int((index.offsets[name] >= 0).sum()) for index in indexes) for name in indexes[0].offsets}
        formats: dict[str, dict[str, int]] = {}
        for name in indexes[0].photos:
            there = [index.photos[name].format[index.offsets[name] >= 0] for index in indexes]
            kinds, numbers = np.unique(np.concatenate(there), return_counts=True)
            formats[name] = {PHOTO_FORMATS[kind]: int(number) for kind, number in zip(kinds, numbers, strict=True)}
        files = [index.to_bytes() for index in indexes]
        self.manifest = Manifest(
            names=[index.shard for index in indexes],
            shard_bytes=np.array([index.shard_bytes for index in indexes], np.int64),
            checksums=np.array([index.shard_checksum for index in indexes], np.uint64),
            samples=np.array([index.num_samples for index in indexes], np.int64),
            index_bytes=np.array([len(file) for file in files], np.int64),
            index_checksums=np.array([checksum(file) for file in files], np.uint64),
            components=counts,
            classes=CLASSES if classes is None else classes,
            photos=formats,
        )

    def samples(self, **rules: object) -> Samples:
        return Samples(self.manifest, self.read_index, rules=SampleRules(**rules))  # type: ignore[arg-type]

    def stored(self, *, excluded: Sequence[int] = (), **rules: object) -> StoredSamples:
        return StoredSamples(
            self.manifest,
            self.read_index,
            rules=SampleRules(**rules),  # type: ignore[arg-type]
            excluded=np.array(excluded, np.int64),
        )

    def read_index(self, shard: int) -> bytes:
        self.read.append(shard)
        return self.indexes[shard].to_bytes()

    def naive(self, ordinal: int) -> tuple[ShardIndex, int]:
        for index in self.indexes:
            if ordinal < index.num_samples:
                return index, ordinal
            ordinal -= index.num_samples
        raise IndexError


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any), st.data())
def test_rows_are_those_of_a_loop(sizes: list[int], data: st.DataObject) -> None:
    """Any ordinals, in any order, repeated, over shards of any number of samples, none as well."""
    data_set = DataSet([make_index(shard, size) for shard, size in enumerate(sizes)])
    ordinals = np.array(data.draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=20)), np.int64)
    samples = data_set.samples()
    assert len(samples) == sum(sizes)
    rows = samples.rows(ordinals)
    assert len(rows) == len(ordinals)
    for component in ("jpg", "jpg;jpeg", "txt;jpeg", "none"):
        places = rows.places(component)
        for position, ordinal in enumerate(ordinals.tolist()):
            index, row = data_set.naive(ordinal)
            has = [name for name in component.split(";") if name in index.offsets and index.offsets[name][row] >= 0]
            if not has:
                assert places.offset[position] == -1
                continue
            assert places.offset[position] == index.offsets[has[0]][row]
            assert places.size[position] == index.sizes[has[0]][row]
            photo = index.photos.get(has[0])
            found = (places.height[position], places.width[position], places.format[position])
            assert found == ((photo.height[row], photo.width[row], JPEG) if photo else (0, 0, NO_PHOTO))
    for position, ordinal in enumerate(ordinals.tolist()):
        index, row = data_set.naive(ordinal)
        assert rows.labels[position] == index.labels[row]
        assert rows.name(position)[1] == index.keys[row]
        assert rows.name(position)[0] == index.shard


def test_labels_contiguous_are_places_in_the_class_table() -> None:
    """10, 20, 40 -> 0, 1, 2; an id that is not in the table is named."""
    data_set = DataSet([make_index(0, 6)])
    ordinals = np.arange(6)
    assert data_set.samples().rows(ordinals).labels.tolist() == [10, 20, 40] * 2
    labels = data_set.samples(labels="contiguous").rows(ordinals).labels
    assert labels.tolist() == [0, 1, 2] * 2
    assert labels.dtype == np.int64
    strange = replace(data_set.indexes[0], labels=np.array([10, 20, 40, 41, 10, 9], np.int64))
    with pytest.raises(
        DataError,
        match=r"shard 's-0.tar', key '0/k3': class id 41 is not in the class table \(3 classes, 10 to 40\); add it",
    ):
        _ = DataSet([strange]).samples(labels="contiguous").rows(ordinals).labels
    without = DataSet([make_index(0, 6)], classes={})
    without.stored().check_labels()
    with pytest.raises(DataError, match=r"and the manifest has none; write '.dali-pipes/s-classes.json'"):
        without.stored(labels="contiguous").check_labels()


def with_format(index: ShardIndex, row: int, kind: str) -> ShardIndex:
    photo = index.photos["jpg"]
    formats = photo.format.copy()
    formats[row] = PHOTO_FORMATS.index(kind)
    return replace(index, photos={**index.photos, "jpg": replace(photo, format=formats)})


def test_first_sample_that_cannot_be_read_is_named() -> None:
    """A GIF, an unreadable header, a missing component. Excluded samples are not checked."""
    good = with_format(make_index(0, 4), 1, "GIF")  # row 1 has jpeg, and no jpg
    DataSet([good]).stored().check_photos("jpg")
    data_set = DataSet([good, with_format(make_index(1, 4), 2, "GIF")])
    samples = data_set.stored(excluded=[1, 3, 5, 6, 7])
    samples.check_photos("jpg")
    samples.check_component("jpg")
    with pytest.raises(DataError, match=r"shard 's-1.tar', key '1/k2': component 'jpg' holds a GIF, expected JPEG"):
        samples.without(np.array([1, 3, 5, 7])).check_photos("jpg")
    with pytest.raises(DataError, match=r"shard 's-1.tar', key '1/k1': no component 'jpg' \(found: cls, jpeg\)"):
        data_set.stored(excluded=[1, 3, 7]).check_component("jpg")
    unknown = with_format(with_format(make_index(1, 4), 2, "unknown"), 0, "unknown")
    with pytest.raises(DataError, match=r"key '1/k0': component 'jpg;jpeg' holds no photo of a known format"):
        DataSet([make_index(0, 2), unknown]).stored().check_photos("jpg;jpeg")


def test_neighbours_are_of_the_same_shard_first_and_the_nearest_first() -> None:
    """First those before it, then those after, then the shards that follow, the last one's being the first."""
    samples = DataSet([make_index(0, 3), make_index(1, 5), make_index(2, 2)]).stored()

    def neighbours(ordinal: int, *excluded: int) -> list[list[int]]:
        return [of_a_shard.tolist() for of_a_shard in samples.without(np.array(excluded)).neighbours(ordinal)]

    assert neighbours(5) == [[4, 3, 6, 7], [8, 9], [0, 1, 2]]
    assert neighbours(0) == [[1, 2], [3, 4, 5, 6, 7], [8, 9]]
    assert neighbours(5, 1, 3, 6, 8, 9) == [[4, 7], [0, 2]]


def test_missing_components_are_let_through_where_that_is_asked_for() -> None:
    """``empty``: no place, one pixel, class id -1; a component that nobody has is refused all the same."""
    index = make_index(0, 4)
    offsets = index.offsets | {"cls": np.where(np.arange(4) == 2, -1, index.offsets["cls"])}
    sizes = index.sizes | {"cls": np.where(offsets["cls"] < 0, 0, 1)}
    samples = DataSet([replace(index, offsets=offsets, sizes=sizes)]).stored(missing="empty")
    samples.check_component("jpg")
    rows = samples.rows(np.arange(4))
    assert rows.places("jpg").offset.tolist() == [1024, -1, 11264, -1]
    assert rows.places("jpg").height.tolist() == [10, 1, 12, 1]
    assert rows.labels.tolist() == [10, 20, -1, 10]
    with pytest.raises(DataError, match="no sample has component 'webp'; the data set has 'cls', 'jpg', 'jpeg', 'txt'"):
        samples.check_component("webp")


def test_component_without_sizes_is_refused_where_they_are_needed() -> None:
    """`txt` is no photo by its name: nobody has read its header."""
    samples = DataSet([make_index(0, 4)]).stored()
    samples.check_photos("txt")
    with pytest.raises(DataError, match=r"component 'txt' has no height and width in the index"):
        samples.check_sized("txt")
