"""Which samples, how often, from which data sets: through a whole loader, across ranks, epochs and resumes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dali_pipes as dp
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests import loaders
from tests.dali_pipes.bad_samples.test_bad_samples import gif
from tests.loaders import keys_of
from tests.shards import Sample, make_samples, photo_bytes, write_shards, write_tar

KEYS = [f"s{number:05d}" for number in range(23)]


def label_of(key: str) -> int:
    """As `make_samples` gives them: classes 1 to 5 in turns."""
    return int(key[1:]) % 5 + 1


def open_loader(shards: Any, graph: Any = None, **options: Any) -> dp.Loader:
    return loaders.open_loader(shards, graph or dp.classification_train(crop=8), **({"seed": 3} | options))


def test_where_keeps_what_it_says(small_shards: Path) -> None:
    """By label, and by key; lengths are exact, in every epoch."""
    select = dp.Select(where=lambda columns: (columns.labels == 2) & ~np.strings.endswith(columns.keys, "6"))
    with open_loader(small_shards, select=select) as loader:
        assert (loader.num_samples, len(loader)) == (3, 1)
        for _ in range(2):
            assert sorted(keys_of(loader)) == ["s00001", "s00011", "s00021"]


def test_shards_of_which_nothing_is_left_are_not_staged(small_shards: Path, tmp_path: Path) -> None:
    """Four shards of six: samples of one only are read, so one is brought into the cache."""
    options = {
        "select": dp.Select(where=lambda columns: columns.shards == "s-000001.tar"),
        "cache": dp.Cache(directory=tmp_path),
    }
    with open_loader(small_shards, **options) as loader:
        assert sorted(keys_of(loader)) == [f"s{i:05d}" for i in range(6, 12)]
        assert loader.parts.stager.num_missing([1])[0] == 0
        assert loader.parts.stager.num_missing([0, 2, 3])[0] == 3


def test_several_ranks_and_a_resume_with_all_of_it(small_shards: Path, tmp_path: Path) -> None:
    """Filter, factors, fixed length: two ranks read what one reads, and a resumed job goes on, JSON in between."""
    excluded = tmp_path / "left-out.txt"
    excluded.write_text("s00003\ns00004\n")
    options: dict[str, Any] = {
        "select": dp.Select(
            where=lambda columns: columns.labels != 5, oversample={1: 2}, epoch_samples=24, exclude=excluded
        ),
        "shuffle": dp.Shuffle(window_bytes=20_000),
    }
    with open_loader(small_shards, **options) as loader:
        whole = [batch for _ in range(2) for (batch,) in loader]
    keys = [key for batch in whole for key in batch["key"]]
    assert not {"s00003", "s00004"} & set(keys)
    assert 5 not in map(label_of, keys)
    ranks = [open_loader(small_shards, batch_size=2, rank=rank, world_size=2, **options) for rank in range(2)]
    together = []
    for number in range(12):
        together += [key for loader in ranks for key in next(loader)[0]["key"]]
        if number == 5:
            state = json.loads(json.dumps(ranks[0].state_dict()))
            for loader in ranks:
                with pytest.raises(StopIteration):
                    next(loader)
                iter(loader)
    assert together == keys
    for loader in ranks:
        loader.close()
    with open_loader(small_shards, batch_size=3, **options) as loader:
        assert state["delivered"] == 24
        loader.load_state_dict(state | {"delivered": 9, "epoch": 1})
        assert keys_of(loader) == keys[24 + 9 :]
    with (
        open_loader(
            small_shards, **(options | {"select": dataclasses.replace(options["select"], oversample={1: 3})})
        ) as loader,
        pytest.raises(
            dp.StateError, match=r"another selection of samples.*pass the same select=.*Select\(exclude=, where="
        ),
    ):
        loader.load_state_dict(state)


# Mixtures


@pytest.fixture(scope="module")
def other_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven samples in two shards, of keys and labels of their own."""
    samples = [Sample(f"o{i}", {"cls": b"40", "image.jpg": photo_bytes(90 + i, 30, 30)}) for i in range(7)]
    return write_shards(tmp_path_factory.mktemp("other"), samples, per_shard=4)


@pytest.mark.parametrize(("weights", "expected"), [(None, (23, 7)), ({"small": 1, "other": 2}, (23, 46))])
def test_mixture_has_every_sample_in_the_proportion_of_the_weights(
    small_shards: Path, other_shards: Path, weights: dict[str, float] | None, expected: tuple[int, int]
) -> None:
    """In every epoch, over all ranks; each rank has both, mixed; labels and keys belong together."""
    mixture = dp.Mixture({"small": small_shards, "other": other_shards}, weights=weights)
    read: Counter[tuple[str, int]] = Counter()
    for rank in range(2):
        with open_loader(mixture, rank=rank, world_size=2) as loader:
            rows = [row for (b,) in loader for row in zip(b["key"], b["label"].tolist(), strict=True)]
        assert {key[0] for key, _ in rows[:15]} == {key[0] for key, _ in rows[-15:]} == {"s", "o"}
        read.update(rows)
    small = {(f"small/{key}", label_of(key)): 1 for key in KEYS}
    passes = [read[f"other/o{i}", 40] for i in range(7)]
    assert read == small | {(f"other/o{i}", 40): num for i, num in enumerate(passes)}
    assert (len(small), sum(passes)) == expected
    assert max(passes) - min(passes) <= 1


