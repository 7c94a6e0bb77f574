"""Cut a few hundred photos with masks, in many sizes, from the photographs inside scikit-image.

They are for first runs and for tests without a data set. Nothing is downloaded. Each choice is a digest of the
seed, the record's number and the choice's name, so the same seed gives the same bytes on every machine with the same
Pillow.
"""

import hashlib
import io
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter, ImageOps

from dali_pipes.errors import PipesError
from dali_pipes.progress import progress
from prep.sources.folders import MASK, PHOTO
from prep.sources.record import Record, Source

NUM_PHOTOS = 300

PHOTOGRAPHS = {
    "astronaut": "astronaut.png",
    "cat": "chelsea.png",
    "coffee": "coffee.png",
    "galaxies": "hubble_deep_field.jpg",
    "motorcycle": "motorcycle_left.png",
    "retina": "retina.jpg",
    "rocket": "rocket.jpg",
    "tissue": "ihc.png",
}
"""Class name -> file in ``skimage.data``; the colour photographs among those in the wheel."""

MIN_SIDE, MAX_SIDE = 150, 1000
FOREGROUND, BACKGROUND, BOUNDARY = 1, 2, 3
# Half the width of the boundary's band, in pixels, as in Oxford's trimaps.
BAND = 3
# Blur before the threshold, in pixels. Without it, noise gives specks instead of regions.
BLUR = 4

_Draw = Callable[[str, int], int]
"""Returns an integer in ``[0, bound)`` for the name of a choice and ``bound``."""


def demo_photos(*, count: int = NUM_PHOTOS, seed: int = 0, show_progress: bool = False) -> Source:
    """Records cut from eight photographs, sorted by class; each photograph is a class, ids from 1.

    Photos measure 150 to 1,000 pixels a side, most of them 300 to 500; some are grey, some progressive, the quality is
    60 to 95. A mask divides its photo by luminance: 2 is the side of the mean that has more of the photo's edge,
    1 is the other side, 3 a band between them.

    Raises:
        PipesError: If scikit-image is not installed.
    """
    records: list[Record] = []
    photographs = {name: _read_photograph(file) for name, file in PHOTOGRAPHS.items()}
    for number in progress(range(count), what="cut demo photos", unit="photos", shown=show_progress):
        label = number * len(PHOTOGRAPHS) // count
        name = list(PHOTOGRAPHS)[label]
        draw = _draw(seed, number)
        photo = _cut(photographs[name], draw)
        components = {PHOTO: _encode_photo(photo, draw), MASK: _encode(_segment(photo), "PNG")}
        records.append(Record(key=f"{name}_{number:04d}", components=components, label=label + 1))
    return Source(
        name=f"demo photos, seed {seed}",
        records=records,
        classes=dict(enumerate(PHOTOGRAPHS, start=1)),
        masks=frozenset({MASK}),
    )


def _read_photograph(file: str) -> Image.Image:
    try:
        with (resources.files("skimage.data") / file).open("rb") as stream:
            return Image.open(stream).convert("RGB")
    except (ModuleNotFoundError, FileNotFoundError) as exc:
        raise PipesError(
            f"the demo photos are cut from '{file}' of scikit-image, which is not there ({exc}); "
            "install it: pip install 'dali-pipes[demo]'"
        ) from exc


def _draw(seed: int, number: int) -> _Draw:
    def draw(choice: str, bound: int) -> int:
        digest = hashlib.blake2b(f"{seed}/{number}/{choice}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % bound

    return draw


def _cut(photograph: Image.Image, draw: _Draw) -> Image.Image:
    def side(name: str) -> int:
        # Six of ten are as in Oxford's photos, two below a crop of 350, two from 500 on.
        kind = draw(f"{name} kind", 10)
        first, stop = (MIN_SIDE, 350) if kind < 2 else (300, 501) if kind < 8 else (500, MAX_SIDE + 1)
        return first + draw(name, stop - first)

    width, height = side("width"), side("height")
    # The box has between a half and all of the sides of the largest box of this shape that fits.
    fit = min(photograph.width * 1000 // width, photograph.height * 1000 // height)
    scale = fit * (50 + draw("scale", 51)) // 100
    box_width, box_height = max(1, width * scale // 1000), max(1, height * scale // 1000)
    left = draw("left", photograph.width - box_width + 1)
    top = draw("top", photograph.height - box_height + 1)
    box = (left, top, left + box_width, top + box_height)
    photo = photograph.resize((width, height), Image.Resampling.BICUBIC, box=box)
    if draw("flip", 2):
        photo = ImageOps.mirror(photo)
    return photo.convert("L") if draw("grey", 12) == 0 else photo


def _encode_photo(photo: Image.Image, draw: _Draw) -> bytes:
    options: dict[str, Any] = {"quality": 60 + draw("quality", 36), "progressive": draw("progressive", 5) == 0}
    if photo.mode != "L":
        options["subsampling"] = ("4:2:0", "4:2:0", "4:2:2", "4:4:4")[draw("subsampling", 4)]
    return _encode(photo, "JPEG", **options)


def _encode(picture: Image.Image, format: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, format, **options)
    return stream.getvalue()


def _segment(photo: Image.Image) -> Image.Image:
    """An 8-bit grey mask of `FOREGROUND`, `BACKGROUND` and `BOUNDARY`."""
    luminance = np.asarray(photo.convert("L").filter(ImageFilter.BoxBlur(BLUR)))
    inside = luminance > luminance.mean()
    edge = np.concatenate([inside[0], inside[-1], inside[:, 0], inside[:, -1]])
    if 2 * int(edge.sum()) > edge.size:
        inside = ~inside
    mask = np.where(inside, FOREGROUND, BACKGROUND).astype(np.uint8)
    mask[_dilate(inside) & _dilate(~inside)] = BOUNDARY
    return Image.fromarray(mask)


def _dilate(region: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The region and all pixels at most `BAND` rows and columns away from it."""
    # A mean is above 0 where any pixel of the window is. Pillow's MaxFilter gives the same, in ten times the CPU.
    picture = Image.fromarray(np.where(region, np.uint8(255), np.uint8(0)))
    return np.asarray(picture.filter(ImageFilter.BoxBlur(BAND))) > 0
