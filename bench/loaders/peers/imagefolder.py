"""Load files that were unpacked from shards, with torchvision's ``ImageFolder`` and a ``DataLoader``.

Settings (torchvision 0.29, "Datasets": ``ImageFolder``, one folder for each class; PyTorch 2.13, "Performance Tuning
Guide": workers, pinned memory; ``torch.utils.data``: ``persistent_workers``, ``prefetch_factor``): one worker for each
core, kept for all epochs, each with one torch thread (torch's default in a worker). The sampler shuffles all samples in
each epoch, which costs a random read of a small file and gives the best possible order.

Masks lie in a second tree, at the same paths as the photos; a subclass reads each mask with its photo. Each photo is
decoded as a whole where the batch is made (``collate_fn``), straight into the batch in shared memory.
"""

import contextlib
from pathlib import Path

import torch
from torchvision.datasets import ImageFolder

from bench.loaders.encoded import KEY, EncodedSample, label_of, samples_of
from bench.loaders.protocol import BenchLoader, LoaderOptions, Prepared
from bench.loaders.workers import open_data_loader
from dali_pipes.errors import DataError
from dali_pipes.store.shard_names import check_object_name
from dali_pipes.store.shard_set import ShardSet


def prepare(shards: ShardSet, *, directory: Path) -> None:
    """Write each member of each sample as ``COMPONENT/LABEL/KEY.ENDING``: ``image.jpg/3/animals/pet_001.jpg``.

    Raises:
        DataError: If a sample has no label, or its key is not a path.
    """
    for where, sample in samples_of(shards):
        key = sample.pop(KEY)
        if "cls" not in sample:
            raise DataError(f"shard '{where}', key '{key}': no component 'cls' (found: {', '.join(sorted(sample))})")
        label = label_of(sample.pop("cls"), key=key, shard=where)
        try:
            check_object_name(f"{key}.", url=key)
        except ValueError as exc:
            raise DataError(
                f"shard '{where}', key '{key}': cannot be unpacked, it is not a path below a folder"
            ) from exc
        for component, data in sample.items():
            path = directory / component / str(label) / f"{key}.{component.rpartition('.')[2]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def open_loader(
    shards: ShardSet, *, options: LoaderOptions, prepared: Prepared
) -> contextlib.AbstractContextManager[BenchLoader]:
    """The files come in a shuffled order, each sample once an epoch."""
    samples = PhotosWithMasks(Path(prepared.url), options)
    generator = torch.Generator().manual_seed(options.seed)
    return open_data_loader(samples, shards, options=options, shuffle=True, generator=generator)


class PhotosWithMasks(ImageFolder):  # type: ignore[misc]  # torchvision has no types
    """An ``ImageFolder`` whose items are encoded samples: photo, mask if the recipe takes it, label and key."""

    def __init__(self, directory: Path, options: LoaderOptions) -> None:
        self._directory, self._photos = directory, directory / options.photo
        self._options = options
        for name in filter(None, (options.photo, options.mask)):
            if ";" in name:
                raise DataError(f"ImageFolder reads one tree, and the samples have their photos in '{name}'")
            if not (folder := directory / name).is_dir():
                raise DataError(f"no sample has the component '{name}': no folder '{folder}'")
        super().__init__(str(self._photos))

    def __getitem__(self, row: int) -> EncodedSample:
        path, class_row = self.samples[row]
        label = self.classes[class_row]
        place = Path(path).relative_to(self._photos)
        sample: EncodedSample = {
            KEY: str(place.relative_to(label).with_suffix("")),
            self._options.photo: Path(path).read_bytes(),
            "cls": label.encode(),
        }
        if (mask := self._options.mask) is not None:
            path_of_mask = self._directory / mask / place.with_suffix(f".{mask.rpartition('.')[2]}")
            sample[mask] = path_of_mask.read_bytes()
        return sample
