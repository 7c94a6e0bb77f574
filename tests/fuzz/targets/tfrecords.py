"""TFRecord files: broken records are refused, and features are read within their record."""

import io
from collections.abc import Sequence
from typing import Literal

from dali_pipes.errors import PipesError
from prep.sources.tfrecord_files import find_features, read_frames, values_of
from tests.fuzz.seeds.tfrecords import example, frame
from tests.fuzz.target import BrokenPromiseError, Target

PHOTO = bytes(range(256))


class TFRecords(Target):
    """`read_frames` and `find_features`."""

    name = "tfrecords"

    def seeds(self) -> Sequence[bytes]:
        one = example({"image/encoded": PHOTO, "image/class/label": 3, "image/name": "a/b"})
        two = example({"image/encoded": PHOTO[::-1], "image/class/label": [1, 2]}, is_packed=False)
        return [frame(one), frame(one) + frame(two)]

    def check(self, data: bytes) -> Literal["taken", "refused"]:
        try:
            for _, record, problem in read_frames(io.BytesIO(data), len(data)):
                if problem is not None:
                    return "refused"
                features = find_features(record)
                for name in features:
                    for value in values_of(features, record, name):
                        if isinstance(value, bytes) and value not in record:
                            raise BrokenPromiseError("a feature has bytes that its record does not have")
        except (PipesError, ValueError):
            return "refused"
        return "taken"
