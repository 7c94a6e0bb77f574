"""Trainings with Lightning's and Hugging Face's trainers, for the resume tests and each trainer's own tests."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.trainers.tiny import (
    BATCH_SIZE,
    NUM_CLASSES,
    NUM_EPOCHS,
    Step,
    TinyModel,
    open_loader,
    step_of,
    tiny_optimizer,
)

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip
NAMES = {"image": "image", "labels": "label", "key": "key"}


class Module(pl.LightningModule):
    """Keeps a `Step` of each training batch, and the keys of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = TinyModel()
        self.steps: list[Step] = []
        self.validated: list[list[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch[0] if isinstance(batch, list) else batch  # a bare loader gives a list
        loss, _ = self.tiny(batch["image"], batch["label"])
        self.steps.append(step_of(batch["key"], loss))
        return loss

    def on_validation_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated[-1] += (batch[0] if isinstance(batch, list) else batch)["key"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return tiny_optimizer(self.tiny)


def fit(shards: Path, folder: Path, *, resume: int = 0, bare: bool = False, **options: Any) -> Module:
    """Train with two late loaders from the checkpoint of step ``resume``; without one, save each step."""
    usual: dict[str, Any] = {"max_epochs": NUM_EPOCHS, "num_sanity_val_steps": 2, "devices": 1}
    if "LOCAL_WORLD_SIZE" in os.environ:  # Lightning deletes WORLD_SIZE after a fit
        usual |= {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "strategy": "ddp"}
    saved = [] if resume else [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)]
    settings = {"default_root_dir": folder, "callbacks": saved, "enable_checkpointing": not resume} | QUIET | usual
    module = Module()
    with open_loader(shards, rank="late") as train, open_loader(shards, train=False, shuffle=False, rank="late") as val:
        data = (train, val) if bare else (train.as_dataloader(), val.as_dataloader(each_iter="same"))
        path = folder / f"step={resume}.ckpt" if resume else None
        pl.Trainer(**settings | options).fit(module, *data, ckpt_path=path)
    return module


class RecordingModel(TinyModel):
    """Keeps a `Step` of each training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def forward(self, image: Any, labels: Any, key: Any = ()) -> dict[str, Any]:  # type: ignore[override]
        loss, logits = super().forward(image, labels)
        if self.training:
            self.steps.append(step_of(key, loss))
        return {"loss": loss, "logits": logits}


def make_trainer(folder: Path, train: Any, *, evaluation: Any = None, **options: Any) -> Any:
    """Make our subclass of Hugging Face's trainer: three epochs, a checkpoint each step, metrics that count labels."""
    from transformers import TrainingArguments

    from dali_pipes.transformers import Trainer

    arguments = {
        "output_dir": str(folder), "use_cpu": True, "num_train_epochs": NUM_EPOCHS, "report_to": "none",
        "per_device_train_batch_size": BATCH_SIZE, "per_device_eval_batch_size": BATCH_SIZE, "disable_tqdm": True,
        "logging_strategy": "no", "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant",
    }  # fmt: skip
    model = RecordingModel()

    def count_classes(found: Any) -> dict[str, float]:
        assert len(found.predictions) == len(found.label_ids)
        return {f"class_{number}": (found.label_ids == number).sum().item() for number in range(NUM_CLASSES)}

    return Trainer(
        model,
        TrainingArguments(**(arguments | options)),
        train_dataset=train,
        eval_dataset=evaluation,
        optimizers=(tiny_optimizer(model), None),
        compute_metrics=count_classes,
    )
