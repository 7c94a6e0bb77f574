"""A plain loop over a face, over torchdata's loaders, and with torch's distributed checkpoint."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import distributed
from torch.distributed import checkpoint

from tests.trainers.packages import need
from tests.trainers.ranks import run_ranks
from tests.trainers.tiny import Step, Training, assert_whole_epochs, open_loader

need("torchdata")

NUM_EPOCHS = 3
STOPS = (1, 4, 5, 8)
"""Steps after which a job is broken off: in mid-epoch, and after the last batch of an epoch of 1 or 2 ranks."""


def face(loader: Any) -> Any:
    return loader.as_dataloader()


def stateful(loader: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(loader.as_dataset(), batch_size=None, num_workers=0)


def nodes(loader: Any) -> Any:
    from torchdata import nodes

    return nodes.Loader(nodes.IterableWrapper(loader.as_dataloader()))


def keep_in_memory(saved: dict[str, Any], folder: Path) -> Callable[[dict[str, Any]], None]:
    states = {name: each.state_dict() for name, each in saved.items()}

    def load(into: dict[str, Any]) -> None:
        for name, each in into.items():
            each.load_state_dict(states[name])

    return load


def keep_distributed(saved: dict[str, Any], folder: Path) -> Callable[[dict[str, Any]], None]:
    checkpoint.save(dict(saved), checkpoint_id=folder)
    return lambda into: checkpoint.load(dict(into), checkpoint_id=folder)


def broken_and_resumed(shards: Path, folder: Path, wrap: Any, keep: Any) -> dict[int, list[Step]]:
    """The steps of this rank in an unbroken job, under 0, and in jobs that were broken off and resumed."""
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")

    def train(*, steps: list[Step], load: Any = None, stop: int = 0) -> Any:
        job = Training()
        with open_loader(shards) as loader:
            batches = wrap(loader)
            if load is not None:
                load({"job": job, "batches": batches})
            job.steps = steps
            while len(steps) < NUM_EPOCHS * len(loader):
                for batch in batches:
                    job.step(batch)
                    if len(steps) == stop:
                        return keep({"job": job, "batches": batches}, folder / str(stop))
        return None

    jobs: dict[int, list[Step]] = {stop: [] for stop in (0, *STOPS)}
    for stop, steps in jobs.items():
        load = train(steps=steps, stop=stop)
        if stop:
            train(steps=steps, load=load)
    return jobs


@pytest.mark.parametrize(
    ("wrap", "keep", "world_size"),
    [(face, keep_in_memory, 2), (stateful, keep_in_memory, 1), (nodes, keep_in_memory, 2), (face, keep_distributed, 2)],
)
def test_job_that_is_resumed_has_the_losses_of_an_unbroken_one(
    shards: Path, tmp_path: Path, wrap: Any, keep: Any, world_size: int
) -> None:
    """Each sample once an epoch; broken off anywhere, the losses of the unbroken job."""
    ranks = run_ranks(world_size, broken_and_resumed, shards, tmp_path, wrap, keep)
    assert_whole_epochs([jobs[0] for jobs in ranks], num_epochs=NUM_EPOCHS, world_size=world_size)
    for jobs in ranks:
        assert jobs == dict.fromkeys(jobs, jobs[0])
