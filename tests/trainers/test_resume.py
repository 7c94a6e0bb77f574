"""Resumed trainings read each sample once an epoch and have the losses of an unbroken training, to the bit.

The programs of examples/trainers resume, too.
"""

import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.lazy import Lazy
from tests.loaders import torchdatas_loader
from tests.programs import free_port
from tests.trainers.ranks import join_jax, launch, need, run_ranks, write_program
from tests.trainers.tiny import (
    ALL_KEYS,
    EVEN,
    NUM_EPOCHS,
    Step,
    TinyModel,
    Training,
    assert_whole_epochs,
    num_steps,
    open_loader,
    step_of,
    tiny_optimizer,
)

checkpoint, distributed, torch = Lazy("torch.distributed.checkpoint"), Lazy("torch.distributed"), Lazy("torch")

ACCUMULATED = 3
"""Batches for each step of the optimizer; it divides neither the 8 batches of 1 rank nor the 4 batches of 2 ranks."""
KEPT: dict[int, Any] = {}
"""The state after each step, for trainings that keep states in memory."""


class Run(NamedTuple):
    """The steps and validations of one rank."""

    steps: list[Step]
    validated: list[list[str]]
    """The keys of each validation."""


Train = Callable[[Path, Path, int], Run]

# Each function trains for three epochs and saves a checkpoint after each step, or resumes from one checkpoint.


def face(loader: Any) -> Any:
    return loader.as_dataloader()


def nodes(loader: Any) -> Any:
    from torchdata import nodes

    return nodes.Loader(nodes.IterableWrapper(loader.as_dataloader()))


def loop(shards: Path, folder: Path, resume: int, *, wrap: Callable[[Any], Any], to_disk: bool = False) -> Run:
    """A user's own loop, with states in memory or in torch's distributed checkpoints."""
    job = Training()
    with open_loader(shards) as loader:
        kept = {"job": job, "batches": wrap(loader)}
        if resume and to_disk:
            checkpoint.load(dict(kept), checkpoint_id=folder / str(resume))
        elif resume:
            for name, each in kept.items():
                each.load_state_dict(KEPT[resume][name])
        while resume + len(job.steps) < NUM_EPOCHS * len(loader):
            for batch in kept["batches"]:
                job.step(batch)
                if not resume and to_disk:
                    checkpoint.save(dict(kept), checkpoint_id=folder / str(len(job.steps)))
                elif not resume:
                    KEPT[len(job.steps)] = {name: each.state_dict() for name, each in kept.items()}
    return Run(job.steps, [])


def accelerate(shards: Path, folder: Path, resume: int) -> Run:
    """The optimizer steps after every third batch and each epoch's last; the loader marks the last for Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    steps: list[Step] = []
    with open_loader(shards) as loader:
        batches, tiny = loader.as_dataloader(("image", "label", "key")), TinyModel()
        prepared: Any = accelerator.prepare(tiny, tiny_optimizer(tiny), batches)
        model, optimizer, same = prepared
        assert same is batches
        accelerator.register_for_checkpointing(batches)
        if resume:
            accelerator.load_state(str(folder / str(resume)))
        while (done := resume + len(steps)) < NUM_EPOCHS * len(batches):
            for number, (image, label, keys) in enumerate(batches, done % len(batches) + 1):
                with accelerator.accumulate(model):
                    loss, _ = model(image, label)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                steps.append(step_of(keys, loss))
                assert accelerator.sync_gradients == (number % ACCUMULATED == 0 or number == len(batches))
                if not resume and accelerator.sync_gradients:  # Accelerate saves no gradients
                    accelerator.save_state(str(folder / str(len(steps))))
    accelerator.free_memory()
    return Run(steps, [])


def transformers(shards: Path, folder: Path, resume: int, *, accumulated: int, **options: Any) -> Run:
    """Hugging Face's trainer counts optimizer steps; ``resume`` counts batches."""
    from tests.trainers.fits import NAMES, make_trainer

    options |= {"gradient_accumulation_steps": accumulated, "save_strategy": "no" if resume else "steps"}
    with open_loader(shards) as loader, open_loader(shards, train=False, last_batch_policy="FILL") as other:
        batches = loader.as_dataloader(NAMES)
        trainer = make_trainer(folder, batches, evaluation=other.as_dataloader(NAMES, each_iter="same"), **options)
        step = resume // len(batches) * -(-len(batches) // accumulated) + resume % len(batches) // accumulated
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}") if resume else None)
        return Run(trainer.model.steps, [])


def lightning(shards: Path, folder: Path, resume: int) -> Run:
    """Lightning validates on all samples after each epoch, although its sanity check has read two batches before."""
    from tests.trainers.fits import fit

    module = fit(shards, folder, resume=resume)
    return Run(module.steps, module.validated[1:])


