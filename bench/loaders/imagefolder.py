"""Shards unpacked into files to batches, by torchvision's ``ImageFolder`` and a ``DataLoader``: no shards at all.

Settings (torchvision 0.29, "Datasets": ``ImageFolder``, one folder a class; PyTorch 2.13, "Performance Tuning Guide":
workers, pinned memory; ``torch.utils.data``: ``persistent_workers``, ``prefetch_factor``): one worker a core, kept for
all epochs, each with one torch thread (torch's own default in a worker); the sampler shuffles all samples anew each
epoch, which costs a random read of a small file and gives the best order that there is.

A mask lies in a tree of its own beside the photos', at the same path, and a subclass reads it with its photo. Both are
decoded where the batch is made (``collate_fn``), straight into it in shared memory, the whole photo of each.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from bench.loaders import Loader, LoaderOptions, Prepared
from bench.loaders._samples import KEY, EncodedSample, encoded_samples
from bench.loaders.workers import WorkerEpochs, worker_settings
from bench.transforms import BatchDecoder, label_of
from dali_pipes.errors import DataError
from dali_pipes.store.urls import check_object_name

if TYPE_CHECKING:
    from dali_pipes.store.urls import ShardSet

__all__ = ["PhotosWithMasks", "open_loader", "prepare"]


def prepare(shards: "ShardSet", *, directory: Path) -> Prepared:
    """Each member of each sample as ``COMPONENT/LABEL/KEY.ENDING``: ``image.jpg/3/animals/pet_001.jpg``.

    Raises:
        DataError: If a sample has no label, or its key is no path.
    """
    started = time.perf_counter()
    for name in shards.names:
        where = shards.store.locate(name)
        with shards.store.open(name) as stream:
            for sample in encoded_samples(stream, shard=where):
                _unpack(sample, directory=directory, where=where)
    return Prepared.of(directory, started=started)


def _unpack(sample: EncodedSample, *, directory: Path, where: str) -> None:
    key = sample.pop(KEY)
    if "cls" not in sample:
        raise DataError(f"shard '{where}', key '{key}': no component 'cls' (found: {', '.join(sorted(sample))})")
    label = label_of(sample.pop("cls"), key=key)
    try:
        check_object_name(f"{key}.", url=key)
    except ValueError as exc:
        raise DataError(f"shard '{where}', key '{key}': cannot be unpacked, it is no path below a folder") from exc
    for component, data in sample.items():
        path = directory / component / str(label) / f"{key}.{component.rpartition('.')[2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@contextlib.contextmanager
def open_loader(shards: "ShardSet", *, options: LoaderOptions, prepared: Prepared) -> Iterator[Loader]:
    """Files in a shuffled order; each sample once an epoch."""
    from bench.loaders.devices import delivery_device

    num_workers = options.num_threads
    device = delivery_device(options.device)
    loader: DataLoader[EncodedSample] = DataLoader(
        PhotosWithMasks(Path(prepared.url), options),
        batch_size=options.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(options.seed),
        collate_fn=BatchDecoder(options),
        **worker_settings(shards, options=options, num_workers=num_workers, device=device),
    )
    epochs = WorkerEpochs(loader, data_loader=loader, num_workers=num_workers, decode=options.decode, device=device)
    try:
        yield epochs
    finally:
        epochs.close()


class PhotosWithMasks(ImageFolder):  # type: ignore[misc]  # torchvision has no types
    """An ``ImageFolder`` whose items are encoded samples: photo, its mask, label and key."""

    def __init__(self, directory: Path, options: LoaderOptions) -> None:
        self._photos, self._masks = directory / options.photo, directory / options.mask
        self._options = options
        self._ending = f".{options.mask.rpartition('.')[2]}"
        for folder, name in ((self._photos, options.photo), (self._masks, options.mask)):
            if not folder.is_dir():
                raise DataError(f"no sample has the component '{name}': no folder '{folder}'")
        super().__init__(str(self._photos))

    def __getitem__(self, row: int) -> EncodedSample:
        path, class_row = self.samples[row]
        label = self.classes[class_row]
        place = Path(path).relative_to(self._photos)
        return {
            KEY: str(place.relative_to(label).with_suffix("")),
            self._options.photo: Path(path).read_bytes(),
            self._options.mask: (self._masks / place.with_suffix(self._ending)).read_bytes(),
            "cls": label.encode(),
        }
