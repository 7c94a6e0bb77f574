"""A shard's bytes in, its samples out, still encoded: what loaders without a reader of their own cut shards with."""

from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

from dali_pipes.errors import DataError
from dali_pipes.formats.tar_reader import ArchiveReader

__all__ = ["KEY", "EncodedSample", "checked_fields", "encoded_samples"]

KEY = "__key__"

EncodedSample = dict[str, Any]
"""As WebDataset has it: the key under `KEY`, and each component's bytes."""


def encoded_samples(stream: BinaryIO, *, shard: str) -> Iterator[EncodedSample]:
    """The samples of one shard, front to back.

    Raises:
        DataError: If it is no whole tar.
    """
    sample: EncodedSample = {}
    for member in ArchiveReader(stream, shard=shard):
        if sample and sample[KEY] != member.key:
            yield sample
            sample = {}
        sample[KEY] = member.key
        sample[member.component] = member.read()
    if sample:
        yield sample


def checked_fields(sample: EncodedSample, fields: Collection[str], *, shard: str) -> EncodedSample:
    """The sample, in the order of ``fields``, for a format whose samples all have the same.

    Raises:
        DataError: If it has others.
    """
    if frozenset(sample) != frozenset(fields):
        raise DataError(
            f"shard '{shard}', key '{sample[KEY]}': its components are {_named(sample)}, expected {_named(fields)} as "
            "of the first sample; this format has the same fields in all samples"
        )
    return {name: sample[name] for name in fields}


def _named(fields: Collection[str]) -> str:
    return ", ".join(sorted(set(fields) - {KEY}))
