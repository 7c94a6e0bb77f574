"""Train the segmentation example on dali_pipes and on WebLoader: compare the losses, and what the models learn.

    python examples/compare_loaders.py losses --shards 'pets/shuffled-{000002..000009}.tar'
    python examples/compare_loaders.py iou --shards 'pets/shuffled-{000002..000009}.tar' \\
        --val-shards 'pets/shuffled-{000000..000001}.tar' --seeds 0 1 2 --json iou.json

``losses`` trains two copies of one model side by side. Both loaders read the samples in the order of the shards. First
the training step normalises the decoded pixels, and everything must be equal bit for bit; then each loader normalises
the photos in its own way. ``iou`` trains a model for each loader and seed, and each loader shuffles in its own way:
dali_pipes the whole data set, WebLoader the shards and then samples in its buffer of 1,000. All models are validated on
the same batches, and a Markdown table is printed.

WebLoader decodes with Pillow and torchvision, in one worker. Needs ``pip install 'dali-pipes[bench]'``.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import webdataset
from models import UNet
from processes import Process, start_process
from segmentation import CLASSES, evaluate, loss_of, train_step
from torch import Tensor
from torch.utils.data import default_collate

import dali_pipes as dp
from bench.loaders.encoded import shard_urls
from bench.loaders.protocol import LoaderOptions
from bench.loaders.recipe import choose_recipe
from bench.loaders.transforms import IMAGENET_MEAN as MEAN
from bench.loaders.transforms import IMAGENET_STD as STD
from bench.loaders.transforms import SampleDecoder
from bench.loaders.workers import opened_workers, opener_for_workers, worker_context
from bench.reports.record import check_target, write_record
from bench.tools.environment import describe_environment
from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.data_set.named import name_shards
from dali_pipes.errors import PipesError
from dali_pipes.store.cluster.endpoint import endpoint_for
from dali_pipes.store.shard_set import ShardSet

Dtype = Literal["uint8", "float32"]
"""Decoded pixels, or normalised ones."""
Feed = Callable[[], Iterator[Any]]
"""One epoch's batches: image, mask, label, key."""

SHUFFLE_BUFFER = 1000
"""Samples; WebDataset's own examples use this number."""
TOLERANCES = {"uint8": 0.0, "float32": 1e-6}
"""How far photos, and one model's losses on them, may differ. A float32 near 2.6 has steps of 2.4e-7."""
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Degrees of freedom -> the 97.5 % point of Student's t."""


@contextlib.contextmanager
def dali_feed(shards: ShardSet, options: LoaderOptions, *, shuffle: bool, dtype: Dtype = "float32") -> Iterator[Feed]:
    """Open our loader."""
    with dp.loader(
        shard_urls(shards),
        dp.segmentation(crop=options.crop, dtype=dtype, photo=options.photo, mask=options.mask, orient=False),
        batch_size=options.batch_size,
        seed=options.seed,
        shuffle=shuffle,
        last_batch_policy="DROP",
        device=options.device,
        outputs=dp.Outputs(keys=True),
        endpoint=shards.store.endpoint,
    ) as loader:
        yield lambda: iter(loader.as_dicts())


@contextlib.contextmanager
def webloader_feed(
    shards: ShardSet, options: LoaderOptions, *, shuffle: bool, dtype: Dtype = "float32"
) -> Iterator[Feed]:
    """Open WebLoader: shuffled shards, then a shuffle buffer; its order is a function of the seed, too."""
    dataset = webdataset.WebDataset(
        shard_urls(shards), shardshuffle=len(shards.names) if shuffle else False, detshuffle=shuffle, seed=options.seed
    )
    if shuffle:
        dataset = dataset.shuffle(SHUFFLE_BUFFER, rng=random.Random(options.seed))
    options = replace(options, dtype=dtype)
    dataset = dataset.map(SampleDecoder(options)).batched(
        options.batch_size, collation_fn=default_collate, partial=False
    )
    loader = webdataset.WebLoader(
        dataset,
        batch_size=None,
        num_workers=1,
        multiprocessing_context=worker_context(),
        worker_init_fn=opener_for_workers(shards),
        # The buffer's generator lives in the worker: a new worker for each epoch would start it anew.
        persistent_workers=True,
    )
    # It gives out epochs, and ends the worker with the loader.
    with opened_workers(loader.pipeline[0], batches=loader, options=options) as opened:
        yield opened.epoch


FEEDS = {"dali": dali_feed, "webloader": webloader_feed}


