"""Runs Lightning's trainer with the data module, for `test_lightning`. Importing this module imports Lightning."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import dali_pipes as dp
from dali_pipes.lightning import DataModule


class Model(pl.LightningModule):
    """A linear classifier that records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3 * 16 * 16, 6)
        self.steps: list[tuple[int, int, list[str], Any]] = []
        """Epoch, batch index, keys and loss of each training step."""
        self.seen: dict[str, list[list[str]]] = {"validate": [], "test": [], "predict": []}
        """The keys of each pass."""
        self.loader_epochs: list[int] = []

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(batch["image"].flatten(1)), batch["label"])

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        # In another run torch may add in another order, which changes the last bits.
        self.steps.append((self.trainer.current_epoch, batch_idx, batch["key"], pytest.approx(loss.item(), rel=1e-5)))
        self.loader_epochs.append(self.trainer.datamodule.loaders["train"].epoch)  # type: ignore[attr-defined]
        return loss

    def on_validation_start(self) -> None:
        self.seen["validate"].append([])

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.seen["validate"][-1] += batch["key"]

    def on_test_start(self) -> None:
        self.seen["test"].append([])

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.seen["test"][-1] += batch["key"]

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[str]:
        return list(batch["key"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # With momentum, a step that is left out or taken twice changes all later steps.
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def evaluation(shards: Path) -> dict[str, Any]:
    return {"shards": str(shards), "graph": dp.classification_eval(resize=16, crop=16, photo="image.jpg")}


def make_data(shards: Path, **changes: Any) -> DataModule:
    train = {"shards": str(shards), "graph": dp.classification_train(crop=16, photo="image.jpg")}
    options = {
        "batch_size": 5,
        "seed": 4,
        "decode": dp.Decode(threads=1),
        "outputs": dp.Outputs(keys=True),
        "train": train,
        "val": evaluation(shards),
    }
    return DataModule(**(options | changes))


def make_trainer(folder: Path, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder, "enable_checkpointing": False}
    if "callbacks" in options:
        settings["enable_checkpointing"] = True
    return pl.Trainer(**(quiet | settings | options))


def fit(
    shards: Path, folder: Path, *, ckpt: Path | None = None, data: DataModule | None = None, **options: Any
) -> Model:
    model = make_model()
    trainer = make_trainer(folder, **options)
    trainer.fit(model, datamodule=data or make_data(shards), ckpt_path=ckpt)
    if "overfit_batches" not in options:
        assert model.loader_epochs == [epoch for epoch, *_ in model.steps], "the loader's epoch is the trainer's"
    return model


def every_step(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
