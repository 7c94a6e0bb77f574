"""Read encoded samples out of shards, for loaders that have no reader of their own."""

import contextlib
import functools
import io
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from bench.loaders.protocol import LoaderOptions
from bench.loaders.s3 import S3Place, cloud_endpoint, s3_client
from dali_pipes.errors import DataError
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.tar_reader import ArchiveReader
from dali_pipes.store.base import Store
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import open_store

KEY = "__key__"
STREAM_BUFFER_BYTES = 1 << 20  # one read of the connection; tarfile asks for 10 KiB at a time

EncodedSample = dict[str, Any]
"""A sample as WebDataset has it: the key under `KEY`, and the bytes of each component."""


def shard_urls(shards: ShardSet) -> list[str]:
    """The shards' paths, or URLs such as ``ais://pets/shuffled-000000.tar``."""
    return [shards.store.locate(name) for name in shards.names]


class ShuffledNames:
    """Names of shards, in another order each time they are iterated; the orders are the same in every run."""

    def __init__(self, names: Iterable[str], *, seed: int) -> None:
        self._names, self._seed, self._epochs = list(names), seed, 0

    def __iter__(self) -> Iterator[str]:
        order = list(self._names)
        random.Random(f"{self._seed} {self._epochs}").shuffle(order)
        self._epochs += 1
        return iter(order)


def open_stream(url: str, *, endpoint: str | None) -> BinaryIO:
    """Open a shard to be read from front to back: a local path, or a URL such as ``ais://pets/shuffled-000000.tar``.

    Without ``endpoint``, ``s3://`` and other URLs are buckets of clouds.
    """
    return cast("BinaryIO", open_object(url, endpoint=endpoint)) if "://" in url else Path(url).open("rb")


def fetched(url: str, *, endpoint: str | None) -> BinaryIO:
    """Open a shard, as `open_stream` does; but a bucket's object is read into memory first, as a whole.

    obstore reads objects of S3, because it takes two thirds of the time that our client takes.
    """
    scheme, _, path = url.partition("://")
    if not path:
        return open_stream(url, endpoint=endpoint)
    if scheme == "s3" and endpoint is None:
        bucket, _, name = path.partition("/")
        client = s3_client(S3Place(cloud_endpoint(), bucket))
        return io.BytesIO(client.get(name).bytes().to_bytes())
    store, name = _object(url, endpoint=endpoint)
    return io.BytesIO(store.read(name))


def open_object(url: str, mode: str = "rb", bufsize: int = -1, *, endpoint: str | None) -> io.BufferedReader:
    """Open a shard of a bucket, with the arguments that WebDataset gives an opener."""
    return io.BufferedReader(_ObjectStream(url, endpoint=endpoint), STREAM_BUFFER_BYTES)


class _ObjectStream(io.RawIOBase):
    def __init__(self, url: str, *, endpoint: str | None) -> None:
        super().__init__()
        store, name = _object(url, endpoint=endpoint)
        self._open = contextlib.ExitStack()
        self._body: Any = self._open.enter_context(store.open(name))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return int(self._body.readinto(buffer))

    def close(self) -> None:
        if not self.closed:
            self._open.close()
        super().close()


def _object(url: str, *, endpoint: str | None) -> tuple[Store, str]:
    scheme, _, path = url.partition("://")
    bucket, _, name = path.partition("/")
    return _bucket(f"{scheme}://{bucket}/", endpoint=endpoint), name


@functools.cache
def _bucket(url: str, *, endpoint: str | None) -> Store:
    """A bucket, opened once in a process: its connections stay open from one shard to the next, as in a script."""
    return open_store(url, endpoint=endpoint)[0]


def encoded_samples(stream: BinaryIO, *, shard: str) -> Iterator[EncodedSample]:
    """Yield the samples of one shard, front to back."""
    sample: EncodedSample = {}
    for member in ArchiveReader(stream, shard=shard):
        if sample and sample[KEY] != member.key:
            yield sample
            sample = {}
        sample[KEY] = member.key
        sample[member.component] = member.read()
    if sample:
        yield sample


def samples_of(shards: ShardSet) -> Iterator[tuple[str, EncodedSample]]:
    """Yield every sample of every shard, each with the URL of its shard."""
    for name in shards.names:
        where = shards.store.locate(name)
        with shards.store.open(name) as stream:
            for sample in encoded_samples(stream, shard=where):
                yield where, sample


def components_of(
    sample: Mapping[str, Any], options: LoaderOptions, *, shard: str | None = None
) -> tuple[Any, Any, int, str]:
    """Return photo, mask, label and key of an `EncodedSample`; the mask is ``None`` if the recipe takes none.

    Raises:
        DataError: If the sample lacks a component, or its label is not a number; names ``shard``, if it is known.
    """
    key: str = sample[KEY]
    parts: list[Any] = []
    for names in (options.photo, options.mask, LABEL_COMPONENT):
        name = None if names is None else next((one for one in names.split(";") if one in sample), None)
        if names is not None and name is None:
            found = ", ".join(sorted(other for other in sample if not other.startswith("__")))
            raise DataError(f"{_place(shard, key)}: no component '{names}' (found: {found})")
        parts.append(None if name is None else sample[name])
    return parts[0], parts[1], label_of(parts[2], key=key, shard=shard), key


def label_of(data: bytes | memoryview, *, key: str, shard: str | None = None) -> int:
    """Return the class id that ``cls`` holds."""
    try:
        return int(bytes(data))
    except ValueError as exc:
        raise DataError(f"{_place(shard, key)}: cls must be a number, got {bytes(data[:40])!r}") from exc


def checked_fields(sample: EncodedSample, fields: Collection[str], *, shard: str) -> EncodedSample:
    """Return the sample in the order of ``fields``, for a format whose samples all have the same fields."""
    if sample.keys() != set(fields):
        found, expected = (", ".join(sorted(set(names) - {KEY})) for names in (sample, fields))
        raise DataError(
            f"{_place(shard, sample[KEY])}: its components are {found}, expected {expected} as in the first sample; "
            "this format has the same fields in all samples"
        )
    return {name: sample[name] for name in fields}


def _place(shard: str | None, key: str) -> str:
    return f"key '{key}'" if shard is None else f"shard '{shard}', key '{key}'"
