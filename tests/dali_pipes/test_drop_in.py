"""Loops that were written for DALI's iterators, and for torch's loader, run unchanged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia.dali.plugin.pytorch import DALIGenericIterator

import dali_pipes as dp


def open_loader(shards: Path, **options: Any) -> Any:
    graph = options.pop("graph", dp.classification_train(crop=16, photo="image.jpg"))
    return dp.loader(str(shards), graph, **({"batch_size": 5, "seed": 1, "device": "cpu"} | options))


def test_loop_of_a_classification_iterator_runs_unchanged(small_shards: Path) -> None:
    """The inner loop of DALI's own ResNet example: ``data[0]["data"]``, ``label`` squeezed to int64 [B]."""
    with open_loader(small_shards, output_map=["data", "label"], column_labels=True) as train_loader:
        assert isinstance(train_loader, DALIGenericIterator)
        seen = 0
        for _epoch in range(2):
            num_batches = 0
            for data in train_loader:
                num_batches += 1
                images = data[0]["data"]
                assert data[0]["label"].shape == (len(images), 1)
                target = data[0]["label"].squeeze(-1).long()
                assert images.shape[1:] == (3, 16, 16)
                assert target.shape == (len(images),)
                seen += len(images)
            assert num_batches == len(train_loader)
            train_loader.reset()
        assert seen == 2 * 23


def test_output_map_renames_in_the_graphs_order(small_shards: Path) -> None:
    """As DALI's iterators take it; batches are those without it."""
    graph = dp.segmentation(crop=16)
    with (
        open_loader(small_shards, graph=graph) as plain,
        open_loader(small_shards, graph=graph, output_map=["x", "y", "z"]) as renamed,
    ):
        for (one,), (other,) in zip(plain, renamed, strict=True):
            assert list(other) == ["x", "y", "z"]
            for name, new in zip(one, other, strict=True):
                assert torch.equal(one[name], other[new])


def test_as_dicts_gives_plain_dicts(small_shards: Path) -> None:
    """Epoch after epoch, as iterating the loader itself."""
    with open_loader(small_shards) as loader:
        for _ in range(2):
            assert sum(len(batch["label"]) for batch in loader.as_dicts()) == 23


def test_dataset_face_goes_through_torchs_loader(small_shards: Path) -> None:
    """``DataLoader(batch_size=None, num_workers=0)`` hands batches through, and knows how many there are."""
    with open_loader(small_shards) as loader:
        batches = torch.utils.data.DataLoader(loader.as_dataset(), batch_size=None, num_workers=0)
        assert len(batches) == len(loader) == 5
        for _ in range(2):
            assert sum(len(batch["label"]) for batch in batches) == 23


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"output_map": ["a"]}, r"output_map must name the graph's 2 outputs \(image, label\), got \['a'\]"),
        ({"output_map": "ab"}, "output_map must name the graph's 2 outputs"),
        ({"output_map": ["a", "a"]}, r"output_map must not name an output twice, got \['a', 'a'\]"),
        ({"output_map": ["a", "key"], "with_keys": True}, "with_keys adds 'key'"),
        (
            {"column_labels": True, "graph": lambda components, random: {"n": components["image.jpg"].shape()}},
            "column_labels needs an output 'label', the graph gives n",
        ),
    ],
)
def test_names_that_do_not_fit_are_refused(small_shards: Path, options: dict[str, Any], text: str) -> None:
    """What was expected, what was given."""
    with pytest.raises(ValueError, match=text):
        open_loader(small_shards, **options)
