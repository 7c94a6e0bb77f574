"""The data set face under torch's and torchdata's own loaders: every batch once, and resumed at the exact next one."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import dali_pipes as dp
from tests import builders

NUM_EPOCHS = 3
BATCHES = 5  # 23 samples, 5 a batch; 4 under DROP


# Crops are random: a batch that comes from elsewhere in the order, or from another epoch, has other pixels.
open_loader = partial(
    builders.open_loader, graph=dp.classification_train(crop=16, photo="image.jpg"), batch_size=5, seed=3
)


def wrap(loader: Any) -> Any:
    return StatefulDataLoader(loader.as_dataset(), batch_size=None, num_workers=0)


def read(batches: Any, num_epochs: int = 1) -> list[list[dict[str, Any]]]:
    """The batches of epochs, as a training loop goes over them."""
    return [list(batches) for _ in range(num_epochs)]


def assert_same(found: list[list[dict[str, Any]]], expected: list[list[dict[str, Any]]]) -> None:
    assert [[batch["key"] for batch in epoch] for epoch in found] == [
        [batch["key"] for batch in epoch] for epoch in expected
    ]
    for batch, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert torch.equal(batch["image"], other["image"])
        assert torch.equal(batch["label"], other["label"])


@pytest.fixture(scope="module")
def whole(small_shards: Path) -> list[list[dict[str, Any]]]:
    """Three epochs without a break."""
    with open_loader(small_shards) as loader:
        return read(loader.as_dataset(), NUM_EPOCHS)


@pytest.mark.parametrize("num_batches", [2, 5])
def test_state_in_a_loader_that_was_opened_with_it_costs_nothing(
    small_shards: Path, whole: list[list[dict[str, Any]]], num_batches: int
) -> None:
    """``state=`` has the loader stand there; torchdata's own state goes to the same place, and says what was over."""
    with open_loader(small_shards) as loader:
        batches = wrap(loader)
        for _ in zip(range(num_batches), batches, strict=False):
            pass
        state, of_loader = batches.state_dict(), loader.state_dict()
    assert of_loader["delivered"] == min(5 * num_batches, 23)
    with open_loader(small_shards, state=of_loader) as loader:
        feed = loader.delivery.current.feed
        batches = wrap(loader)
        batches.load_state_dict(state)
        assert loader.delivery.current.feed is feed
        assert_same(read(batches, NUM_EPOCHS), [whole[0][num_batches:], *whole[1:]])


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, StatefulDataLoader])
def test_worker_processes_are_refused(small_shards: Path, kind: Any) -> None:
    """With the reason and what to do instead; in this process the loader is still good."""
    with open_loader(small_shards) as loader:
        batches = kind(loader.as_dataset(), batch_size=None, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(
            dp.WorkerProcessError, match=r"needs no workers: use it directly, or with DataLoader\(num_w"
        ):
            list(batches)
        assert sum(len(batch["label"]) for batch in loader.as_dicts()) == 23
