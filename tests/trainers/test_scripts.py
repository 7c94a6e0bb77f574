"""What timm's train.py, torchvision's references and pytorch/examples' imagenet ask of a loader, with timm's own parts.

The scripts themselves are not here. Each trains an epoch, validates, once more with averaged weights, writes a
checkpoint, and resumes with the next epoch.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from tests.trainers.ranks import need, run_ranks
from tests.trainers.tiny import BATCH_SIZE, NUM_CLASSES, NUM_EPOCHS, NUM_SAMPLES, Training, open_loader

need("timm")

Run = tuple[list[Any], list[Any]]
"""The steps of a rank, and what its validations found."""


def train_epochs(job: Training, shards: Path, epochs: range, *, world_size: int) -> list[tuple[int, float]]:
    """Train these epochs with mixup and validate twice after each; returns samples and accuracy of each validation."""
    from timm.data import Mixup

    found = []
    with open_loader(shards, last_batch_policy="DROP") as train, open_loader(shards, train=False, shuffle=False) as val:
        loader = train.as_dataloader(("image", "label", "key"))
        val_loader = val.as_dataloader(("image", "label"), each_iter="same")
        mixup = Mixup(mixup_alpha=0.4, cutmix_alpha=0.4, num_classes=NUM_CLASSES)
        # timm names the epoch to the batch sampler, the others to the sampler.
        samplers = [loader.batch_sampler, loader.sampler]
        assert len(loader.sampler) == len(loader) * BATCH_SIZE
        for epoch in epochs:
            samplers[epoch % 2].set_epoch(epoch)
            np.random.seed(epoch)  # Mixup draws from it
            for images, target, keys in loader:
                mixed, soft_target = mixup(images, target)  # it writes into the batch
                job.step({"image": mixed, "label": soft_target, "key": keys})
            found += [validate(job, val_loader, world_size=world_size) for _ in range(2)]
    return found


def validate(job: Training, loader: Any, *, world_size: int) -> tuple[int, float]:
    """Samples over all ranks, and the accuracy."""
    from timm import utils

    # imagenet/main.py reads a remainder by number if this does not hold.
    assert len(loader.sampler) * world_size >= len(loader.dataset)
    top1, counts = utils.AverageMeter(), torch.zeros(1)
    with torch.no_grad():
        for images, target in loader:
            _, output = job.model(images, target)
            accuracy, _ = utils.accuracy(output, target, topk=(1, 5))
            top1.update(accuracy.item(), len(target))
            counts += len(target)
    accuracy = torch.tensor(top1.avg)
    if world_size > 1:
        distributed.all_reduce(counts)
        accuracy = utils.reduce_tensor(accuracy, world_size)
    return int(counts.item()), accuracy.item()  # torchvision warns if the count is not len(loader.dataset)


def train_and_resume(shards: Path) -> dict[str, Run]:
    """An unbroken job, and one that resumed after each epoch with new loaders."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        distributed.init_process_group("gloo")
    runs: dict[str, Run] = {}
    for name, parts in (
        ("unbroken", [range(NUM_EPOCHS)]),
        ("resumed", [range(at, at + 1) for at in range(NUM_EPOCHS)]),
    ):
        steps, found = runs[name] = [], []
        checkpoint = None
        for epochs in parts:
            job = Training()
            if checkpoint is not None:
                job.load_state_dict(checkpoint)
            found += train_epochs(job, shards, epochs, world_size=world_size)
            steps += job.steps
            checkpoint = job.state_dict()
    return runs


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_script_trains_validates_and_resumes(shards: Path, world_size: int) -> None:
    """Each epoch's samples are distinct; all are validated; resumed, the losses are those of the unbroken run."""
    ranks = run_ranks(world_size, train_and_resume, shards)
    length = NUM_SAMPLES // (BATCH_SIZE * world_size)
    for runs in ranks:
        assert runs["resumed"] == runs["unbroken"]
        steps, found = runs["unbroken"]
        assert len(steps) == NUM_EPOCHS * length
        assert [samples for samples, _ in found] == [NUM_SAMPLES] * 2 * NUM_EPOCHS
        assert found[::2] == found[1::2]
    orders = set()
    for first in range(0, NUM_EPOCHS * length, length):
        keys = [key for runs in ranks for step in runs["unbroken"][0][first : first + length] for key in step.keys]
        assert len(set(keys)) == len(keys) == length * BATCH_SIZE * world_size
        orders.add(tuple(keys))
    assert len(orders) == NUM_EPOCHS
