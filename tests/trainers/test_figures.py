"""A loader's figures in the logs of trainers: beside the loss, and as they were at that step."""

import csv
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from tests.trainers.packages import need
from tests.trainers.tiny import BATCH_SIZE, NUM_SAMPLES, TinyModel, open_loader, tiny_optimizer

need("lightning", "transformers", "accelerate")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from transformers import Trainer as HFTrainer  # noqa: E402
from transformers import TrainerCallback, TrainingArguments  # noqa: E402


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = TinyModel()

    def training_step(self, batch: dict[str, Any], _: int) -> Any:
        return self.model(batch["image"], batch["label"])[0]

    def configure_optimizers(self) -> Any:
        return tiny_optimizer(self.model)


def lightning(logger: CSVLogger, callback: dp.metrics.LightningCallback, **options: Any) -> Trainer:
    """A trainer that logs, with this callback, and writes nothing else."""
    usual: dict[str, Any] = {"accelerator": "cpu", "log_every_n_steps": 1, "enable_progress_bar": False}
    quiet = {"enable_checkpointing": False, "enable_model_summary": False}
    return Trainer(logger=logger, callbacks=[callback], **usual | quiet | options)


@pytest.mark.parametrize(("accumulated", "samples"), [(1, (8, 16, 24)), (2, (16, NUM_SAMPLES, NUM_SAMPLES + 16))])
def test_lightning_logs_the_figures(
    shards: Path, tmp_path: Path, accumulated: int, samples: tuple[int, int, int]
) -> None:
    """Once for a step, also if its gradients are those of several batches."""
    logger = CSVLogger(tmp_path)
    with open_loader(shards) as loader:
        options = {"max_steps": 6, "accumulate_grad_batches": accumulated, "log_every_n_steps": 2}
        lightning(logger, dp.metrics.LightningCallback(loader), **options).fit(Module(), loader.as_dicts())
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["loader/samples"]]
    assert [int(row["step"]) for row in rows] == [2, 4, 6]
    # The trainer may have taken a batch ahead of the step.
    seen = [float(row["loader/samples"]) for row in rows]
    assert all(found in (number, number + BATCH_SIZE) for found, number in zip(seen, samples, strict=True))


def test_the_trainers_data_module_is_found(shards: Path, tmp_path: Path) -> None:
    from dali_pipes.lightning import DataModule

    train = {"shards": shards, "graph": dp.classification_train(crop=16, photo="jpg"), "batch_size": BATCH_SIZE}
    logger = CSVLogger(tmp_path)
    trainer = lightning(logger, dp.metrics.LightningCallback(), max_steps=2)
    trainer.fit(Module(), datamodule=DataModule(train=train))
    assert "loader/fetched_bytes" in (Path(logger.log_dir) / "metrics.csv").read_text()


def test_a_loader_that_the_callback_cannot_find_is_asked_for(shards: Path, tmp_path: Path) -> None:
    trainer = lightning(CSVLogger(tmp_path), dp.metrics.LightningCallback(), max_steps=1)
    with open_loader(shards) as loader, pytest.raises(TypeError, match=r"pass the loader: LightningCallback\(loader\)"):
        trainer.fit(Module(), loader.as_dataloader())


def test_hugging_face_reports_the_figures_with_the_loss(shards: Path, tmp_path: Path) -> None:
    """Also to a reporter, which comes before the callbacks of the user; and they are in the trainer's history."""
    reported: list[dict[str, float]] = []

    class Reporter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            reported.append(dict(logs))

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, logging_steps=2, report_to="none", use_cpu=True, save_strategy="no",
        per_device_train_batch_size=BATCH_SIZE, disable_tqdm=True,
    )  # fmt: skip
    with open_loader(shards, outputs=dp.Outputs()) as loader:

        class Trainer(HFTrainer):  # type: ignore[misc]
            def get_train_dataloader(self) -> Any:
                return loader.as_dataloader(outputs=("image", "label"))

            def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
                return model(*inputs)[0]

            def _prepare_inputs(self, inputs: Any) -> Any:
                return inputs

        trainer = Trainer(model=TinyModel(), args=arguments, callbacks=[Reporter()])
        dp.metrics.HFCallback(loader).add_to(trainer)
        trainer.train()
        assert loader.stats()["samples"] <= NUM_SAMPLES
    losses = [entry for entry in reported if "loss" in entry]
    assert len(losses) == 2
    for entries in (losses, [entry for entry in trainer.state.log_history if "loss" in entry]):
        assert [entry["loader/batches"] >= step for entry, step in zip(entries, (2, 4), strict=True)] == [True, True]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for module in ("dali_pipes.transformers", "dali_pipes.metrics.prometheus"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match="needs Hugging Face's: pip install transformers"):
        _ = dp.metrics.HFCallback
    with pytest.raises(ImportError, match=r"install: pip install 'dali-pipes\[metrics\]'"):
        _ = dp.metrics.serve