def ignite(shards: Path, folder: Path, resume: int, *, epoch_length: int | None = None) -> Run:
    """Ignite's engine keeps one iterator over all epochs, and ``epoch_length`` sets the number of steps in an epoch."""
    import ignite.distributed as idist
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    job, validated = Training(), []
    rank = {"rank": idist.get_rank(), "world_size": idist.get_world_size()}
    with open_loader(shards, **rank) as loader, open_loader(shards, train=False, shuffle=False, **rank) as held_out:
        data, val = loader.as_dataloader(), held_out.as_dataloader(each_iter="same")
        trainer = Engine(lambda _, batch: job.step(batch))
        kept: dict[str, Any] = {"job": job, "trainer": trainer, "data": data}
        saver = Checkpoint(kept, DiskSaver(folder, create_dir=True, require_empty=False), n_saved=None)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, saver)
        if epoch_length is None:
            trainer.add_event_handler(
                Events.EPOCH_COMPLETED, lambda: validated.append([key for batch in val for key in batch["key"]])
            )
        if resume:
            Checkpoint.load_objects(kept, folder / f"checkpoint_{resume}.pt")
        num_epochs = NUM_EPOCHS if epoch_length is None else NUM_EPOCHS * len(data) // epoch_length
        trainer.run(data, max_epochs=num_epochs, epoch_length=epoch_length)
    return Run(job.steps, validated)


def mesh(shards: Path, folder: Path, resume: int) -> Run:
    """Train on arrays over a mesh of all processes' devices; samples that FILL repeats do not count."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    @jax.jit
    def step(training: Any, images: Any, labels: Any, valid: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            logits = images.reshape(len(images), -1) @ weights
            losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
            return (losses * valid).sum() / valid.sum()

        weights, momentum = training
        loss, gradient = jax.value_and_grad(loss_of)(weights)
        momentum = 0.9 * momentum + gradient
        return (weights - 0.1 * momentum, momentum), loss

    start = jnp.zeros((3 * 16 * 16, 6))
    training, state = KEPT[resume] if resume else ((start, start), None)
    steps: list[Step] = []
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    with open_loader(shards, state=state, **EVEN) as loader:
        batches = loader.as_jax(sharding=sharding)
        while resume + len(steps) < NUM_EPOCHS * len(batches):
            for batch in batches:
                valid = np.concatenate([np.asarray(shard.data) for shard in batch["valid"].addressable_shards])
                training, loss = step(training, batch["image"], batch["label"], batch["valid"])
                keys = [key for key, is_valid in zip(batch["key"], valid, strict=True) if is_valid]
                steps.append(Step(tuple(keys), float(loss).hex()))
                if not resume:
                    KEPT[len(steps)] = training, batches.state_dict()
    return Run(steps, [])


TRAINERS: dict[str, tuple[str, Train, tuple[int, ...]]] = {
    "face": ("torch", partial(loop, wrap=face), (1, 2)),
    "distributed checkpoint": ("torch", partial(loop, wrap=face, to_disk=True), (2,)),
    "StatefulDataLoader": ("torchdata", partial(loop, wrap=torchdatas_loader), (1,)),
    "torchdata.nodes": ("torchdata", partial(loop, wrap=nodes), (2,)),
    "Accelerate": ("accelerate", accelerate, (1, 2)),
    "Trainer": ("transformers", partial(transformers, accumulated=1), (1,)),
    "Trainer that accumulates and evaluates": (
        "transformers",
        partial(transformers, accumulated=ACCUMULATED, eval_strategy="steps", eval_steps=1),
        (2,),
    ),
    "Lightning": ("lightning", lightning, (1, 2)),
    "Ignite": ("ignite", ignite, (1, 2)),
    "Ignite with epochs of 6": ("ignite", partial(ignite, epoch_length=6), (1,)),
    "JAX": ("jax", mesh, (1, 2)),
}
"""By name: the package, the training function, and the numbers of ranks to test."""


def runs(package: str, train: Train, shards: Path, folder: Path, stops: tuple[int, ...], port: int) -> dict[int, Run]:
    """Return the unbroken training as 0, and the training resumed after each stop."""
    if package == "jax":
        join_jax(port, num_devices=2)
    elif package == "ignite" and "RANK" in os.environ:
        import ignite.distributed as idist

        idist.initialize("gloo")
    elif package in ("torch", "torchdata", "composer") and "RANK" in os.environ:
        os.environ["NODE_RANK"] = "0"  # Composer's launcher sets it
        distributed.init_process_group("gloo")
    return {stop: train(shards, folder, stop) for stop in (0, *stops)}


def assert_resumes(
    package: str, train: Train, shards: Path, folder: Path, *, world_size: int, validates: bool = False
) -> None:
    """Resume in mid-epoch and after an epoch's last batch. Each validation must read every sample once."""
    length = num_steps(world_size)
    stops = (ACCUMULATED, length, length + ACCUMULATED)
    ranks = run_ranks(world_size, runs, package, train, shards, folder, stops, free_port())
    assert_whole_epochs([run[0].steps for run in ranks], num_epochs=NUM_EPOCHS, world_size=world_size)
    passes = list(zip(*(run[0].validated for run in ranks), strict=True))
    assert [sorted(key for keys in each for key in keys) for each in passes] == [ALL_KEYS] * len(passes)
    assert len(passes) == (NUM_EPOCHS if validates else 0)
    for run in ranks:
        for stop in stops:
            assert run[stop].steps == run[0].steps[stop:], f"after step {stop}"


