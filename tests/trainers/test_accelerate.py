"""Accelerate: ``prepare`` leaves a face alone, a checkpoint has its state, and it says when an epoch ends."""

import re
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from tests.trainers.packages import need
from tests.trainers.ranks import launch, run_ranks, write_program
from tests.trainers.tiny import (
    ALL_KEYS,
    BATCH_SIZE,
    NUM_SAMPLES,
    Step,
    TinyModel,
    assert_whole_epochs,
    open_loader,
    step_of,
    tiny_optimizer,
)

need("accelerate")

NUM_EPOCHS = 3
ACCUMULATED = 3
"""Batches for each step of the optimizer; divides neither 8 batches, of 1 rank, nor 4, of 2."""


def num_steps(world_size: int) -> int:
    """Of an epoch."""
    return -(-NUM_SAMPLES // (BATCH_SIZE * world_size))


def train(shards: Path, folder: Path, steps: list[Step], *, stop: int = 0, between: bool = False) -> list[bool]:
    """Train for three epochs, or until a state is saved after batch ``stop``: in the loop, or ``between`` epochs.

    Returns for each batch whether the optimizer made a step.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    synced = []
    with open_loader(shards) as loader:
        batches = loader.as_dataloader(("image", "label", "key"))
        model: Any = TinyModel()
        prepared = accelerator.prepare(model, tiny_optimizer(model), batches)
        model, optimizer, same = prepared
        assert same is batches
        accelerator.register_for_checkpointing(batches)
        if steps:
            accelerator.load_state(str(folder))
        while len(steps) < NUM_EPOCHS * len(batches):
            for image, label, keys in batches:
                with accelerator.accumulate(model):
                    loss, _ = model(image, label)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                steps.append(step_of(keys, loss))
                synced.append(accelerator.sync_gradients)
                if len(steps) == stop and not between:
                    break
            if len(steps) == stop:
                accelerator.save_state(str(folder))
                break
    accelerator.free_memory()
    return synced


def resumed_jobs(shards: Path, folder: Path, world_size: int) -> tuple[list[Step], list[bool], dict[str, list[Step]]]:
    """The unbroken job's steps, and those of jobs that were broken off and resumed."""
    whole: list[Step] = []
    synced = train(shards, folder, whole)
    last = num_steps(world_size)
    jobs: dict[str, list[Step]] = {}
    # Where the optimizer makes a step: Accelerate saves no gradients.
    for stop, between in ((3, False), (last, False), (last, True), (last + 3, False), (2 * last, True)):
        steps = jobs[f"stopped after {stop}, between epochs: {between}"] = []
        train(shards, folder, steps, stop=stop, between=between)
        train(shards, folder, steps)
    return whole, synced, jobs


@pytest.mark.parametrize("world_size", [1, 2])
def test_job_that_is_resumed_has_the_losses_of_an_unbroken_one(shards: Path, tmp_path: Path, world_size: int) -> None:
    """Every sample once an epoch; the last batches of an epoch are a group of their own; resumed anywhere."""
    ranks = run_ranks(world_size, resumed_jobs, shards, tmp_path, world_size)
    assert_whole_epochs([whole for whole, _, _ in ranks], num_epochs=NUM_EPOCHS, world_size=world_size)
    last = num_steps(world_size)
    for whole, synced, jobs in ranks:
        assert synced == [(each + 1) % ACCUMULATED == 0 or each + 1 == last for each in range(last)] * NUM_EPOCHS
        assert jobs == dict.fromkeys(jobs, whole)


def synced_through_data_loader(shards: Path) -> list[bool]:
    """For each batch of an epoch that a prepared ``DataLoader`` gives: whether the optimizer would make a step."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    synced = []
    with open_loader(shards, outputs=dp.Outputs()) as loader:
        for _ in accelerator.prepare(DataLoader(loader.as_dataset(), batch_size=None, num_workers=0)):
            with accelerator.accumulate():
                synced.append(accelerator.sync_gradients)
    return synced


def test_data_set_in_a_prepared_data_loader_ends_where_that_does(shards: Path) -> None:
    """It takes a batch ahead: the data set must not speak for it. On two processes it is refused."""
    (synced,) = run_ranks(1, synced_through_data_loader, shards)
    assert synced == [False, False, True, False, False, True, False, True]
    with pytest.raises(AssertionError, match="would deal the batches of one rank to all"):
        run_ranks(2, synced_through_data_loader, shards)


def evaluated(shards: Path, policy: str) -> list[list[str]]:
    """What ``gather_for_metrics`` gives of two passes with the same loader, the first one left early before that."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    passes: list[list[str]] = []
    with (
        open_loader(shards) as train_loader,
        open_loader(shards, train=False, shuffle=False, last_batch_policy=policy) as loader,
    ):
        train_batches, batches = train_loader.as_dataloader(), loader.as_dataloader(each_iter="same")
        for _ in train_batches:  # as in the middle of a training
            for _ in range(2):
                next(iter(batches))
                passes.append([])
                for batch in batches:
                    passes[-1] += accelerator.gather_for_metrics(batch["key"], use_gather_object=True)
                    assert len(accelerator.gather_for_metrics(batch["label"])) <= BATCH_SIZE * accelerator.num_processes
            break
    return passes


def test_metrics_are_of_every_sample_once(shards: Path) -> None:
    """FILL repeats a sample in the last step, which ``gather_for_metrics`` drops."""
    for passes in run_ranks(2, evaluated, shards, "FILL"):
        assert [sorted(each) for each in passes] == [ALL_KEYS] * 2


def evaluated_in_buckets(shards: Path) -> tuple[list[str], int]:
    """The keys and the number of labels that ``gather_for_metrics`` gives of an epoch with short batches in it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    keys: list[str] = []
    num_labels = 0
    select = dp.Select(buckets=dp.buckets(area=32 * 32, step=4, max_aspect=1.5))
    with open_loader(shards, train=False, select=select, batch_size=5) as loader:  # 31 = 6 * 5 + 1
        for batch in loader.as_dataloader():
            keys += accelerator.gather_for_metrics(batch["key"], use_gather_object=True)
            num_labels += len(accelerator.gather_for_metrics(batch["label"]))
    return keys, num_labels


def test_metrics_of_short_batches_are_whole(shards: Path) -> None:
    """Accelerate cuts the last batch to what is left of whole ones; with buckets that is another number."""
    for keys, num_labels in run_ranks(1, evaluated_in_buckets, shards):
        assert sorted(keys) == ALL_KEYS
        assert num_labels == len(ALL_KEYS)


def skipped(shards: Path) -> tuple[list[list[str]], dict[int, list[list[str]]], list[int]]:
    """The keys of two epochs; the same with some of the first epoch's batches skipped; the number of batches read."""
    from accelerate import Accelerator, skip_first_batches

    Accelerator(cpu=True)
    with open_loader(shards) as loader:
        batches = loader.as_dataloader()
        whole = [[key for batch in batches for key in batch["key"]] for _ in range(2)]
    found, num_read = {}, []
    for num in range(len(batches) + 1):
        with open_loader(shards) as loader:
            batches = loader.as_dataloader()
            found[num] = [[key for batch in skip_first_batches(batches, num) for key in batch["key"]]]
            num_read.append(loader.stats()["batches"])
            found[num].append([key for batch in batches for key in batch["key"]])
    return whole, found, num_read


def test_skipped_batches_are_not_read(shards: Path) -> None:
    """The rest of the epoch, which may be none, then the whole next one."""
    for whole, found, num_read in run_ranks(2, skipped, shards):
        assert num_read == list(range(num_steps(2), -1, -1))
        for num, epochs in found.items():
            assert epochs == [whole[0][num * BATCH_SIZE :], whole[1]]


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_program_of_the_page_goes_on_as_if_it_was_not_broken_off(shards: Path, tmp_path: Path, world_size: int) -> None:
    """Started by ``accelerate launch``, and by torchrun: on CPUs the former wants MPI for more than one process."""
    command = ["-m", "accelerate.commands.launch", "--cpu"] if world_size == 1 else []
    command.append(write_program("accelerate_train.py", shards, tmp_path))
    # Not by lines: those of two processes may run into each other.
    step = re.compile(r"rank \d: epoch \d, loss 0x1\.[0-9a-f]+p[+-]\d+")
    whole = step.findall(launch(*command, folder=tmp_path, num_processes=world_size))
    rest = step.findall(launch(*command, "--resume", folder=tmp_path, num_processes=world_size))
    last = num_steps(world_size)
    for rank in range(world_size):
        of_rank = [line for line in whole if line.startswith(f"rank {rank}: ")]
        assert len(of_rank) == 3 * last
        assert len(set(of_rank)) == 3 * last
    assert set(rest) < set(whole)
    assert len(rest) == world_size * (2 * last - 2)
