"""Hugging Face's ``Trainer``: every sample once, exact resume, metrics over all samples."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from tests.trainers.packages import need
from tests.trainers.ranks import launch, run_ranks, write_program
from tests.trainers.tiny import (
    BATCH_SIZE,
    NUM_CLASSES,
    NUM_SAMPLES,
    Step,
    TinyModel,
    assert_whole_epochs,
    open_loader,
    step_of,
    tiny_optimizer,
)

need("accelerate", "transformers")

NUM_EPOCHS = 3
NAMES = {"image": "image", "labels": "label", "key": "key"}
CLASS_COUNTS = [len(range(number, NUM_SAMPLES, NUM_CLASSES)) for number in range(NUM_CLASSES)]


class RecordingModel(TinyModel):
    """Keeps a `Step` of each training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def forward(self, image: Any, labels: Any, key: list[str]) -> dict[str, Any]:  # type: ignore[override]
        loss, logits = super().forward(image, labels)
        if self.training:
            self.steps.append(step_of(key, loss))
        return {"loss": loss, "logits": logits}


def make_trainer(folder: Path, train: Any, *, evaluation: Any = None, **options: Any) -> Any:
    from transformers import TrainingArguments

    from dali_pipes.transformers import Trainer

    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "num_train_epochs": NUM_EPOCHS,
        "per_device_train_batch_size": BATCH_SIZE,
        "per_device_eval_batch_size": BATCH_SIZE,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "steps",
        "save_steps": 1,
        "lr_scheduler_type": "constant",
    }
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


def trained(shards: Path, folder: Path, *, resume: int | None = None, **options: Any) -> tuple[list[Step], Any]:
    """The steps of this rank in a job of three epochs, or in the rest of it from a checkpoint on; and its trainer."""
    policy = "DROP" if options.get("dataloader_drop_last") else "PARTIAL"
    with (
        open_loader(shards, last_batch_policy=policy) as loader,
        open_loader(shards, train=False, last_batch_policy="FILL") as other,
    ):
        evaluation = other.as_dataloader(NAMES, each_iter="same")
        trainer = make_trainer(folder, loader.as_dataloader(NAMES), evaluation=evaluation, **options)
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{resume}") if resume else None)
        return trainer.model.steps, trainer


