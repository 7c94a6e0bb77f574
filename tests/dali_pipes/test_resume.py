"""Going on where a state was taken: the exact next sample, whatever the batch size, world size or cache are then."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dali_pipes as dp
from tests.conftest import Sample, make_samples, write_shards
from tests.dali_pipes.raw import check_rows, raw

NUM_SAMPLES = 41


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return make_samples([(30 + 3 * (i % 5), 25 + 5 * (i % 3)) for i in range(NUM_SAMPLES)])


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, samples: list[Sample]) -> Path:
    return write_shards(tmp_path_factory.mktemp("resumed"), samples, per_shard=4)


def open_ranks(shards: Path, world_size: int, batch_size: int, **options: Any) -> list[Any]:
    settings = {"seed": 5, "device": "cpu", "num_threads": 1, "shuffle_window": 50_000} | options
    return [
        dp.loader(str(shards), raw, batch_size=batch_size, rank=rank, world_size=world_size, **settings)
        for rank in range(world_size)
    ]


def read_steps(loaders: list[Any], samples: list[Sample], num: int | None = None) -> list[list[int]]:
    """For each step the ordinals of all ranks, those that count, up to the epoch's end or ``num`` steps."""
    steps: list[list[int]] = []
    iterators = [iter(loader) for loader in loaders]
    while num is None or len(steps) < num:
        found = [next(iterator, None) for iterator in iterators]
        if found[0] is None:
            assert found == [None] * len(found)
            break
        ordinals: list[int] = []
        for loader, batches in zip(loaders, found, strict=True):
            assert batches is not None
            ordinals += check_rows(batches[0], samples)[: loader.num_valid]
        steps.append(ordinals)
    return steps


def close(loaders: list[Any]) -> None:
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("policy", ["PARTIAL", "FILL", "DROP"])
@pytest.mark.parametrize("window", [50_000, "all"])
def test_resume_at_every_batch_gives_the_rest(
    shards: Path, samples: list[Sample], policy: str, window: int | str
) -> None:
    """State after batch i, as JSON, into a new loader: batches i, i + 1, ... of this epoch and those of the next."""
    options = {"last_batch_policy": policy, "shuffle_window": window}
    (whole,) = open_ranks(shards, 1, 6, **options)
    (other,) = open_ranks(shards, 1, 6, **options)
    epochs = [read_steps([whole], samples) for _ in range(2)]
    whole.set_epoch(0)
    for taken in range(len(epochs[0]) + 1):
        if taken:
            read_steps([whole], samples, 1)
        state = json.loads(json.dumps(whole.state_dict()))
        assert state["delivered"] == min(6 * taken, NUM_SAMPLES)
        other.load_state_dict(state)
        assert (other.epoch, len(other)) == (0, len(epochs[0]))
        if taken < len(epochs[0]):
            assert read_steps([other], samples) == epochs[0][taken:]
        assert read_steps([other], samples) == epochs[1]
    close([whole, other])


@pytest.mark.parametrize(("before", "after"), [((3, 2), (6, 1)), ((6, 1), (2, 4)), ((1, 8), (4, 2)), ((2, 3), (3, 4))])
def test_resume_with_another_world_and_batch_size_goes_on_with_the_same_order(
    shards: Path, samples: list[Sample], before: tuple[int, int], after: tuple[int, int]
) -> None:
    """World sizes 1 to 6, batch sizes 1 to 8: the order's samples, one after the other, each once."""
    (alone,) = open_ranks(shards, 1, 1)
    order = [ordinal for step in read_steps([alone], samples) for ordinal in step]
    first = open_ranks(shards, *before)
    seen = [ordinal for step in read_steps(first, samples, 3) for ordinal in step]
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states)
    second = open_ranks(shards, *after)
    for loader in second:
        loader.load_state_dict(states[0])
    seen += [ordinal for step in read_steps(second, samples) for ordinal in step]
    assert seen == order
    close([alone, *first, *second])


def test_resume_sees_the_same_random_numbers(shards: Path) -> None:
    """Augmentation belongs to the sample: pixels after a resume are those of the unbroken run, bit for bit."""
    graph = dp.classification_train(crop=16, photo="image.jpg")
    options = {"batch_size": 4, "seed": 2, "device": "cpu", "shuffle_window": 50_000}
    with dp.loader(str(shards), graph, **options) as whole, dp.loader(str(shards), graph, **options) as resumed:
        batches = [batch for (batch,) in whole]
        whole.set_epoch(0)
        for _ in range(5):
            next(whole)
        resumed.load_state_dict(whole.state_dict())
        for expected, (found,) in zip(batches[5:], resumed, strict=True):
            for name in expected:
                assert torch.equal(expected[name], found[name])


def test_state_goes_through_torch_save(shards: Path, tmp_path: Path, samples: list[Sample]) -> None:
    """Plain values: also where only weights may be loaded."""
    (loader,) = open_ranks(shards, 1, 6)
    read_steps([loader], samples, 2)
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    rest = read_steps([loader], samples)
    loader.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert read_steps([loader], samples) == rest
    close([loader])


def test_state_of_another_order_is_refused_and_nothing_is_lost(
    shards: Path, samples: list[Sample], tmp_path: Path
) -> None:
    """What differs is named; the loader goes on as it was."""
    (loader,) = open_ranks(shards, 1, 6)
    read_steps([loader], samples, 1)
    state = loader.state_dict()
    for changed, text in [
        ({"seed": 6}, "the state has seed=6, this loader seed=5; pass the state's"),
        ({"shuffle_window": "all"}, "the state has shuffle_window='all', this loader shuffle_window=50000"),
        ({"manifest": "0" * 64}, "the state is of other shards: its manifest is 000000000000..."),
        ({"selection": "0" * 64}, "another selection of samples"),
        ({"version": 1}, "the state is of version 1, this dali-pipes reads version 2"),
        ({"epoch_samples": 6}, "the state has epoch_samples=6, this loader epoch_samples=None"),
        ({"weights": [1, 2.5]}, r"the state has weights=\(1.0, 2.5\), this loader weights=None"),
        ({"weights": ["a"]}, "the state cannot be: could not convert string to float: 'a'"),
        ({"kind": "?"}, "expected what state_dict\\(\\) gave, got a dict of kind, version"),
        ({"delivered": -1}, "'delivered' must not be negative, got -1"),
        ({"delivered": 6.0}, "'delivered' must be int, got 6.0"),
        ({"delivered": 100}, "the state has 100 samples delivered, an epoch has 41"),
        ({"epoch": -1}, "the state cannot be: epoch must not be negative, got -1"),
    ]:
        with pytest.raises(dp.StateError, match=text):
            loader.load_state_dict(state | changed)
    with pytest.raises(dp.StateError, match="expected what state_dict"):
        loader.load_state_dict([])  # type: ignore[arg-type]
    rest = read_steps([loader], samples)
    loader.load_state_dict(state)
    assert read_steps([loader], samples) == rest
    close([loader])
