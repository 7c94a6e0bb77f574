"""Decode components to tensors as a PyTorch user would write it, for all recipes.

`SampleDecoder` is the reference and takes one sample at a time. `BatchDecoder` is for the peers that decode in Python;
it makes whole batches in less time. Both decode the whole photo and cut the window out of it: neither Pillow nor
torchvision can decode a part.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import functional
from torchvision.transforms.v2 import functional as tensors

from bench.loaders.encoded import components_of
from bench.loaders.protocol import BenchBatch, LoaderOptions
from bench.loaders.recipe import Crop, crop_of
from dali_pipes.reader.buffers import Buffers

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class TensorSample(TypedDict):
    image: NotRequired[Tensor]
    """float32 [3, crop, crop]; not of the encoded recipe."""
    mask: NotRequired[Tensor]
    """uint8 [1, crop, crop]; the segmentation recipe only."""
    encoded: NotRequired[Tensor]
    """uint8 [bytes], the photo's file; the encoded recipe only."""
    label: int
    key: str


def photo_transform(crop: int) -> Any:
    """Return ``CenterCrop(crop) -> ToTensor -> Normalize``: a Pillow RGB image to float32 [3, crop, crop]."""
    return transforms.Compose([transforms.CenterCrop(crop), normalised_tensor])


def normalised_tensor(photo: Image.Image) -> Any:
    """Return ``ToTensor -> Normalize`` of a Pillow RGB image: float32 [3, height, width]."""
    # inplace: nothing else uses ToTensor's result. It saves a copy of 1.5 MB a sample and changes no bit.
    return functional.normalize(functional.to_tensor(photo), IMAGENET_MEAN, IMAGENET_STD, inplace=True)


def cropped_photo(photo: Image.Image, crop: Crop, size: int) -> Any:
    """Cut out a crop and resize it as ``RandomResizedCrop`` does, flip it if the crop says so: Pillow RGB."""
    resized = functional.resized_crop(photo, crop.top, crop.left, crop.height, crop.width, [size, size])
    return functional.hflip(resized) if crop.is_flipped else resized


def mask_transform(crop: int) -> Any:
    """Return ``CenterCrop(crop)`` that keeps class ids: a Pillow ``L`` image to uint8 [1, crop, crop]."""
    return transforms.Compose([transforms.CenterCrop(crop), transforms.PILToTensor()])


class SampleDecoder:
    """Decodes a sample of WebDataset, a dict of bytes, to a `TensorSample`, with Pillow; can be pickled."""

    def __init__(self, options: LoaderOptions) -> None:
        self._options = options
        self._photo, self._mask = photo_transform(options.crop), mask_transform(options.crop)

    def __call__(self, sample: Mapping[str, Any]) -> TensorSample:
        photo, mask, label, key = components_of(sample, self._options)
        if self._options.recipe == "encoded":
            return {"encoded": _as_tensor(photo), "label": label, "key": key}
        image = _opened(photo, "RGB")
        if mask is not None:
            return {"image": self._photo(image), "mask": self._mask(_opened(mask, "L")), "label": label, "key": key}
        crop = crop_of(len(photo), height=image.height, width=image.width)
        return {"image": normalised_tensor(cropped_photo(image, crop, self._options.crop)), "label": label, "key": key}


class BatchDecoder:
    """A callable from encoded samples, each a dict of bytes as WebDataset has it, to a `BenchBatch`; can be pickled.

    A photo's window is copied from the decoder into its row of the batch and normalised there, in one step: x / (255
    std) - mean / std. In a worker of a ``DataLoader`` the batch lies in shared memory from the start, as a batch of
    ``default_collate`` does.
    """

    def __init__(self, options: LoaderOptions) -> None:
        self._options = options
        put, put_crop = (_put_turbo, _put_crop_turbo) if options.decode == "turbo" else (_put_pil, _put_crop_pil)
        self._put_mask = put
        self._put_photo = put_crop if options.recipe == "classification" else put
        std = torch.tensor(IMAGENET_STD, dtype=torch.float64)[:, None, None]
        mean = torch.tensor(IMAGENET_MEAN, dtype=torch.float64)[:, None, None]
        self._scale, self._shift = (1 / (255 * std)).float(), (mean / std).float()
        self._buffers: Buffers | None = None

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> BenchBatch:
        """Return the batch of ``samples``, in their order."""
        found = [components_of(sample, self._options) for sample in samples]
        if self._options.recipe == "encoded":
            return encoded_batch(found)
        side = self._options.crop
        images = self._new_images((len(samples), 3, side, side))
        batch: BenchBatch = {"image": images, **_labels_and_keys(found)}
        if self._options.mask is not None:
            batch["mask"] = _new_tensor((len(samples), 1, side, side), torch.uint8)
        for row, (photo, mask, _, _) in enumerate(found):
            self._put_photo(photo, images[row])
            images[row].mul_(self._scale).sub_(self._shift)
            if mask is not None:
                self._put_mask(mask, batch["mask"][row])
        return batch

    def _new_images(self, shape: tuple[int, ...]) -> Tensor:
        """Return uninitialised images; those of a thread lie in memory that is used again, as our loader's do."""
        if get_worker_info() is not None:
            return _new_tensor(shape, torch.float32)
        self._buffers = self._buffers or Buffers()  # not before: the decoder is pickled
        num_bytes = math.prod(shape) * 4
        return torch.from_numpy(self._buffers.take(num_bytes)[:num_bytes].view(np.float32)).view(shape)


