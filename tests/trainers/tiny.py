"""A training that is small and forgets nothing: 31 photos, a model with momentum, and what each step saw."""

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import dali_pipes as dp
from tests import loaders

NUM_SAMPLES = 31
"""Odd, so that two ranks never have the same number."""
BATCH_SIZE = 4
NUM_CLASSES = 6
NUM_EPOCHS = 3
CROP = 16
EVEN: dict[str, Any] = {"last_batch_policy": "FILL", "outputs": dp.Outputs(keys=True, valid=True)}
"""Options that give all batches the same size."""


def key_of(number: int) -> str:
    return f"s{number:05d}"


ALL_KEYS = [key_of(number) for number in range(NUM_SAMPLES)]


class Step(NamedTuple):
    """One batch of one rank."""

    keys: tuple[str, ...]
    loss: str
    """Its exact value: hexadecimal."""


def open_loader(shards: Path | str, *, train: bool = True, **options: Any) -> dp.Loader:
    """Open a loader with keys, 4 samples a batch; with ``train``, crops depend on the epoch and the position."""
    graph = dp.classification_eval(resize=CROP, crop=CROP, photo="jpg")
    if train:
        graph = dp.classification_train(crop=CROP, photo="jpg")
    return loaders.open_loader(shards, graph, **({"batch_size": BATCH_SIZE, "seed": 3} | options))


class TinyModel(nn.Module):
    """A model of two layers with fixed initial parameters; it returns the loss and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * CROP**2, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 20)

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits: Tensor = self.layers(image)
        return nn.functional.cross_entropy(logits, label), logits


def tiny_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """With momentum: a step that was left out or taken twice shows in all that follow."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Training:
    """Trains a model, replicated if there is a process group, and keeps a `Step` for each batch of this rank."""

    def __init__(self) -> None:
        self.model: nn.Module = TinyModel()
        if distributed.is_initialized():
            self.model = DistributedDataParallel(self.model)
        self.optimizer = tiny_optimizer(self.model)
        self.steps: list[Step] = []

    def step(self, batch: dict[str, Any]) -> None:
        """Train on one batch: a dict of ``image``, ``label`` and ``key``."""
        loss, _ = self.model(batch["image"], batch["label"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps.append(step_of(batch["key"], loss))

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return copy.deepcopy({"model": model, "optimizer": optimizer})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def step_of(keys: Iterable[str], loss: Tensor) -> Step:
    """What a training step saw."""
    return Step(tuple(keys), loss.item().hex())


def num_steps(world_size: int) -> int:
    """The number of steps in an epoch."""
    return -(-NUM_SAMPLES // (BATCH_SIZE * world_size))


def assert_whole_epochs(ranks: Sequence[Sequence[Step]], *, num_epochs: int, world_size: int) -> None:
    """Each epoch has every sample once, over all ranks; no two epochs have one order; losses change."""
    length = num_steps(world_size)
    assert [len(steps) for steps in ranks] == [num_epochs * length] * world_size
    epochs = [
        [key for steps in ranks for step in steps[first : first + length] for key in step.keys]
        for first in range(0, num_epochs * length, length)
    ]
    assert [sorted(keys) for keys in epochs] == [ALL_KEYS] * num_epochs
    assert len({tuple(keys) for keys in epochs}) == num_epochs
    assert all(len({step.loss for step in steps}) == len(steps) for steps in ranks)
