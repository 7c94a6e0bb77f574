"""Choose the features of each sample's record from the shard indexes.

So every sample is checked, and the size of its record is known, before the record is made.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.errors import DataError
from dali_pipes.formats.names import LABEL_COMPONENT, manifest_name
from dali_pipes.formats.photo_header import PHOTO_FORMATS
from dali_pipes.formats.photo_names import is_mask_name
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.base import StoreAccess, StoredFile
from dali_pipes.store.shard_set import ShardSet
from prep.export.tasks import BYTES, FRAME_BYTES, INTEGERS, Feature, ValuePlace, example_bytes, varint
from prep.inspect.indexed_set import IndexedSet
from prep.sources.tfrecord_files import MAX_RECORD_BYTES

ENCODED, FORMAT, HEIGHT, WIDTH = "image/encoded", "image/format", "image/height", "image/width"
LABEL, TEXT, KEY = "image/class/label", "image/class/text", "image/filename"
PHOTO_FEATURES = (ENCODED, FORMAT, HEIGHT, WIDTH, LABEL, TEXT, KEY)
"""Features that a record has in addition to the features of its components."""

Int64s = npt.NDArray[np.int64]


class Records:
    """Indexed shards, and the records of their samples.

    Args:
        shards: The shards.
        photo: The components that can be the photo, ``"jpg;png"``; ``None``: all photos that are not masks.
        features: Feature -> component; ``None``: all other components, under their own names.

    Raises:
        DataError: If the shards are not indexed, hold no sample, differ from their manifest, or lack a component.
    """

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
            self._photos = [name for name in sorted(known) if not is_mask_name(name, known)]
            if not self._photos:
                raise DataError(
                    f"'{shards.url}': no component is a photo by its name (found: {_list(manifest.components)}); "
                    "name it: --photo COMPONENT"
                )
        else:
            self._photos = photo.split(";")
            self._check_known((ENCODED, name) for name in self._photos)
        self._features, self._classes = features, manifest.classes

    def _check_sizes(self) -> None:
        manifest = self.indexed.manifest
        for name, size, expected in zip(
            manifest.names, [e.size for e in self.shards.entries()], manifest.shard_bytes.tolist(), strict=True
        ):
            if size != expected:
                raise DataError(
                    f"shard '{self.shards.store.locate(name)}' has {size} bytes, its manifest says {expected}: it was "
                    f"written again; index it: dali-pipes prep index {self.shards.url}"
                )

    def _check_known(self, features: Iterable[tuple[str, str]]) -> None:
        known = self.indexed.manifest.components
        for feature, component in features:
            if component not in known:
                raise DataError(
                    f"feature '{feature}': no component '{component}' in '{self.shards.url}' (found: {_list(known)})"
                )

    def look(self) -> tuple[Int64s, set[str]]:
        """Check every sample; returns the bytes of each framed record, int64 [N], and the names of all features."""
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
        """The features of one sample, sorted by name; raises `DataError` if it has no photo."""
        there = {c: ValuePlace(int(index.offsets[c][row]), int(index.sizes[c][row])) for c in index.offsets}
        there = {component: place for component, place in there.items() if place.offset >= 0}
        key = index.keys[row]
        photo = next((name for name in self._photos if name in there), None)
        if photo is None:
            raise DataError(
                f"shard '{index.shard}', key '{key}': no photo '{';'.join(self._photos)}' (found: {_list(there)}); "
                "pack the shards again without the sample, or name the photo: --photo COMPONENT"
            )
        features = [
            Feature(ENCODED, BYTES, there[photo]),
            Feature(KEY, BYTES, key.encode()),
            *self._header_features(index, row, photo),
        ]
        if index.labels is not None and LABEL_COMPONENT in there:
            label = int(index.labels[row])
            features.append(Feature(LABEL, INTEGERS, varint(label)))
            if label in self._classes:
                features.append(Feature(TEXT, BYTES, self._classes[label].encode()))
        if self._features is None:
            others = {name: name for name in there if name not in (photo, LABEL_COMPONENT)}
        else:
            others = {feature: name for feature, name in self._features.items() if name in there}
        features += [Feature(feature, BYTES, there[component]) for feature, component in others.items()]
        return sorted(features, key=lambda feature: feature.name)

    def _header_features(self, index: ShardIndex, row: int, photo: str) -> list[Feature]:
        columns = index.photos.get(photo)
        code = 0 if columns is None else int(columns.format[row])
        name = PHOTO_FORMATS[code] if code else photo.rpartition(".")[2].upper()
        # Readers of TFRecords know no other names for an animated PNG and for photos that are cut off.
        name = name.replace("APNG", "PNG").removesuffix(" cut off")
        features = [Feature(FORMAT, BYTES, name.encode())]
        # A height of 0 means that the header does not tell the size of the photo.
        if columns is not None and columns.height[row]:
            features.append(Feature(HEIGHT, INTEGERS, varint(int(columns.height[row]))))
            features.append(Feature(WIDTH, INTEGERS, varint(int(columns.width[row]))))
        return features

    def file(self, row: int) -> Path | StoredFile:
        """A shard, in the form that a worker reads."""
        manifest = self.indexed.manifest
        return self._access.file(manifest.names[row], size=int(manifest.shard_bytes[row]))

    @cached_property
    def _access(self) -> StoreAccess:
        return self.shards.store.access()


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
