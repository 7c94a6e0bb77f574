"""JPEG decoders by name: each makes uint8 [height, width, 3], RGB, of a file's bytes, in one thread.

The decoders, and what they give, are those of github.com/ternaus/imread_benchmark (its ``imread_benchmark/decoders``,
eb3b2e9). Photos are not turned upright by EXIF data. To add a decoder, write a function that imports the package and
returns the decoder, and a line in `DECODERS`.
"""

import importlib.util
import io
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Decode = Callable[[bytes], Pixels]


class Decoder(NamedTuple):
    """A decoder that works photo by photo."""

    open: Callable[[], Decode]
    """Imports the package, and sets it to one thread."""
    package: str
    """The import name of its package."""
    distribution: str
    """What pip installs."""

    def reason_against(self) -> str | None:
        """Why it cannot be opened here; ``None`` if it can."""
        if importlib.util.find_spec(self.package) is not None:
            return None
        return f"needs the package '{self.package}', which is not installed; pip install {self.distribution}"


def _pillow() -> Decode:
    from PIL import Image

    def decode(data: bytes) -> Pixels:
        with Image.open(io.BytesIO(data)) as photo:
            return np.array(photo if photo.mode == "RGB" else photo.convert("RGB"))

    return decode


def _torchvision() -> Decode:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    torch.set_num_threads(1)

    def decode(data: bytes) -> Pixels:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels: Pixels = decode_jpeg(encoded, mode=ImageReadMode.RGB).permute(1, 2, 0).contiguous().numpy()
        return pixels

    return decode


def _simplejpeg() -> Decode:
    import simplejpeg

    return lambda data: simplejpeg.decode_jpeg(data, colorspace="RGB")


def _opencv() -> Decode:
    import cv2

    cv2.setNumThreads(1)
    how = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    return lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), how)


def _ajpegli() -> Decode:
    import ajpegli

    return lambda data: ajpegli.imdecode(data, mode="RGB")


DECODERS: Mapping[str, Decoder] = {
    "pillow": Decoder(_pillow, "PIL", "pillow"),
    "torchvision": Decoder(_torchvision, "torchvision", "torchvision"),
    "simplejpeg": Decoder(_simplejpeg, "simplejpeg", "simplejpeg"),
    "opencv": Decoder(_opencv, "cv2", "opencv-python-headless"),
    "ajpegli": Decoder(_ajpegli, "ajpegli", "ajpegli"),
}
"""Name -> decoder, in the order of the table. The first one is what the others are compared with."""
