"""Photos: what the rules let pass does not end the process in a decoder of DALI, and has its header's size.

What is called cut off or damaged is not let pass, but goes to the decoder here, too: of a PNG the verdict is never
wrong.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from nvidia.dali import fn, pipeline_def, types

from dali_pipes.formats.photo_header import PhotoRules, read_photo_header, read_whole_photo_header
from tests.fuzz.seeds.photos import other_photos, photos
from tests.fuzz.target import BrokenPromiseError, Target

# More would only measure this machine's memory.
MAX_PIXELS = 4_000_000


class Photos(Target):
    """`PhotoRules`, then DALI's decoder on the CPU, with the arguments of the built-in graphs."""

    name = "photos"

    def __init__(self) -> None:
        self._rules = PhotoRules(max_pixels=MAX_PIXELS)
        self._photo = np.zeros(0, np.uint8)
        self._pipeline: Any = None

    def seeds(self) -> Sequence[bytes]:
        return photos()

    def strangers(self) -> Sequence[bytes]:
        return other_photos()

    def check(self, data: bytes) -> Literal["taken", "refused"]:
        header = read_photo_header(data)
        if self._rules.problem(header) is not None:
            return "refused"
        self._photo = np.frombuffer(data, np.uint8)
        if self._pipeline is None:
            self._pipeline = _decoder(lambda: [self._photo])
        try:
            (decoded,) = self._pipeline.run()
        except RuntimeError:
            self._pipeline = None  # it would give this error again
            return "refused"
        shape = tuple(decoded.as_cpu()[0].shape())
        if shape != (header.height, header.width, 3):
            raise BrokenPromiseError(f"{header} is decoded to {shape}")
        if (format := read_whole_photo_header(data).format) in ("PNG cut off", "PNG damaged"):
            raise BrokenPromiseError(f"a photo of format '{format}' is decoded")
        return "taken"


def _decoder(source: Any) -> Any:
    @pipeline_def(  # type: ignore[misc]  # DALI publishes no types
        batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1, exec_dynamic=True
    )
    def decode() -> Any:
        encoded = fn.external_source(source=source, batch=True, dtype=types.UINT8, ndim=1)
        return fn.decoders.image(encoded, output_type=types.RGB, adjust_orientation=False)

    pipeline = decode()
    pipeline.build()
    return pipeline
