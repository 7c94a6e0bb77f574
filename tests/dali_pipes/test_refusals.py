"""What a loader refuses: shards that are others, arguments and graphs that cannot be, a worker process."""

from __future__ import annotations

import gc
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import dali_pipes as dp
from dali_pipes.formats.names import index_name
from tests import loaders
from tests.loaders import keys_of
from tests.shards import make_samples, write_shards

open_loader = partial(loaders.open_loader, batch_size=5)


def test_shard_changed_after_indexing_is_refused(tmp_path: Path) -> None:
    """One flipped byte, same size: the checksum finds it, the message names the shard, no batch of it is delivered."""
    shards = write_shards(tmp_path, make_samples([(30, 30)] * 6), per_shard=3)
    path = tmp_path / "s-000001.tar"
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)
    text = r"s-000001.tar' has the xxhash2 [0-9a-f]{16}, the manifest says [0-9a-f]{16}"
    with open_loader(shards, batch_size=3, shuffle=False) as loader, pytest.raises(dp.DataError, match=text):
        list(loader)


def test_shard_of_another_size_is_refused(tmp_path: Path) -> None:
    """Cut off or deleted since it was indexed."""
    shards = write_shards(tmp_path, make_samples([(30, 30)] * 3), per_shard=3)
    path = tmp_path / "s-000000.tar"
    path.write_bytes(path.read_bytes()[:-1024])
    text = r"s-000000.tar' has 19456 bytes, the manifest says 20480; it was cut off or replaced"
    with pytest.raises(dp.DataError, match=text), open_loader(shards) as loader:
        list(loader)
    path.unlink()
    with pytest.raises(dp.StoreError, match=r"no shard '.*s-000000.tar'"):
        open_loader([path])


def test_index_changed_after_the_manifest_is_refused(small_shards: Path, tmp_path: Path) -> None:
    """A shard index that is not the manifest's would point at the wrong bytes."""
    shards = write_shards(tmp_path, make_samples([(30, 30)] * 3), per_shard=3)
    (tmp_path / index_name("s-000000.tar")).write_bytes((small_shards / index_name("s-000000.tar")).read_bytes())
    with pytest.raises(dp.DataError, match="is not the index that the manifest was made with"):
        open_loader(shards)


@pytest.mark.parametrize("shuffle", [True, dp.Shuffle(window_bytes=70_000)], ids=["all", "windows"])
def test_bytes_that_an_error_names_are_enough(tmp_path: Path, shuffle: dp.Shuffle | bool) -> None:
    """A disk's file system takes blocks of its own; the bytes named count them. One byte less is refused."""
    shards = write_shards(tmp_path / "shards", make_samples([(200, 200)] * 8), per_shard=2)
    (tmp_path / "cache").mkdir()

    def opened(max_bytes: int) -> dp.Loader:
        return open_loader(shards, shuffle=shuffle, cache=dp.Cache(directory=tmp_path / "cache", max_bytes=max_bytes))

    with pytest.raises(dp.CacheError) as refused:
        opened(66_000)
    (named,) = re.findall(r"max_bytes=(\d+)\)", str(refused.value))
    with pytest.raises(dp.CacheError):
        opened(int(named) - 1)
    with opened(int(named)) as loader:
        assert keys_of(loader)


def test_global_shuffle_past_memory_is_refused(small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All samples are permuted at once: where their numbers do not fit, windows are asked for."""
    monkeypatch.setattr("dali_pipes.opening.available_memory", lambda: 2000)
    with pytest.raises(
        ValueError,
        match=r"window_bytes='all' permutes 23 samples at once, which takes 2760 bytes of memory, and 2000 are avail",
    ):
        open_loader(small_shards)
    open_loader(small_shards, shuffle=dp.Shuffle(window_bytes=50_000)).close()
    open_loader(small_shards, shuffle=False).close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size must be positive, got 0"),
        ({"device": "tpu"}, "device must be one of auto, cpu, gpu, cuda, cuda:N, got 'tpu'"),
        ({"cache": "/tmp"}, "cache must be a dali_pipes.Cache, got '/tmp'"),
        ({"last_batch_policy": "pad"}, "last_batch_policy must be one of FILL, DROP, PARTIAL, got 'pad'"),
    ],
)
def test_bad_arguments_are_refused(small_shards: Path, options: dict, text: str) -> None:
    """Refused with the value in the text."""
    with pytest.raises((ValueError, TypeError), match=text):
        open_loader(small_shards, **options)


def test_arguments_may_be_written_as_other_libraries_write_them(small_shards: Path) -> None:
    """A lower-case policy or DALI's own, torch's device, numpy's integers."""
    import torch
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy

    for policy in ("drop", LastBatchPolicy.DROP):
        options = {"batch_size": np.int64(5), "last_batch_policy": policy, "device": torch.device("cpu")}
        with open_loader(small_shards, **options) as loader:
            assert [len(batch["label"]) for (batch,) in loader] == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("graph", "text"),
    [
        (lambda components, random: components["image.jpg"], "graph must return a dict of outputs by name"),
        (lambda components, random: {"label": components.label}, "graph takes none of the components"),
        ("segmentation", "graph must be a function graph.components, random., .* got 'segmentation'"),
        (lambda components: {}, "graph must be a function .* which does not take two arguments"),
        ("", r"got the function 'segmentation', which makes a graph; call it: segmentation\(\)"),
    ],
)
def test_graphs_that_cannot_be_run_are_refused(small_shards: Path, graph, text: str) -> None:
    """The error says what a graph must take and give."""
    with pytest.raises((TypeError, ValueError), match=text):
        dp.loader(small_shards, graph or dp.segmentation, batch_size=5, device="cpu")


class _InWorker:
    """Makes a loader where it must not be."""

    def __init__(self, shards: Path) -> None:
        self.shards = shards

    def __len__(self) -> int:
        return 1

    def __getitem__(self, item: int) -> object:
        return next(open_loader(self.shards))


def test_loader_in_a_dataloader_worker_is_refused(small_shards: Path) -> None:
    """Made in a worker process: the error says what to do instead."""
    import torch

    workers = torch.utils.data.DataLoader(_InWorker(small_shards), num_workers=1, batch_size=None)
    with pytest.raises(dp.WorkerProcessError, match="cannot be made in a DataLoader worker process"):
        list(workers)
    gc.collect()  # the worker ends with its iterator, which the error's traceback keeps
