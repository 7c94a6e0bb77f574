"""Processes that share the samples of one data-parallel rank: tensor and pipeline parallelism, on four processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lazy import Lazy
from tests.trainers.ranks import need, run_ranks
from tests.trainers.tiny import ALL_KEYS, BATCH_SIZE, NUM_CLASSES, Step, TinyModel, open_loader, step_of, tiny_optimizer

checkpoint, distributed, torch = Lazy("torch.distributed.checkpoint"), Lazy("torch.distributed"), Lazy("torch")

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_EPOCHS = 2


def join(*sizes: int) -> Any:
    """A mesh of data times model parallelism over all processes."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
    return torch.distributed.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=("data", "model"))


def train(shards: Path, folder: Path, mesh: Any, *, resume: int, save: bool) -> list[Step]:
    """Train for two epochs. With ``resume``, load the checkpoint of that step, and train the rest."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from tests.trainers.meshes import sharded_model

    model = sharded_model(mesh["data"], mesh["model"])
    optimizer, steps = tiny_optimizer(model), list[Step]()
    with open_loader(shards, mesh=mesh["data"], batch_size=BATCH_SIZE * 2 // mesh["data"].size()) as loader:
        batches = loader.as_dataloader()
        if resume:
            weights, moments = get_state_dict(model, optimizer)
            kept = {"model": weights, "optimizer": moments, "loader": batches.state_dict()}
            checkpoint.load(kept, checkpoint_id=folder / str(resume))
            set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
            batches.load_state_dict(kept["loader"])
        while resume + len(steps) < NUM_EPOCHS * len(loader):
            for batch in batches:
                loss, _ = model(batch["image"], batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steps.append(step_of(batch["key"], loss))
                if save:
                    weights, moments = get_state_dict(model, optimizer)
                    kept = {"model": weights, "optimizer": moments, "loader": batches.state_dict()}
                    checkpoint.save(kept, checkpoint_id=folder / str(len(steps)))
    return steps


def trained_on_meshes(shards: Path, folder: Path) -> dict[str, list[Step]]:
    """An unbroken run on 2 x 2 processes, a run from each of its checkpoints, and runs on other meshes from one."""
    mesh = join(2, 2)
    whole = train(shards, folder, mesh, resume=0, save=True)
    runs = {"whole": whole}
    for stop in range(1, len(whole)):
        runs[f"2 x 2 from {stop}"] = train(shards, folder, mesh, resume=stop, save=False)
    for sizes in ((4, 1), (1, 4)):
        runs["{} x {} from 3".format(*sizes)] = train(shards, folder, join(*sizes), resume=3, save=False)
    return runs


def piped(shards: Path) -> list[Step]:
    """Two stages of a pipeline on each of two data ranks: the first reads images, the last one labels.

    The last stage's losses; the first stage has none.
    """
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = join(2, 2)
    number, whole = mesh["model"].get_local_rank(), TinyModel().layers
    module = whole[:2] if number == 0 else whole[2:]
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh["model"].get_group())
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.cross_entropy)
    optimizer, steps = tiny_optimizer(module), list[Step]()
    with open_loader(shards, mesh=mesh["data"], last_batch_policy="FILL") as loader:
        for (batch,) in loader:
            optimizer.zero_grad()
            losses: list[Any] = []
            schedule.step(*[batch["image"]] if number == 0 else [], target=batch["label"], losses=losses)
            optimizer.step()
            steps.append(step_of(batch["key"], torch.stack(losses).mean() if losses else torch.zeros(())))
    return steps


def ranks_by_accelerate(shards: Path) -> tuple[str, str]:
    """The rank of a loader by Accelerate's mesh, and what a loader says that was opened before."""
    from accelerate import Accelerator
    from accelerate.utils import ParallelismConfig

    join(4, 1)
    early = open_loader(shards)
    # Accelerate trains on such a mesh with GPUs only. On CPUs it says so when it has made the mesh.
    with pytest.raises(ValueError, match="MULTI_CPU"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2))
    with early, pytest.raises(ValueError, match="this loader was opened as that of rank") as told:
        next(early)
    with open_loader(shards) as loader:
        process = loader.parts.batching.process
        return f"{process.rank} of {process.world_size} by {process.source}", str(told.value)


