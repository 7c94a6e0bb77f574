"""Train the classification example on whole photos and on resized ones: what do small shards cost in accuracy?

    dali-pipes prep pack pets DIR pets/packed-
    dali-pipes prep shuffle pets/packed- --output all- --by split --splits train=0.75,val=0.25
    for part in train val; do
        dali-pipes prep recode pets/all-$part- pets/small-$part- --short-side 160 --masks nearest
        dali-pipes prep index pets/all-$part-
        dali-pipes prep index pets/small-$part-
    done
    python examples/compare_shards.py --train whole=pets/all-train- small=pets/small-train- \\
        --val whole=pets/all-val- small=pets/small-val- --seeds 0 1 2 3 4 5 6 --json accuracy.json

Each set trains a model for each seed, and its own photos validate it. A seed fixes the model's start, and the crops as
shares of a photo. The sets must hold the same samples. A Markdown table is printed: the share of photos that are
classified right, and the difference to the first set, seed by seed, with its 95 % interval.

Needs ``pip install 'dali-pipes[bench]'``.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from classification import TASKS, evaluate, targets_of, train_step
from compare_loaders import interval
from models import Classifier
from processes import Process, start_process

import dali_pipes as dp
from bench.reports.record import check_target, write_record
from bench.tools.environment import describe_environment
from dali_pipes.data_set.indexing import find_columns, find_manifest
from dali_pipes.data_set.named import name_shards
from dali_pipes.errors import PipesError
from dali_pipes.store.cluster.endpoint import endpoint_for
from dali_pipes.store.shard_set import ShardSet

Sets = Mapping[str, ShardSet]


def compare(arguments: Any, process: Process, train: Sets, val: Sets) -> dict[str, Any]:
    """Train a model for each set and seed, and validate it.

    Raises:
        PipesError: If the sets do not hold the same samples, or have other labels than the pets.
    """
    for sets in (train, val):
        check_same(sets)
        check_labels(sets, num_targets=len(targets_of(arguments.task)))
    runs: list[dict[str, Any]] = []
    for seed, name in itertools.product(arguments.seeds, train):
        started = time.perf_counter()
        accuracy = train_one(arguments, process, train[name], val[name], seed=seed)
        runs.append({"set": name, "seed": seed, "accuracy": accuracy, "s": round(time.perf_counter() - started, 1)})
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    print(format_accuracy(runs))
    num_bytes = {name: sum(entry.size for entry in shards.entries()) for name, shards in train.items()}
    return {"runs": runs, "train_bytes": num_bytes}


def check_same(sets: Sets) -> None:
    """Raise `PipesError` if the sets do not hold samples of the same keys."""
    found = {name: keys_of(shards) for name, shards in sets.items()}
    first = next(iter(found))
    for name, keys in found.items():
        if keys != found[first]:
            differ = sorted(keys ^ found[first])
            raise PipesError(
                f"'{first}' and '{name}' must hold the same samples, {len(differ)} are in one only: {differ[:3]}; "
                "make one from the other: dali-pipes prep recode"
            )


def check_labels(sets: Sets, *, num_targets: int) -> None:
    """Raise `PipesError` if a set has labels for which the example has no class."""
    for name, shards in sets.items():
        manifest = find_manifest(shards)
        labels = {} if manifest is None else manifest.labels
        if not labels or labels["min"] < 1 or labels["max"] >= num_targets:
            found = f"{labels['min']} to {labels['max']}" if labels else "none"
            raise PipesError(
                f"'{name}' must have the labels of the pets, 1 to {num_targets - 1}, found {found}; for other classes "
                "change TASKS and targets_of in classification.py"
            )


def keys_of(shards: ShardSet) -> set[str]:
    """The keys of indexed shards."""
    manifest = find_manifest(shards)
    columns = None if manifest is None else find_columns(shards, manifest)
    if manifest is None or columns is None:
        raise PipesError(f"'{shards.url}' is not indexed: dali-pipes prep index {shards.url}")
    keys: set[str] = set()
    stops = manifest.samples.cumsum()
    for row in manifest.rows_of(shards.names, where=shards.url):
        keys.update(columns.keys[number] for number in range(stops[row] - manifest.samples[row], stops[row]))
    return keys


def train_one(arguments: Any, process: Process, train: ShardSet, val: ShardSet, *, seed: int) -> float:
    """The share of the validation photos that a model gets right after its training."""
    options: dict[str, Any] = {
        "batch_size": arguments.batch_size,
        "device": "cpu" if process.device.type == "cpu" else "gpu",
        "endpoint": train.store.endpoint,
    }
    targets = targets_of(arguments.task).to(process.device)
    torch.manual_seed(seed)
    model = Classifier(num_classes=len(TASKS[arguments.task]), width=arguments.width).to(process.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    graph = dp.classification_train(crop=arguments.crop)
    with dp.loader(train.url, graph, seed=seed, last_batch_policy="DROP", **options) as loader:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.epochs * len(loader))
        step = 0
        for epoch in range(arguments.epochs):
            loader.set_epoch(epoch)
            for (batch,) in loader:
                process.seed_step(seed, step)  # for dropout
                train_step(model, optimizer, batch, targets)
                schedule.step()
                step += 1
    graph = dp.classification_eval(resize=arguments.crop * 8 // 7, crop=arguments.crop)
    with dp.loader(val.url, graph, shuffle=False, **options) as val_loader:
        return evaluate(model, val_loader, process, targets)


def format_accuracy(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table: a row for each set and for its difference to the first, a column for each seed.

    >>> runs = [{"set": name, "seed": seed, "accuracy": 0.8 + seed / 10} for seed in (0, 1) for name in ("a", "b")]
    >>> print(format_accuracy(runs))
    | set | seed 0 | seed 1 | mean, 95 % interval |
    | --- | ---: | ---: | ---: |
    | a | 0.800 | 0.900 | 0.850 ± 0.635 |
    | b | 0.800 | 0.900 | 0.850 ± 0.635 |
    | b - a | 0.000 | 0.000 | 0.000 ± 0.000 |
    """
    seeds = sorted({run["seed"] for run in runs})
    names = list(dict.fromkeys(run["set"] for run in runs))
    by_run = {(run["set"], run["seed"]): run["accuracy"] for run in runs}
    found = {name: [by_run[name, seed] for seed in seeds] for name in names}
    first = names[0]
    for name in names[1:]:
        found[f"{name} - {first}"] = [one - other for one, other in zip(found[name], found[first], strict=True)]
    rows = [["set", *(f"seed {seed}" for seed in seeds), "mean, 95 % interval"]]
    rows += [[name, *(f"{value:.3f}" for value in values), interval(values)] for name, values in found.items()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"| --- |{' ---: |' * (len(seeds) + 1)}", *lines[1:]])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parse(argv)
    if arguments.json is not None:
        check_target(arguments.json)
    with contextlib.ExitStack() as stack:
        urls = [*arguments.train.values(), *arguments.val.values()]
        endpoint = stack.enter_context(endpoint_for(urls, endpoint=os.environ.get("AIS_ENDPOINT") or None))
        train, val = (
            {name: name_shards([url], endpoint=endpoint) for name, url in sets.items()}
            for sets in (arguments.train, arguments.val)
        )
        process = stack.enter_context(start_process(device=arguments.device, num_threads=arguments.num_threads, seed=0))
        report = compare(arguments, process, train, val)
    options = {name: value for name, value in vars(arguments).items() if name not in ("json", "train", "val")}
    if arguments.json is not None:
        write_record({"options": options, "environment": describe_environment()} | report, arguments.json)
    return 0


