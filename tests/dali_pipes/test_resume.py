"""Going on where a state was taken: the exact next sample, whatever the batch size, world size or cache are then."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dali_pipes as dp
from dali_pipes.store.local import LocalFetcher
from tests.dali_pipes.raw import check_rows, raw
from tests.shards import Sample, samples_and_shards

if TYPE_CHECKING:
    from dali_pipes.fetch.fetcher import Wanted

NUM_SAMPLES = 41
HALVES = {"even": "[02468]", "odd": "[13579]"}  # of the shards, by their last digit


samples, shards = samples_and_shards([(30 + 3 * (i % 5), 25 + 5 * (i % 3)) for i in range(NUM_SAMPLES)], per_shard=4)


def open_ranks(shards: Path, world_size: int, batch_size: int, **options: Any) -> list[Any]:
    settings = {
        "seed": 5,
        "device": "cpu",
        "decode": dp.Decode(threads=1),
        "shuffle": dp.Shuffle(window_bytes=50_000),
    } | options
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


def test_state_of_another_order_is_refused_and_nothing_is_lost(
    shards: Path, samples: list[Sample], tmp_path: Path
) -> None:
    """What differs is named; the loader goes on as it was."""
    import torch

    (loader,) = open_ranks(shards, 1, 6)
    read_steps([loader], samples, 1)
    state = loader.state_dict()
    # tests/dali_pipes/order/test_state.py tests every difference.
    with pytest.raises(dp.StateError, match="the state has 100 samples delivered, an epoch has 41"):
        loader.load_state_dict(state | {"delivered": 100})
    rest = read_steps([loader], samples)
    # The state has plain values only, so that `weights_only=True` can load it.
    torch.save(state, tmp_path / "state.pt")
    loader.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert read_steps([loader], samples) == rest
    close([loader])


@pytest.mark.parametrize(
    ("before", "after", "options", "is_mixture"),
    [
        ((1, 6), (1, 6), {"shuffle": dp.Shuffle(window_bytes=50_000)}, True),
        # Ranks and batch size change, the global batch does not.
        ((3, 2), (2, 3), {"shuffle": dp.Shuffle(window_bytes="all")}, False),
        ((3, 2), (2, 4), {"shuffle": dp.Shuffle(window_bytes=50_000, slices=2)}, True),
    ],
)
def test_loader_opened_with_a_state_gives_what_load_state_dict_does(
    shards: Path, before: tuple[int, int], after: tuple[int, int], options: dict[str, Any], is_mixture: bool
) -> None:
    """In mid-epoch and at an epoch's end, on every rank: the rest of the epoch and the next, bit for bit."""
    import torch

    source: Any = str(shards)
    if is_mixture:
        halves = {half: sorted(map(str, shards.glob(f"s-*{digits}.tar"))) for half, digits in HALVES.items()}
        source = dp.Mixture(halves, weights={"even": 0.7, "odd": 0.3})
    graph = dp.classification_train(crop=16, photo="image.jpg")
    (world_size, batch_size), (new_world_size, new_batch_size) = before, after
    settings = {"seed": 5, "device": "cpu", "decode": dp.Decode(threads=1), "outputs": dp.Outputs(keys=True)} | options

    def open_rank(rank: int, world_size: int, batch_size: int, state: Any = None) -> Any:
        return dp.loader(
            source, graph, batch_size=batch_size, rank=rank, world_size=world_size, state=state, **settings
        )

    with open_rank(0, world_size, batch_size) as loader:
        states = [loader.state_dict() for _ in loader]
    for state in (states[2], states[-1]):
        for rank in range(new_world_size):
            with (
                open_rank(rank, new_world_size, new_batch_size, state) as opened,
                open_rank(rank, new_world_size, new_batch_size) as loaded,
            ):
                loaded.load_state_dict(state)
                assert opened.state_dict() == loaded.state_dict() == state
                assert (opened.epoch, opened.num_batches_left) == (loaded.epoch, loaded.num_batches_left)
                for _ in range(2):
                    for (found,), (expected,) in zip(opened, loaded, strict=True):
                        assert found["key"] == expected["key"]
                        assert all(torch.equal(found[name], expected[name]) for name in ("image", "label"))


