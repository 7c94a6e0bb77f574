"""Decode components to tensors as a PyTorch user would write it, for all recipes.

`SampleDecoder` is the reference and takes one sample at a time. `BatchDecoder` is for the peers that decode in Python;
it makes whole batches in less time. Pillow and torchvision decode the whole photo, because they cannot decode a part;
nvImageCodec can.
"""

import io
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import functional
from torchvision.transforms.v2 import functional as tensors

from bench.loaders.encoded import components_of
from bench.loaders.protocol import BenchBatch, LoaderOptions
from bench.loaders.recipe import crop_of
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


def recipe_photo(photo: Image.Image, options: LoaderOptions, *, num_bytes: int) -> Any:
    """Make the recipe's image of a photo as torchvision does: Pillow RGB. ``num_bytes`` is the size of its file."""
    if options.recipe == "classification":
        crop = crop_of(num_bytes, height=photo.height, width=photo.width)
        resized = functional.resized_crop(photo, *crop[:4], [options.crop, options.crop])
        return functional.hflip(resized) if crop.is_flipped else resized
    if options.recipe == "evaluation":
        photo = functional.resize(photo, [options.resize])
    return functional.center_crop(photo, [options.crop, options.crop])


def image_tensor(photo: Image.Image, options: LoaderOptions) -> Any:
    """Return ``ToTensor -> Normalize`` of a Pillow RGB image, float32 [3, height, width]; or its pixels, uint8."""
    if options.dtype == "uint8":
        return functional.pil_to_tensor(photo)
    # inplace: nothing else uses ToTensor's result. It saves a copy of 1.5 MB a sample and changes no bit.
    return functional.normalize(functional.to_tensor(photo), IMAGENET_MEAN, IMAGENET_STD, inplace=True)


def centre_tensor(image: Image.Image, options: LoaderOptions) -> Any:
    """Return ``CenterCrop(crop)`` of a Pillow image, the levels as they are: uint8 [channels, crop, crop]."""
    return functional.pil_to_tensor(functional.center_crop(image, [options.crop, options.crop]))


class SampleDecoder:
    """Decodes a sample of WebDataset, a dict of bytes, to a `TensorSample`, with Pillow; can be pickled."""

    def __init__(self, options: LoaderOptions) -> None:
        self._options = options

    def __call__(self, sample: Mapping[str, Any]) -> TensorSample:
        photo, mask, label, key = components_of(sample, self._options)
        if self._options.recipe == "encoded":
            return {"encoded": _as_tensor(photo), "label": label, "key": key}
        image = recipe_photo(_opened(photo, "RGB"), self._options, num_bytes=len(photo))
        made: TensorSample = {"image": image_tensor(image, self._options), "label": label, "key": key}
        if mask is not None:
            made["mask"] = centre_tensor(_opened(mask, "L"), self._options)
        return made


class BatchDecoder:
    """A callable from encoded samples, each a dict of bytes as WebDataset has it, to a `BenchBatch`; can be pickled.

    A photo's window is copied from the decoder into its row of the batch. In a thread it is normalised there. In a
    worker of a ``DataLoader`` the batch lies in shared memory from the start, as that of ``default_collate`` does, and
    its pixels stay uint8 until `Normaliser` takes them where they arrive: a worker fills a quarter of the new pages.
    """

    def __init__(self, options: LoaderOptions) -> None:
        self._options, self._normalise = options, Normaliser(options)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> BenchBatch:
        """Return the batch of ``samples``, in their order."""
        found = [components_of(sample, self._options) for sample in samples]
        if self._options.recipe == "encoded":
            return encoded_batch(found)
        side, is_worker = self._options.crop, get_worker_info() is not None
        shape = (len(samples), 3, side, side)
        images = _new_tensor(shape, torch.uint8) if is_worker else self._normalise.new_images(shape)
        batch: BenchBatch = {"image": images, **_labels_and_keys(found)}
        if self._options.mask is not None:
            batch["mask"] = _new_tensor((len(samples), 1, side, side), torch.uint8)
        for row, (photo, mask, _, _) in enumerate(found):
            _put_photo(photo, images[row], self._options)
            if images.dtype == torch.float32:
                self._normalise.into(images[row], images[row])
            if mask is not None:
                _put_mask(mask, batch["mask"][row], self._options)
        return batch