def test_bad_sample_of_a_mixture_is_named_with_its_set(small_shards: Path, tmp_path: Path) -> None:
    """The quarantine names the set; the next job leaves the sample out by it."""
    samples = make_samples([(20, 20)] * 5)
    samples[2] = Sample("bad", samples[2].components | {"image.jpg": gif(b"")})
    mixture = dp.Mixture({"small": small_shards, "few": write_shards(tmp_path / "few", samples, per_shard=5)})
    quarantine = tmp_path / "quarantine-{rank}.tsv"
    with open_loader(mixture, bad_samples=dp.BadSamples(on_error="substitute", quarantine=quarantine)) as loader:
        list(loader)
        assert [(bad.shard, bad.key) for bad in loader.bad_samples] == [("few/s-000000.tar", "few/bad")]
    with open_loader(mixture, select=dp.Select(exclude=tmp_path / "quarantine-0.tsv")) as loader:
        assert loader.num_samples == 23 + 4
        assert "few/bad" not in keys_of(loader)


# Missing components


@pytest.fixture(scope="module")
def gappy_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve samples: every third has no mask, one no label, one neither."""
    samples = [
        Sample(
            sample.key,
            {
                name: data
                for name, data in sample.components.items()
                if not (name == "trimap.png" and i % 3 == 0) and not (name == "cls" and i in (5, 6))
            },
        )
        for i, sample in enumerate(make_samples([(30, 24)] * 12))
    ]
    return write_shards(tmp_path_factory.mktemp("gappy"), samples, per_shard=5)


def test_missing_components_are_an_error_or_skipped(gappy_shards: Path) -> None:
    """Whatever the graph takes counts: mask and label here, the label alone there; lengths are exact."""
    graph = dp.segmentation(crop=16)
    with pytest.raises(dp.DataError, match=r"key 's00000': no component 'trimap.png' \(found: cls, image.jpg\)"):
        open_loader(gappy_shards, graph)
    select = dp.Select(missing="skip")
    with open_loader(gappy_shards, graph, select=select, batch_size=3) as loader:
        assert sorted(keys_of(loader)) == [f"s{i:05d}" for i in (1, 2, 4, 7, 8, 10, 11)]
        assert (loader.num_samples, len(loader)) == (7, 3)
    with open_loader(gappy_shards, select=select) as loader:
        assert sorted(keys_of(loader)) == [f"s{i:05d}" for i in range(12) if i not in (5, 6)]


def test_missing_empty_lets_them_through(gappy_shards: Path) -> None:
    """A mask of nothing, class id -1, and a flag; the photo is what it is."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        return {**dp.segmentation(crop=16)(components, random), "has_mask": components.present("trimap.png")}

    with open_loader(gappy_shards, graph, select=dp.Select(missing="empty"), shuffle=False) as loader:
        assert loader.num_samples == 12
        batches = [batch for (batch,) in loader]
    has_mask = [i % 3 != 0 for i in range(12)]
    assert [int(value) for batch in batches for value in batch["has_mask"]] == has_mask
    assert [bool(mask.any()) for batch in batches for mask in batch["mask"]] == has_mask
    assert [int(label) for batch in batches for label in batch["label"]] == [
        -1 if i in (5, 6) else i % 5 + 1 for i in range(12)
    ]
    assert all(batch["image"].any() for batch in batches)


def test_slices_of_other_lengths_in_each_epoch(tmp_path: Path) -> None:
    """Two slices of uneven shards: an epoch is as long as its longest slice; a state of another epoch goes on there."""
    samples = make_samples([(20, 20)] * 24)
    for number, (start, stop) in enumerate(itertools.pairwise([0, 13, 15, 17, 18, 24])):
        write_tar(tmp_path / f"s-{number:06d}.tar", samples[start:stop])
    index_shards(resolve_shards(tmp_path, endpoint=None))
    options: dict[str, Any] = {"shuffle": dp.Shuffle(slices=2), "batch_size": 2, "seed": 0}
    states, rests, lengths = [], [], []
    with open_loader(tmp_path, **options) as loader:
        for _ in range(4):
            iter(loader)
            lengths.append(len(loader))
            next(loader)
            states.append(loader.state_dict())
            rests.append(keys_of(loader))
    assert len(set(lengths)) > 1
    with open_loader(tmp_path, **options) as loader:
        for state, rest, length in zip(states[::-1], rests[::-1], lengths[::-1], strict=True):
            loader.load_state_dict(state)
            assert len(loader) == length
            assert keys_of(loader) == rest