def _parse(argv: Sequence[str] | None) -> Any:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="Whole and resized photos, training.", formatter_class=formatter)
    add = parser.add_argument
    add("--train", nargs="+", required=True, metavar="NAME=URL", help="indexed shards to train on; the first is whole")
    add("--val", nargs="+", required=True, metavar="NAME=URL", help="shards to validate on, of the same names")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a run of each set for each")
    add("--epochs", type=int, default=30, help="passes over the training shards")
    add("--task", choices=tuple(TASKS), default="species", help="what to tell apart")
    add("--batch-size", type=int, default=16, help="samples a step")
    add("--crop", type=int, default=128, help="rows and columns of the model's input")
    add("--width", type=int, default=16, help="channels of the model's first level")
    add("--lr", type=float, default=2e-3, help="learning rate of the first step; it falls to 0 as a cosine")
    add("--device", choices=("auto", "cpu", "gpu"), default="cpu", help="a GPU decodes to other pixels")
    add("--num-threads", type=int, default=1, help="torch's threads on the CPU")
    add("--json", type=Path, help="write the record here")
    arguments = parser.parse_args(argv)
    for option in ("train", "val"):
        pairs = [text.partition("=") for text in getattr(arguments, option)]
        if bad := next(("".join(pair) for pair in pairs if not all(pair)), None):
            parser.error(f"--{option} must be NAME=URL, got '{bad}'")
        setattr(arguments, option, {name: url for name, _, url in pairs})
    if list(arguments.train) != list(arguments.val):
        parser.error(f"--val must name the sets of --train, {', '.join(arguments.train)}, in their order")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