def test_ranks_go_on_with_a_filter_factors_and_a_fixed_length(shards: Path, samples: list[Sample]) -> None:
    """Two ranks, and a job resumed from JSON, read the same as one rank; a state of another selection is refused."""

    def selecting(factor: float) -> dict[str, Any]:
        where = {"where": lambda columns: columns.labels != 5}
        return {"select": dp.Select(**where, oversample={1: factor}, epoch_samples=24)}

    (whole,) = open_ranks(shards, 1, 4, **selecting(2))
    steps = read_steps([whole], samples) + read_steps([whole], samples)
    assert [len(step) for step in steps] == [4] * 12
    assert not [ordinal for step in steps for ordinal in step if ordinal % 5 == 4]
    ranks = open_ranks(shards, 2, 2, **selecting(2))
    assert read_steps(ranks, samples, 4) == steps[:4]
    state = json.loads(json.dumps(ranks[0].state_dict()))
    again = open_ranks(shards, 2, 2, state=state, **selecting(2))
    assert read_steps(again, samples) + read_steps(again, samples) == steps[4:]
    with pytest.raises(dp.StateError, match=r"another selection of samples.*pass the same select="):
        open_ranks(shards, 1, 4, state=state, **selecting(3))
    close([whole, *ranks, *again])


def test_job_with_slices_goes_on_with_any_number_of_nodes(shards: Path, samples: list[Sample]) -> None:
    """The rest of the epoch and the next one are those that the two nodes of the beginning read."""
    shuffle = dp.Shuffle(window_bytes=50_000, slices=2)
    jobs = open_ranks(shards, 2, 4, shuffle=shuffle)
    read_steps(jobs, samples, 2)
    state = jobs[0].state_dict()
    rest = read_steps(jobs, samples) + read_steps(jobs, samples)
    for num_nodes in (1, 4):
        again = open_ranks(shards, num_nodes, 8 // num_nodes, state=state, shuffle=shuffle)
        assert read_steps(again, samples) + read_steps(again, samples) == rest
        close(again)
    close(jobs)


@pytest.mark.parametrize("taken", [4, 7])
def test_loader_opened_with_a_state_fetches_first_what_its_first_batch_names(
    shards: Path, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """One shard at a time, in mid-epoch and where the epoch is over: none that only the epoch's start would name."""
    fetched: list[str] = []
    fetch = LocalFetcher.fetch

    def recorded(self: LocalFetcher, wanted: Sequence[Wanted], **options: Any) -> bool:
        fetched.extend(one.name for one in wanted if one.name.endswith(".tar"))
        return fetch(self, wanted, **options)

    (whole,) = open_ranks(shards, 1, 6)
    assert len(read_steps([whole], samples, taken)) == taken
    state = whole.state_dict()
    assert whole.num_batches_left == 7 - taken
    (expected,) = read_steps([whole], samples, 1)
    close([whole])
    monkeypatch.setattr(LocalFetcher, "fetch", recorded)
    (loader,) = open_ranks(shards, 1, 6, state=state, cache=dp.Cache(directory=tmp_path, fetchers=1))
    named = {f"s-{ordinal // 4:06d}.tar" for ordinal in expected}
    if taken == 7:
        assert read_steps([loader], samples) == []
    assert read_steps([loader], samples, 1) == [expected]
    assert set(fetched[: len(named)]) == named
    assert len(named) < 11
    close([loader])


def test_state_of_another_order_or_of_other_shards_is_refused_before_anything_is_staged(
    shards: Path, tmp_path: Path
) -> None:
    """The loader compares the order before it looks for shards. It makes no cache file."""
    (loader,) = open_ranks(shards, 1, 6)
    state = loader.state_dict()
    close([loader])
    for place, wrong, text in (
        (tmp_path / "nowhere", state | {"seed": 6}, "the state has seed=6, this loader seed=5; pass the state's"),
        (shards, state | {"manifest": "0" * 64}, "the state is of other shards: its manifest is 000000000000"),
    ):
        with pytest.raises(dp.StateError, match=text):
            open_ranks(place, 1, 6, state=wrong, cache=dp.Cache(directory=tmp_path))
    assert list(tmp_path.iterdir()) == []
    (loader,) = open_ranks(shards, 1, 6, state=None)  # as a job's first start says it
    assert loader.state_dict() == state
    close([loader])
