"""Accelerate: metrics count every sample once, skipped batches are not read, Accelerate's own loader is refused."""

from pathlib import Path

import pytest

import dali_pipes as dp
from tests.trainers.ranks import need, run_ranks
from tests.trainers.tiny import ALL_KEYS, BATCH_SIZE, num_steps, open_loader

need("accelerate")


def through_data_loader(shards: Path) -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    with open_loader(shards, outputs=dp.Outputs()) as loader:
        list(Accelerator(cpu=True).prepare(DataLoader(loader.as_dataset(), batch_size=None, num_workers=0)))


def test_data_set_in_a_prepared_data_loader_is_refused(shards: Path) -> None:
    """Such a data loader would lose samples on two processes; on one, a state would be one batch too far."""
    with pytest.raises(AssertionError, match="would deal the batches of one rank to all"):
        run_ranks(2, through_data_loader, shards)
    with pytest.raises(AssertionError, match="takes one batch ahead, and the loader's state counts that batch as used"):
        run_ranks(1, through_data_loader, shards)


def evaluated_and_skipped(shards: Path) -> tuple[list[list[str]], list[list[list[str]]], list[int]]:
    """Return the keys of two evaluations, the keys of two epochs for each number of skipped batches, and batches read.

    A training is under way, and each evaluation follows one that was left early. Only the first epoch skips batches.
    """
    from accelerate import Accelerator, skip_first_batches

    accelerator = Accelerator(cpu=True)
    passes: list[list[str]] = []
    with open_loader(shards) as train, open_loader(shards, train=False, last_batch_policy="FILL") as loader:
        batches = loader.as_dataloader(each_iter="same")
        next(iter(train.as_dataloader()))
        for _ in range(2):
            next(iter(batches))
            passes.append([])
            for batch in batches:
                passes[-1] += accelerator.gather_for_metrics(batch["key"], use_gather_object=True)
                assert len(accelerator.gather_for_metrics(batch["label"])) <= BATCH_SIZE * accelerator.num_processes
    skipped, num_read = [], []
    for num in range(len(batches) + 1):
        with open_loader(shards) as loader:
            batches = loader.as_dataloader()
            rest = skip_first_batches(batches, num) if num else batches
            skipped.append([[key for batch in rest for key in batch["key"]]])
            num_read.append(loader.stats()["batches"])
            skipped[-1].append([key for batch in batches for key in batch["key"]])
    return passes, skipped, num_read


def test_metrics_are_of_every_sample_once_and_skipped_batches_are_not_read(shards: Path) -> None:
    """FILL repeats a sample in the last step, and Accelerate drops it. A user may skip all batches of an epoch."""
    for passes, skipped, num_read in run_ranks(2, evaluated_and_skipped, shards):
        assert [sorted(each) for each in passes] == [ALL_KEYS] * 2
        assert num_read == list(range(num_steps(2), -1, -1))
        first, second = skipped[0]
        assert skipped == [[first[num * BATCH_SIZE :], second] for num in range(len(skipped))]
