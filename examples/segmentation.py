"""Train a small U-Net to tell foreground, background and boundary of pets: plain PyTorch, fed by dali_pipes.

The Oxford-IIIT Pet data set, packed, shuffled and indexed once:

    dali-pipes prep pack pets DIR ais://pets --max-bytes 80MiB
    dali-pipes prep shuffle ais://pets/samples-
    dali-pipes prep index ais://pets/shuffled-

``prep shuffle`` prints how many shards there are; here we assume ten. Each is a random part of the data set, so two
of them can be held out for validation.

One process, on the GPU if there is one:

    python examples/segmentation.py --shards 'ais://pets/shuffled-{000002..000009}.tar' \\
        --val-shards 'ais://pets/shuffled-{000000..000001}.tar' --out runs/trimaps

Two processes on the CPU, 8 GPUs of a node, 4 such nodes (on each of them, ``--out`` on a file system that they share):

    torchrun --standalone --nproc-per-node 2 examples/segmentation.py --device cpu ...
    torchrun --standalone --nproc-per-node 8 examples/segmentation.py ...
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/segmentation.py --num-slices 4 ...

``--batch-size`` is for each rank. With ``--resume`` a run that was killed continues at the exact next sample; on the
CPU its losses equal those of an unbroken run, bit for bit. Without a checkpoint it starts from the beginning. So one
command line suffices for a job that is requeued, and for ``torchrun --max-restarts 3``. With the latter, also set
``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``: otherwise torch (2.15) uses addresses from before the restart.

SIGTERM or SIGUSR1 to any rank announces that the run will be ended. All ranks finish the same step, rank 0 writes a
checkpoint, and the exit code is 128 plus the signal's number, so that the training does not look complete.
"""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from models import UNet
from options import make_parser
from processes import Process, start_process
from run_files import StepLog, load_checkpoint, save_checkpoint
from torch import Tensor, nn
from torch.nn import functional

import dali_pipes as dp

CLASSES = ("foreground", "background", "boundary")
"""The classes of a pixel; a trimap, the mask of these pets, counts them from 1."""
OUTSIDE = -1
"""The class of a pixel of the crop that lies outside the photo; it is 0 in a trimap."""


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any], *, shrink: int) -> Tensor:
    """Train the model on one batch; returns the loss before the update, a float32 scalar."""
    loss = loss_of(model, batch, shrink=shrink)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # it has no types in torch
    optimizer.step()
    return loss.detach()


def loss_of(model: nn.Module, batch: Mapping[str, Any], *, shrink: int) -> Tensor:
    """Return the mean cross entropy of the pixels inside the photo: a float32 scalar."""
    photo, target = shrunk(batch, shrink)
    return functional.cross_entropy(model(photo), target, ignore_index=OUTSIDE)


@torch.no_grad()
def evaluate(model: nn.Module, loader: dp.Loader, process: Process, *, shrink: int) -> Tensor:
    """Return the intersection over union of each of `CLASSES`, over all pixels of all ranks: float64 [3]."""
    model.eval()
    confusion = torch.zeros(len(CLASSES), len(CLASSES), dtype=torch.int64, device=process.device)
    for (batch,) in loader:
        photo, target = shrunk(batch, shrink)
        # In a short last batch a rank may have rows that only fill it.
        found, target = model(photo).argmax(dim=1)[: loader.num_valid], target[: loader.num_valid]
        is_inside = target != OUTSIDE
        pairs = target[is_inside] * len(CLASSES) + found[is_inside]
        confusion += torch.bincount(pairs, minlength=confusion.numel()).reshape(confusion.shape)
    model.train()
    return iou(process.sum(confusion))


def iou(confusion: Tensor) -> Tensor:
    """Return the intersection over union of each class, NaN for an absent class, from counts [class, class found].

    >>> iou(torch.tensor([[6, 2, 0], [0, 4, 0], [0, 0, 0]]))
    tensor([0.7500, 0.6667,    nan], dtype=torch.float64)
    """
    both = confusion.diagonal().double()
    return both / (confusion.sum(dim=0) + confusion.sum(dim=1) - both)


def shrunk(batch: Mapping[str, Any], shrink: int) -> tuple[Tensor, Tensor]:
    """Return the model's input: the mean of ``shrink`` x ``shrink`` pixels, and the class of the middle pixel."""
    middle = shrink // 2
    mask = batch["mask"][:, 0, middle::shrink, middle::shrink]  # [B, rows, columns]
    return functional.avg_pool2d(batch["image"], shrink), mask.long() - 1


def train(
    arguments: Any, process: Process, saved: Mapping[str, Any] | None, loader: dp.Loader, val_loader: dp.Loader | None
) -> int:
    """Train to the last epoch, from the checkpoint or the start; returns 0, or the signal that stopped it."""
    model = UNet(num_classes=len(CLASSES), width=arguments.width).to(process.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.epochs * len(loader))
    step = 0
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        step = saved["step"]
    size = arguments.crop // arguments.shrink
    replicated = process.replicate(model, example=torch.zeros(1, 3, size, size, device=process.device))

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
                loss = train_step(replicated, optimizer, batch, shrink=arguments.shrink)
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
                found = evaluate(model, val_loader, process, shrink=arguments.shrink)
                if process.rank == 0:
                    each = ", ".join(f"{value:.3f} {name}" for name, value in zip(CLASSES, found.tolist(), strict=True))
                    print(f"epoch {loader.epoch}: IoU {each}; mean {found.nanmean().item():.3f}", flush=True)
            loader.set_epoch(loader.epoch + 1)
        save()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = make_parser("Segment pets by their trimaps.", batch_size=8, crop=384, width=8, lr=3e-3)
    parser.add_argument("--shrink", type=int, default=4, help="pixels of the crop a pixel of the model, each way")
    arguments = parser.parse_args(argv)
    if arguments.shrink < 1 or arguments.crop % (16 * arguments.shrink):
        parser.error(f"--crop must be a multiple of 16 * --shrink, got {arguments.crop} and {arguments.shrink}")
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
        graph = dp.segmentation(crop=arguments.crop)
        loader = stack.enter_context(
            dp.loader(
                arguments.shards,
                graph,
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
            val_loader = stack.enter_context(dp.loader(arguments.val_shards, graph, shuffle=False, **options))
            val_loader.name = "val"
        stop = train(arguments, process, saved, loader, val_loader)
    return 128 + stop if stop else 0


if __name__ == "__main__":
    sys.exit(main())
