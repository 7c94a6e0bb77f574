"""One contract for every face of a loader: epochs, ranks, last batches, leaving early, resuming, closing, lengths."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Use(NamedTuple):
    """A way to use a face: what was read, and what it had to be, each as batches of keys."""

    read: list[Any]
    expected: list[Any]


def began(face: Face, whole: Epochs, epoch: int, num_taken: int) -> list[list[str]]:
    """What the next iteration gives if ``num_taken`` batches of ``epoch`` were taken."""
    rest = {"rest": whole[epoch][num_taken:], "next": whole[epoch + 1], "same": whole[epoch]}
    return rest[face.after_break]


def peek(face: Face, wrapped: Any, whole: Epochs) -> Use:
    """Someone looks at one batch before the epochs."""
    first = face.keys(next(iter(wrapped)))
    after = began(face, whole, 0, 1)
    number = whole.index(after) if after in whole else 0
    return Use([first, *face.read(wrapped, 2)], [whole[0][0], after, whole[face.following(number)]])


def check_sanity(face: Face, wrapped: Any, whole: Epochs) -> Use:
    """A trainer looks at two batches, and puts the state from before back."""
    state = face.stateful(wrapped).state_dict()
    for _ in itertools.islice(wrapped, 2):
        pass
    face.stateful(wrapped).load_state_dict(state)
    return Use(face.read(wrapped), whole[:1])


def break_off(face: Face, wrapped: Any, whole: Epochs) -> Use:
    """A loop ends by an exception; its iterator is kept, and another one begins."""
    seen, iterator = [], iter(wrapped)
    with contextlib.suppress(KeyError):
        for batch in iterator:
            seen.append(face.keys(batch))
            if len(seen) == 2:
                raise KeyError
    return Use([seen, *face.read(wrapped)], [whole[0][:2], began(face, whole, 0, 2)])


def limit(face: Face, wrapped: Any, whole: Epochs) -> Use:
    """Three of five batches an epoch, four times."""
    read = [[face.keys(batch) for batch in itertools.islice(wrapped, 3)] for _ in range(4)]
    lines = {
        "next": [epoch[:3] for epoch in whole[:4]],
        "rest": [whole[0][:3], whole[0][3:], whole[1][:3], whole[1][3:]],
        "same": [whole[0][:3]] * 4,
    }
    return Use(read, lines[face.after_break])


def pass_twice_at_once(face: Face, wrapped: Any, whole: Epochs) -> Use:
    """Two iterators take turns: a refused one loses nothing, and where both are the loader they go on."""
    older = iter(wrapped)
    read = [face.keys(next(older))]
    newer = iter(wrapped)
    read.append(face.keys(next(newer)))
    if older is newer:
        read.append(face.keys(next(older)))
        return Use(read, whole[0][:3])
    with pytest.raises(RuntimeError, match=r"this iterator|iterated elsewhere"):
        next(older)
    read += [face.keys(batch) for batch in newer]
    return Use(read, [whole[0][0], *began(face, whole, 0, 1)])


USES = [peek, check_sanity, break_off, limit, pass_twice_at_once]


@pytest.mark.parametrize("use", USES)
def test_uses(small_shards: Path, whole: Epochs, face: Face, use: Callable[[Face, Any, Epochs], Use]) -> None:
    with open_loader(small_shards, **face.options) as loader:
        read, expected = use(face, face.wrap(loader), whole)
        assert read == expected


def test_state_at_every_step(small_shards: Path, whole: Epochs, face: Face) -> None:
    """A resumed job has the rest of the epoch, and after that the next one, whatever the face's rule."""
    with open_loader(small_shards, **face.options) as loader, open_loader(small_shards, **face.options) as other:
        wrapped, resumed = face.wrap(loader), face.wrap(other)
        iterator = iter(wrapped)
        for taken in range(BATCHES):
            state = face.stateful(wrapped).state_dict()
            face.stateful(resumed).load_state_dict(state)
            assert face.read(resumed, 2) == [whole[0][taken:], whole[face.following(0)]], taken
            next(iterator)


@pytest.mark.parametrize("policy", ["PARTIAL", "FILL", "DROP"])
def test_ranks_share_an_epoch(small_shards: Path, whole: Epochs, face: Face, policy: Any) -> None:
    """Two ranks have as many batches each; all samples come once, but those that the policy repeats or leaves out."""
    read = []
    for rank in range(2):
        options = face.options if face.options else {"rank": rank, "world_size": 2}
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("RANK", str(rank))
            patched.setenv("WORLD_SIZE", "2")
            with open_loader(small_shards, last_batch_policy=policy, **options) as loader:
                wrapped = face.wrap(loader)
                read.append(face.read(wrapped, 2))
                assert [len(epoch) for epoch in read[-1]] == [len(wrapped)] * 2
    for number in range(2):
        found = [key for rank in read for batch in rank[number] for key in batch]
        samples = [key for batch in whole[number if face.following(0) else 0] for key in batch]
        if policy == "PARTIAL":
            assert sorted(found) == sorted(samples)
        else:
            assert sorted(found) == sorted(samples[:20] if policy == "DROP" else samples + samples[:7])


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
