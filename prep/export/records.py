"""Indexed shards to what goes into each sample's TFRecord: features, and where their bytes lie in the shard.

All of it is in the shard indexes: a record's size is known, and every sample has been looked at, before one is made.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dali_pipes.data_set.indexing import find_manifest, listed_sizes
from dali_pipes.errors import DataError
from dali_pipes.formats.names import LABEL_COMPONENT, manifest_name
from dali_pipes.formats.photo_header import PHOTO_FORMATS
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.ais import AisStore
from dali_pipes.store.transfer import BucketAccess, RemoteFile
from dali_pipes.store.urls import ShardSet
from prep.export.tasks import BYTES, FRAME_BYTES, INTEGERS, Feature, Place, example_bytes, varint
from prep.inspect.info import IndexedSet
from prep.inspect.verify_shard import is_mask_name
from prep.sources.tfrecords import MAX_RECORD_BYTES

__all__ = ["ENCODED", "KEY", "LABEL", "PHOTO_FEATURES", "Records"]

ENCODED, FORMAT, HEIGHT, WIDTH = "image/encoded", "image/format", "image/height", "image/width"
LABEL, TEXT, KEY = "image/class/label", "image/class/text", "image/filename"
PHOTO_FEATURES = (ENCODED, FORMAT, HEIGHT, WIDTH, LABEL, TEXT, KEY)
"""What a record has beside the components that go under names of their own."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What goes into a record."""

    photos: Sequence[str]
    """The photo is the first of these that a sample has."""
    features: Mapping[str, str] | None
    """Feature -> component; ``None``: each of the other components under its own name."""
    classes: Mapping[int, str]


class Records:
    """Indexed shards, and what of their samples goes into records."""

    def __init__(self, shards: ShardSet, *, photo: str | None, features: Mapping[str, str] | None) -> None:
        if find_manifest(shards) is None:
            where = shards.store.locate(manifest_name(shards.prefix))
            raise DataError(f"no manifest '{where}': the shards are not indexed; dali-pipes prep index {shards.url}")
        self.shards = shards
        self.indexed = IndexedSet(shards)
        if not self.indexed.manifest.num_samples:
            raise DataError(f"'{shards.url}' holds no sample to export")
        self._check_sizes()
        manifest = self.indexed.manifest
        self._check_known((features or {}).items())
        if photo is None:
            known = {*manifest.photos}
            photos = [name for name in sorted(known) if not is_mask_name(name, known)]
            if not photos:
                raise DataError(
                    f"'{shards.url}': no component is a photo by its name (found: {_list(manifest.components)}); "
                    "name it: --photo COMPONENT"
                )
        else:
            photos = photo.split(";")
            self._check_known((ENCODED, name) for name in photos)
        self._wanted = _Wanted(photos=photos, features=features, classes=manifest.classes)

    def _check_sizes(self) -> None:
        manifest = self.indexed.manifest
        for name, size, expected in zip(
            manifest.names, listed_sizes(self.shards), manifest.shard_bytes.tolist(), strict=True
        ):
            if size != expected:
                raise DataError(
                    f"shard '{self.shards.store.locate(name)}' has {size} bytes, its manifest says {expected}: it was "
                    f"written anew; dali-pipes prep index {self.shards.url}"
                )

    def _check_known(self, features: Iterable[tuple[str, str]]) -> None:
        known = self.indexed.manifest.components
        for feature, component in features:
            if component not in known:
                raise DataError(
                    f"feature '{feature}': no component '{component}' in '{self.shards.url}' (found: {_list(known)})"
                )

    def look(self) -> tuple[Int64s, set[str]]:
        """Bytes of each sample's framed record, int64 [N], and the names of all features; every sample is looked at."""
        sizes = np.zeros(self.indexed.manifest.num_samples, np.int64)
        names: set[str] = set()
        number = 0
        for _, index in self.indexed.each():
            for row in range(index.num_samples):
                features = self.features(index, row)
                num_bytes = example_bytes(features)
                if num_bytes >= MAX_RECORD_BYTES:
                    raise DataError(
                        f"shard '{index.shard}', key '{index.keys[row]}': a record of {num_bytes} bytes, a protocol "
                        f"buffer has less than {MAX_RECORD_BYTES}; leave components out with --feature"
                    )
                sizes[number] = FRAME_BYTES + num_bytes
                names.update(feature.name for feature in features)
                number += 1
        return sizes, names

    def features(self, index: ShardIndex, row: int) -> list[Feature]:
        """Those of one sample, by name in order.

        Raises:
            DataError: If it has no photo.
        """
        wanted = self._wanted
        there = {c: Place(int(index.offsets[c][row]), int(index.sizes[c][row])) for c in index.offsets}
        there = {component: place for component, place in there.items() if place.offset >= 0}
        key = index.keys[row]
        photo = next((name for name in wanted.photos if name in there), None)
        if photo is None:
            raise DataError(
                f"shard '{index.shard}', key '{key}': no photo '{';'.join(wanted.photos)}' (found: {_list(there)}); "
                "pack it anew without the sample, or name the photo: --photo COMPONENT"
            )
        features = [
            Feature(ENCODED, BYTES, there[photo]),
            Feature(KEY, BYTES, key.encode()),
            *self._header_features(index, row, photo),
        ]
        if index.labels is not None and LABEL_COMPONENT in there:
            label = int(index.labels[row])
            features.append(Feature(LABEL, INTEGERS, varint(label)))
            if label in wanted.classes:
                features.append(Feature(TEXT, BYTES, wanted.classes[label].encode()))
        if wanted.features is None:
            others = {name: name for name in there if name not in (photo, LABEL_COMPONENT)}
        else:
            others = {feature: name for feature, name in wanted.features.items() if name in there}
        features += [Feature(feature, BYTES, there[component]) for feature, component in others.items()]
        return sorted(features, key=lambda feature: feature.name)

    def _header_features(self, index: ShardIndex, row: int, photo: str) -> list[Feature]:
        columns = index.photos.get(photo)
        code = 0 if columns is None else int(columns.format[row])
        name = PHOTO_FORMATS[code] if code else photo.rpartition(".")[2].upper()
        features = [Feature(FORMAT, BYTES, name.encode())]
        # 0: the header says nothing, and a record says nothing of it.
        if columns is not None and columns.height[row]:
            features.append(Feature(HEIGHT, INTEGERS, varint(int(columns.height[row]))))
            features.append(Feature(WIDTH, INTEGERS, varint(int(columns.width[row]))))
        return features

    def file(self, row: int) -> Path | RemoteFile:
        """A shard, as a worker reads it."""
        store, manifest = self.shards.store, self.indexed.manifest
        if isinstance(store, AisStore):
            return RemoteFile(self._access, manifest.names[row], int(manifest.shard_bytes[row]))
        return Path(store.locate(manifest.names[row]))

    @cached_property
    def _access(self) -> BucketAccess:
        assert isinstance(self.shards.store, AisStore), "asked for where shards are in a bucket"
        return self.shards.store.access()


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