def on_other_meshes(shards: Path) -> tuple[list[Step], str, str]:
    return piped(shards), *ranks_by_accelerate(shards)


def keys_of(ranks: Sequence[dict[str, list[Step]]], run: str, *, num_shared: int) -> list[str]:
    """All keys that the data ranks saw; each is the same on all of its processes, which follow each other."""
    shown = [[step.keys for step in rank[run]] for rank in ranks]
    groups = [shown[first : first + num_shared] for first in range(0, len(shown), num_shared)]
    assert all(one == group[0] for group in groups for one in group), run
    return [key for group in groups for keys in group[0] for key in keys]


def test_data_times_tensor_parallelism_resumes_at_every_step(shards: Path, tmp_path: Path) -> None:
    """FSDP2 over tensor parallelism in plain torch: every sample once an epoch, and the losses of an unbroken run."""
    ranks = run_ranks(4, trained_on_meshes, shards, tmp_path)
    assert sorted(keys_of(ranks, "whole", num_shared=2)) == sorted(ALL_KEYS * NUM_EPOCHS)
    for rank in ranks:
        whole = rank.pop("whole")
        assert len({step.loss for step in whole}) == len(whole) == 8
        for run, steps in rank.items():
            if run.startswith("2 x 2"):
                assert steps == whole[int(run.split()[-1]) :], run
        rank["rest"] = whole[3:]
    rest = keys_of(ranks, "rest", num_shared=2)
    for run, num_shared in (("4 x 1 from 3", 1), ("1 x 4 from 3", 4)):
        assert sorted(keys_of(ranks, run, num_shared=num_shared)) == sorted(rest), run


def on_two_seeds(shards: Path) -> str:
    """What a process says whose seed is its own, though all processes are of the only data rank."""
    mesh = join(1, 2)
    with open_loader(shards, mesh=mesh["data"], seed=distributed.get_rank()) as loader:
        try:
            next(loader)
        except ValueError as exc:
            return str(exc)
    return ""


def test_processes_of_the_only_data_rank_are_compared(shards: Path) -> None:
    assert [one for one in run_ranks(2, on_two_seeds, shards) if "the ranks disagree: seed" in one]


def test_pipelines_and_meshes_of_accelerate(shards: Path) -> None:
    """Both stages of a pipeline get the same batches: its losses are those of the whole model on these batches."""
    need("accelerate")
    ranks = run_ranks(4, on_other_meshes, shards)
    for first, last in ((ranks[0][0], ranks[1][0]), (ranks[2][0], ranks[3][0])):
        assert [step.keys for step in first] == [step.keys for step in last]
        model, labels = TinyModel(), {key: number % NUM_CLASSES for number, key in enumerate(ALL_KEYS)}
        optimizer = tiny_optimizer(model)
        with open_loader(shards, batch_size=2 * BATCH_SIZE, last_batch_policy="FILL") as loader:
            for (batch,), step in zip(loader, last, strict=True):
                mine = [batch["key"].index(key) for key in step.keys]
                assert [int(label) for label in batch["label"][mine]] == [labels[key] for key in step.keys]
                loss, _ = model(batch["image"][mine], batch["label"][mine])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                assert abs(loss.item() - float.fromhex(step.loss)) < 1e-5
    assert [found for _, found, _ in ranks] == [f"{rank} of 2 by Accelerate's mesh" for rank in (0, 0, 1, 1)]
    for process, (_, _, told) in enumerate(ranks):
        assert f"of rank {process} of 4, by torch.distributed; now this is rank {process // 2} of 2" in told