def resumed_from_checkpoints(shards: Path, folder: Path, options: dict[str, Any], per_epoch: int) -> Any:
    """The unbroken job's steps, and the steps of jobs from some of its checkpoints on; the number of its steps, and
    the metrics of its evaluations.
    """
    whole, trainer = trained(shards, folder, **options)
    rests = {}
    # In mid-epoch, around an epoch's end, and before the last step.
    for checkpoint in sorted({1, per_epoch - 1, per_epoch, per_epoch + 1, trainer.state.global_step - 1}):
        rests[checkpoint], _ = trained(shards, folder, resume=checkpoint, **(options | {"save_strategy": "no"}))
    evaluated = [line for line in trainer.state.log_history if "eval_loss" in line]
    return whole, rests, trainer.state.global_step, evaluated


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        ({}, 1),
        ({"gradient_accumulation_steps": 3, "eval_strategy": "steps", "eval_steps": 1}, 2),
        ({"max_steps": 10, "eval_strategy": "epoch"}, 1),
        ({"dataloader_drop_last": True, "restore_callback_states_from_checkpoint": True}, 2),
    ],
    ids=["epochs", "accumulation", "steps", "drop"],
)
def test_job_that_is_resumed_has_the_losses_of_an_unbroken_one(
    shards: Path, tmp_path: Path, options: dict[str, Any], world_size: int
) -> None:
    """From checkpoints in mid-epoch and at epochs' ends; with evaluations between."""
    num_batches = NUM_SAMPLES // (BATCH_SIZE * world_size) + ("dataloader_drop_last" not in options)
    accumulated = options.get("gradient_accumulation_steps", 1)
    per_epoch = -(-num_batches // accumulated)
    ranks = run_ranks(world_size, resumed_from_checkpoints, shards, tmp_path, options, per_epoch)
    if not {"max_steps", "dataloader_drop_last"} & options.keys():
        assert_whole_epochs([whole for whole, *_ in ranks], num_epochs=NUM_EPOCHS, world_size=world_size)
    for whole, rests, num_steps, evaluated in ranks:
        assert num_steps == options.get("max_steps", NUM_EPOCHS * per_epoch)
        assert any(checkpoint % per_epoch for checkpoint in rests)
        assert not all(checkpoint % per_epoch for checkpoint in rests)
        for checkpoint, steps in rests.items():
            epoch, step = divmod(checkpoint, per_epoch)
            assert steps == whole[epoch * num_batches + step * accumulated :], checkpoint
        assert bool(evaluated) == ("eval_strategy" in options)
        for metrics in evaluated:
            assert [metrics[f"eval_class_{number}"] for number in range(NUM_CLASSES)] == CLASS_COUNTS


def evaluated_loss(shards: Path, folder: Path, policy: str) -> tuple[dict[str, float], int, float]:
    """Metrics of ``evaluate``, the number of samples of ``predict``, and the mean loss over the samples."""
    with open_loader(shards, train=False, last_batch_policy=policy) as loader:
        batches = loader.as_dataloader(NAMES, each_iter="same")
        trainer = make_trainer(folder, None, evaluation={"first": batches, "again": batches})
        metrics, predicted = trainer.evaluate(), trainer.predict(batches)
    with open_loader(shards, train=False, rank=0, world_size=1, batch_size=NUM_SAMPLES) as loader:
        (batch,) = loader.as_dicts()
        expected = TinyModel()(batch["image"], batch["label"])[0].item()
    return metrics, len(predicted.label_ids), expected


@pytest.mark.parametrize(("world_size", "policy"), [(1, "PARTIAL"), (1, "FILL"), (2, "FILL")])
def test_evaluation_is_of_every_sample_once(shards: Path, tmp_path: Path, world_size: int, policy: str) -> None:
    """What FILL repeats is dropped. The loss is ``Trainer``'s mean: of batches, each as often as it has samples."""
    for metrics, num_predicted, expected in run_ranks(world_size, evaluated_loss, shards, tmp_path, policy):
        for name in ("first", "again"):
            assert [metrics[f"eval_{name}_class_{number}"] for number in range(NUM_CLASSES)] == CLASS_COUNTS
            assert metrics[f"eval_{name}_loss"] == pytest.approx(expected, rel=1e-5 if policy == "PARTIAL" else 0.02)
        assert num_predicted == NUM_SAMPLES


def refused(shards: Path, folder: Path) -> dict[str, str]:
    """The errors of settings with which samples would be lost, repeated or counted twice."""
    errors = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as exc:  # noqa: BLE001 (the test looks at it)
            errors[name] = f"{type(exc).__name__}: {exc}"

    trained(shards, folder, save_steps=2, max_steps=2)
    checkpoint = str(folder / "checkpoint-2")
    with open_loader(shards) as loader, open_loader(shards, seed=4) as other:
        batches = loader.as_dataloader(NAMES)
        note("dataset", make_trainer(folder, loader.as_dataset()).train)
        note("loader", make_trainer(folder, loader).train)
        note("batch size", make_trainer(folder, batches, per_device_train_batch_size=8).train)
        note("drop last", make_trainer(folder, batches, dataloader_drop_last=True).train)
        note("partial", make_trainer(folder, None, evaluation=batches).evaluate)
        with open_loader(shards, select=dp.Select(buckets=dp.buckets(area=32 * 32))) as grouped:
            note("buckets", make_trainer(folder, None, evaluation=grouped.as_dataloader(NAMES)).evaluate)
        note("seed", lambda: make_trainer(folder, other.as_dataloader(NAMES)).train(resume_from_checkpoint=checkpoint))
        note(
            "accumulation",
            lambda: make_trainer(folder, batches, gradient_accumulation_steps=2).train(
                resume_from_checkpoint=checkpoint
            ),
        )
    return errors


def test_settings_that_would_train_on_wrong_data_are_refused(shards: Path, tmp_path: Path) -> None:
    """On two processes, with what to do instead."""
    expected = {
        "dataset": "takes loader.as_dataloader(), not the loader itself and not loader.as_dataset()",
        "loader": "takes loader.as_dataloader()",
        "batch size": "per_device_train_batch_size makes 8 samples a batch, the loader gives 4",
        "drop last": "open the train loader with last_batch_policy='DROP'",
        "buckets": "in many places of an epoch, and Trainer expects them at its end",
        "partial": "the last 7 of 31 samples cannot be dealt evenly to 2 ranks",
        "seed": "StateError: the state has seed=3, this loader seed=4",
        "accumulation": "after 16 samples of epoch 0, and Trainer would continue after 0 samples of epoch 1",
    }
    for errors in run_ranks(2, refused, shards, tmp_path):
        assert errors.keys() == expected.keys()
        for name, text in expected.items():
            assert text in errors[name], errors[name]


def refused_with_mesh(shards: Path, folder: Path) -> dict[str, str]:
    """The errors of a training and an evaluation whose batches several processes share."""
    from accelerate import ParallelismConfig

    errors = {}
    for name in ("tp", "cp", "sp"):
        with open_loader(shards, last_batch_policy="FILL") as loader:
            batches = loader.as_dataloader(NAMES)
            trainer = make_trainer(folder, batches, evaluation=batches)
            # Accelerate itself takes a mesh on accelerators only; `Trainer` asks it for the sizes.
            trainer.accelerator.state.parallelism_config = ParallelismConfig(**{f"{name}_size": 2})
            for call in (trainer.train, trainer.evaluate):
                with pytest.raises(ValueError, match="must get the same batches") as caught:
                    call()
                errors[f"{name} {call.__name__}"] = str(caught.value)
            assert loader.delivery.current.delivered == 0
    return errors


def test_processes_that_share_batches_are_refused(shards: Path, tmp_path: Path) -> None:
    """Tensor, context and sequence parallelism: each process of a data rank would get other batches."""
    for errors in run_ranks(2, refused_with_mesh, shards, tmp_path):
        assert len(errors) == 6
        for call, error in errors.items():
            assert f"Trainer has {call[:2]}_size=2: several processes must get the same batches" in error
            assert "use data parallelism alone" in error


@pytest.mark.nightly
def test_program_of_the_page_goes_on_where_it_was_broken_off(shards: Path, tmp_path: Path) -> None:
    """Under torchrun, from its last checkpoint to the same model."""
    program = write_program("trainer_train.py", shards, tmp_path)
    launch(program, folder=tmp_path, num_processes=2)
    checkpoints = sorted((tmp_path / "runs").iterdir(), key=lambda each: int(each.name.rpartition("-")[2]))
    whole = (checkpoints[-1] / "model.safetensors").read_bytes()
    shutil.rmtree(checkpoints[-1])
    launch(program, "--resume", folder=tmp_path, num_processes=2)
    assert (checkpoints[-1] / "model.safetensors").read_bytes() == whole
