"""`Loader.as_dataloader` beyond the contract of `test_faces`: which epoch comes, what trainers ask, what is refused."""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dali_pipes.integrations.test_faces import BATCHES, NUM_SAMPLES, Epochs, open_loader, torchs_loader, whole

__all__ = ["whole"]  # a fixture


def keys(face: Any) -> list[list[str]]:
    """The keys of one iteration of a face with ``outputs=("key",)``."""
    return [key for (key,) in face]


def bring(loader: Any, face: Any, state: str) -> None:
    """Bring a loader into a line of the table in `dali_pipes.integrations.data_loader`; it is then in epoch 1."""
    face.set_epoch(1)
    if state == "new":
        loader.set_epoch(1)
        return
    taken = {"loaded": 2, "loaded end": BATCHES, "mid": 2, "last": BATCHES, "end": BATCHES + 1}[state]
    for _ in itertools.islice(face, taken):
        pass
    if state.startswith("loaded"):
        face.load_state_dict(face.state_dict())


def test_state_counts_the_samples_that_a_trainer_has_used(small_shards: Path) -> None:
    """A trainer that takes a batch ahead says how many; a number below zero is refused."""
    with open_loader(small_shards) as loader:
        face = loader.as_dataloader()
        for _ in itertools.islice(face, 2):
            pass
        assert face.state_dict(5, True)["delivered"] == face.dataset.state_dict(5, True)["delivered"] == 5
        assert face.state_dict(0)["delivered"] == 0
        with pytest.raises(ValueError, match="num_samples must not be negative, got -5"):
            face.state_dict(-5)
        face.load_state_dict(face.state_dict())
        next(iter(face))
        assert face.state_dict(5, False)["delivered"] == 15


@pytest.mark.parametrize("num_taken", [0, 1])
def test_rest_that_is_given_up_is_said(small_shards: Path, caplog: pytest.LogCaptureFixture, num_taken: int) -> None:
    """A trainer names another epoch than the state's, or ends that one early, because it counts larger batches."""
    with open_loader(small_shards) as loader:
        face = loader.as_dataloader(("key",))
        bring(loader, face, "loaded")
        for _ in itertools.islice(face, num_taken):
            pass
        left = loader.num_batches_left
        face.set_epoch(2)
        with caplog.at_level(logging.WARNING, logger="dali_pipes"):
            next(iter(face))
    expected = f"begins before its end: the rest of epoch 1, {left} batches, is given up"
    assert f"epoch 1 was resumed in the middle, and epoch 2 {expected}" in caplog.text


def test_iterator_that_is_not_the_newest_is_refused(small_shards: Path, whole: Epochs) -> None:
    """Of one face, of two faces of a loader, and beside the loader's own loop: never other batches."""
    with open_loader(small_shards) as loader:
        face, other = loader.as_dataloader(("key",)), loader.as_dataloader(("key",), each_iter="rest")
        old, new = iter(face), iter(face)
        with pytest.raises(RuntimeError, match="this iterator ended when another one was made"):
            next(old)
        assert next(new) == (whole[0][0],)
        rest = iter(other)
        assert next(rest) == (whole[0][1],)
        with pytest.raises(RuntimeError, match="the loader was iterated elsewhere"):
            next(new)
        assert next(loader)[0]["key"] == whole[0][2]
        with pytest.raises(RuntimeError, match="the loader was iterated elsewhere"):
            next(rest)
        assert next(iter(other)) == (whole[0][3],)
        with pytest.raises(RuntimeError, match="the loader was iterated elsewhere"):
            next(loader)
        assert [batch["key"] for (batch,) in loader] == whole[0][4:]
        ended = iter(face)
        loader.set_epoch(0)
        assert next(ended) == (whole[0][0],)  # it has not begun before
        loader.set_epoch(0)
        with pytest.raises(RuntimeError, match="or put to another position"):
            next(ended)


