"""Lightning's trainer with `as_dataloader`, without the data module."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dali_pipes as dp
from tests.trainers.packages import need
from tests.trainers.ranks import launch_from_page, run_ranks
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

need("lightning")

import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NUM_EPOCHS = 3
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(pl.LightningModule):
    """Keeps a `Step` of each training batch, and the keys of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = TinyModel()
        self.steps: list[Step] = []
        self.validated: list[list[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch[0] if isinstance(batch, list) else batch  # of a bare loader
        loss, _ = self.tiny(batch["image"], batch["label"])
        self.steps.append(step_of(batch["key"], loss))
        return loss

    def on_validation_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated[-1] += (batch[0] if isinstance(batch, list) else batch)["key"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return tiny_optimizer(self.tiny)


def fit(shards: Path, folder: Path, *, resume: str | None = None, bare: bool = False, **options: Any) -> Module:
    """Train with two late loaders; with ``save_top_k`` in ``options`` a checkpoint is kept of each step and epoch."""
    usual: dict[str, Any] = {"max_epochs": NUM_EPOCHS, "num_sanity_val_steps": 2}
    if "LOCAL_WORLD_SIZE" in os.environ:  # Lightning takes WORLD_SIZE away after a fit
        usual |= {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "strategy": "ddp"}
    settings = {"devices": 1, "default_root_dir": folder} | QUIET | usual | options
    saved = [
        ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True),
    ]
    module = Module()
    with open_loader(shards, rank="late") as train, open_loader(shards, train=False, shuffle=False, rank="late") as val:
        trainer = pl.Trainer(**settings, callbacks=saved if resume is None else [], enable_checkpointing=resume is None)
        data = (train, val) if bare else (train.as_dataloader(), val.as_dataloader(each_iter="same"))
        trainer.fit(module, *data, ckpt_path=None if resume is None else folder / f"{resume}.ckpt")
        if resume is None:
            trainer.save_checkpoint(folder / "end.ckpt")
    return module


def runs(shards: Path, folder: Path, stops: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """The unbroken run under "", and what followed each checkpoint."""
    whole = fit(shards, folder, **options)
    found = {"": (whole.steps, whole.validated)}
    for stop in stops:
        more = {"max_epochs": NUM_EPOCHS + 1} if stop == "end" else {}
        resumed = fit(shards, folder, resume=stop, **(options | more))
        found[stop] = (resumed.steps, resumed.validated)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_resumed_fit_has_the_unbroken_losses(shards: Path, tmp_path: Path, world_size: int) -> None:
    """Each sample once an epoch, also of validation after the sanity check's two batches. From a checkpoint in
    mid-epoch, after an epoch's last batch, of an epoch's end, and of the end of the fit.
    """
    length = -(-NUM_SAMPLES // (BATCH_SIZE * world_size))
    stops = {"step=1": 1, f"step={length}": length, f"step={length + 2}": length + 2, "epoch=0": length}
    ranks = run_ranks(world_size, runs, shards, tmp_path, stops | {"end": 0}, {})
    assert_whole_epochs([run[""][0] for run in ranks], num_epochs=NUM_EPOCHS, world_size=world_size)
    validated = list(zip(*(run[""][1] for run in ranks), strict=True))
    sanity, *full = [sorted(key for keys in passes for key in keys) for passes in validated]
    assert sanity == ALL_KEYS[: 2 * BATCH_SIZE * world_size]
    assert full == [ALL_KEYS] * NUM_EPOCHS
    for run in ranks:
        for stop, step in stops.items():
            assert run[stop][0] == run[""][0][step:], stop
        assert len(run["end"][0]) == length
    last = sorted(key for run in ranks for step in run["end"][0] for key in step.keys)
    assert last == ALL_KEYS


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"limit_train_batches": 3, "limit_val_batches": 2}, id="limited"),
        pytest.param({"accumulate_grad_batches": 3}, id="accumulation"),
        pytest.param({"reload_dataloaders_every_n_epochs": 1}, id="reloaded"),
    ],
)
def test_fit_with_options_is_resumed(shards: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """A limited epoch is followed by the next one; the resumed run has the unbroken one's losses."""
    per_epoch = options.get("limit_train_batches", 8)
    whole = fit(shards, tmp_path, **options)
    epochs = [whole.steps[first : first + per_epoch] for first in range(0, len(whole.steps), per_epoch)]
    for epoch in epochs:
        keys = [key for step in epoch for key in step.keys]
        assert len(set(keys)) == len(keys) == min(NUM_SAMPLES, BATCH_SIZE * len(epoch))
    assert len({epoch[0].keys for epoch in epochs}) == len(epochs) >= 3
    val_keys = ALL_KEYS[: BATCH_SIZE * options.get("limit_val_batches", 8)]
    assert all(keys == val_keys for keys in whole.validated[1:])
    # A step of the trainer is that of the optimizer, which an epoch's last batch ends, too.
    accumulated = options.get("accumulate_grad_batches", 1)
    per_epoch_steps = -(-per_epoch // accumulated)
    for step in (1, per_epoch_steps, per_epoch_steps + 1):
        seen = step // per_epoch_steps * per_epoch + step % per_epoch_steps * accumulated
        resumed = fit(shards, tmp_path, resume=f"step={step}", **options)
        assert resumed.steps == whole.steps[seen:], step


def test_bare_loader_gives_lists_and_skips_what_the_sanity_check_saw(shards: Path, tmp_path: Path) -> None:
    """As with DALI's iterators: whoever breaks off goes on. The page says so; `as_dataloader` validates all."""
    module = fit(shards, tmp_path, bare=True, max_epochs=1)
    assert sorted(key for step in module.steps for key in step.keys) == ALL_KEYS
    assert [len(keys) for keys in module.validated] == [8, 23]


def test_processes_that_get_a_copy_of_the_loader_are_refused(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(dp.WorkerProcessError, match="cannot be copied or sent to another process"):
        fit(shards, tmp_path, devices=2, strategy="ddp_spawn")


class ParallelModule(Module):
    """Is trained by Lightning's `ModelParallelStrategy`, which wants this hook."""

    def configure_model(self) -> None:
        """Nothing is split: what counts is which process gets which batches."""


def fitted_with_mesh(shards: Path, folder: Path, data_size: int, tensor_size: int) -> tuple[str, list[Step]]:
    """The error of a fit with a data module, and the steps of this rank; the mesh is Lightning's own."""
    from dali_pipes.lightning import DataModule

    graph = dp.classification_train(crop=16, photo="jpg")
    options = {"batch_size": BATCH_SIZE, "decode": dp.Decode(threads=1), "outputs": dp.Outputs(keys=True)}
    data = DataModule(train={"shards": str(shards), "graph": graph}, **options)
    strategy = ModelParallelStrategy(
        data_parallel_size=data_size, tensor_parallel_size=tensor_size, process_group_backend="gloo"
    )
    mesh = {"devices": 2, "strategy": strategy, "max_steps": 2, "enable_checkpointing": False}
    trainer = pl.Trainer(**QUIET, **mesh, default_root_dir=folder)
    module = ParallelModule()
    try:
        trainer.fit(module, datamodule=data)
    except ValueError as exc:
        return str(exc), module.steps
    return "", module.steps


def test_data_module_under_tensor_parallelism_is_refused(shards: Path, tmp_path: Path) -> None:
    """The processes of one data rank would train on different batches; a mesh with data ranks alone is as DDP."""
    for error, steps in run_ranks(2, fitted_with_mesh, shards, tmp_path, 1, 2):
        assert "ModelParallelStrategy has 1 data-parallel ranks in 2 processes" in error
        assert "use data parallelism alone, or open dali_pipes.loader(rank=..., world_size=...)" in error
        assert steps == []
    errors, steps = zip(*run_ranks(2, fitted_with_mesh, shards, tmp_path, 2, 1), strict=True)
    assert errors == ("", "")
    assert len({key for rank in steps for step in rank for key in step.keys}) == 2 * 2 * BATCH_SIZE


@pytest.mark.nightly
def test_program_of_the_page_runs(shards: Path, tmp_path: Path) -> None:
    """Lightning itself starts the second process."""
    launch_from_page("train_lightning.py", shards, tmp_path)
    assert list(tmp_path.rglob("*.ckpt"))
