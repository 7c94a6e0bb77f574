"""DALI's own tests of its PyTorch iterators, as cases for our loader: what holds, and what a loader does instead.

They are in NVIDIA/DALI, dali/test/python/test_fw_iterators.py (commit 2bba4cf8); each docstring names its test or check
function there. docs/dali-cases.md has a table of all. They read 64 photos, and so do these.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dali_pipes as dp
from tests import loaders
from tests.lazy import Lazy
from tests.shards import make_samples, write_shards

fn, types = Lazy("nvidia.dali.fn"), Lazy("nvidia.dali.types")

Ids = list[int]
DataSet = Callable[[int], Path]


def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    return {"label": components.label, "bytes": components["image.jpg"].shape()}


open_loader = functools.partial(loaders.open_loader, graph=graph, seed=7, outputs=dp.Outputs())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    """Makes a data set of so many samples, whose labels count from 1; it is written once."""
    new, samples_of = tmp_path_factory.mktemp, lambda num: make_samples([(16, 16)] * num, num_classes=num)
    return functools.cache(lambda num: write_shards(new("data"), samples_of(num), per_shard=16))


def ids_of(batch: list[dict[str, Any]], name: str = "label") -> Ids:
    """The samples of a batch, by their numbers from 0."""
    return [int(label) - 1 for label in batch[0][name]]


def epochs_of(shards: Path, *, auto_reset: bool = False, **options: Any) -> list[list[Ids]]:
    """The batches of two epochs of a loader, as many as the length before each says."""
    with open_loader(shards, **options) as loader:
        epochs, iterator = [], loader.as_dali(output_map=["data", "size"], auto_reset=auto_reset)
        for length in (len(iterator) for _ in range(2)):
            epochs.append([ids_of(batch, "data") for batch in iterator])
            assert len(epochs[-1]) == length
            if not auto_reset:
                iterator.reset()
    return epochs


@pytest.fixture(scope="module")
def orders(data: DataSet) -> list[Ids]:
    """The orders of two epochs of 64 samples, on one rank."""
    orders = [[*chain(*epoch)] for epoch in epochs_of(data(64), batch_size=64)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(64)) != orders[0] != orders[1]
    return orders


@pytest.mark.parametrize("batch_size", [100, 5])
@pytest.mark.parametrize("policy", ["FILL", "PARTIAL"])
def test_last_batch(data: DataSet, orders: list[Ids], policy: Any, batch_size: int) -> None:
    """``last_batch_no_pad_last_batch`` and ``not_fill_last_batch_pad_last_batch`` hold. ``last_batch_pad_last_batch``
    differs: DALI then repeats the last sample; ours fill with the epoch's first samples.
    """
    num_missing = -64 % batch_size
    epochs = epochs_of(data(64), batch_size=batch_size, last_batch_policy=policy)
    for order, epoch in zip(orders, epochs, strict=True):
        assert (read := [*chain(*epoch)]) == order + (order[:num_missing] if policy == "FILL" else [])
        assert len(set(read[-num_missing - 1 :])) > 1


def dealt(order: Ids, num_ranks: int, batch_size: int, policy: str) -> list[list[Ids]]:
    """The batches of each rank of ours: its block of each step, no slice of the data set."""
    ranks: list[list[Ids]] = [[] for _ in range(num_ranks)]
    for first in range(0, 64, num_ranks * batch_size):
        step = order[first : first + num_ranks * batch_size]
        num_missing = num_ranks * batch_size - len(step)
        if num_missing and policy == "DROP":
            break
        step += order[:num_missing] if policy == "FILL" else []
        for batches, block in zip(ranks, np.array_split(step, num_ranks), strict=True):
            batches.append(block.tolist() or step[:1])
    return ranks


def failures(ranks: list[list[Ids]], policy: str) -> str:
    """Those of DALI's checks that do not hold for an epoch of all ranks."""
    lists = [[*chain(*batches)] for batches in ranks]
    sizes, different, together = [len(read) for read in lists], [len(set(read)) for read in lists], set(chain(*lists))
    shares = [(rank + 1) * 64 // len(ranks) - rank * 64 // len(ranks) for rank in range(len(ranks))]
    checks = {
        "apart": not set.intersection(*map(set, lists)),
        "differ": different == sizes,
        "once": len(together) == sum(sizes) or policy == "FILL",
        "share": max(sizes) <= min(shares) if policy == "DROP" else different == shares,
    }
    return " ".join(name for name, holds in checks.items() if not holds)


READER_NAME = [  # ranks, batch size, and what does not hold with PARTIAL, FILL and DROP
    (3, 3, "apart once share", "differ share", ""),  # the last step has one sample, and PARTIAL gives it to all ranks
    (3, 5, "share", "differ share", ""),
    (3, 7, "apart once share", "differ share", ""),
    (5, 3, "once share", "share", ""),
    (5, 5, "share", "share", ""),
    (5, 7, "share", "share", ""),
    (17, 3, "once share", "share", ""),
    (17, 5, "share", "share"),  # DROP is refused: see below
    (17, 7, "share", "share"),
]
CASES = [(*row[:2], *case) for row in READER_NAME for case in zip(("PARTIAL", "FILL", "DROP"), row[2:], strict=False)]


@pytest.mark.parametrize(("num_ranks", "batch_size", "policy", "fails"), CASES)
def test_reader_name(
    data: DataSet, orders: list[Ids], num_ranks: int, batch_size: int, policy: Any, fails: str
) -> None:
    """``pass_reader_name``, for one pipeline and for one on each rank, which is a loader here, and ``_autoreset``.

    Named are DALI's checks that do not hold. ``share``: each rank has as many samples as a slice of the data set;
    ``once``: no sample comes twice; ``differ``: none comes twice on its rank; ``apart``: no sample is on all ranks.
    """
    options: dict[str, Any] = {"batch_size": batch_size, "last_batch_policy": policy, "world_size": num_ranks}
    ranks = [epochs_of(data(64), rank=rank, auto_reset=rank % 2 == 1, **options) for rank in range(num_ranks)]
    for order, *epoch in zip(orders, *ranks, strict=True):
        assert epoch == dealt(order, num_ranks, batch_size, policy)
        assert failures(epoch, policy) == fails


@pytest.mark.parametrize("shuffle", [False, True])
def test_reader_name_stick_to_shard(data: DataSet, shuffle: bool) -> None:
    """Without shuffle, a rank has the same samples in each epoch. With shuffle, each epoch gives it other samples."""
    ranks = [epochs_of(data(64), rank=rank, world_size=2, shuffle=shuffle) for rank in range(2)]
    first, second = ([set(chain(*epoch)) for epoch in epochs] for epochs in ranks)
    assert (first[0] == first[1]) is not shuffle
    assert first[1] != second[0]


@pytest.mark.parametrize("auto_reset", ["yes", "no"])
@pytest.mark.parametrize(("policy", "holds"), [("FILL", False), ("DROP", True), ("PARTIAL", True)])
def test_autoreset_iter(data: DataSet, auto_reset: str, policy: Any, holds: bool) -> None:
    """``check_autoreset_iter``: a loop by the length, which never sees the end; ``iter()`` begins the next epoch."""
    with open_loader(data(11), batch_size=2, shuffle=False, last_batch_policy=policy) as loader:
        iterator = loader.as_dali(auto_reset=auto_reset)
        for _ in range(2):
            begun = iter(iterator)
            read = [*chain(*(ids_of(next(begun)) for _ in range(len(begun))))]
            assert read == {"FILL": [*range(11), 0], "DROP": [*range(10)], "PARTIAL": [*range(11)]}[policy]
            assert (read == [min(place, 10) for place in range(len(read))]) is holds


@pytest.mark.parametrize("is_infinite", [False, True])
@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("batch_size", [1, 10, 100])
@pytest.mark.parametrize("num_batches", [1, 2, 9])
def test_stop_iteration(data: DataSet, num_batches: int, batch_size: int, auto_reset: bool, is_infinite: bool) -> None:
    """``check_stop_iter`` after 1, 3 and 6 epochs: holds. A data set does not run dry as its sources with a limit."""
    with open_loader(data(num_batches * batch_size), batch_size=batch_size) as loader:
        iterator, count = loader.as_dali(auto_reset=auto_reset, size=-1 if is_infinite else loader.num_samples), 0
        for epoch in range(1, 7):
            count += sum(1 for _ in iterator)
            assert (count, loader.epoch) == (epoch * num_batches, epoch - (not auto_reset))
            if not auto_reset:
                iterator.reset()


ERRORS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # pass_reader_name: where DALI has no data, and its readers' arguments.
    ({"last_batch_policy": "DROP", "world_size": 2, "rank": 1}, {}, "'DROP' leaves an epoch of 4 samples without a ba"),
    *[({name: 1}, {}, f"no argument '{name}'") for name in ("stick_to_shard", "pad_last_batch", "shard_id")],
    # stop_iteration_fail_multi: several pipelines are several loaders; stop_iteration_fail_single.
    ({"rank": 1, "world_size": 2, "batch_size": 1}, {"size": -1}, ""),
    ({}, {"size": 0}, "size must be left out: this rank has 4 samples in an epoch, got 0"),
    # external_source_variable_size_fail: DALI sees a wrong size in the loop, ours when the iterator is made.
    # external_source_*: a loader reads shards, and takes no source.
    ({}, {"size": 5}, "size must be left out: this rank has 4 samples in an epoch, got 5"),
    ({"graph": lambda *_: {"data": fn.external_source(lambda: [1])}}, {}, "graph takes none of the components"),
    (
        {"graph": lambda *of: graph(*of) | {"data": fn.external_source(lambda: [1])}},
        {},
        "a source of its own (External",
    ),
    (
        {"graph": lambda *of: graph(*of) | {"data": fn.readers.file(files=[__file__])[1]}},
        {},
        "a source of its own (read",
    ),
    # wrong_last_batch_policy_type: names are policies, too.
    ({"last_batch_policy": "FILL", "batch_size": 2}, {"last_batch_policy": "FILL"}, ""),
    ({"last_batch_policy": "WRAP"}, {}, "last_batch_policy must be one of FILL, DROP, PARTIAL, got 'WRAP'"),
]