def test_rest_of_an_epoch_is_said_once(small_shards: Path, whole: Epochs, caplog: pytest.LogCaptureFixture) -> None:
    """The loader's own loop goes on after `break`, as DALI's iterators do; other faces begin the next epoch."""
    with open_loader(small_shards) as loader, caplog.at_level(logging.WARNING, logger="dali_pipes"):
        next(iter(loader.as_dicts()))
        assert not caplog.records
        assert [batch["key"] for (batch,) in loader] == whole[0][1:]
        next(iter(loader.as_dali()))
        assert [batch["key"] for (batch,) in loader] == whole[1][1:]
    (record,) = caplog.records
    assert "the rest of epoch 0, after 1 of its 5 batches, as with DALI's iterators" in record.getMessage()


def test_reset_in_mid_epoch_says_once_what_it_gives_up(small_shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    """DALI's iterators ignore it, and go on with the epoch."""
    with open_loader(small_shards) as loader:
        for _ in range(2):
            loader.reset()  # before the first batch it does nothing
            next(loader)
            loader.reset()
        assert len(list(loader)) == BATCHES
        loader.reset()
        next(loader)
        state = loader.state_dict()
    (record,) = (record for record in caplog.records if "reset()" in record.getMessage())
    with open_loader(small_shards, state=state) as loader:
        loader.reset()
    assert f"gives up the rest of epoch {state['epoch']}, {BATCHES - 1} batches" in caplog.records[-1].getMessage()
    assert f"gives up the rest of epoch 0, {BATCHES - 1} batches, where DALI's" in record.getMessage()


def test_what_takes_a_loader_for_a_data_loader_names_the_face(small_shards: Path) -> None:
    from torch.utils.data import DataLoader

    with open_loader(small_shards) as loader:
        with pytest.raises(AttributeError, match=r"has no attribute 'dataset': a loader gives .* loader.as_dataloader"):
            _ = loader.dataset
        with pytest.raises(TypeError, match=r"no sample \d+; .* DataLoader\(loader.as_dataset\(\), batch_size=None"):
            next(iter(DataLoader(loader)))
        with pytest.raises(TypeError, match=r"batch\[0\]\['image'\]; loader.as_dicts\(\) gives the dicts"):
            next(loader)["image"]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"outputs": ("image", "mask")}, ValueError, r"gives \(image, label, key\), got 'mask'"),
        ({"outputs": {"x": "mask", "y": "cls"}}, ValueError, "got 'mask', 'cls'"),
        ({"outputs": "image"}, TypeError, r"a tuple of names, \('image', 'label'\), or a dict of new names, got 'im"),
        ({"each_iter": "again"}, ValueError, "each_iter must be one of next, rest, same, got 'again'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(small_shards: Path, options: Any, error: Any, text: str) -> None:
    with open_loader(small_shards) as loader, pytest.raises(error, match=text):
        loader.as_dataloader(**options)


def test_each_object_of_the_face_takes_the_epoch(small_shards: Path, whole: Epochs) -> None:
    """Neither `set_epoch` nor `iter` opens a late loader; the first batch opens it."""
    with open_loader(small_shards, rank="late") as loader:
        face = loader.as_dataloader(("key",))
        for epoch, part in enumerate([face.sampler, face, face.batch_sampler, face.dataset], 1):
            part.set_epoch(epoch)
            iterator = iter(face)
            assert loader.is_open == (epoch > 1)
            assert next(iterator) == (whole[epoch][0],)
        with pytest.raises(ValueError, match="epoch must"):
            face.sampler.set_epoch(-1)


class Skipping:
    """Leaves out the first batches of a batch sampler, as Accelerate's ``skip_first_batches`` does."""

    def __init__(self, batch_sampler: Any, num_skipped: int) -> None:
        self.batch_sampler, self.num_skipped = batch_sampler, num_skipped

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.batch_sampler, self.num_skipped, None)


def torchs(dataset: Any, **options: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, **options)


def skip(face: Any, num_skipped: int) -> Any:
    batches = Skipping(face.batch_sampler, num_skipped)
    return torchs(face.dataset, batch_sampler=batches, collate_fn=face.collate_fn)