def encoded_batch(samples: Sequence[tuple[Any, Any, int, str]]) -> BenchBatch:
    """Join the photos' files of ``samples``, as `components_of` returns them, by one copy of each."""
    ends = np.cumsum([0, *(len(photo) for photo, *_ in samples)])
    joined = _new_tensor((int(ends[-1]),), torch.uint8)
    place = joined.numpy()
    for (photo, *_), start, end in zip(samples, ends[:-1], ends[1:], strict=True):
        place[start:end] = np.frombuffer(photo, np.uint8)
    return {"encoded": joined, "cu_seqlens": torch.from_numpy(ends.astype(np.int32)), **_labels_and_keys(samples)}


def _labels_and_keys(samples: Sequence[tuple[Any, Any, int, str]]) -> BenchBatch:
    labels = torch.tensor([label for _, _, label, _ in samples], dtype=torch.int64)
    return {"label": labels, "key": [key for *_, key in samples]}


def _opened(data: bytes, mode: str) -> Image.Image:
    """Decode an image, as RGB or gray."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        # convert() copies even an RGB photo, which takes a tenth of the time; so call it only if needed.
        return image if image.mode == mode else image.convert(mode)


def _put_pil(data: bytes, row: Tensor) -> None:
    """Decode into the centre of ``row``, [channels, crop, crop], of any dtype; levels stay as they are."""
    photo = _opened(data, "RGB" if len(row) == 3 else "L")
    (left, width), (top, height), place = _centre(photo.width, photo.height, row)
    pixels = np.asarray(photo.crop((left, top, left + width, top + height)))
    place.numpy()[...] = pixels.reshape(height, width, len(row)).transpose(2, 0, 1)


def _put_turbo(data: bytes, row: Tensor) -> None:
    """The same as `_put_pil`, with torchvision's decoders."""
    photo = decode_image(_as_tensor(data), mode=ImageReadMode.RGB if len(row) == 3 else ImageReadMode.GRAY)
    (left, width), (top, height), place = _centre(photo.shape[2], photo.shape[1], row)
    place.copy_(photo[:, top : top + height, left : left + width])


def _put_crop_pil(data: bytes, row: Tensor) -> None:
    """Decode, and put the classification recipe's crop into ``row``, [3, crop, crop]; levels stay as they are."""
    photo = _opened(data, "RGB")
    crop = crop_of(len(data), height=photo.height, width=photo.width)
    pixels = np.asarray(cropped_photo(photo, crop, row.shape[-1]))
    row.numpy()[...] = pixels.transpose(2, 0, 1)


def _put_crop_turbo(data: bytes, row: Tensor) -> None:
    """The same as `_put_crop_pil`, with torchvision's decoders and its resampling of tensors."""
    photo = decode_image(_as_tensor(data), mode=ImageReadMode.RGB)
    top, left, height, width, is_flipped = crop_of(len(data), height=photo.shape[1], width=photo.shape[2])
    size = [row.shape[-1], row.shape[-1]]
    # Of uint8: the older functions would convert it to float32 and back.
    resized = tensors.resized_crop(photo, top, left, height, width, size, antialias=True)
    row.copy_(tensors.hflip(resized) if is_flipped else resized)


def _centre(width: int, height: int, row: Tensor) -> tuple[tuple[int, int], tuple[int, int], Tensor]:
    """Return the part of a photo that ``CenterCrop`` takes, start and size along x and y, and its place in ``row``.

    A smaller photo is padded with zeros; if their number is odd, there is one more after the photo.
    """
    crop = row.shape[-1]
    if width < crop or height < crop:
        row.zero_()
    taken, places = [], []
    for side in (width, height):
        size = min(side, crop)
        pad = (crop - size) // 2
        taken.append((round((side - size) / 2), size))
        places.append(slice(pad, pad + size))
    return taken[0], taken[1], row[:, places[1], places[0]]


def _new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor; in a worker it lies in shared memory, so sending it copies nothing."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    # As torch.utils.data._utils.collate does: share_memory_() of an existing tensor would copy it.
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


def _as_tensor(data: bytes) -> Tensor:
    # Through numpy: torch.frombuffer warns that bytes cannot be written to; decode_image only reads.
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
