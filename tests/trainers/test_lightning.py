"""Lightning's trainer: limited epochs, bare loaders, and refusal of processes that would train on wrong batches."""

from pathlib import Path

import pytest

import dali_pipes as dp
from tests.trainers.ranks import need, run_ranks
from tests.trainers.tiny import ALL_KEYS, BATCH_SIZE, Step, open_loader

need("lightning", "transformers")

from lightning.pytorch import Trainer  # noqa: E402
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
    module = ParallelModule()
    try:
        Trainer(**QUIET, **mesh, default_root_dir=folder).fit(module, datamodule=data)
    except ValueError as exc:
        return str(exc), module.steps
    return "", module.steps


def test_data_module_under_tensor_parallelism_is_refused(shards: Path, tmp_path: Path) -> None:
    """The processes of one data rank would train on different batches; a mesh with data ranks alone is as DDP."""
    for error, steps in run_ranks(2, fitted_with_mesh, shards, tmp_path, 1, 2):
        assert "ModelParallelStrategy has 1 data-parallel ranks in 2 processes" in error
        assert steps == []
    errors, steps = zip(*run_ranks(2, fitted_with_mesh, shards, tmp_path, 2, 1), strict=True)
    assert errors == ("", "")
    assert len({key for rank in steps for step in rank for key in step.keys}) == 2 * 2 * BATCH_SIZE
