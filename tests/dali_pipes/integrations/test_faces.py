"""One contract for every face of a loader: epochs, ranks, last batches, leaving early, resuming, closing, lengths."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import loaders

if TYPE_CHECKING:
    import dali_pipes as dp

NUM_SAMPLES = 23
BATCHES = 5  # of 5 samples, the last of 3

Epochs = list[list[list[str]]]
"""Keys, by epoch and batch."""


def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """Enough to tell one sample from another."""
    from nvidia.dali import fn

    pixels = fn.decoders.image(components["image.jpg"], device=components.device)
    return {"image": fn.slice(pixels, [0, 0], [4, 4], axes=(0, 1)), "label": components.label}


open_loader = partial(loaders.open_loader, graph=graph, batch_size=5, seed=7)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Face:
    """A way to iterate a loader, and what it promises beyond the contract."""

    wrap: Callable[[Any], Any]
    keys: Callable[[Any], list[str]] = lambda batch: batch["key"]
    stateful: Callable[[Any], Any] = lambda face: face
    """What has ``state_dict`` and ``load_state_dict``."""
    after_break: str = "rest"
    """What comes after ``break``: the rest of the epoch, the next one, or the same one again."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def following(self, epoch: int) -> int:
        """The epoch after a whole one."""
        return epoch if self.after_break == "same" else epoch + 1

    def read(self, face: Any, num_epochs: int = 1) -> Epochs:
        return [[self.keys(batch) for batch in face] for _ in range(num_epochs)]


def torchs_loader(loader: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(loader.as_dataset(), batch_size=None, num_workers=0)


FACES = {
    "loader": Face(wrap=lambda loader: loader, keys=lambda batch: batch[0]["key"]),
    "as_dali": Face(
        wrap=lambda loader: loader.as_dali(output_map=["data", "label"], column_labels=True),
        keys=lambda batch: batch[0]["key"],
    ),
    "as_dicts": Face(wrap=lambda loader: loader.as_dicts(), after_break="next"),
    "as_dataset": Face(wrap=torchs_loader, stateful=lambda face: face.dataset, after_break="next"),
    "as_dataset, torchdata": Face(wrap=loaders.torchdatas_loader, after_break="next"),
    "as_dataloader": Face(
        wrap=lambda loader: loader.as_dataloader(("label", "key")), keys=lambda batch: batch[1], after_break="next"
    ),
    "as_dataloader, same": Face(
        wrap=lambda loader: loader.as_dataloader({"name": "key"}, each_iter="same"),
        keys=lambda batch: batch["name"],
        after_break="same",
    ),
    "as_jax": Face(wrap=lambda loader: loader.as_jax(), after_break="next"),
    "as_dataloader, late": Face(
        wrap=lambda loader: loader.as_dataloader(), after_break="next", options={"rank": "late"}
    ),
}


@pytest.fixture(scope="module")
def whole(small_shards: Path) -> Epochs:
    """Five epochs of one rank, each started by its number."""
    epochs = []
    with open_loader(small_shards) as loader:
        for epoch in range(5):
            loader.set_epoch(epoch)
            epochs.append([next(loader)[0]["key"] for _ in range(BATCHES)])
    assert len({str(epoch) for epoch in epochs}) == 5
    return epochs


@pytest.fixture(params=FACES, name="face")
def _face(request: pytest.FixtureRequest) -> Face:
    if request.param == "as_jax":
        pytest.importorskip("jax")
    return FACES[request.param]


def test_leaving_early_and_starting_again(small_shards: Path, whole: Epochs, face: Face) -> None:
    """After `break`, the next loop begins where `Face.after_break` says; the loop after it reads the next epoch."""
    after = {"rest": whole[0][2:], "next": whole[1], "same": whole[0]}[face.after_break]
    then = {"rest": whole[1], "next": whole[2], "same": whole[0]}[face.after_break]
    with open_loader(small_shards, **face.options) as loader:
        wrapped = face.wrap(loader)
        first = [face.keys(batch) for batch in itertools.islice(wrapped, 2)]
        assert [first, *face.read(wrapped, 2)] == [whole[0][:2], after, then]


def test_closed_loader_is_refused_and_its_state_is_known(small_shards: Path, face: Face) -> None:
    """Also by an iterator that is under way; the state is that of the last batch."""
    with open_loader(small_shards, **face.options) as loader:
        wrapped = face.wrap(loader)
        iterator = iter(wrapped)
        next(iterator)
        state = face.stateful(wrapped).state_dict()
    assert face.stateful(wrapped).state_dict() == state
    assert len(wrapped) == BATCHES
    with pytest.raises(ValueError, match="this loader is closed; make another"):
        next(iterator)
    with pytest.raises(ValueError, match="this loader is closed; make another"):
        next(iter(wrapped))