class Normaliser:
    """Normalises uint8 images, x / (255 std) - mean / std, into memory that is used again, as our loader's is; can be
    pickled.
    """

    def __init__(self, options: LoaderOptions) -> None:
        self._options = options
        std = torch.tensor(IMAGENET_STD, dtype=torch.float64)[:, None, None]
        mean = torch.tensor(IMAGENET_MEAN, dtype=torch.float64)[:, None, None]
        self._scale, self._shift = (1 / (255 * std)).float(), (mean / std).float()
        self._buffers: Buffers | None = None

    def __call__(self, batch: BenchBatch) -> BenchBatch:
        """Normalise the images of a batch if the run asks for that, on a GPU if they are wanted there."""
        if "image" not in batch or self._options.dtype == "uint8" or batch["image"].dtype == torch.float32:
            return batch
        pixels, device = batch["image"], self._options.delivery_device
        if device != "cpu":
            # The constants are copied once. Each copy from the host waits for all earlier work of the stream.
            self._scale, self._shift = self._scale.to(device), self._shift.to(device)
            moved = pixels.to(device, non_blocking=True)
            return {**batch, "image": (moved * self._scale).sub_(self._shift)}
        images = self.new_images(tuple(pixels.shape))
        for row, image in enumerate(pixels):  # one by one, while it is in the cores' cache
            self.into(images[row], image)
        return {**batch, "image": images}

    def into(self, row: Tensor, image: Tensor) -> None:
        torch.mul(image, self._scale, out=row).sub_(self._shift)

    def new_images(self, shape: tuple[int, ...]) -> Tensor:
        """Return uninitialised images of the run's dtype."""
        self._buffers = self._buffers or Buffers()  # not before: this object is pickled
        return torch.from_numpy(self._buffers.array(shape, self._options.dtype))


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


def _put_photo(data: bytes, row: Tensor, options: LoaderOptions) -> None:
    """Decode, and put the recipe's image into ``row``, [3, crop, crop], of any dtype; levels stay as they are."""
    if options.decode == "pil":
        pixels = np.asarray(recipe_photo(_opened(data, "RGB"), options, num_bytes=len(data)))
        row.numpy()[...] = pixels.transpose(2, 0, 1)
        return
    photo = _Region(data) if options.decode == "nvimgcodec" else _Whole(data, ImageReadMode.RGB)
    if options.recipe == "segmentation":
        _put_centre(photo, row)
    elif options.recipe == "evaluation":
        _put_resized_centre(photo, row, options)
    else:
        crop = crop_of(len(data), height=photo.height, width=photo.width)
        # Version 2 of torchvision's functions resizes uint8 as it is; version 1 converts it to float32 and back.
        resized = tensors.resize(photo.part(*crop[:4]), [options.crop, options.crop], antialias=True)
        row.copy_(tensors.hflip(resized) if crop.is_flipped else resized)


def _put_mask(data: bytes, row: Tensor, options: LoaderOptions) -> None:
    """Decode a mask and put its centre into ``row``, uint8 [1, crop, crop]."""
    if options.decode == "pil":
        row.copy_(centre_tensor(_opened(data, "L"), options))
    else:
        _put_centre(_Whole(data, ImageReadMode.GRAY), row)


class _Whole:
    """An image that torchvision has decoded."""

    def __init__(self, data: bytes, mode: ImageReadMode) -> None:
        self._pixels = decode_image(_as_tensor(data), mode=mode)
        self.height, self.width = self._pixels.shape[1:]

    def part(self, top: int, left: int, height: int, width: int) -> Any:
        return self._pixels[:, top : top + height, left : left + width]


class _Region:
    """A photo whose parts nvImageCodec decodes, by libjpeg-turbo, in the calling thread."""

    def __init__(self, data: bytes) -> None:
        from nvidia import nvimgcodec

        if not hasattr(_of_thread, "decoder"):
            _of_thread.decoder = nvimgcodec.Decoder(
                device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
                max_num_cpu_threads=1,
                backends=[nvimgcodec.Backend(nvimgcodec.CPU_ONLY)],
            )
            _of_thread.settings = nvimgcodec.DecodeParams(apply_exif_orientation=False)
        self._codec, self._stream = nvimgcodec, nvimgcodec.CodeStream(bytes(data))
        self.height, self.width = self._stream.height, self._stream.width

    def part(self, top: int, left: int, height: int, width: int) -> Any:
        stream = self._stream
        if (height, width) != (self.height, self.width):
            region = self._codec.Region(start=(top, left), end=(top + height, left + width))
            stream = stream.get_sub_code_stream(region=region)
        decoded = _of_thread.decoder.decode(stream, params=_of_thread.settings)
        return torch.from_numpy(np.asarray(decoded.cpu())).permute(2, 0, 1)


_of_thread = threading.local()


def _put_resized_centre(photo: "_Whole | _Region", row: Tensor, options: LoaderOptions) -> None:
    """Decode the part of a photo that the crop is made of, resize it, and put the crop into ``row``.

    ``row`` has [3, crop, crop], of any dtype; levels stay as they are.
    """
    # These modules import DALI. The other recipes of these loaders do not need it, so the import is here.
    from dali_pipes.graph.finish import resized_crop
    from dali_pipes.graph.pipelines import crop_regions, resized_shape

    size = np.array([[photo.height, photo.width]], np.int32)
    resized, crop = resized_shape(size, options.resize), (options.crop, options.crop)
    regions = crop_regions(size, resized, crop)
    pixels = photo.part(*regions.start[0].tolist(), *regions.shape[0].tolist())
    row.copy_(resized_crop(pixels[None], resized[0].tolist(), crop, np.stack(regions, axis=1)[0])[0])


def _put_centre(image: "_Whole | _Region", row: Tensor) -> None:
    """Put the centre of an image into ``row``, as ``CenterCrop`` does."""
    (left, width), (top, height), place = _centre(image.width, image.height, row)
    place.copy_(image.part(top, left, height, width))


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
