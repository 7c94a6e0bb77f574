"""What a loader refuses: shards that are others, arguments and graphs that cannot be, a worker process."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path

import pytest

import dali_pipes as dp
from dali_pipes import opening
from dali_pipes.formats.names import index_name
from tests import loaders
from tests.lazy import Lazy
from tests.shards import make_samples, write_shards

open_loader = partial(loaders.open_loader, batch_size=5)


def test_shard_changed_after_indexing_is_refused(tmp_path: Path) -> None:
    """One flipped byte, same size: the checksum finds it, the message names the shard, no batch of it is delivered."""
    shards = write_shards(tmp_path, make_samples([(30, 30)] * 6), per_shard=3)
    path = tmp_path / "s-000001.tar"
    data = bytearray(path.read_bytes())
    data[512] ^= 1
    path.write_bytes(data)
    text = r"s-000001.tar' has the xxhash2 [0-9a-f]{16}, the manifest says [0-9a-f]{16}.*: component 'cls' of 's00003'$"
    opened = open_loader(shards, batch_size=3, shuffle=False, cache=dp.Cache(directory=tmp_path))
    with opened as loader, pytest.raises(dp.DataError, match=text):
        list(loader)


def test_index_changed_after_the_manifest_is_refused(small_shards: Path, tmp_path: Path) -> None:
    """A shard index that is not the manifest's would point at the wrong bytes."""
    shards = write_shards(tmp_path, make_samples([(30, 30)] * 3), per_shard=3)
    (tmp_path / index_name("s-000000.tar")).write_bytes((small_shards / index_name("s-000000.tar")).read_bytes())
    with pytest.raises(dp.DataError, match="is not the index that the manifest was made with"):
        open_loader(shards)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size must be positive, got 0"),
        ({"device": "tpu"}, "device must be one of auto, cpu, gpu, cuda, cuda:N, got 'tpu'"),
        ({"cache": "/tmp"}, "cache must be a dali_pipes.Cache, got '/tmp'"),
        ({"shuffle": 1}, "shuffle must be a bool or a dali_pipes.Shuffle, got 1"),
        ({"graph": 3}, "graph must be a function .*, got 3"),
        ({"graph": lambda *, crop: crop}, "got the function '<lambda>', which makes a graph; call it"),
        ({"graph": lambda components: components}, "graph must be a function .* which does not take these two"),
        ({"graph": lambda components, random: []}, "graph must return a dict of outputs by name, got list"),
        ({"graph": lambda components, random: {"x": 1}}, "graph takes none of the components"),
        ({"rank": 0, "world_size": 1, "mesh": object()}, "mesh gives rank and world size; leave rank and world_size"),
        ({"shuffle": dp.Shuffle(slices=3)}, r"slices must divide batch_size \* world_size, got 3 and 5 \* 1"),
        ({"last_batch_policy": "pad"}, "last_batch_policy must be one of FILL, DROP, PARTIAL, got 'pad'"),
    ],
)
def test_bad_arguments_are_refused(small_shards: Path, options: dict, text: str) -> None:
    """Refused with the value in the text."""
    with pytest.raises((ValueError, TypeError), match=text):
        open_loader(small_shards, **options)


def test_transform_as_graph_is_told_where_it_belongs(small_shards: Path) -> None:
    with pytest.raises(TypeError, match=r"got Identity\(\), which does not .* transforms of tensors go on batches"):
        open_loader(small_shards, graph=Lazy("torch.nn").Identity())


def test_shuffle_of_all_that_memory_does_not_hold_is_refused(
    small_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "available_memory", lambda: 22)
    with pytest.raises(ValueError, match=r"window_bytes='all' permutes 23 samples .* 22 are available; pass shuffle="):
        open_loader(small_shards)
    open_loader(small_shards, shuffle=dp.Shuffle(window_bytes=20_000)).close()


def test_refused_graph_ends_the_fetches_that_have_begun(small_shards: Path, tmp_path: Path) -> None:
    """No fetch thread remains, and the next loader can read all shards from the same cache."""
    opened = partial(open_loader, small_shards, cache=dp.Cache(directory=tmp_path))
    with pytest.raises(dp.DataError, match=r"component 'depth\.png'"):
        opened(graph=lambda components, random: {"depth": components["depth.png"]})
    assert not [thread for thread in threading.enumerate() if thread.name == "dali-pipes-fetch"]
    with opened() as loader:
        assert len(loaders.keys_of(loader)) == 23


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