class Training:
    """A model with its optimizer and schedule; two of one seed begin with the same parameters."""

    def __init__(self, arguments: Any, process: Process, *, seed: int, num_steps: int) -> None:
        torch.manual_seed(seed)
        self.model = UNet(num_classes=len(CLASSES), width=arguments.width).to(process.device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=arguments.lr)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, T_max=num_steps)
        self._shrink, self._device = arguments.shrink, process.device

    def step(self, batch: Mapping[str, Any]) -> float:
        """Train on a batch; returns its loss."""
        loss = train_step(self.model, self._optimizer, self._seen(batch), shrink=self._shrink)
        self._schedule.step()
        return loss.item()

    @torch.no_grad()
    def loss(self, batch: Mapping[str, Any]) -> float:
        """Return the loss of a batch, without training."""
        return loss_of(self.model, self._seen(batch), shrink=self._shrink).item()

    def _seen(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        image, mask = (batch[name].to(self._device) for name in ("image", "mask"))
        if image.dtype == torch.uint8:
            mean, std = (image.new_tensor(each, dtype=torch.float32)[:, None, None] for each in (MEAN, STD))
            image = (image / 255 - mean) / std
        return {"image": image, "mask": mask}


def compare_losses(arguments: Any, process: Process, shards: ShardSet) -> dict[str, Any]:
    """Train two copies of a model side by side, each on its loader's batches: first pixels, then normalised photos.

    Raises:
        PipesError: If a batch's keys, masks or labels differ; if photos, or one model's losses on the batches of both,
            differ by more than `TOLERANCES` says; if with equal photos the trainings' losses differ at all.
    """
    return {dtype: _compare_losses(arguments, process, shards, dtype=dtype) for dtype in get_args(Dtype)}


def _compare_losses(arguments: Any, process: Process, shards: ShardSet, *, dtype: Dtype) -> dict[str, Any]:
    options = _loader_options(arguments, process, shards, seed=arguments.seed)
    steps: list[dict[str, Any]] = []
    with (
        dali_feed(shards, options, shuffle=False, dtype=dtype) as our_feed,
        webloader_feed(shards, options, shuffle=False, dtype=dtype) as their_feed,
    ):
        fed = [Training(arguments, process, seed=arguments.seed, num_steps=arguments.steps) for _ in FEEDS]
        for ours, theirs in itertools.islice(zip(_repeat(our_feed), _repeat(their_feed), strict=True), arguments.steps):
            _check_same(ours, theirs, step=len(steps))
            on_theirs = fed[0].loss(theirs)
            losses = [training.step(batch) for training, batch in zip(fed, (ours, theirs), strict=True)]
            step = {
                "loss_hex": [loss.hex() for loss in losses],
                "photos": (ours["image"].cpu().float() - theirs["image"].float()).abs().max().item(),
                "losses of one model": abs(losses[0] - on_theirs),
                "losses of two trainings": abs(losses[0] - losses[1]),
            }
            steps.append(step)
    worst = {name: max(step[name] for step in steps) for name in steps[0] if name != "loss_hex"}
    print(
        f"{dtype}, {len(steps)} steps of {options.batch_size}: keys, masks and labels equal; "
        + ", ".join(f"{name} within {value:.2g}" for name, value in worst.items())
    )
    for name, value in worst.items():
        # Each step amplifies a rounding difference: if photos are not equal, the trainings drift apart.
        limit = math.inf if dtype == "float32" and name == "losses of two trainings" else TOLERANCES[dtype]
        if not value <= limit:
            raise PipesError(f"{dtype}: {name} differ by up to {value:.3g}, expected at most {limit:g}")
    return {"steps": steps, "largest differences": worst}


def compare_iou(arguments: Any, process: Process, shards: ShardSet, val_shards: ShardSet) -> dict[str, Any]:
    """Train a model for each loader and seed, and validate it."""
    runs: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        for name in FEEDS:
            started = time.perf_counter()
            found = _train_one(name, arguments, process, shards, val_shards, seed=seed)
            runs.append({"loader": name, "seed": seed, "iou": found, "s": round(time.perf_counter() - started, 1)})
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    print(format_iou(runs))
    return {"runs": runs}


def _train_one(
    name: str, arguments: Any, process: Process, shards: ShardSet, val_shards: ShardSet, *, seed: int
) -> dict[str, float]:
    options = _loader_options(arguments, process, shards, seed=seed)
    with FEEDS[name](shards, options, shuffle=True) as feed:
        num_steps = arguments.epochs * (_num_samples(shards) // options.batch_size)
        training = Training(arguments, process, seed=seed, num_steps=num_steps)
        for batch in itertools.islice(_repeat(feed), num_steps):
            training.step(batch)
    graph = dp.segmentation(crop=arguments.crop)
    with dp.loader(
        shard_urls(val_shards),
        graph,
        batch_size=arguments.batch_size,
        shuffle=False,
        device=options.device,
        endpoint=val_shards.store.endpoint,
    ) as val_loader:
        found = evaluate(training.model, val_loader, process, shrink=arguments.shrink)
    return dict(zip((*CLASSES, "mean"), [*found.tolist(), found.nanmean().item()], strict=True))


def format_iou(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table: a row for each loader and measure, a column for each seed, and mean and interval."""
    seeds = sorted({run["seed"] for run in runs})
    rows = [["loader", "IoU", *(f"seed {seed}" for seed in seeds), "mean, 95 % interval"]]
    for what in ("foreground", "mean"):
        found = {
            name: [run["iou"][what] for seed in seeds for run in runs if (run["loader"], run["seed"]) == (name, seed)]
            for name in FEEDS
        }
        found["difference"] = [ours - theirs for ours, theirs in zip(*found.values(), strict=True)]
        what = "mean of 3 classes" if what == "mean" else what
        rows += [[name, what, *(f"{v:.3f}" for v in values), interval(values)] for name, values in found.items()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"| --- | --- |{' ---: |' * (len(seeds) + 1)}", *lines[1:]])


def interval(values: Sequence[float]) -> str:
    """Return the mean and half the width of its 95 % interval by Student's t, the expected range for other seeds.

    >>> interval([0.60, 0.62, 0.64])
    '0.620 ± 0.050'
    """
    if not 2 <= len(values) <= max(T_95) + 1:
        return f"{statistics.fmean(values):.3f}"
    half = T_95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.3f} ± {half:.3f}"


def _repeat(feed: Feed) -> Iterator[Any]:
    """Yield the batches of epoch after epoch."""
    while True:
        yield from feed()


def _check_same(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, step: int) -> None:
    if ours["key"] != theirs["key"]:
        raise PipesError(f"step {step}: dali_pipes read {ours['key']}, WebLoader {theirs['key']}")
    for name in ("mask", "label"):
        if not torch.equal(ours[name].cpu(), theirs[name].cpu()):
            raise PipesError(f"step {step}: '{name}' differs between dali_pipes and WebLoader, keys {ours['key']}")


def _num_samples(shards: ShardSet) -> int:
    manifest = find_manifest(shards)
    assert manifest is not None
    return manifest.num_samples


def _loader_options(arguments: Any, process: Process, shards: ShardSet, *, seed: int) -> LoaderOptions:
    device: Any = "cpu" if process.device.type == "cpu" else "gpu"
    chosen = choose_recipe(shards, recipe="segmentation")._asdict()
    return LoaderOptions(batch_size=arguments.batch_size, crop=arguments.crop, seed=seed, device=device, **chosen)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parse(argv)
    if arguments.json is not None:
        check_target(arguments.json)
    with contextlib.ExitStack() as stack:
        urls = [*arguments.shards, *arguments.val_shards]
        endpoint = stack.enter_context(endpoint_for(urls, endpoint=os.environ.get("AIS_ENDPOINT") or None))
        shards = name_shards(arguments.shards, endpoint=endpoint)
        process = stack.enter_context(start_process(device=arguments.device, num_threads=arguments.num_threads, seed=0))
        if arguments.what == "losses":
            report = compare_losses(arguments, process, shards)
        else:
            report = compare_iou(arguments, process, shards, name_shards(arguments.val_shards, endpoint=endpoint))
    options = {name: value for name, value in vars(arguments).items() if name not in ("json", "shards", "val_shards")}
    if arguments.json is not None:
        write_record({"options": options, "environment": describe_environment()} | report, arguments.json)
    return 0


def _parse(argv: Sequence[str] | None) -> Any:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="dali_pipes and WebLoader, training.", formatter_class=formatter)
    subparsers = parser.add_subparsers(dest="what", required=True)
    losses = subparsers.add_parser("losses", help="the same batches to both", formatter_class=formatter)
    losses.add_argument("--steps", type=int, default=24, help="steps of training")
    losses.add_argument("--seed", type=int, default=0, help="fixes the model's start")
    losses.set_defaults(val_shards=[])
    iou = subparsers.add_parser("iou", help="each shuffles in its own way", formatter_class=formatter)
    iou.add_argument("--val-shards", nargs="+", required=True, metavar="URL", help="shards to validate on")
    iou.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a run of each loader for each")
    iou.add_argument("--epochs", type=int, default=30, help="passes over the training shards")
    for each in (losses, iou):
        add = each.add_argument
        add("--shards", nargs="+", required=True, metavar="URL", help="indexed shards to train on")
        add("--batch-size", type=int, default=8, help="samples a step")
        add("--crop", type=int, default=384, help="rows and columns that are cut from a photo")
        add("--shrink", type=int, default=4, help="pixels of the crop a pixel of the model, each way")
        add("--width", type=int, default=8, help="channels of the model's first level, a multiple of 8")
        add("--lr", type=float, default=3e-3, help="learning rate of the first step; it falls to 0 as a cosine")
        add("--device", choices=("auto", "cpu", "gpu"), default="cpu", help="a GPU decodes to other pixels")
        add("--num-threads", type=int, default=1, help="torch's threads on the CPU")
        add("--json", type=Path, help="write the record here")
    arguments: argparse.Namespace = parser.parse_args(argv)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
