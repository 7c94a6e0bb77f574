"""MosaicML Composer's trainer, which wants an older torch: see `make integrations-composer`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainers.ranks import launch_from_page, run_ranks
from tests.trainers.tiny import ALL_KEYS, BATCH_SIZE, NUM_SAMPLES, Step, TinyModel, open_loader, step_of, tiny_optimizer

pytest.importorskip("composer", reason="composer is not installed; make integrations-composer")
from composer import Callback, ComposerModel, Trainer

from dali_pipes.integrations.composer import ResumeLoader

NUM_EPOCHS = 3


class Model(ComposerModel):
    """With dropout: the random state is restored, too. Keeps a `Step` of each microbatch, and the validated keys."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny, self.dropout = TinyModel(), nn.Dropout(0.2)
        self.steps: list[Step] = []
        self.validated: list[list[str]] = []

    def forward(self, batch: dict[str, Any]) -> Tensor:
        loss, _ = self.tiny(self.dropout(batch["image"]), batch["label"])
        return loss

    def loss(self, outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        self.steps.append(step_of(batch["key"], outputs))
        return outputs

    def eval_forward(self, batch: dict[str, Any], outputs: Any = None) -> Tensor:
        self.validated[-1] += batch["key"]
        return self.forward(batch)

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None: ...


class Validations(Callback):
    def __init__(self, model: Model) -> None:
        self._model = model

    def eval_start(self, state: Any, logger: Any) -> None:
        self._model.validated.append([])


def fit(
    shards: Path,
    folder: Path,
    *,
    resume: Path | None = None,
    skips: bool = False,
    durations: Sequence[str | None] = (None,),
    **options: Any,
) -> tuple[list[Step], list[list[str]]]:
    """Train; return steps and validated keys. With ``skips`` the trainer resumes by skipping batches; each of the
    ``durations`` is a call of its ``fit``.
    """
    from composer.utils import dist

    rank = {"rank": dist.get_global_rank(), "world_size": dist.get_world_size()}
    model = Model()
    with open_loader(shards, **rank) as train, open_loader(shards, train=False, shuffle=False, **rank) as val:
        batches = train.as_dataloader()
        trainer = Trainer(
            model=model,
            train_dataloader=batches,
            eval_dataloader=val.as_dataloader(each_iter="same"),
            optimizers=tiny_optimizer(model),
            max_duration=f"{NUM_EPOCHS}ep",
            device="cpu",
            device_train_microbatch_size=2,
            callbacks=[Validations(model)] if skips else [Validations(model), ResumeLoader(batches)],
            save_folder=None if resume else str(folder),
            save_num_checkpoints_to_keep=-1,
            load_path=None if resume is None else str(resume),
            seed=0,
            progress_bar=False,
            **options,
        )
        for duration in durations:
            trainer.fit(duration=duration)
        trainer.close()
    return model.steps, model.validated


def runs(shards: Path, folder: Path) -> dict[str, Any]:
    """The unbroken run under "", and what followed each checkpoint, the last by skipping."""
    if "RANK" in os.environ:
        os.environ["NODE_RANK"] = "0"  # as Composer's launcher
        torch.distributed.init_process_group("gloo")
    found = {"": fit(shards, folder / "batches", save_interval="1ba")}
    fit(shards, folder / "epochs", save_interval="1ep")
    length = -(-NUM_SAMPLES // (BATCH_SIZE * int(os.environ.get("WORLD_SIZE", 1))))
    for stop in (f"batches/ep0-ba{length}", f"batches/ep1-ba{length + 1}", f"epochs/ep1-ba{length}"):
        found[stop] = fit(shards, folder, resume=folder / f"{stop}-rank0.pt")
    skipping = f"batches/ep1-ba{length + 2}"
    found[skipping] = fit(shards, folder, resume=folder / f"{skipping}-rank0.pt", skips=True)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_resumed_trainer_has_the_unbroken_losses(shards: Path, tmp_path: Path, world_size: int) -> None:
    """With two microbatches a batch. From checkpoints in mid-epoch, after an epoch's last batch and of its end."""
    ranks = run_ranks(world_size, runs, shards, tmp_path)
    keys = [[key for step in run[""][0] for key in step.keys] for run in ranks]
    per_epoch = [len(of_rank) // NUM_EPOCHS for of_rank in keys]
    assert sum(per_epoch) == NUM_SAMPLES
    for epoch in range(NUM_EPOCHS):
        seen = [key for own, num in zip(keys, per_epoch, strict=True) for key in own[epoch * num : (epoch + 1) * num]]
        assert sorted(seen) == ALL_KEYS
    validated = [
        sorted(key for own in passes for key in own) for passes in zip(*(run[""][1] for run in ranks), strict=True)
    ]
    assert validated == [ALL_KEYS] * NUM_EPOCHS
    for run, num_samples in zip(ranks, per_epoch, strict=True):
        whole, _ = run.pop("")
        for stop, (steps, _) in run.items():
            step = int(stop.partition("-ba")[2])
            assert steps == whole[-len(steps) :], stop
            seen = [key for step in whole[: len(whole) - len(steps)] for key in step.keys]
            length = -(-NUM_SAMPLES // (BATCH_SIZE * world_size))
            num_seen = step // length * num_samples + step % length * BATCH_SIZE
            assert len(seen) == num_seen, stop


def in_parts(shards: Path, folder: Path) -> list[list[Step]]:
    """The steps of an unbroken training, of one by several calls of ``fit``, and of such a one that was resumed."""
    whole, _ = fit(shards, folder, save_interval="1ba")
    parts = {"durations": ("10ba", "2ba", "1ba")}  # 8 batches an epoch
    fresh, _ = fit(shards, folder / "parts", **parts)
    resumed, _ = fit(shards, folder, resume=folder / "ep0-ba2-rank0.pt", **parts)
    return [whole, fresh, resumed]


def test_training_may_go_on_in_another_fit(shards: Path, tmp_path: Path) -> None:
    """It continues in mid-epoch, with no batch repeated or left out."""
    ((whole, fresh, resumed),) = run_ranks(1, in_parts, shards, tmp_path)
    keys = [step.keys for step in whole]
    assert [step.keys for step in fresh] == keys[: len(fresh)]
    seen = 2 * 2  # microbatches of the two batches before the checkpoint
    assert [step.keys for step in resumed] == keys[seen : seen + len(resumed)]


def test_program_of_the_page_runs(shards: Path, tmp_path: Path) -> None:
    launch_from_page("train_composer.py", shards, tmp_path)
    launch_from_page("train_composer.py", shards, tmp_path, "checkpoints/ep0-ba5-rank0.pt")
    assert (tmp_path / "checkpoints" / "ep2-ba24-rank0.pt").exists()
