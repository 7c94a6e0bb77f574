"""Samples that lack a component: an error, skipped, or let through as nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from tests import loaders
from tests.loaders import keys_of
from tests.shards import Sample, make_samples, write_shards


def open_loader(shards: Any, graph: Any = None, **options: Any) -> dp.Loader:
    return loaders.open_loader(shards, graph or dp.classification_train(crop=8), **({"seed": 3} | options))


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
