"""Photos: what the rules let pass does not end the process in a decoder of DALI, alone or in a batch of broken ones.

It has its header's size. What is called cut off or damaged is not let pass, but goes to the decoder here, too: of a PNG
the verdict is never wrong. Batches have sizes and numbers of threads at which DALI parses in parallel.
"""

import os
import signal
from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from dali_pipes.formats.photo_header import PhotoRules, read_photo_header, read_whole_photo_header
from dali_pipes.graph.inputs import DecodedPhotos
from dali_pipes.graph.photos import judge_photos
from dali_pipes.reader.batch import Places
from dali_pipes.reader.encoded_batch import EncodedBatch
from tests.fuzz.mutations import mutant
from tests.fuzz.photo_seeds import other_photos, photos
from tests.fuzz.target import HANG_S, Answer, BrokenPromiseError, Target
from tests.hostile_photos import bmp_of_16_bits, misleading_jpeg, odd_webp, with_fill, with_long_marker
from tests.turned_photos import exif_block, slope, stored_photo, turned_photo, with_exif

# More would only measure this machine's memory.
MAX_PIXELS, MAX_PIXELS_IN_A_BATCH = 4_000_000, 100_000


class Photos(Target):
    """`PhotoRules`, then DALI's decoder on the CPU, with the arguments of the built-in graphs."""

    num_daily = 150

    def __init__(self) -> None:
        self._rules = PhotoRules(max_pixels=MAX_PIXELS)
        self._photo = np.zeros(0, np.uint8)
        self._pipeline: Any = None

    def seeds(self) -> Sequence[bytes]:
        return photos()

    def strangers(self) -> Sequence[bytes]:
        return other_photos()

    def check(self, data: bytes) -> Answer:
        header = read_photo_header(data)
        if self._rules.problem(header) is not None:
            return "refused"
        self._photo = np.frombuffer(data, np.uint8)
        if self._pipeline is None:
            self._pipeline = decoder(lambda: [self._photo], batch_size=1, num_threads=1, orient=False)
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


def decoder(source: Any, *, batch_size: int, num_threads: int, orient: bool) -> Any:
    """A pipeline on the CPU that decodes the photos of ``source``."""
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    pipeline = Pipeline(
        batch_size=batch_size, num_threads=num_threads, device_id=None, prefetch_queue_depth=1, exec_dynamic=True
    )
    with pipeline:
        encoded = fn.external_source(source=source, batch=True, dtype=types.UINT8, ndim=1)
        pipeline.set_outputs(fn.decoders.image(encoded, output_type=types.RGB, adjust_orientation=orient))
    pipeline.build()
    return pipeline


BATCH_SIZES = (64, 128, 256, 512, 1024)
NUM_THREADS = (1, 2, 3, 4, 8, 16)
MAX_BYTES = 1 << 16
# The bytes in which most headers stand.
HEADER_BYTES = 800
UNBROKEN = b"unbroken"


class PhotoBatches(Target):
    """`judge_photos`, then DALI's decoder with many photos at a time; each batch has its own process.

    An input is the seed of a batch, so that it names all of its photos; `UNBROKEN` is a batch of the seeds.
    """

    num_daily = 10

    def __init__(self) -> None:
        self._good = photos()[0]
        formats = ("JPEG", "PNG", "WEBP")
        self._photos = [
            *photos(),
            *(turned_photo(slope(), 6, format) for format in formats),
            *(with_exif(stored_photo(slope(), format), exif_block(3), exif_block(8)) for format in formats),
            odd_webp(),
            with_fill(photos()[0]),
            with_long_marker(photos()[0]),
        ]
        self._hostile = [misleading_jpeg(), bmp_of_16_bits()]

    def seeds(self) -> Sequence[bytes]:
        return [UNBROKEN]

    def strangers(self) -> Sequence[bytes]:
        return [b"a batch", b"another one"]

    def check(self, data: bytes) -> Answer:
        draw = Random(data)
        batch_size, num_threads = draw.choice(BATCH_SIZES), draw.choice(NUM_THREADS)
        share = draw.choice((0.02, 0.5, 1, 1))
        batch = [self._drawn(draw, share=0 if data == UNBROKEN else share) for _ in range(batch_size)]
        orient = draw.random() < 0.5
        judged = judged_batch(batch, orient=orient)
        decoded = [np.frombuffer(photo, np.uint8) for photo in batch]
        for (_, at), copy in judged.copies.items():
            decoded[at] = copy
        for at in judged.problems:
            decoded[at] = np.frombuffer(self._good, np.uint8)
        said = in_child(lambda: self.decode(decoded, orient=orient, num_threads=num_threads))
        if said in ("taken", "refused"):
            return "taken" if said == "taken" else "refused"
        raise BrokenPromiseError(
            f"a batch of {batch_size} photos in {num_threads} threads, orient={orient}: {said}",
            files={f"{at:04d}.bin": photo.tobytes() for at, photo in enumerate(decoded)},
        )

    def decode(self, batch: list[Any], *, orient: bool, num_threads: int) -> str:
        """Decode a batch; the text says if DALI refuses a header, which it may do only for a photo alone."""
        pipeline = decoder(lambda: batch, batch_size=len(batch), num_threads=num_threads, orient=orient)
        try:
            pipeline.run()
        except RuntimeError as exc:
            if "Failed to decode sample" not in str(exc):
                return f"a header is refused: {exc}"
            return "refused"
        return "taken"

    def _drawn(self, draw: Random, *, share: float) -> bytes:
        if draw.random() >= share:
            return draw.choice(self._photos)
        if draw.random() < 0.5:
            return mutant(draw, [*self._photos, *self._hostile])[:MAX_BYTES]
        photo = bytearray(draw.choice([*self._photos, *self._hostile]))
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            photo[draw.randrange(min(len(photo), HEADER_BYTES))] = draw.choice((0, 0xFF, draw.randrange(256)))
        return bytes(photo)


def in_child(run: Callable[[], str]) -> str:
    """The text that ``run`` gives in a forked process, or how that process ended. The parent has no DALI threads."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(int(HANG_S))
        try:
            said = run()
        except BaseException as exc:  # noqa: BLE001 (the parent reports it)
            said = f"{type(exc).__name__}: {exc}"
        os.write(writing, said.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        told = stream.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return told if not code else f"ends with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def judged_batch(batch: Sequence[bytes], *, orient: bool) -> Any:
    """The photos as a loader judges them that knows nothing of their headers."""
    sizes = np.array([len(photo) for photo in batch], np.int64)
    zeros = np.zeros(len(batch), np.int64)
    places = Places(zeros, sizes, zeros, zeros, zeros - 1, zeros + 1)
    decoded = DecodedPhotos(components=("photo",), upright=frozenset(["photo"] if orient else []))
    encoded = EncodedBatch(np.frombuffer(b"".join(batch) + bytes(8), np.uint8), np.cumsum(sizes) - sizes, sizes)

    class OneComponent(SimpleNamespace):
        def __len__(self) -> int:
            return len(batch)

    one: Any = OneComponent(places=lambda component: places)
    return judge_photos(decoded, one, {"photo": encoded}, rules=PhotoRules(max_pixels=MAX_PIXELS_IN_A_BATCH))
