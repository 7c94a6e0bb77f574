"""Hugging Face's ``Trainer``: metrics count all samples; settings that would train on wrong data are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from tests.trainers.ranks import need, run_ranks
from tests.trainers.tiny import NUM_CLASSES, NUM_SAMPLES, TinyModel, open_loader

need("transformers", "lightning")

from tests.trainers.fits import NAMES, make_trainer  # noqa: E402


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


@pytest.mark.parametrize(("world_size", "policy"), [(1, "PARTIAL"), (2, "FILL")])
def test_evaluation_is_of_every_sample_once(shards: Path, tmp_path: Path, world_size: int, policy: str) -> None:
    """What FILL repeats is dropped. The loss is ``Trainer``'s mean: of batches, each as often as it has samples."""
    counts = [len(range(number, NUM_SAMPLES, NUM_CLASSES)) for number in range(NUM_CLASSES)]
    for metrics, num_predicted, expected in run_ranks(world_size, evaluated_loss, shards, tmp_path, policy):
        for name in ("first", "again"):
            assert [metrics[f"eval_{name}_class_{number}"] for number in range(NUM_CLASSES)] == counts
            assert metrics[f"eval_{name}_loss"] == pytest.approx(expected, rel=1e-5 if policy == "PARTIAL" else 0.02)
        assert num_predicted == NUM_SAMPLES


REFUSED = {
    "dataset": "takes loader.as_dataloader(), not the loader itself and not loader.as_dataset()",
    "loader": "takes loader.as_dataloader()",
    "batch size": "per_device_train_batch_size makes 8 samples a batch, the loader gives 4",
    "drop last": "open the train loader with last_batch_policy='DROP'",
    "buckets": "in many places of an epoch, and Trainer expects them at its end",
    "partial": "the last 7 of 31 samples cannot be dealt evenly to 2 ranks",
    "seed": "StateError: the state has seed=3, this loader seed=4",
    "accumulation": "after 16 samples of epoch 0, and Trainer would continue after 0 samples of epoch 1",
    # The processes of one data rank would get different batches.
    **{
        f"{name} {call}": "of 2, and Trainer has 2 processes, 2 for each rank; make TrainingArguments"
        for name in ("tp", "cp", "sp")
        for call in ("train", "evaluate")
    },
}


def refused(shards: Path, folder: Path) -> dict[str, str]:
    """The errors of settings with which samples would be lost, repeated or counted twice."""
    from accelerate import ParallelismConfig

    errors = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as exc:  # noqa: BLE001 (the test looks at it)
            errors[name] = f"{type(exc).__name__}: {exc}"

    checkpoint = str(folder / "checkpoint-2")
    with open_loader(shards) as loader:
        make_trainer(folder, loader.as_dataloader(NAMES), save_steps=2, max_steps=2).train()
    with open_loader(shards) as loader, open_loader(shards, seed=4) as other:
        batches = loader.as_dataloader(NAMES)

        def resume(data: Any, **options: Any) -> None:
            make_trainer(folder, data, **options).train(resume_from_checkpoint=checkpoint)

        note("dataset", make_trainer(folder, loader.as_dataset()).train)
        note("loader", make_trainer(folder, loader).train)
        note("batch size", make_trainer(folder, batches, per_device_train_batch_size=8).train)
        note("drop last", make_trainer(folder, batches, dataloader_drop_last=True).train)
        note("partial", make_trainer(folder, None, evaluation=batches).evaluate)
        with open_loader(shards, select=dp.Select(buckets=dp.buckets(area=32 * 32))) as grouped:
            note("buckets", make_trainer(folder, None, evaluation=grouped.as_dataloader(NAMES)).evaluate)
        note("seed", lambda: resume(other.as_dataloader(NAMES)))
        note("accumulation", lambda: resume(batches, gradient_accumulation_steps=2))
    with open_loader(shards, last_batch_policy="FILL") as loader:
        batches = loader.as_dataloader(NAMES)
        for name in ("tp", "cp", "sp"):
            trainer = make_trainer(folder, batches, evaluation=batches)
            # Accelerate accepts a mesh only on accelerators, so the test sets the sizes that `Trainer` reads.
            trainer.accelerator.state.parallelism_config = ParallelismConfig(**{f"{name}_size": 2})
            note(f"{name} train", trainer.train)
            note(f"{name} evaluate", trainer.evaluate)
            with open_loader(shards, rank=0, world_size=1) as shared:  # as on a mesh with one data rank
                trainer.train_dataset = shared.as_dataloader(NAMES)
                assert trainer.get_train_dataloader() is trainer.train_dataset
        assert loader.delivery.current.delivered == 0
    return errors


def test_settings_that_would_train_on_wrong_data_are_refused(shards: Path, tmp_path: Path) -> None:
    """On two processes, with what to do instead."""
    for errors in run_ranks(2, refused, shards, tmp_path):
        assert errors.keys() == REFUSED.keys()
        for name, text in REFUSED.items():
            assert text in errors[name], errors[name]
