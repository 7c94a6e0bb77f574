"""A loader's figures in the logs of trainers: beside the loss, and as they were at that step."""

import csv
from pathlib import Path
from typing import Any

import dali_pipes as dp
from tests.trainers.ranks import need
from tests.trainers.tiny import BATCH_SIZE, NUM_SAMPLES, open_loader

need("lightning", "transformers", "accelerate")

from lightning.pytorch import Trainer  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from dali_pipes.lightning import DataModule  # noqa: E402
from tests.trainers.fits import NAMES, QUIET, Module, make_trainer  # noqa: E402


def fit_with_log(folder: Path, callback: dp.metrics.LightningCallback, **data: Any) -> list[dict[str, str]]:
    """Train six steps of two batches each, and return the rows that Lightning logged."""
    logger = CSVLogger(folder)
    options = {"max_steps": 6, "accumulate_grad_batches": 2, "log_every_n_steps": 2, "enable_checkpointing": False}
    Trainer(callbacks=[callback], **QUIET | options | {"logger": logger}).fit(Module(), **data)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_lightning_logs_the_figures(shards: Path, tmp_path: Path) -> None:
    """Lightning logs them once a step. The callback finds the loader in the trainer's data module."""
    with open_loader(shards) as loader:
        lines = fit_with_log(tmp_path, dp.metrics.LightningCallback(loader), train_dataloaders=loader.as_dicts())
    rows = [row for row in lines if row["loader/samples"]]
    assert [int(row["step"]) for row in rows] == [2, 4, 6]
    # The trainer may have taken a batch ahead of the step.
    for row, number in zip(rows, (16, NUM_SAMPLES, NUM_SAMPLES + 16), strict=True):
        assert float(row["loader/samples"]) in (number, number + BATCH_SIZE)
    graph = dp.classification_train(crop=16, photo="jpg")
    options = {"batch_size": BATCH_SIZE, "outputs": dp.Outputs(keys=True)}
    data = DataModule(train={"shards": str(shards), "graph": graph}, **options)
    assert "loader/fetched_bytes" in fit_with_log(tmp_path, dp.metrics.LightningCallback(), datamodule=data)[0]


def test_hugging_face_reports_the_figures_with_the_loss(shards: Path, tmp_path: Path) -> None:
    """Also to a reporter, which comes before the callbacks of the user; and they are in the trainer's history."""
    reported: list[dict[str, float]] = []

    class Reporter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            reported.append(dict(logs))

    options = {"max_steps": 4, "logging_strategy": "steps", "logging_steps": 2, "save_strategy": "no"}
    with open_loader(shards) as loader:
        trainer = make_trainer(tmp_path, loader.as_dataloader(NAMES), **options)
        trainer.add_callback(Reporter())
        dp.metrics.HFCallback(loader).add_to(trainer)
        trainer.train()
        assert loader.stats()["samples"] <= NUM_SAMPLES
    for lines in (reported, trainer.state.log_history):
        losses = [line for line in lines if "loss" in line]
        assert [line["loader/batches"] >= step for line, step in zip(losses, (2, 4), strict=True)] == [True, True]