@pytest.mark.parametrize("num_skipped", [0, 2, 5])
def test_skipped_batches_are_not_read(
    small_shards: Path, whole: Epochs, num_skipped: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of the epoch comes, and the next iteration is the next epoch."""
    with open_loader(small_shards) as loader:
        face = loader.as_dataloader(("key",))
        face.set_epoch(1)
        assert keys(skip(face, num_skipped)) == whole[1][num_skipped:]
        assert loader.delivery.current.start == min(5 * num_skipped, NUM_SAMPLES)
        assert keys(face) == whole[2]
    assert ("all 5 batches of an epoch were skipped" in caplog.text) == (num_skipped == 5)


@pytest.mark.parametrize("num_samples", [1, 10])
def test_skipping_twice_is_refused(small_shards: Path, whole: Epochs, num_samples: int) -> None:
    """A loaded state stands in mid-epoch already, also if as many batches are left as a whole epoch has."""
    with open_loader(small_shards) as loader:
        face = loader.as_dataloader(("key",))
        face.load_state_dict(face.state_dict() | {"delivered": num_samples})
        assert len(face) == BATCHES
        with pytest.raises(ValueError, match="load the state or skip the batches, not both"):
            keys(skip(face, 2))
        assert list(itertools.chain(*keys(face))) == list(itertools.chain(*whole[0]))[num_samples:]


@pytest.mark.parametrize(
    "misuse",
    [
        lambda face: face.dataset[3],
        lambda face: face.dataset.__getitems__([3]),
        lambda face: list(face.dataset),
        lambda face: list(face.sampler),
        # A DataLoader sends pickled indices to its worker processes.
        lambda face: face.dataset[pickle.loads(pickle.dumps(next(iter(face.batch_sampler))))],
        lambda face: list(torchs(face.dataset, sampler=face.sampler)),
        lambda face: [index for batch in face.batch_sampler for index in batch],  # as Accelerate splits batches
        lambda face: list(torchs(face.dataset, batch_sampler=list(face.batch_sampler)[::-1])),
    ],
)
def test_samples_cannot_be_had_by_number(small_shards: Path, misuse: Any) -> None:
    """Nor can batches be dealt out or shuffled; the error says what to iterate."""
    with open_loader(small_shards) as loader:
        with pytest.raises((TypeError, RuntimeError), match="iterate what as_dataloader\\(\\) gave, and do not let"):
            misuse(loader.as_dataloader())
        assert len(list(loader.as_dataloader(each_iter="same"))) == BATCHES


def test_dataset_in_a_loader_that_stacks_batches_is_refused(small_shards: Path) -> None:
    """``DataLoader(dataset, batch_size=4)`` would make batches of four batches."""
    with open_loader(small_shards) as loader:
        with pytest.raises(TypeError, match=r"would stack whole batches; pass DataLoader\(loader.as_dataset\(\), b"):
            list(torchs(loader.as_dataset(), batch_size=4))
        assert len(list(torchs_loader(loader))) == BATCHES


def test_dataset_in_a_loader_of_ray_train_is_refused(small_shards: Path) -> None:
    """It takes a batch ahead: a state in mid-epoch would be one batch too far."""

    class _WrappedDataLoader:  # Ray's own needs the packages of ray[train]
        def __init__(self, data_loader: Any) -> None:
            self.data_loader = data_loader

        def __iter__(self) -> Iterator[Any]:
            yield from self.data_loader

    with open_loader(small_shards) as loader:
        with pytest.raises(RuntimeError, match="takes one batch ahead, and the loader's state counts that batch as us"):
            list(_WrappedDataLoader(torchs_loader(loader)))
        with pytest.raises(
            AttributeError, match="no attribute 'bs': it is no torch DataLoader, and what is the loader's"
        ):
            _ = loader.as_dataloader().bs


def test_policy_that_leaves_no_batch_is_refused(small_shards: Path) -> None:
    """A loader resumed at an epoch's end has no batches left and is not refused."""
    options = {"batch_size": 8, "world_size": 3, "rank": 0}
    text = "leaves an epoch of 23 samples without a batch: one of batch_size=8 on 3 r"
    with pytest.raises(ValueError, match=text):
        open_loader(small_shards, last_batch_policy="DROP", **options)
    with open_loader(small_shards, **options) as loader:
        assert len(loader) == 1
