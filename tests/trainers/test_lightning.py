"""Lightning's trainer: limited epochs, bare loaders, and processes that share batches."""

from pathlib import Path

import pytest

import dali_pipes as dp
from tests.trainers.meshes import sharded_model
from tests.trainers.ranks import need, run_ranks
from tests.trainers.tiny import ALL_KEYS, BATCH_SIZE, Step, open_loader

need("lightning", "transformers")

from lightning.pytorch import Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

from tests.trainers.fits import QUIET, Module, fit  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def test_limited_epoch_is_followed_by_the_next_one(shards: Path, tmp_path: Path) -> None:
    """Each epoch starts at its first batch, also if the trainer reloads its data loader or resumes."""
    options = {"limit_train_batches": 3, "reload_dataloaders_every_n_epochs": 1}
    whole = fit(shards, tmp_path, **options).steps
    epochs = [[key for step in whole[first : first + 3] for key in step.keys] for first in (0, 3, 6)]
    assert [len(set(keys)) for keys in epochs] == [3 * BATCH_SIZE] * 3
    with open_loader(shards) as loader:
        unlimited = [[key for batch in loader.as_dicts() for key in batch["key"]] for _ in epochs]
    assert epochs == [keys[: 3 * BATCH_SIZE] for keys in unlimited]
    assert fit(shards, tmp_path, resume=4, **options).steps == whole[4:]


def test_bare_loader_gives_lists_and_skips_what_the_sanity_check_saw(shards: Path, tmp_path: Path) -> None:
    """As with DALI's iterators: whoever breaks off goes on. The page says so; `as_dataloader` validates all."""
    module = fit(shards, tmp_path, bare=True, max_epochs=1)
    assert sorted(key for step in module.steps for key in step.keys) == ALL_KEYS
    assert [len(keys) for keys in module.validated] == [8, 23]


def test_processes_that_get_a_copy_of_the_loader_are_refused(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(dp.WorkerProcessError, match="cannot be copied, pickled or sent to another process"):
        fit(shards, tmp_path, devices=2, strategy="ddp_spawn")


class ParallelModule(Module):
    """Is trained by Lightning's `ModelParallelStrategy`, which calls this hook."""

    def configure_model(self) -> None:
        self.tiny = sharded_model(self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"])


def fitted_with_mesh(shards: Path, folder: Path, data_size: int, tensor_size: int) -> dict[int, list[Step]]:
    """The steps of this process by the step from which the fit was resumed; the mesh is Lightning's own."""
    from dali_pipes.lightning import DataModule

    graph = dp.classification_train(crop=16, photo="jpg")
    options = {"batch_size": BATCH_SIZE, "decode": dp.Decode(threads=1), "outputs": dp.Outputs(keys=True)}
    runs: dict[int, list[Step]] = {}
    for resume in (0, 3, 4, 6):
        data = DataModule(train={"shards": str(shards), "graph": graph}, **options)
        strategy = ModelParallelStrategy(
            data_parallel_size=data_size,
            tensor_parallel_size=tensor_size,
            process_group_backend="gloo",
            save_distributed_checkpoint=False,
        )
        module = ParallelModule()
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        mesh = {"devices": data_size * tensor_size, "strategy": strategy, "callbacks": [] if resume else [saver]}
        trainer = Trainer(**QUIET, **mesh, max_epochs=2, default_root_dir=folder, enable_checkpointing=not resume)
        trainer.fit(module, datamodule=data, ckpt_path=str(folder / f"step={resume}.ckpt") if resume else None)
        runs[resume] = module.steps
    return runs


def test_data_module_under_tensor_parallelism(shards: Path, tmp_path: Path) -> None:
    """Two data ranks of two processes each: these get the same batches, which resume exactly."""
    ranks = run_ranks(4, fitted_with_mesh, shards, tmp_path, 2, 2)
    for one, other in (ranks[:2], ranks[2:]):
        assert [step.keys for step in one[0]] == [step.keys for step in other[0]]
    assert sorted(key for rank in ranks[::2] for step in rank[0] for key in step.keys) == sorted(ALL_KEYS * 2)
    for rank in ranks:
        whole = rank.pop(0)
        assert {resume: whole[resume:] for resume in rank} == rank
