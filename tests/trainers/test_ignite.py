"""Ignite's engine: it iterates on across epochs, and its checkpoints keep the loader beside model and engine."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.packages import need
from tests.trainers.ranks import launch_from_page, run_ranks
from tests.trainers.tiny import ALL_KEYS, NUM_SAMPLES, Step, Training, assert_whole_epochs, open_loader

need("ignite")

NUM_EPOCHS = 3


def train(
    shards: Path,
    folder: Path,
    *,
    resume: int | None = None,
    max_epochs: int = NUM_EPOCHS,
    epoch_length: int | None = None,
) -> tuple[list[Step], list[list[str]]]:
    """Train and validate each epoch, with a checkpoint after each step; return the steps, and the validated keys.

    ``resume``: the step after which the job was broken off; ``epoch_length``: steps that the engine calls an epoch.
    """
    import ignite.distributed as idist
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    job, validated = Training(), []
    rank = {"rank": idist.get_rank(), "world_size": idist.get_world_size()}
    with open_loader(shards, **rank) as loader, open_loader(shards, train=False, shuffle=False, **rank) as held_out:
        data, val = loader.as_dataloader(), held_out.as_dataloader(each_iter="same")
        trainer = Engine(lambda _, batch: job.step(batch))
        evaluator = Engine(lambda _, batch: batch["key"])
        kept: dict[str, Any] = {"job": job, "trainer": trainer, "data": data}
        saver = Checkpoint(kept, DiskSaver(folder, create_dir=True, require_empty=False), n_saved=None)

        @trainer.on(Events.EPOCH_COMPLETED)
        def validate() -> None:
            validated.append([])
            evaluator.run(val)

        @evaluator.on(Events.ITERATION_COMPLETED)
        def note(engine: Engine) -> None:
            validated[-1] += engine.state.output

        trainer.add_event_handler(Events.ITERATION_COMPLETED, saver)
        if resume is not None:
            Checkpoint.load_objects(kept, folder / f"checkpoint_{resume}.pt")
        trainer.run(data, max_epochs=max_epochs, epoch_length=epoch_length)
    return job.steps, validated


def runs(shards: Path, folder: Path, stops: tuple[int, ...], options: dict[str, Any]) -> dict[int, Any]:
    """The unbroken run under 0, and what followed each stop."""
    if "RANK" in os.environ:
        import ignite.distributed as idist

        idist.initialize("gloo")
    found = {0: train(shards, folder, **options)}
    for stop in stops:
        found[stop] = train(shards, folder, resume=stop, **options)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_resumed_engine_has_the_unbroken_losses(shards: Path, tmp_path: Path, world_size: int) -> None:
    """Each sample once an epoch, also of validation; broken off in mid-epoch, and after an epoch's last batch."""
    length = -(-NUM_SAMPLES // (4 * world_size))
    stops = (2, length, length + 1, 2 * length)
    ranks = run_ranks(world_size, runs, shards, tmp_path, stops, {})
    assert_whole_epochs([run[0][0] for run in ranks], num_epochs=NUM_EPOCHS, world_size=world_size)
    validated = zip(*(run[0][1] for run in ranks), strict=True)
    assert [sorted(key for keys in epoch for key in keys) for epoch in validated] == [ALL_KEYS] * NUM_EPOCHS
    for run in ranks:
        for stop in stops:
            assert run[stop][0] == run[0][0][stop:], f"after step {stop}"


def test_engine_may_count_other_epochs(shards: Path, tmp_path: Path) -> None:
    """With an epoch length of its own the engine reads one loader's epoch after the other, also after a resume."""
    (run,) = run_ranks(1, runs, shards, tmp_path, (3, 5, 8, 9), {"epoch_length": 5, "max_epochs": 4})
    steps = run[0][0]
    assert sorted(key for step in steps[:8] for key in step.keys) == ALL_KEYS
    assert all(run[stop][0] == steps[stop:] for stop in (3, 5, 8, 9))


def test_auto_dataloader_is_refused(shards: Path) -> None:
    """It would deal the batches of one rank to all."""
    import ignite.distributed as idist

    with open_loader(shards) as loader, pytest.raises(TypeError, match="as_dataloader"):
        list(idist.auto_dataloader(loader.as_dataloader(), batch_size=4))


def test_program_of_the_page_goes_on(shards: Path, tmp_path: Path) -> None:
    """The last loss is the unbroken run's."""
    whole = launch_from_page("train_ignite.py", shards, tmp_path)
    assert whole.startswith("24 ")
    assert launch_from_page("train_ignite.py", shards, tmp_path, "checkpoints/checkpoint_10.pt") == whole
