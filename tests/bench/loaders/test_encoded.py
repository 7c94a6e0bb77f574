"""The encoded recipe: loaders hand over the photos' files, byte for byte, and decode nothing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.compare.outputs import OutputError, Reference, compare_epoch, tolerance_of
from bench.loaders.protocol import PARTS, LoaderOptions, num_rows
from bench.loaders.registry import LOADERS, LoaderSpec, open_loader
from dali_pipes.store.shard_set import ShardSet
from tests.bench.conftest import NUM_SAMPLES, loader_cases


@pytest.fixture(scope="module")
def encoded(options: LoaderOptions) -> LoaderOptions:
    return replace(options, recipe="encoded", mask=None)


@pytest.fixture(scope="module")
def reference(shards: ShardSet, encoded: LoaderOptions) -> Iterator[Reference]:
    with Reference.open(shards, options=encoded) as found:
        yield found


def _check(spec: LoaderSpec, shards: ShardSet, options: LoaderOptions, reference: Reference) -> None:
    name = spec.name
    with open_loader(name, shards, options=spec.apply(options)) as loader:
        tolerance = tolerance_of(decode=loader.decode, device=loader.device, recipe="encoded")
        for _ in range(2):
            gives = LOADERS[name].gives
            found = compare_epoch(loader.epoch(), reference, loader=name, tolerance=tolerance, gives=gives)
            assert found.num_samples == NUM_SAMPLES
            assert found.not_compared == tuple(sorted(PARTS["encoded"] - gives))
        batch = next(iter(loader.epoch()))
        assert "image" not in batch
        if "encoded" not in batch:
            assert gives
            assert "encoded" not in gives
            return
        files = batch["encoded"]
        if isinstance(files, list):
            assert len(files) == num_rows(batch)
            return
        assert files.dtype == torch.uint8
        assert len(files) == int(batch["cu_seqlens"][-1])
        assert len(batch["cu_seqlens"]) == num_rows(batch) + 1


@pytest.mark.parametrize("spec", loader_cases("local", "converted", each_decoder=False))
def test_loader_hands_over_the_files_of_photos(
    spec: LoaderSpec, shards: ShardSet, encoded: LoaderOptions, reference: Reference
) -> None:
    """From a directory: each file once an epoch, unchanged, one after the other in one tensor."""
    _check(spec, shards, encoded, reference)


@pytest.mark.parametrize("name", ["dali", "dali-s3", "webloader"])
def test_loader_hands_over_the_files_of_a_bucket(
    name: str, bucket: ShardSet, encoded: LoaderOptions, reference: Reference
) -> None:
    """Each file once an epoch, unchanged, read from a bucket."""
    _check(LoaderSpec(name=name), bucket, encoded, reference)


@pytest.mark.parametrize("name", ["dali", "memory"], ids=["a list", "a tensor"])
def test_file_of_another_photo_is_found(
    name: str, shards: ShardSet, encoded: LoaderOptions, reference: Reference
) -> None:
    """A loader that gives a file with one other byte is refused."""
    with open_loader(name, shards, options=encoded) as loader:

        def changed() -> Iterator[Any]:
            for batch in loader.epoch():
                files = batch["encoded"]
                batch["encoded"] = [data ^ 1 for data in files] if isinstance(files, list) else files ^ 1
                yield batch

        tolerance = tolerance_of(decode=loader.decode, device=loader.device, recipe="encoded")
        with pytest.raises(OutputError, match="the photo's file differs"):
            compare_epoch(changed(), reference, loader=name, tolerance=tolerance)