@pytest.mark.parametrize(("name", "world_size"), [(name, size) for name in TRAINERS for size in TRAINERS[name][2]])
def test_resumed_training_has_the_unbroken_losses(shards: Path, tmp_path: Path, name: str, world_size: int) -> None:
    package, train, _ = TRAINERS[name]
    need(package)
    validates = name in ("Lightning", "Ignite")
    assert_resumes(package, train, shards, tmp_path, world_size=world_size, validates=validates)


# The programs of examples/trainers


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_program_of_accelerate(shards: Path, tmp_path: Path, world_size: int) -> None:
    """``accelerate launch`` starts one process, torchrun two: on CPUs, ``accelerate launch`` needs MPI for two."""
    need("accelerate")
    command = ["-m", "accelerate.commands.launch", "--cpu"] if world_size == 1 else []
    command.append(write_program("accelerate_train.py", shards, tmp_path))
    # Search the whole text: two processes may print into one line.
    step = re.compile(r"rank \d: epoch \d, loss 0x1\.[0-9a-f]+p[+-]\d+")
    whole = step.findall(launch(*command, folder=tmp_path, num_processes=world_size))
    rest = step.findall(launch(*command, "--resume", folder=tmp_path, num_processes=world_size))
    assert len(set(whole)) == len(whole) == world_size * 3 * num_steps(world_size)
    assert set(rest) < set(whole)
    assert len(rest) == world_size * (2 * num_steps(world_size) - 2)


@pytest.mark.nightly
def test_program_of_transformers(shards: Path, tmp_path: Path) -> None:
    """Under torchrun, the program resumes from its last checkpoint but one and ends with the same model."""
    need("transformers")
    program = write_program("transformers_train.py", shards, tmp_path)
    launch(program, folder=tmp_path, num_processes=2)
    last = max((tmp_path / "runs").iterdir(), key=lambda each: int(each.name.rpartition("-")[2]))
    whole = (last / "model.safetensors").read_bytes()
    shutil.rmtree(last)
    launch(program, "--resume", folder=tmp_path, num_processes=2)
    assert (last / "model.safetensors").read_bytes() == whole


@pytest.mark.nightly
def test_program_of_lightning(shards: Path, tmp_path: Path) -> None:
    """Lightning itself starts the second process."""
    need("lightning")
    launch(write_program("lightning_train.py", shards, tmp_path), folder=tmp_path)
    assert (tmp_path / "last.ckpt").exists()


@pytest.mark.nightly
def test_program_of_fabric(shards: Path, tmp_path: Path) -> None:
    """Fabric starts the second process. The resumed run has the same losses as the unbroken run."""
    need("lightning")
    program, step = (
        write_program("fabric_train.py", shards, tmp_path),
        re.compile(r"rank \d: epoch \d, loss 0x\S+p[+-]\d+"),
    )
    whole = step.findall(launch(program, folder=tmp_path))
    rest = step.findall(launch(program, "--resume", folder=tmp_path))
    assert (len(whole), len(rest)) == (6 * num_steps(2), 4 * num_steps(2) - 4)
    assert set(rest) < set(whole)


def test_program_of_ignite(shards: Path, tmp_path: Path) -> None:
    """The resumed run prints the same last loss as the unbroken run."""
    need("ignite")
    program = write_program("ignite_train.py", shards, tmp_path)
    whole = launch(program, folder=tmp_path)
    assert whole.startswith("24 ")
    assert launch(program, "checkpoints/checkpoint_10.pt", folder=tmp_path) == whole


def test_program_of_jax(shards: Path, tmp_path: Path) -> None:
    need("jax")
    printed = launch(write_program("jax_train.py", shards, tmp_path), folder=tmp_path)
    assert re.findall(r"epoch (\d): loss \d+\.\d{4}\n", printed) == ["0", "1"]