@pytest.mark.parametrize(("options", "arguments", "error"), ERRORS)
def test_errors(data: DataSet, options: dict[str, Any], arguments: dict[str, Any], error: str) -> None:
    """What DALI refuses, and ours takes or refuses in its own words."""
    refused = pytest.raises((TypeError, ValueError), match=re.escape(error)) if error else contextlib.nullcontext()
    with refused, open_loader(data(4), **options) as loader:
        assert len([*loader.as_dali(**arguments)]) == len(loader) == 2


@pytest.mark.parametrize("arguments", [{}, {"prepare_first_batch": False}, {"size": -1, "dynamic_shape": True}])
def test_external_source(data: DataSet, arguments: dict[str, Any]) -> None:
    """``external_source_autoreset``, ``_do_not_prepare`` and ``_variable_size_pass``: hold, with shards as source."""
    with open_loader(data(4), batch_size=3, shuffle=False) as loader:
        iterator = loader.as_dali(auto_reset=True, **arguments)
        assert [[ids_of(batch) for batch in iterator] for _ in range(3)] == [[[0, 1, 2], [3]]] * 3


@pytest.mark.parametrize("prepare_first_batch", [True, False])
def test_prepare_first_batch(data: DataSet, prepare_first_batch: bool) -> None:
    """``check_prepare_first_batch`` and ``check_iterator_wrapper_first_iteration``: no batch is made before the first
    ``next()``, in either case. But the loader made one sample to check the graph, and no class derives from it.
    """
    made: list[int] = []

    def noting(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        made_of = components.array(lambda batch: made.append(len(batch.labels)) or batch.labels)
        return graph(components, random) | {"label": made_of}

    with open_loader(data(16), graph=noting, shuffle=False) as loader:
        iterator = loader.as_dali(prepare_first_batch=prepare_first_batch)
        assert (len(iter(iterator)), iterator._ever_consumed, made) == (4, False, [1])
        assert ids_of(next(iterator)) == [0, 1, 2, 3]
        assert set(made[1:]) == {4}
    with pytest.raises(TypeError, match=r"a Loader is made by the function dali_pipes.loader\("):
        type("Derived", (dp.Loader,), {})([None], output_map=["data"], size=100)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint8", "int8", "bool", "int16", "int32", "int64"])
def test_feed_ndarray_types(data: DataSet, dtype: str) -> None:
    """``check_pytorch_iterator_feed_ndarray_types``: holds for what batches hold."""

    def cast(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        data_type = getattr(types, {"float32": "FLOAT"}.get(dtype, dtype.upper()))
        return graph(components, random) | {"data": fn.cast(components.label, dtype=data_type)}

    with open_loader(data(64), graph=cast, batch_size=64) as loader:
        (batch,) = next(loader)
    np.testing.assert_array_equal(batch["data"].numpy(), batch["label"].numpy().astype(dtype), strict=True)


@pytest.mark.parametrize("is_packed", [False, True])
def test_ragged_batches(small_shards: Path, is_packed: bool) -> None:
    """``ragged_iterator_sparse_coo_batch`` and ``_sparse_list_batch``: no batch is sparse or a list. Samples of several
    shapes are refused, or packed into one dense tensor, with the place at which each begins.
    """

    def pixels(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        photo = fn.decoders.image(components["image.jpg"], device=components.device)
        pixels = fn.reshape(photo, shape=[-1, 3])
        return {"pixels": components.packed(pixels) if is_packed else pixels, "shape": photo.shape()}

    text = "output 'pixels' of the graph has samples of different shapes; crop, resize or pad them alike"
    refused = contextlib.nullcontext() if is_packed else pytest.raises(ValueError, match=text)
    with open_loader(small_shards, graph=pixels, batch_size=16, last_batch_policy="FILL") as loader, refused:
        for (batch,) in loader.as_dali(output_map=["pixels", "dense"]):
            lengths = batch["dense"][:, :2].prod(1)
            assert batch["cu_seqlens"].tolist() == [0, *lengths.cumsum(0)]
            assert (batch["pixels"].shape, batch["dense"].shape) == ((lengths.sum(), 3), (16, 3))
