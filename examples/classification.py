"""Train a small network to tell cats from dogs, or 37 breeds: plain PyTorch, fed by dali_pipes.

The Oxford-IIIT Pet data set, packed, shuffled and indexed as in segmentation.py.

One process, on the GPU if there is one:

    python examples/classification.py --task breed --shards 'ais://pets/shuffled-{000002..000009}.tar' \\
        --val-shards 'ais://pets/shuffled-{000000..000001}.tar' --out runs/breeds

Two processes on the CPU, 8 GPUs of a node, 4 such nodes (on each of them, ``--out`` on a file system that they share):

    torchrun --standalone --nproc-per-node 2 examples/classification.py --device cpu ...
    torchrun --standalone --nproc-per-node 8 examples/classification.py ...
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/classification.py --num-slices 4 ...

``--batch-size`` is for each rank. Windows and flips are functions of the sample, dropout of the step. So a run with
``--resume`` sees the same photos as an unbroken run, and on the CPU computes the same bits. See also segmentation.py.
"""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from models import Classifier
from options import make_parser
from processes import Process, start_process
from run_files import StepLog, load_checkpoint, save_checkpoint
from torch import Tensor, nn
from torch.nn import functional

import dali_pipes as dp

TASKS = {"species": ("cat", "dog"), "breed": tuple(range(1, 38))}
"""The classes of each task; breeds have Oxford's class ids."""
CAT_BREEDS = (1, 6, 7, 8, 10, 12, 21, 24, 27, 28, 33, 34)
"""Oxford's class ids of cats; the others are dogs'."""


def targets_of(task: str) -> Tensor:
    """Return the model's class for each of Oxford's class ids: int64 [38], from 0; -1 for 0, which is not an id."""
    breeds = torch.arange(-1, 37)
    if task == "breed":
        return breeds
    species = torch.ones(38, dtype=torch.int64)
    species[list(CAT_BREEDS)] = 0
    species[0] = -1
    return species


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any], targets: Tensor) -> Tensor:
    """Train the model on one batch; returns the loss before the update, a float32 scalar."""
    loss = functional.cross_entropy(model(batch["image"]), targets[batch["label"]])
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # it has no types in torch
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model: nn.Module, loader: dp.Loader, process: Process, targets: Tensor) -> float:
    """Return the share of photos, of all ranks, that the model gets right."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=process.device)  # right, all
    for (batch,) in loader:
        is_right = model(batch["image"]).argmax(dim=1) == targets[batch["label"]]
        # In a short last batch a rank may have rows that only fill it.
        counts[0] += is_right[: loader.num_valid].sum()
        counts[1] += loader.num_valid
    model.train()
    right, all_photos = process.sum(counts).tolist()
    return float(right / all_photos)


def train(
    arguments: Any, process: Process, saved: Mapping[str, Any] | None, loader: dp.Loader, val_loader: dp.Loader | None
) -> int:
    """Train to the last epoch, from the checkpoint or the start; returns 0, or the signal that stopped it."""
    targets = targets_of(arguments.task).to(process.device)
    model = Classifier(num_classes=len(TASKS[arguments.task]), width=arguments.width).to(process.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.epochs * len(loader))
    step = 0
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        step = saved["step"]
    example = torch.zeros(1, 3, arguments.crop, arguments.crop, device=process.device)
    replicated = process.replicate(model, example=example)

    def save() -> None:
        if process.rank == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "loader": loader.state_dict(),
                "step": step,
            }
            save_checkpoint(arguments.out, state)

    with StepLog(arguments.out, step=step, is_written=process.rank == 0) as log:
        while loader.epoch < arguments.epochs:
            # After a resume this is the rest of an epoch; it may be empty, and only the validation is left.
            for (batch,) in loader if loader.num_batches_left else ():
                process.seed_step(arguments.seed, step)  # for dropout
                loss = train_step(replicated, optimizer, batch, targets)
                schedule.step()
                log.write(step=step, epoch=loader.epoch, loss=process.mean(loss).item())
                step += 1
                stop = process.stop_signal()
                if stop or step % arguments.checkpoint_every == 0:
                    save()
                if stop:
                    return stop
            if val_loader is not None:
                save()  # validation can take longer than the time that is left after a signal
                accuracy = evaluate(model, val_loader, process, targets)
                if process.rank == 0:
                    print(f"epoch {loader.epoch}: {accuracy:.1%} of {val_loader.num_samples} photos right", flush=True)
            loader.set_epoch(loader.epoch + 1)
        save()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = make_parser("Tell cats from dogs, or breeds of both.", batch_size=16, crop=128, width=16, lr=2e-3)
    parser.add_argument("--task", choices=tuple(TASKS), default="species", help="what to tell apart")
    arguments = parser.parse_args(argv)
    if arguments.crop < 16:
        parser.error(f"--crop must be at least 16, which the model halves four times, got {arguments.crop}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        saved = load_checkpoint(arguments.out, resume=arguments.resume)
    except FileExistsError as exc:
        parser.error(str(exc))
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            start_process(device=arguments.device, num_threads=arguments.num_threads, seed=arguments.seed)
        )
        if arguments.metrics_port:
            stack.enter_context(dp.metrics.serve(arguments.metrics_port))
        options: dict[str, Any] = {
            "batch_size": arguments.batch_size,
            "device": "cpu" if process.device.type == "cpu" else "gpu",
            "cache": dp.Cache(directory=arguments.cache_dir),
        }
        loader = stack.enter_context(
            dp.loader(
                arguments.shards,
                dp.classification_train(crop=arguments.crop),
                seed=arguments.seed,
                shuffle=dp.Shuffle(slices=arguments.num_slices),
                last_batch_policy="DROP",
                state=saved["loader"] if saved else None,
                **options,
            )
        )
        loader.name = "train"  # in its metrics
        val_loader = None
        if arguments.val_shards:
            graph = dp.classification_eval(resize=arguments.crop * 8 // 7, crop=arguments.crop)
            val_loader = stack.enter_context(dp.loader(arguments.val_shards, graph, shuffle=False, **options))
            val_loader.name = "val"
        stop = train(arguments, process, saved, loader, val_loader)
    return 128 + stop if stop else 0


if __name__ == "__main__":
    sys.exit(main())
